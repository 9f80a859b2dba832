"""Artifacts: the same bytes for the same program, nothing half-written, no trust in the file."""

import io
import json
import random
import stat
import warnings
import zipfile

import pytest

from relower.lowering import artifact
from relower.lowering.artifact_index import canonical_json, form_digest
from relower.lowering.errors import InputError
from relower.lowering.program import Form, Location, Program, Section, Stamp, Unknown, digest_of


def _program() -> Program:
    body = 'func.func public\n  %0 = "a.b"() : () -> (f32)\n'
    inner = 'func.func private\n  "func.return"() : () -> ()\n'
    kernel = '@s1\nfunc.func private\n  "tpu.x"() {s = "é\\22"} : () -> ()\n'
    sections = (
        Section("module", "module", "module a = 1\n", "", (-1,)),
        Section("main", "function", body, "main", (0, 1)),
        Section("f1", "function", inner, "inner"),
    )
    name = f"kernel:{digest_of(kernel)[:12]}"
    return Program(
        forms={
            "exact": Form("exact", sections, form_digest(sections)),
            "inlined": Form("inlined", sections[:2], form_digest(sections[:2])),
        },
        kernels={name: Section(name, "kernel", kernel, "gmm", (-1, 0, 1))},
        kernel_calls={name: 2},
        ops={"a.b": 1},
        ledger={"location": 3},
        stamp=Stamp({"jax": "0.12.0", "mesh": "data=4"}, ("jax.devices() at m.py:3",)),
        unknowns=(Unknown("odd", "unheard of"), Unknown("o", "p", Location("m.py", 3, None))),
        locations=(Location("m.py", 1, "jit(f)/a"), Location(None, None, None)),
    )


PROGRAM = _program()
DATA = artifact.dumps(PROGRAM)


def test_round_trip(tmp_path):
    artifact.save(PROGRAM, tmp_path / "a.program")
    assert artifact.load(tmp_path / "a.program") == PROGRAM
    assert [p.name for p in tmp_path.iterdir()] == ["a.program"]
    assert stat.S_IMODE((tmp_path / "a.program").stat().st_mode) == 0o644


def test_same_bytes_for_the_same_program():
    assert artifact.dumps(_program()) == DATA
    assert artifact.dumps(artifact.loads(DATA)) == DATA


def test_no_digest_depends_on_a_location(tmp_path):
    from dataclasses import replace

    moved = replace(PROGRAM, locations=(Location("other.py", 9, None),) * 2)
    roots = []
    for p in (PROGRAM, moved):
        with zipfile.ZipFile(io.BytesIO(artifact.dumps(p))) as archive:
            roots.append(json.loads(archive.read("index.json"))["root"])
    assert roots[0] == roots[1]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.program"
    artifact.save(PROGRAM, path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact.os, "fsync", fail)
    with pytest.raises(InputError, match="No space left"):
        artifact.save(PROGRAM, path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.program"]
    assert artifact.load(path) == PROGRAM


def test_places_that_can_not_be_written_or_read(tmp_path):
    with pytest.raises(InputError, match="can't be written"):
        artifact.save(PROGRAM, tmp_path / "no" / "a.program")
    with pytest.raises(InputError, match="no such file"):
        artifact.load(tmp_path / "none.program")
    with pytest.raises(InputError, match="not a file"):
        artifact.load(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="not a whole relower artifact"):
        artifact.load(tmp_path / "text")


def _survives(data: bytes) -> bool:
    """Whether damaged bytes load; if they do, it must be as the very same program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = artifact.loads(data)
    except InputError as error:
        message = str(error)
    else:
        assert loaded == PROGRAM
        return True
    assert "\n" not in message
    return False


def test_every_truncation():
    assert not any(_survives(DATA[:end]) for end in range(len(DATA)))


def test_flipped_bits():
    rng = random.Random(0)
    caught = 0
    for _ in range(4000):
        data = bytearray(DATA)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        caught += not _survives(bytes(data))
    assert caught > 3000


def test_spliced_bytes():
    rng = random.Random(1)
    for _ in range(2000):
        start, end = sorted(rng.randrange(len(DATA)) for _ in range(2))
        _survives(DATA[:start] + rng.randbytes(rng.randrange(40)) + DATA[end:])


def _rezipped(change, compression=zipfile.ZIP_DEFLATED):
    """The artifact with its members changed, and every zip checksum right again."""
    with zipfile.ZipFile(io.BytesIO(DATA)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            for name, data in change(members):
                archive.writestr(name, data)
    return buffer.getvalue()


def _index(edit):
    def change(members):
        for name, data in members:
            if name == "index.json":
                index = json.loads(data)
                edit(index)
                data = canonical_json(index)
            yield name, data

    return change


def _stamped(stamp):
    """Another stamp, with the digests that belong to it."""

    def edit(index):
        index["stamp"] = stamp
        index["nodes"]["stamp"] = digest_of(canonical_json(stamp).decode())
        index["root"] = digest_of(canonical_json(index["nodes"]).decode())

    return _index(edit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: [*m, ("../evil", b"x")], "unexpected member '../evil'"),
        (lambda m: [*m, ("text/" + "0" * 64 + ".mlir", b"x")], "digest it is named by"),
        (lambda m: [*m, (f"text/{digest_of('x')}.mlir", b"x")], "belong to no section"),
        (lambda m: [*m, m[-1]], "two members have one name"),
        (lambda m: m[1:], "no member index.json"),
        (lambda m: [m[0], *m[2:]], "no member locations.json"),
        (lambda m: m[:-1], "no text for"),
        (lambda m: [("index.json", b"[" * 100_000), *m[1:]], "not a whole"),
        (lambda m: [("index.json", b"NaN"), *m[1:]], "NaN"),
        (lambda m: [("index.json", b"[]"), *m[1:]], "not an object"),
        (lambda m: [m[0], ("locations.json", b"{}"), *m[2:]], "locations.json doesn't have"),
        (_index(lambda i: i.update(format="other")), "format 'other'"),
        (_index(lambda i: i.update(version=99)), "version 99"),
        (_index(lambda i: i.update(extra=1)), "unexpected key 'extra'"),
        (_index(lambda i: i["counts"]["ops"].update({"a.b": 7})), "counts doesn't have the digest"),
        (_index(lambda i: i.update(root="0")), "root digest"),
        (_stamped({"jax": "\ud800"}), "surrogates not allowed"),
        (_stamped({"\ud800": "x"}), "surrogates not allowed"),
        (_stamped({"jax": 3}), "int where a string was wanted"),
        (_stamped([]), "list where an object was wanted"),
    ],
)
def test_crafted_archives(change, message):
    with pytest.raises(InputError, match=message):
        artifact.loads(_rezipped(change))


def test_expansion_is_bounded(monkeypatch):
    monkeypatch.setattr(artifact, "MAX_EXPANDED_BYTES", 1000)
    bomb = b"0" * 5_000_000
    data = _rezipped(lambda m: [*m, (f"text/{digest_of(bomb.decode())}.mlir", bomb)])
    with pytest.raises(InputError, match="expands to over"):
        artifact.loads(data)


def test_a_program_that_states_a_wrong_form_digest_is_refused():
    from dataclasses import replace

    form = replace(PROGRAM.forms["exact"], digest="0" * 64)
    with pytest.raises(InputError, match="form exact doesn't have the digest"):
        artifact.loads(artifact.dumps(replace(PROGRAM, forms={"exact": form})))
