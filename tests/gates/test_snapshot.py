"""Snapshots: their text, what is said of a change, and what is written when."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relower.gates.config import load_matrix
from relower.gates.matrix import Ready, guards, judge, run_matrix, snapshot_of_cell
from relower.gates.snapshot import changes, read, snapshot_of, written
from relower.gates.snapshot_files import Kept, check, mode, unused
from relower.lowering.artifact_index import form_digest
from relower.lowering.errors import InputError
from relower.lowering.program import Form, Program, Section, Stamp, Unknown

STAMP = {"jax": "0.12.0", "x64": "False", "flags": "a=1, b=2"}


def function(name, label, *lines):
    return Section(name, "function", "\n".join(lines), label)


MAIN = ["func.func public @main() {", '"func.call"() {callee = @f1}', '"stablehlo.add"(%0)', "}"]


def program(main=MAIN, f1=('"stablehlo.sine"(%0)',), kernel='"arith.addf"(%0)', calls=1, **stamp):
    body = Section("", "kernel", kernel, "gmm")
    body = replace(body, name=f"kernel:{body.digest[:12]}")
    sections = (
        function("main", "main", *main, f'"stablehlo.custom_call"(%0) {{body = "{body.name}"}}'),
        function("f1", "norm", *f1),
    )
    ops = {"stablehlo.add": 1, "stablehlo.sine": len(f1)}
    form = Form("exact", sections, form_digest(sections))
    names = {body.name: body}
    return Program({"exact": form}, names, {body.name: calls}, ops, {}, Stamp({**STAMP, **stamp}))


def said(old, new):
    return changes(snapshot_of(old, "exact", "x"), snapshot_of(new, "exact", "x"))


def test_text_and_back():
    made = snapshot_of(program(), "exact", 'moe: "plain"')
    text = written(made)
    assert read(text.encode(), "x") == made
    assert json.loads(text)["parts"][1][:2] == ["function", "norm"]
    assert max(map(len, text.splitlines())) < 100
    assert text.endswith("}\n")


@given(st.data())
@settings(deadline=None)
def test_a_damaged_text_is_one_line(data):
    whole = bytearray(written(snapshot_of(program(), "exact", "moe")).encode())
    kind = data.draw(st.sampled_from(["cut", "flip", "drop"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "cut":
        del whole[at:]
    elif kind == "drop":
        del whole[at]
    else:
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = read(bytes(whole), "x.snapshot")
    except InputError as error:
        found, told = None, str(error)
    if found is None:
        assert "x.snapshot: not a whole snapshot" in told
        assert "\n" not in told
    else:  # spaces that say nothing
        assert found == snapshot_of(program(), "exact", "moe")


def edits(value):
    """Every way to change one value of a snapshot, its keys and its sum left alone."""
    for key, old in value.items():
        if key in ("stamp", "ops"):
            for name, field in old.items():
                changed = field + (1 if isinstance(field, int) else "x")
                yield {**value, key: {**old, name: changed}}
            yield {**value, key: {**old, "stablehlo.tan": 1} if key == "ops" else {}}
        elif key == "parts":
            yield {**value, key: old[1:]}
            yield {**value, key: old[::-1]}
            for index in range(5):
                part = list(old[0])
                part[index] = {0: "kernel", 1: "x", 2: "0" * 16}.get(index, 77)
                yield {**value, key: [part, *old[1:]]}
        else:
            yield {**value, key: {"level": "inlined", "digest": "0" * 64}.get(key, f"{old}x")}


def test_every_edit_by_hand_is_noticed():
    value = json.loads(written(snapshot_of(program(), "exact", "moe")))
    tried = list(edits(value))
    assert len(tried) > 15
    for changed in tried:
        assert changed != value
        with pytest.raises(InputError, match=r"x: not a whole snapshot .*; accept it again"):
            read(json.dumps(changed).encode(), "x")
    assert read(json.dumps(value).encode(), "x") == snapshot_of(program(), "exact", "moe")


@pytest.mark.parametrize("digest", ["g" * 64, "A" * 64, "0" * 63, " " + "0" * 63, "0" * 63 + "\n"])
def test_a_digest_is_hexadecimal(digest):
    made = replace(snapshot_of(program(), "exact", "moe"), digest=digest)
    with pytest.raises(InputError, match="its digest"):
        read(written(made).encode(), "x")


def test_a_key_twice_is_none():
    text = written(snapshot_of(program(), "exact", "moe"))
    with pytest.raises(InputError, match="a key twice"):
        read(text.replace(' "of":', ' "of": "other",\n "of":').encode(), "x")


def test_an_edited_one_neither_holds_nor_breaks(kept):
    check(kept, program(), "accept", "moe")
    (path,) = kept.folder.iterdir()
    path.write_text(path.read_text().replace('"stablehlo.sine": 1', '"stablehlo.sine": 7'))
    found = check(kept, program(), "check", "moe")
    assert found.state == "undecided"
    assert "edited" in found.messages[0]
    assert check(kept, program(), "accept", "moe").state == "holds"
    assert check(kept, program(), "check", "moe").messages == ()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "[" * 100_000, '{"format": "relower-snapshot 2"}',
        "<<<<<<< HEAD\n{}", "\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
    ],
)  # fmt: skip
def test_what_is_no_snapshot(text):
    with pytest.raises(InputError, match="x: not a whole snapshot"):
        read(text.encode(), "x")


def test_changes_are_placed():
    assert said(program(), program(f1=('"stablehlo.cosine"(%0)',)))[0].startswith(
        "function norm changed: "
    )
    grown, counts = said(program(), program(f1=('"stablehlo.sine"(%0)', '"stablehlo.sine"(%1)')))
    assert grown.startswith("function norm changed: ")
    assert grown.endswith(", 1 → 2 operations")
    assert counts == "operations: stablehlo.sine 1 → 2"
    (kernel,) = said(program(), program(kernel='"arith.mulf"(%0)'))  # main only refers to it
    assert kernel.startswith("kernel gmm changed: ")
    assert said(program(), program(calls=3)) == ["kernel gmm changed: 1 → 3 calls"]
    lean = program()
    lean = replace(
        lean,
        forms={"exact": replace(lean.forms["exact"], sections=lean.forms["exact"].sections[:1])},
    )
    assert said(program(), lean)[0] == "function norm is gone (1 operation)"
    assert said(lean, program())[0] == "function norm is new (1 operation)"
    renumbered = program(main=[line.replace("@f1", "@f2") for line in MAIN])
    assert said(program(), renumbered)[0].startswith("each function and kernel by itself is the")
    form = program().forms["exact"]
    copy = function("f2", "norm_7", '"stablehlo.sine"(%0)')  # jax numbers a second one
    twice = replace(program(), forms={"exact": replace(form, sections=(*form.sections, copy))})
    assert said(program(), twice)[0] == "function norm changed: 1 → 2 copies"
    many = [function(f"f{i}", f"g{i}", "") for i in range(30)]
    wide = replace(lean, forms={"exact": replace(lean.forms["exact"], sections=tuple(many))})
    assert said(lean, wide)[-1] == "and 19 more functions and kernels"


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path / "relower.snapshots", "moe.plain+packed", "exact")


def on_disk(kept):
    return sorted(p.name for p in kept.folder.glob("*")) if kept.folder.exists() else []


NAME = "moe.plain+packed.exact.jax-0.12.0-"


def test_propose_accept_check(kept):
    found = check(kept, program(), "check", "x")
    assert (found.state, found.messages, on_disk(kept)) == (
        "missing", ("there is no snapshot of it",), [],
    )  # fmt: skip
    found = check(kept, program(), "propose", "x")
    assert (found.state, found.accepted) == ("missing", False)
    (name,) = on_disk(kept)
    assert name.startswith(NAME)
    assert name.endswith(".snapshot.proposed")
    found = check(kept, program(), "accept", "x")
    assert (found.state, found.messages) == ("holds", ("accepted: its first snapshot",))
    assert found.accepted
    assert on_disk(kept) == [name.removesuffix(".proposed")]
    assert check(kept, program(), "check", "another title").state == "holds"
    other = program(kernel='"arith.mulf"(%0)')
    before = kept.folder.joinpath(on_disk(kept)[0]).read_bytes()
    found = check(kept, other, "check", "x")
    assert found.state == "different"
    assert found.messages[0].startswith("not the program of its snapshot (")
    assert found.messages[1].startswith("kernel gmm changed")
    assert on_disk(kept) == [name.removesuffix(".proposed")]
    assert check(kept, other, "propose", "x").state == "different"
    assert on_disk(kept) == [name.removesuffix(".proposed"), name]
    assert kept.folder.joinpath(on_disk(kept)[0]).read_bytes() == before
    assert check(kept, program(), "propose", "x").state == "holds"  # back again: not proposed
    assert on_disk(kept) == [name.removesuffix(".proposed")]
    assert check(kept, other, "accept", "x").messages[0].startswith("accepted: not the program of")
    assert check(kept, other, "check", "x").state == "holds"
    assert check(kept, program(), "check", "x").state == "different"


@pytest.mark.parametrize("how", ["check", "propose"])
def test_another_environment_is_undecided_and_has_its_own(kept, how):
    check(kept, program(), "accept", "x")
    other = program(kernel='"arith.mulf"(%0)', flags="a=1, b=3")
    found = check(kept, other, how, "x")
    assert found.state == "undecided"
    assert "no snapshot of this environment (jax-0.12.0-" in found.messages[0]
    assert "flags is b=2 there and b=3 here" in found.messages[0]
    assert "a=1" not in found.messages[0]
    check(kept, other, "accept", "x")
    assert len(on_disk(kept)) == 2
    assert check(kept, other, "check", "x").state == "holds"
    assert check(kept, program(), "check", "x").state == "holds"
    first, second = sorted(kept.folder.glob("*.snapshot"))
    second.write_bytes(first.read_bytes())  # a file under another's name
    states = {check(kept, p, "check", "x").state for p in (program(), other)}
    assert states == {"holds", "undecided"}


def test_a_file_under_a_name_that_is_not_its_own(kept):
    check(kept, program(), "accept", "x")
    (only,) = kept.folder.glob("*.snapshot")
    only.rename(only.with_name(f"{kept.stem}0.9-00000000.snapshot"))
    (message,) = check(kept, program(), "check", "x").messages
    assert message.endswith("0.9-00000000.snapshot is of it: accept it again")


def test_environments_are_named_once(kept):
    check(kept, program(), "accept", "x")
    (only,) = kept.folder.glob("*.snapshot")
    only.with_name(f"{kept.stem}0.9-00000000.snapshot").write_bytes(only.read_bytes())
    (message,) = check(kept, program(flags="a=1, b=3"), "check", "x").messages
    assert message.count("jax-0.12.0-") == 2  # of here, and of there


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "the file is empty"),
        (b"<<<<<<< HEAD\n{}\n=======\n{}\n>>>>>>> b\n", "it holds the marks of a merge conflict"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(data, what):
    with pytest.raises(InputError, match=rf"x: not a whole snapshot \({what}\); accept it again"):
        read(data, "x")


def test_unknown_constructs_are_never_accepted(kept):
    odd = replace(program(), unknowns=(Unknown("a callback", "looks like any other"),))
    for how in ("check", "propose", "accept"):
        found = check(kept, odd, how, "x")
        assert found.state == "undecided"
        assert found.messages == ("undecided: a callback: looks like any other",)
    assert on_disk(kept) == []


def test_a_folder_that_can_not_be_written(kept):
    kept.folder.write_text("a file")
    with pytest.raises(InputError, match="can't be written"):
        check(kept, program(), "accept", "x")


def test_names_stay_within_their_folder(tmp_path):
    names = ["..", "../../x", "a/b", "é", ".hidden", "x" * 300, "a b", "a_b", "test[1/2]"]
    paths = [Kept(tmp_path, name, "exact").path("jax-1-2") for name in names]
    assert {path.parent for path in paths} == {tmp_path}
    assert len(set(paths)) == len(names)
    assert not any(path.name.startswith(".") for path in paths)
    assert max(len(path.name) for path in paths) < 200


def test_unused(tmp_path):
    mine = Kept(tmp_path, "a", "exact")
    check(mine, program(), "accept", "x")
    check(mine, program(flags="other"), "accept", "x")  # of another environment, not unused
    check(Kept(tmp_path, "a", "exact"), program(), "propose", "x")
    (tmp_path / "a.inlined.jax-1.snapshot").write_text("")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.exact.jax-1.snapshot").write_text("")
    found = [str(path.relative_to(tmp_path)) for path in unused(tmp_path, [mine])]
    assert found == ["a.inlined.jax-1.snapshot", "deep/a.exact.jax-1.snapshot"]
    assert len(unused(tmp_path, [])) == 4
    assert unused(tmp_path / "none", []) == []


def test_modes(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert (mode(False, "--accept"), mode(True, "--accept")) == ("propose", "accept")
    for value in ("", "0", "false", "False"):
        monkeypatch.setenv("CI", value)
        assert (mode(False, "--accept"), mode(True, "--accept")) == ("propose", "accept")
    for value in ("true", "1", "github"):
        monkeypatch.setenv("CI", value)
        assert mode(False, "--accept") == "check"
        with pytest.raises(InputError, match="--accept: CI is set"):
            mode(True, "--accept")


GATE = """
[[program]]
name = "step"
variants.base = "cases.py:base"
variants.mul = "cases.py:mul"
[[program.cell]]
variant = "base"
snapshot = true
kernels = 1
[[program.cell]]
variant = "mul"
differs-from = "base"
"""


@pytest.fixture
def matrix(tmp_path):
    (tmp_path / "relower.toml").write_text(GATE)
    return load_matrix(tmp_path / "relower.toml")


def judged(matrix, made, how):
    lowered = {node: Ready(made) for node in matrix.nodes()}
    return judge(matrix.cells[0], lowered, matrix, how), guards(matrix, lowered)


def test_in_a_gate(matrix):
    statuses = [judged(matrix, program(), how)[0].status for how in ("check", "propose")]
    assert statuses == ["broken", "undecided"]  # in CI, and where it can be accepted
    cell, _ = judged(matrix, program(calls=2), "accept")  # misses what the cell expects
    assert cell.status == "broken"
    kept = snapshot_of_cell(matrix.cells[0], matrix)
    assert not [name for name in on_disk(kept) if name.endswith(".snapshot")]
    cell, _ = judged(matrix, program(), "accept")
    assert (cell.status, cell.messages) == ("holds", ("accepted: its first snapshot",))
    cell, _ = judged(matrix, program(f1=('"stablehlo.cosine"(%0)',)), "check")
    assert cell.status == "broken"
    assert cell.messages[-1] == "`relower diff cases.py:base@REV cases.py:base` shows where"
    assert any("function norm changed" in text for text in cell.messages)
    assert cell.to_json()["expects"] == "snapshot"


def test_an_unused_one_fails_a_gate(matrix):
    judged(matrix, program(), "accept")
    assert not any("no cell has" in text for text in judged(matrix, program(), "check")[1])
    stray = matrix.folder / "relower.snapshots" / "step.gone.exact.jax-1.snapshot"
    stray.write_text("")
    found = [text for text in judged(matrix, program(), "check")[1] if "no cell has" in text]
    assert found == [f"relower.snapshots/{stray.name}: no cell has this snapshot; delete it"]


def test_of_a_real_program(cases):
    (cases / "snap.toml").write_text(GATE)
    matrix = load_matrix(cases / "snap.toml")
    first = run_matrix(matrix, snapshots="accept")
    assert (first.exit_code, first.closing) == (0, "1 of 1 controls differ, 1 of 1 snapshots match")
    (path,) = (cases / "snap.snapshots").glob("*.snapshot")
    assert path.stat().st_size < 3000
    again = run_matrix(matrix)
    assert (again.exit_code, again.cells[0].messages) == (0, ())
    assert path.name.startswith("step.base.exact.jax-")
