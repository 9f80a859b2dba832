"""The cache of lowered programs: used only where everything that was read is as it was."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relower.gates import inputs as inputs_module
from relower.gates.cache import Cache, default_folder
from relower.gates.child import Job
from relower.gates.config import load_matrix
from relower.gates.inputs import ABSENT, Digests, Unstable, machinery, matched, variables
from relower.gates.matrix import run_matrix
from relower.gates.recorder import ALL
from relower.gates.sight import identity, sight
from relower.lowering.artifact import save
from relower.lowering.artifact_index import form_digest
from relower.lowering.errors import InputError
from relower.lowering.program import Form, Program, Section, Stamp

SECTIONS = (Section("main", "function", '"stablehlo.add"(%0)', "main"),)
PROGRAM = Program(
    {"exact": Form("exact", SECTIONS, form_digest(SECTIONS))}, {}, {}, {"stablehlo.add": 1}, {},
    Stamp({"jax": "1"}),
)  # fmt: skip


class Lowering:
    """What a child would have read and answered, by hand."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "code").mkdir()
        self.source = folder / "code" / "step.py"
        self.source.write_text("one")
        self.data = folder / "data.txt"
        self.data.write_text("1")
        self.output = folder / "x.program"
        save(PROGRAM, self.output)
        self.job = Job("lower", spec="code/step.py:step", output=str(self.output), record=True)
        self.patterns = ()
        self.read = {
            "files": [str(self.source), str(self.data), str(folder / "none.txt")],
            "searched": [str(folder / "code"), str(folder / "absent")],
            "listed": [str(folder / "code")],
            "variables": ["LAYERS"],
            "opaque": [],
        }
        time.sleep(0.02)  # a file that was written just now isn't trusted

    def answer(self):
        """What a child says, with all that it read as it is now."""
        seen = {
            "files": {path: identity(path) for path in self.read["files"]},
            "searched": {path: sight(path, True) for path in self.read["searched"]},
            "listed": {path: sight(path, False) for path in self.read["listed"]},
        }
        read = {**self.read, "seen": seen}
        return {"expect": {"kernels": 2}, "notes": ["n"], "read": read}

    def cache(self, **options):
        return Cache(self.folder / "cache", **options)

    def kept(self, **options):
        cache = self.cache(**options)
        key = cache.key(self.job, self.folder, matched(self.patterns, self.folder))
        cache.store(key, self.job, self.output, self.answer())
        return cache

    def found(self, **options):
        cache = self.cache(**options)
        key = cache.key(self.job, self.folder, matched(self.patterns, self.folder))
        return None if key is None else cache.find(key)


@pytest.fixture
def lowering(tmp_path):
    return Lowering(tmp_path)


def test_hit(lowering):
    assert lowering.found() is None
    assert lowering.kept().troubles == []
    program, answer = lowering.found()
    assert program == PROGRAM
    assert answer == {"expect": {"kernels": 2}, "notes": ["n"]}
    assert lowering.found(fresh=True) is None


CHANGES = {
    "a source": lambda x: x.source.write_text("two"),
    "a file that was read": lambda x: x.data.write_text("2"),
    "a file that is gone": lambda x: x.data.unlink(),
    "a file that was looked for": lambda x: (x.folder / "none.txt").write_text(""),
    "a module beside": lambda x: (x.folder / "code" / "jax.py").write_text(""),
    "a package beside": lambda x: (x.folder / "code" / "jax").mkdir(),
    "a folder of modules": lambda x: (x.folder / "absent").mkdir(),
    "any name where names were listed": lambda x: (x.folder / "code" / "y.json").write_text(""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_was_read_has_changed(lowering, change):
    if change is not CHANGES["any name where names were listed"]:
        lowering.read["listed"] = []
    lowering.kept()
    assert lowering.found() is not None
    change(lowering)
    assert lowering.found() is None


def test_names_that_no_module_has(lowering):
    lowering.read["listed"] = []
    lowering.kept()
    (lowering.folder / "code" / "notes.txt").write_text("")
    (lowering.folder / "code" / "__pycache__").mkdir()
    (lowering.folder / "code" / ".git").mkdir()
    os.utime(lowering.source)  # the content counts
    assert lowering.found() is not None


@pytest.mark.parametrize("name", ["LAYERS", "JAX_ENABLE_X64", "XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_variables(lowering, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    lowering.kept()
    monkeypatch.setenv("GITHUB_RUN_ID", "12")  # nothing asked for it
    assert lowering.found() is not None
    for value in ("1", ""):
        monkeypatch.setenv(name, value)
        assert lowering.found() is None


def test_a_program_that_goes_through_the_environment():
    assert variables([], {"A": "1"}) == {}
    assert list(variables(["A", "B"], {"A": "1"}).values())[1] == ABSENT
    found = [variables([ALL], environment) for environment in ({"A": "1"}, {"A": "1", "B": "2"})]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "change",
    [
        {"spec": "code/step.py:other"}, {"args": ("f32[8]",)}, {"passes": ("a",)},
        {"passes": "default"}, {"target": "TPU7x:2x2x2"}, {"route": "topology"},
        {"mesh": {"x": 1}}, {"levels": ("exact",)}, {"contract": "value"},
    ],
)  # fmt: skip
def test_another_request(lowering, change):
    lowering.kept()
    lowering.job = Job(**{**vars(lowering.job), **change})
    assert lowering.found() is None


def test_what_lowers(lowering, monkeypatch, tmp_path):
    lowering.kept()
    before = machinery()
    monkeypatch.setattr(inputs_module, "_version", lambda name: "2")
    assert lowering.found() is None
    monkeypatch.undo()
    assert lowering.found() is not None
    monkeypatch.setattr(inputs_module, "_processor", lambda: "another")
    assert lowering.found() is None
    monkeypatch.undo()
    read = Path.read_bytes
    changed = lambda path: read(path) + b"#" * (path.name == "argsort_packed_key.py")
    monkeypatch.setattr(Path, "read_bytes", changed)
    assert machinery()["sources"] != before["sources"]
    lowering.folder = Path(shutil.copytree(tmp_path, tmp_path.parent / "elsewhere"))
    monkeypatch.undo()
    assert lowering.found() is None  # another working directory


def test_a_folder_that_joins_the_path(lowering, monkeypatch, tmp_path):
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    lowering.kept()
    assert lowering.found() is not None
    (tmp_path / "more.pth").write_text("/elsewhere\n")
    assert lowering.found() is None


def test_patterns(lowering):
    lowering.patterns = ("*.txt", "code/**/*.json")
    with pytest.raises(InputError, match=r"'code/\*\*/\*\.json': matches no file in "):
        lowering.kept()
    (lowering.folder / "code" / "deep").mkdir()
    (lowering.folder / "code" / "deep" / "a.json").write_text("1")
    time.sleep(0.02)
    lowering.read["files"] = lowering.read["listed"] = []
    lowering.kept()
    assert lowering.found() is not None
    (lowering.folder / "code" / "deep" / "a.json").write_text("2")
    assert lowering.found() is None


def test_what_is_not_kept(lowering):
    lowering.read["opaque"] = ["subprocess.Popen"]
    said = lowering.kept().troubles
    assert said == ["code/step.py:step: not kept in the cache: the case used subprocess.Popen"]
    lowering.read["opaque"] = []
    for path in ("/dev/null", "/proc/self/status"):
        lowering.read["files"].append(path)
        assert f"it reads {path}" in lowering.kept().troubles[0]
        lowering.read["files"].pop()
    cache = lowering.cache()
    key = cache.key(lowering.job, lowering.folder, ())
    lowering.source.write_text("written meanwhile")
    cache.store(key, lowering.job, lowering.output, lowering.answer())
    assert "was written while it was lowered" in cache.troubles[0]
    assert lowering.found() is None
    assert lowering.kept().troubles == []


def test_what_is_not_kept_for_one_reason_is_said_once(tmp_path):
    cache = Cache(tmp_path)
    mark = ": not kept in the cache: "
    cache.troubles += ["the cache can't be written: full"]
    cache.troubles += [f"{name}{mark}x.py was written" for name in ("a.py:f", "b.py:g", "a.py:f")]
    cache.troubles += [f"c.py:h{mark}it used a socket"]
    assert cache.remarks() == [
        "the cache can't be written: full",
        f"2 programs{mark}x.py was written",
        f"c.py:h{mark}it used a socket",
    ]


def exchanged(x, name):
    """As a whole folder, so that no time of the file itself shows it."""
    (x.folder / name).rename(x.folder / "old")
    (x.folder / "two").rename(x.folder / name)


def relink(x):
    (x.folder / "link").unlink()
    (x.folder / "link").symlink_to("two")


MEANWHILE = {
    "deleted": lambda x: x.data.unlink(),
    "made": lambda x: (x.folder / "two").rename(x.folder / "three"),
    "linked anew": relink,
    "exchanged": lambda x: exchanged(x, "one"),
    "a listed folder": lambda x: (x.folder / "code" / "y.json").write_text(""),
    "an input": lambda x: exchanged(x, "input"),
}


@pytest.mark.parametrize("change", MEANWHILE.values(), ids=MEANWHILE)
def test_what_changes_while_it_is_lowered(lowering, change):
    for name in ("one", "two", "input"):
        (lowering.folder / name).mkdir()
        (lowering.folder / name / "o.txt").write_text(name)
    (lowering.folder / "link").symlink_to("one")
    for name in ("one", "link", "three"):
        lowering.read["files"].append(str(lowering.folder / name / "o.txt"))
    time.sleep(0.02)
    cache = lowering.cache()
    files = matched(("input/*",), lowering.folder)
    key = cache.key(lowering.job, lowering.folder, files)
    answer = lowering.answer()
    change(lowering)
    cache.store(key, lowering.job, lowering.output, answer)
    (said,) = cache.troubles
    assert said.endswith(" changed while it was lowered")
    cache.troubles.clear()
    cache.store(key, lowering.job, lowering.output, lowering.answer())
    assert bool(cache.troubles) is (change is MEANWHILE["an input"])


def test_a_file_exchanged_between_two_lowerings_of_one_gate(lowering, monkeypatch):
    monkeypatch.setattr(inputs_module, "_SETTLED", 0)
    for name in ("one", "two"):
        (lowering.folder / name).mkdir()
        (lowering.folder / name / "o.txt").write_text(name)
    lowering.read["files"] = [str(lowering.folder / "one" / "o.txt")]
    time.sleep(0.02)
    cache = lowering.cache()
    key = cache.key(lowering.job, lowering.folder, ())
    cache._known().file(lowering.read["files"][0])
    swap = lambda a, b: (lowering.folder / a).rename(lowering.folder / b)
    swap("one", "old"), swap("two", "one")
    cache.store(key, lowering.job, lowering.output, lowering.answer())
    assert cache.troubles == []
    assert lowering.found() is not None
    swap("one", "two"), swap("old", "one")
    assert lowering.found() is None


def test_a_file_written_just_now_is_read_again(tmp_path, monkeypatch):
    """Its times may not show the next write."""
    digests = Digests()
    path = tmp_path / "a"
    path.write_text("1")
    same = identity(str(path))
    monkeypatch.setattr(inputs_module, "identity", lambda path: same)
    first = digests.file(str(path))
    path.write_text("2")
    assert digests.file(str(path)) != first


@pytest.mark.parametrize("imports", [True, False])
def test_own_folders_are_no_names(tmp_path, imports):
    (tmp_path / "x.py").write_text("")
    (tmp_path / "gate.toml").write_text("")
    before = Digests().folder(str(tmp_path), imports)
    for name in ("relower.snapshots", "gate.snapshots", "__pycache__"):
        (tmp_path / name).mkdir()
    assert Digests().folder(str(tmp_path), imports) == before
    (tmp_path / "other").mkdir()
    assert Digests().folder(str(tmp_path), imports) != before


def damage(path, how):
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-20])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    elif how == "flipped":
        path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    elif how == "other":
        save(replace(PROGRAM, ops={"stablehlo.add": 2}), path)  # whole, and not what was stored
    else:
        path.write_bytes(data.replace(b'"kernels": 2', b'"kernels": 1'))


@pytest.mark.parametrize("suffix", [".json", ".program"])
@pytest.mark.parametrize("how", ["cut", "empty", "gone", "flipped", "other", "edited"])
def test_damage_is_a_miss_and_said(lowering, suffix, how):
    lowering.kept()
    (path,) = [p for p in (lowering.folder / "cache").glob(f"*{suffix}") if "big" not in p.name]
    whole = path.read_bytes()
    damage(path, how)
    cache = lowering.cache()
    found = cache.find(cache.key(lowering.job, lowering.folder, ()))
    if path.exists() and path.read_bytes() == whole:
        assert (suffix, how) == (".program", "edited")  # it holds no such text
        return
    assert found is None
    if (suffix, how) != (".json", "gone"):
        assert "a damaged entry of the cache was ignored: " in cache.troubles[0]
    lowering.kept()
    assert lowering.found() is not None


def test_a_folder_that_can_not_be_used(lowering):
    (lowering.folder / "cache").write_text("a file")
    cache = lowering.kept()
    assert cache.troubles[0].startswith("the cache can't be written: ")
    assert lowering.found() is None


def test_the_longest_unused_go_first(lowering):
    size = lambda: sum(p.stat().st_size for p in (lowering.folder / "cache").iterdir())
    lowering.kept()
    one = size()
    for number in range(8):
        lowering.data.write_text(str(number))
        time.sleep(0.02)
        lowering.kept(limit=3 * one)
        assert size() <= 4 * one
    assert lowering.found() is not None
    lowering.data.write_text("6")
    assert lowering.found() is not None
    lowering.data.write_text("0")
    assert lowering.found() is None


def test_what_is_used_stays(lowering):
    for number in range(2):
        lowering.data.write_text(str(number))
        time.sleep(0.02)
        lowering.kept()
    lowering.data.write_text("0")
    assert lowering.found() is not None
    time.sleep(0.02)
    lowering.data.write_text("2")
    time.sleep(0.02)
    sizes = [p.stat().st_size for p in (lowering.folder / "cache").iterdir()]
    lowering.kept(limit=sum(sizes))
    lowering.data.write_text("0")
    assert lowering.found() is not None
    lowering.data.write_text("1")
    assert lowering.found() is None


def test_big_files_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs_module, "BIG", 4)
    path = tmp_path / "lib.so"
    path.write_bytes(b"12345")
    first = Digests()
    digest = first.file(str(path))
    (entry,) = first.known.values()
    assert entry[-1] == digest
    kept = {str(path): [*entry[:-1], "known"]}
    assert Digests(kept).file(str(path)) == "known"
    time.sleep(0.02)
    path.write_bytes(b"12346")
    assert Digests(kept).file(str(path)) not in ("known", digest)
    with pytest.raises(Unstable):
        Digests().file("/dev/null")


def test_where_it_is(monkeypatch):
    monkeypatch.setenv("RELOWER_CACHE", "/r")
    assert default_folder() == Path("/r")
    monkeypatch.delenv("RELOWER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_folder() == Path("/x/relower")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "relower"


CASE = """
import os, jax, jax.numpy as jnp
from pathlib import Path
import relower
from {name} import SCALE

def step():
    factor = SCALE + float(Path("factor.txt").read_text()) + float(os.environ.get("MORE", 0))
    return relower.case(lambda x: jnp.sin(x) * factor, jax.ShapeDtypeStruct((8,), jnp.float32))

def shell():
    import subprocess
    return relower.case(lambda x: x * float(subprocess.check_output(["echo", "3"])),
                        jax.ShapeDtypeStruct((8,), jnp.float32))
"""
GATE = """
[gate]
controls = false
[[program]]
name = "p"
variants.step = "case.py:step"
variants.shell = "case.py:shell"
variants.old = "case.py:step@HEAD"
[[program.cell]]
variant = "step"
differs-from = "shell"
[[program.cell]]
variant = "old"
differs-from = "step"
"""


def test_a_real_gate(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "case.py").write_text(CASE.format(name="scale_of_this_test"))
    (folder / "scale_of_this_test.py").write_text("SCALE = 1\n")
    (folder / "factor.txt").write_text("1")
    (folder / "relower.toml").write_text(GATE)
    run = lambda *a: subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *a], cwd=folder, check=True
    )
    run("init", "-q")
    run("add", "-A")
    run("commit", "-qm", "one")
    (folder / "factor.txt").write_text("2")
    time.sleep(0.02)
    matrix = load_matrix(folder / "relower.toml")

    def gate(reused):
        cache = Cache(tmp_path / "cache")
        result = run_matrix(matrix, cache=cache)
        assert result.exit_code == 0, result.to_json()
        assert cache.reused == reused
        said = " | ".join(result.notes)
        assert "case.py:shell: not kept in the cache: the case used subprocess.Popen" in said
        assert (f"{reused} of 3 programs from the cache" in said) is bool(reused)
        return [c.difference.digests for c in result.cells]

    first = gate(0)
    assert gate(2) == first
    (folder / "scale_of_this_test.py").write_text("SCALE = 2\n")
    time.sleep(0.02)
    second = gate(1)  # the revision is as it was
    assert second != first
    (folder / "factor.txt").write_text("3")
    time.sleep(0.02)
    assert gate(1) not in (first, second)
    monkeypatch.setenv("MORE", "4")
    assert gate(0)[0] != second[0]  # both sides read it


def test_what_a_recorder_hears(tmp_path):
    """In a process of its own: an audit hook stays for ever."""
    code = """
import json, os, sys
from relower.gates.recorder import Recorder
r = Recorder(); r.start()
open("a.txt").close(); open("w.txt", "w").close(); os.listdir("listed")
try: open("none.txt")
except OSError: pass
os.environ.get("ASKED"); "IN" in os.environ; os.getenv("GOT"); os.environb.get(b"BYTES")
import beside
print(json.dumps(r.found()))
"""
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "listed").mkdir()
    (tmp_path / "beside.py").write_text("")
    run = lambda: json.loads(
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True
        ).stdout
    )
    for found in (run(), run()):  # the second from byte code
        own = {Path(p).name for p in found["files"] if Path(p).parent == tmp_path}
        assert own == {"a.txt", "none.txt", "beside.py"}
        assert found["listed"] == [str(tmp_path / "listed")]
        assert str(tmp_path) in found["searched"]
        assert {"ASKED", "IN", "GOT", "BYTES"} <= set(found["variables"])
        assert ALL not in found["variables"]
        assert found["opaque"] == []
        assert json.__file__ in found["files"]  # loaded before it began
        assert any("libc" in path or "libpython" in path for path in found["files"])
    for name in ("listed", "a.txt"):
        assert name in str(found["seen"])
    assert found["seen"]["files"][str(tmp_path / "a.txt")] == identity(str(tmp_path / "a.txt"))
    assert found["seen"]["files"][str(tmp_path / "none.txt")] is None
    everything = code.replace("import beside", "dict(os.environ); os.system('true')")
    told = subprocess.run(
        [sys.executable, "-c", everything], cwd=tmp_path, capture_output=True, check=True
    )
    found = json.loads(told.stdout)
    assert (ALL in found["variables"], found["opaque"]) == (True, ["os.system"])


def recorded(folder, code):
    code = (
        "import json, os\nfrom relower.gates.recorder import Recorder\n"
        f"r = Recorder(); r.start()\n{code}\nprint(json.dumps(r.found()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_first_sight_is_before_the_reading(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("1")
    (tmp_path / "sub").mkdir()
    before = identity(str(path)), sight(str(tmp_path / "sub"), False)
    found = recorded(
        tmp_path, "open('a.txt').close(); os.listdir('sub'); os.rename('a.txt', 'sub/b')"
    )
    seen = found["seen"]
    assert (seen["files"][str(path)], seen["listed"][str(tmp_path / "sub")]) == before
    assert sight(str(tmp_path / "sub"), False) != before[1]


def test_descriptors_of_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("1")
    code = "f = os.open('sub', os.O_RDONLY); os.open('d.txt', os.O_RDONLY, dir_fd=f); os.listdir(f)"
    found = recorded(tmp_path, code)
    assert found["seen"]["files"][str(tmp_path / "sub" / "d.txt")] is not None
    assert found["listed"] == [str(tmp_path / "sub")]
    assert found["opaque"] == []


TEMPORARY = """
import shutil
os.mkdir("t"); {fill}; open("t/d").close(); shutil.rmtree("t")
"""


@pytest.mark.parametrize(
    ("fill", "left_out"),
    [
        ("open('t/d', 'w').close()", True),
        ("os.symlink(os.path.abspath('a'), 't/d')", False),
        ("os.link('a', 't/d')", False),
        ("os.rename('a', 't/d')", False),
    ],
)
def test_temporary_folders(tmp_path, fill, left_out):
    (tmp_path / "a").write_text("")
    found = recorded(tmp_path, TEMPORARY.format(fill=fill))["seen"]
    own = {path for path in found["files"] if path.startswith(str(tmp_path / "t"))}
    assert own == (set() if left_out else {str(tmp_path / "t" / "d")})
    if left_out:
        assert found["listed"][str(tmp_path / "t")] is None


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_pools_are_opaque(tmp_path, how):
    code = f"import multiprocessing as m; m.get_context({how!r}).Process(target=print).start()"
    assert any("multiprocessing.popen" in name for name in recorded(tmp_path, code)["opaque"])


def test_the_number_of_variables_is_the_environment(tmp_path):
    assert ALL in recorded(tmp_path, "len(os.environ)")["variables"]
