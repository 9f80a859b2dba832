"""The command line: exit codes, one line for bad input, no jax before it is needed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from relower.cli.main import COMMANDS, main
from relower.lowering.scratch import scratch

CASES = Path(__file__).parent.parent / "gates" / "cases.py"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with ``cases.py``, and the artifact of its ``base``."""
    found = tmp_path_factory.mktemp("cli")
    shutil.copy(CASES, found)
    before = Path.cwd()
    os.chdir(found)
    try:
        assert main(["lower", "cases.py:base", "-o", "base.program", "--json"]) == 0
    finally:
        os.chdir(before)
    return found


@pytest.fixture(autouse=True)
def _inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")


def said(capfd, *arguments, code):
    assert main(list(arguments)) == code, capfd.readouterr()
    return capfd.readouterr()


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_needs_no_jax(arguments):
    code = (
        "import sys\nfrom relower.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "usage: relower" in run.stdout


def test_errors_that_come_from_each_other_end():
    from relower.gates.worker import _of_passes

    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert _of_passes(one) is None


def test_help_of_the_whole_loads_no_command():
    code = (
        "import sys\nfrom relower.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'rich' not in sys.modules and 'relower.cli.diff' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_identical(capfd):
    out, err = said(capfd, "diff", "base.program", "cases.py:renamed", code=0)
    first, second, verdict = out.splitlines()
    size = r" \d\d operations, 1 kernel in 1 call, \d\d details set aside as noise"
    assert re.fullmatch("a:" + size, first)
    assert re.fullmatch("b:" + size, second)
    assert verdict.startswith("IDENTICAL at level exact")
    assert err == ""


def test_different_and_located(capfd):
    out, _ = said(capfd, "diff", "base.program", "cases.py:swapped", code=1)
    line = next(i for i, t in enumerate(CASES.read_text().split("\n"), 1) if "# a subtract" in t)
    assert f"cases.py:{line}  jit(f)/router/sub" in out
    assert "stablehlo.subtract  operands swapped" in out
    assert out.splitlines()[-1] == "DIFFERENT at level exact: 1 difference"


def test_every_line_fits_the_terminal(capfd):
    out, _ = said(capfd, "diff", "base.program", "cases.py:mul", code=1)
    assert "arith.mulf" in out
    assert max(map(len, out.splitlines())) <= 80


def test_two_cases_and_a_level(capfd, parsed):
    out, _ = said(
        capfd, "diff", "cases.py:base", "cases.py:constant", "--level", "inlined", "--json", code=1
    )
    found = parsed("diff", out)
    assert (found["verdict"], found["level"], found["change_count"]) == ("DIFFERENT", "inlined", 1)
    assert found["groups"][0]["detail"] == "value"


def test_the_report_as_a_page(capfd):
    arguments = ["diff", "base.program", "cases.py:swapped", "--html", "report.html"]
    out, err = said(capfd, *arguments, code=1)
    assert (out.splitlines()[-1], err) == ("DIFFERENT at level exact: 1 difference", "")
    page = Path("report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "stablehlo.subtract" in page
    assert "base.program → cases.py:swapped" in page
    _, err = said(capfd, *arguments[:-1], "nowhere/report.html", code=2)
    assert err == "relower: --html nowhere/report.html: its folder doesn't exist\n"
    Path("taken").mkdir(exist_ok=True)
    same = ["diff", "base.program", "base.program", "--html", "taken"]
    out, err = said(capfd, *same, code=2)  # Without its report, it isn't success.
    assert "IDENTICAL" in out
    assert err.startswith("relower: --html taken: can't be written")


def test_other_environments_are_unknown_until_allowed(capfd):
    wider = ["lower", "cases.py:base", "--target", "TPU7x:2x2x2", "-o", "wide.program"]
    assert main(wider) == 0
    capfd.readouterr()
    out, _ = said(capfd, "diff", "base.program", "wide.program", code=2)
    assert "stamp: target is TPU7x:2x2x1 in a and TPU7x:2x2x2 in b" in out
    out, _ = said(capfd, "diff", "base.program", "wide.program", "--allow", "target", code=0)
    assert "allowed to differ: target" in out


def test_lower_shows_what_a_program_holds(capfd):
    out, err = said(capfd, "lower", "cases.py:base", "-o", "again.program", code=0)
    for level in ("exact", "inlined", "dataflow"):
        assert level in out
    assert "scaled  called once" in out
    assert "stablehlo.subtract" in out
    assert "written to again.program" in out
    assert err == ""
    assert Path("again.program").read_bytes() == Path("base.program").read_bytes()


def test_a_plain_function_with_its_arguments(capfd, parsed):
    out, _ = said(capfd, "lower", "cases.py:plain", "--arg", "bf16[8,128]", "--json", code=0)
    assert parsed("program", out)["ops"]["stablehlo.sine"] == 1


BAD = [
    (["diff", "none.program", "base.program"], "none.program: no such file"),
    (["diff", "none.py:base", "base.program"], "none.py: no such file"),
    (["diff", "cases.py:bse", "base.program"], "no 'bse'; it has"),
    (["diff", "cases.py", "base.program"], "not a whole relower artifact"),
    (
        ["diff", "base.program", "base.program", "--passes-b", "default"],
        "--passes-b says how a case",
    ),
    (["diff", "cases.py:base", "base.program", "--passes-b", "x"], "base.program has been: wanted"),
    (
        ["diff", "base.program", "base.program", "--arg", "f32[8"],
        "--arg says how a case is lowered",
    ),
    (["diff", "base.program", "base.program", "--allow", "jaxx"], "did you mean 'jax'"),
    (["lower", "cases.py:fails", "--arg", "f32[8,3]"], "can't be traced: TypeError"),
    (["lower", "cases.py:plain"], "takes 1 argument "),
    (["lower", "cases.py:plain", "--arg", "f33[8]"], "no dtype 'f33'"),
    (["lower", "cases.py:base", "--target", "TPU9"], "target 'TPU9'"),
    (["lower", "cases.py:base", "--mesh", "data"], "--mesh 'data': wanted"),
    (["lower", "cases.py:base", "-o", "no/such/folder"], "can't be written"),
    (["lower", "cases.py:base", "--passes", "a,,b"], "wanted 'none', 'default' or names"),
    (["lower", "cases.py:sleeps", "--timeout", "0.5"], "not done after 0.5 s"),
    (["lower", "cases.py:base", "--passes", "argsort_packd"], "did you mean 'argsort_packed_key'"),
    (["explain", "cases.py:base", "--passes", "argsort_packd"], "did you mean"),
    (["explain", "cases.py:fails", "--arg", "f32[8,3]"], "can't be traced: TypeError"),
    (["lower", "cases.py:base", "--frozen", "w"], "--frozen is for passes: found none, wanted"),
    (
        ["explain", "cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]", "--frozen", "nothing"],
        "the regex 'nothing' matches none of",
    ),
    (["explain", "none.py:base"], "none.py: no such file"),
    (["gate", "none.toml"], "none.toml: can't be read"),
    (["gate", "--shard", "3/2"], "--shard '3/2': wanted I/N"),
    (["gate", "--junit", "no/such/file"], "--junit no/such/file: its folder doesn't exist"),
    (["probe", "none.py:base"], "none.py: no such file"),
    (["probe", "base.program"], "'base.program': wanted FILE.py:NAME"),
    (["probe", "cases.py:base@HEAD"], "check the revision out to probe it"),
    (["diff", "cases.py:base@HEAD", "cases.py:base"], "cases.py is in no git work tree"),
    (["lower", "cases.py:base@"], "wanted a git revision after @"),
    (["probe", "cases.py:base", "--without", "again,cwd"], "--without 'again,cwd': wanted one of"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_line(capfd, arguments, message):
    out, err = said(capfd, *arguments, code=2)
    assert out == ""
    assert err.startswith("relower: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("cut", [0, 1, 1000, -1])
def test_a_truncated_artifact(capfd, cut):
    Path("cut.program").write_bytes(Path("base.program").read_bytes()[:cut])
    _, err = said(capfd, "diff", "base.program", "cut.program", code=2)
    assert "cut.program: not a whole relower artifact" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["nonsense"], "'nonsense'"),
        (["diff", "a"], "required: b"),
        (["lower", "x", "--timeout", "0"], "--timeout: 0: wanted seconds above 0"),
        (["gate", "--jobs", "0"], "--jobs/-j: 0: wanted a number of at least 1"),
        (["gate", "--what"], "--what"),
    ],
)
def test_what_argparse_refuses_is_one_line(capfd, arguments, says):
    _, err = said(capfd, *arguments, code=2)
    assert err.startswith("relower: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["lower", "nope.py:x"],
        ["lower", "cases.py:base", "--timeout", "0"],
        ["diff", "nope.program", "base.program"],
        ["probe", "nope.py:x"],
        ["gate", "nope.toml"],
        ["passes", "nope"],
        ["explain", "nope.py:x"],
        ["cost", "nope.py:x"],
        ["selftest", "nope.py:x"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_bad_input_is_an_object_with_json(capfd, parsed, arguments):
    out, err = said(capfd, *arguments, "--json", code=2)
    assert err == f"relower: {parsed('error', out)['error']}\n"


def test_passes(capfd, parsed):
    out, err = said(capfd, "passes", code=0)
    assert "argsort_packed_key  bitwise" in out
    assert "applies where" in out
    assert err == ""
    out, _ = said(capfd, "passes", "nonnegative_index", "--json", code=0)
    (entry,) = parsed("passes", out)["passes"]
    assert entry["name"] == "nonnegative_index"
    assert "def before" in entry["before"]
    _, err = said(capfd, "passes", "nonnegative", code=2)
    assert "no pass called 'nonnegative'; there are inverse_permutation, argsort_packed_key" in err


def test_explain(capfd, parsed):
    line = next(i for i, t in enumerate(CASES.read_text().split("\n"), 1) if "# an argsort" in t)
    arguments = ["cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]"]
    out, err = said(capfd, "explain", *arguments, code=0)
    assert "applied (1)" in out
    assert "argsort_unique_pairs  sort" in out
    assert f"cases.py:{line}" in out
    assert "declined (1)" in out
    assert "    instead of argsort_packed_key: key-dtype" in out
    assert "    instead of inverse_permutation: not-a-permutation" in out
    assert "maybe-negative: the index is not known to be at least 0" in out
    assert "1 applied, 1 declined" in out.splitlines()[-1]
    assert err == ""
    out, _ = said(capfd, "explain", *arguments, "--json", code=0)
    found = parsed("report", out)
    assert [found[n] for n in ("applied", "declined", "taken")] == [1, 1, 2]
    assert len(found["sites"]) == 4


def test_explain_counts(capfd, parsed):
    arguments = ["explain", "cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]", "--counts"]
    out, _ = said(capfd, *arguments, code=0)
    table = dict(re.findall(r"^(\w+) +(\d+ +\d+)$", out, re.MULTILINE))
    out, _ = said(capfd, *arguments, "--json", code=0)
    found = parsed("counts", out)
    rows = {r["pass"]: (r["applied"], r["declined"], r["taken"]) for r in found["passes"]}
    assert rows["argsort_unique_pairs"] == (1, 0, 0)
    assert rows["argsort_packed_key"] == (0, 0, 1)
    shown = {name: tuple(map(int, row.split())) for name, row in table.items()}
    assert shown == {name: row[:2] for name, row in rows.items() if row[0] or row[1]}
    totals = tuple(found[n] for n in ("applied", "declined", "taken"))
    assert totals == tuple(map(sum, zip(*rows.values(), strict=True))) == (1, 1, 2)
    _, err = said(capfd, *arguments, "--json", "--suggest", code=2)
    assert "--counts --json leaves the sites out" in err


def test_explain_measured(capfd, parsed, tmp_path, monkeypatch):
    """What can't be measured is said at the site; where libtpu is, figures are."""
    monkeypatch.setenv("RELOWER_CACHE", str(tmp_path))
    arguments = ["cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]"]
    arguments += ["--passes", "argsort_unique_pairs", "--measure", "--limit", "0.01"]
    out, err = said(capfd, "explain", *arguments, code=0)
    assert "not measured, the rule of thumb decided: " in out
    assert err == ""
    out, _ = said(capfd, "explain", *arguments, "--json", code=0)
    (site,) = parsed("report", out)["sites"]
    assert site["measured"]["why"]
    assert site["measured"]["chosen"] is None


def test_passes_change_a_program(capfd):
    arguments = ["cases.py:sorts", "cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]"]
    out, _ = said(capfd, "diff", *arguments, "--passes-b", "default", code=1)
    assert "stablehlo.sort" in out
    said(capfd, "diff", *arguments, "--passes", "default", code=0)


def test_a_pass_that_does_not_apply_names_every_reason(capfd):
    arguments = ["cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]"]
    _, err = said(capfd, "lower", *arguments, "--passes", "argsort_packed_key", code=2)
    assert "argsort_packed_key" in err
    assert "range of the keys" in err or "integer" in err
    assert err.count("\n") == 1


PROBE = """
import inspect
import jax.numpy as jnp
from cases import X
from relower.lowering.case import case

def lined():
    line = float(inspect.currentframe().f_lineno)
    return case(lambda x: jnp.sin(x) * line, X)
"""


def test_probe(capfd, parsed):
    Path("probed.py").write_text(PROBE)
    left_out = ["--without", "hash-seed", "--without", "history", "--without", "cwd"]
    arguments = ["probe", "probed.py:lined", "--level", "exact", *left_out, "-j", "2"]
    out, err = said(capfd, *arguments, code=1)
    title, _, digest, again, offset, *tree, verdict, closing = out.splitlines()
    assert (title, err) == ("probed.py:lined", "")
    assert re.fullmatch(r"  exact     [0-9a-f]{64}", digest)
    assert again == "✓ lowered again, nothing varied"
    assert offset == "✗ another file name, 50 lines further down"
    assert "        probed.py:9  jit(<lambda>)/mul" in tree
    assert verdict == "    DIFFERENT at level exact: 1 difference"
    assert closing == "UNSTABLE: 3 lowerings; not shown to be one program at exact"
    assert [p.name for p in Path().glob("*probed*.py")] == ["probed.py"]
    out, _ = said(capfd, *arguments, "--without", "offset", "--json", code=0)
    found = parsed("probe", out)
    assert (found["state"], found["levels"]["exact"]["stable"]) == ("stable", True)
    assert [entry["variation"] for entry in found["lowerings"]] == ["again"]


GATE = """
[[program]]
name = "step"
variants.base = "cases.py:base"
variants.again = "cases.py:renamed"
variants.swapped = "cases.py:swapped"
[[program.cell]]
variant = "again"
identical-to = "base"
[[program.cell]]
variant = "swapped"
differs-from = "base"
"""


def test_gate(capfd, parsed):
    Path("relower.toml").write_text(GATE)
    out, _ = said(capfd, "gate", "--no-cache", code=0)
    assert out.splitlines() == [
        "✓ step: again = base (exact)",
        "✓ step: swapped ≠ base (exact)",
        "1 of 1 identical, 1 of 1 controls differ",
    ]
    Path("bad.toml").write_text(GATE.replace('variant = "swapped"', 'variant = "again"'))
    out, _ = said(capfd, "gate", "bad.toml", code=1)
    assert "the control shows nothing" in out
    assert out.splitlines()[-1] == "1 of 1 identical, 0 of 1 controls differ"
    out, _ = said(capfd, "gate", "bad.toml", "--json", code=1)
    found = parsed("gate", out)
    assert found["exit_code"] == 1
    assert [cell["status"] for cell in found["cells"]] == ["holds", "broken"]


def test_gate_accepts_and_reuses(capfd, monkeypatch, parsed):
    time.sleep(0.02)  # what was written just now isn't kept
    cell = '[[program.cell]]\nvariant = "base"\nsnapshot = true\nops.total = "<= 1x again"\n'
    Path("snap.toml").write_text(GATE + cell)
    out, _ = said(capfd, "gate", "snap.toml", code=2)
    assert "there is no snapshot of it" in out
    out, _ = said(capfd, "gate", "snap.toml", "--accept", code=0)
    assert "    accepted: its first snapshot" in out.splitlines()
    assert "from the cache" not in out
    out, _ = said(capfd, "gate", "snap.toml", "-j", "2", code=0)
    *_, note, closing = out.splitlines()
    assert note == "3 of 3 programs from the cache"
    assert closing == "1 of 1 identical, 1 of 1 controls differ, 1 of 1 snapshots match"
    assert not list(Path("snap.snapshots").glob("*.proposed"))
    monkeypatch.setenv("CI", "1")
    _, err = said(capfd, "gate", "snap.toml", "--accept", code=2)
    assert err.startswith("relower: --accept: CI is set")
    (path,) = Path("snap.snapshots").iterdir()
    path.rename(path.with_name("step.gone.exact.jax-1.snapshot"))
    out, _ = said(capfd, "gate", "snap.toml", "--json", code=1)
    found = parsed("gate", out)
    assert [cell["expects"] for cell in found["cells"]] == ["identical", "differs", "snapshot"]
    assert found["guards"] == [
        "snap.snapshots/step.gone.exact.jax-1.snapshot: no cell has this snapshot; delete it"
    ]


def test_a_file_that_is_not_there_is_no_fault_of_the_output(capfd, monkeypatch):
    def missing(options):
        return open("none/at/all").close()

    monkeypatch.setattr("relower.cli.passes._run", missing)
    out, err = said(capfd, "passes", code=2)
    assert (out, err) == ("", "relower: none/at/all: No such file or directory\n")
    print("standard output is still there")
    assert capfd.readouterr().out == "standard output is still there\n"


def test_gate_reports(capfd, monkeypatch):
    Path("report.toml").write_text(GATE.replace('"cases.py:swapped"', '"cases.py:mul"'))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(Path("summary.md").absolute()))
    Path("summary.md").write_text("before\n")
    out, err = said(capfd, "gate", "report.toml", "-j", "2", "--junit", "junit.xml", code=0)
    assert (out.splitlines()[-1], err) == ("1 of 1 identical, 1 of 1 controls differ", "")
    suites = ElementTree.parse("junit.xml").getroot()
    assert [suites.get(name) for name in ("tests", "failures", "errors")] == ["2", "0", "0"]
    first, head, *_ = Path("summary.md").read_text().splitlines()
    assert first == "before"
    assert head == "## ✅ relower gate: 1 of 1 identical, 1 of 1 controls differ"
    Path("summary.md").write_bytes(b"x" * (1 << 20))  # no room is left
    shards = [["--shard", f"{number}/2"] for number in (1, 2)]
    found = [said(capfd, "gate", "report.toml", *shard, code=2) for shard in shards]
    assert all("is full, nothing was added" in err for _, err in found)
    assert Path("summary.md").stat().st_size == 1 << 20
    assert sum(out.count("✓") for out, _ in found) == 2
    assert all("shard" in out.splitlines()[-1] for out, _ in found)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/such/folder")
    Path("bad.toml").write_text(GATE.replace('identical-to = "base"', 'differs-from = "base"'))
    _, err = said(capfd, "gate", "bad.toml", "--junit", ".", code=1)  # broken, not undecided
    assert "--junit .: can't be written: Is a directory" in err
    assert "$GITHUB_STEP_SUMMARY no/such/folder: can't be written: No such file" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_with_several_at_once(number, code):
    Path("begun").unlink(missing_ok=True)
    Path("slow.toml").write_text(GATE.replace('"cases.py:swapped"', '"cases.py:sleeps"'))
    gate = ["gate", "slow.toml", "-j", "3", "--no-cache"]
    command = [sys.executable, "-m", "relower.cli.main", *gate]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        while not Path("begun").exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(number)
        out, err = run.communicate()
    assert (run.returncode, out, err) == (code, b"", b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("begun").read_text()), 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(number, code):
    Path("begun").unlink(missing_ok=True)
    command = [sys.executable, "-m", "relower.cli.main", "lower", "cases.py:sleeps"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        while not Path("begun").exists():  # the child writes its own process id when it sleeps
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(number)
        out, err = run.communicate()
    assert (run.returncode, out, err) == (code, b"", b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("begun").read_text()), 0)


def test_killed(tmp_path, monkeypatch):
    """It can end nothing itself: the child sees to it, and the next run takes its folder away."""
    Path("begun").unlink(missing_ok=True)
    command = [sys.executable, "-m", "relower.cli.main", "lower", "cases.py:sleeps"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment) as run:
        while not Path("begun").exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    for _ in range(100):
        try:  # one that nobody collects is left as a name
            if ") Z" in Path("/proc", Path("begun").read_text(), "stat").read_text():
                break
        except OSError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child goes on")
    assert list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch() as own:
        assert [p.name for p in tmp_path.iterdir()] == [Path(own).name]


def test_control_characters_do_not_reach_the_terminal(capfd):
    from dataclasses import replace

    from relower.lowering.artifact import load, save
    from relower.lowering.program import Unknown

    found = load("base.program")
    save(replace(found, unknowns=(Unknown("odd\x1b[2J", "unheard of"),)), "odd.program")
    out, _ = said(capfd, "diff", "odd.program", "odd.program", code=2)
    assert "\x1b" not in out
    assert "odd\\x1b[2J in a: unheard of" in out


def test_a_terminal_that_knows_ascii_only(folder):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "relower.cli.main", "gate", "one.toml"]
    Path("one.toml").write_text(GATE)
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "1 of 1 identical, 1 of 1 controls differ" in run.stdout


@pytest.mark.parametrize("more", ["--json", ""])
def test_a_reader_that_leaves(more):
    command = f"{sys.executable} -m relower.cli.main diff base.program base.program {more} | true"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert run.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_report_that_cannot_be_written_is_no_verdict():
    command = [sys.executable, "-m", "relower.cli.main", "diff", "base.program", "base.program"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("relower: can't write the report: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("seconds", ["inf", "1e400", "nan", "0", "-1", "abc"])
def test_a_timeout_nobody_can_wait_for(capfd, seconds):
    _, err = said(capfd, "diff", "base.program", "base.program", "--timeout", seconds, code=2)
    assert "wanted seconds above 0" in err


@pytest.mark.parametrize("what", ["KeyboardInterrupt()", "SystemExit(0)", "Own('enough')"])
def test_a_case_that_ends_its_process_is_one_line(folder, capfd, what):
    (folder / "ends.py").write_text(
        f"class Own(BaseException): pass\n\ndef step():\n    raise {what}\n"
    )
    assert main(["lower", "ends.py:step"]) == 2
    err = capfd.readouterr().err.strip()
    assert "\n" not in err
    assert what.partition("(")[0] in err
    assert "ends.py:4" in err


def test_probe_promises_no_revision(capfd):
    with pytest.raises(SystemExit):
        main(["probe", "--help"])
    assert "@REV" not in capfd.readouterr().out


def test_explain_suggest(capfd, parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "import jax.numpy as jnp\nfrom jax import lax\n"
    source += "def f(s):\n    return jnp.argsort(jnp.argmax(s, -1))\n"
    (tmp_path / "m.py").write_text(source)
    arguments = ["explain", "m.py:f", "--arg", "f32[40,8]", "--passes", "argsort_packed_key"]
    out, _ = said(capfd, *arguments, "--suggest", code=0)
    assert "in the source: sort one word of key and position: the keys lie in [0, 7]" in out
    assert "patch: 1 expression\n" in out
    assert "the patched files lower to the same program (level dataflow): f\n" in out
    assert "--- a/m.py\n+++ b/m.py\n" in out
    out, _ = said(capfd, *arguments, "--suggest", "--patch", "p.diff", "--json", code=0)
    report = parsed("report", out)
    assert (tmp_path / "p.diff").read_text() == report["patch"]
    assert report["not_patched"] == []
    assert report["patch_differs"] is None
    assert (tmp_path / "m.py").read_text() == source
    (site,) = (s for s in report["sites"] if s["status"] == "applied")
    assert site["suggestion"]["span"]["line"] == 4
    _, err = said(capfd, *arguments, "--patch", "no/such/folder.diff", code=2)
    assert "no/such/folder.diff" in err
    _, err = said(capfd, "explain", "m.py:f@HEAD", "--suggest", code=2)
    assert "--suggest is for the files of the work tree" in err
    out, _ = said(capfd, *arguments, code=0)
    assert "in the source" not in out


SEVERAL = """
import jax, jax.numpy as jnp
from jax import lax
import relower

def order(ids):
    return jnp.argsort(ids)

def step(s):
    return order(jnp.argmax(s, -1))

def unknown(s):
    return order(s[:, 0])

def of(fn, *shape):
    return relower.case(jax.jit(fn), jax.ShapeDtypeStruct(shape, jnp.float32))

def small(): return of(step, 40, 8)
def large(): return {"wide": of(step, 96, 16)}
def elsewhere(): return of(jnp.sin, 4)
def broken(): return of(lambda s: s @ s, 4, 5)
def train(): raise SystemExit("called")
if FLOATS:
    def floats(): return of(unknown, 40, 8)
"""


def test_a_patch_is_for_every_case_of_the_file(capfd, parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(SEVERAL.replace("FLOATS", "False"))
    arguments = ["explain", "m.py:small", "--passes", "argsort_packed_key", "--suggest"]
    out, _ = said(capfd, *arguments, "--json", code=0)
    report = parsed("report", out)
    assert "ids.size" in report["patch"]
    assert report["patch_cases"] == [
        {"case": "small", "differs": None}, {"case": "large[wide]", "differs": None}
    ]  # fmt: skip
    assert [one["case"] for one in report["patch_unchecked"]] == ["broken"]
    assert [line.rpartition(": ")[2] for line in report["patch_given"]] == [
        "keys in [0, 7], at most 536,870,912 rows",
        "keys in [0, 15], at most 268,435,456 rows",
    ]
    assert not {"cases", "expressions"} & set(report)

    Path("m.py").write_text(SEVERAL.replace("FLOATS", "True"))
    out, _ = said(capfd, *arguments, "--cases", "floats", code=0)
    assert "patch: 0 expressions\n" in out
    assert "not in it: m.py:7: argsort_packed_key: in floats it isn't rewritten" in out
    out, _ = said(capfd, *arguments, "--cases", "none", code=0)
    assert "patch: 1 expression\n" in out
    assert "(level dataflow): small\n" in out
    assert "not held against it: floats: --cases leaves it out" in out
    _, err = said(capfd, *arguments, "--cases", "flaots", code=2)
    _, other = said(capfd, *arguments[:-1], "--cases", "none", code=2)
    assert "--cases is for --suggest or --patch: found neither" in other
    assert "--cases: no case 'flaots' beside small; wanted of large[wide], elsewhere" in err


@pytest.mark.parametrize("command", ["explain", "lower", "bisect"])
def test_the_contract_of_what_default_stands_for(capfd, parsed, tmp_path, monkeypatch, command):
    """top_k's transpose is of the value contract: only by name, or where that is asked for."""
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(
        "import jax, jax.numpy as jnp, relower\n"
        "def f(x): return jnp.sum(jax.lax.top_k(x, 2)[0] ** 2)\n"
        "def case(): return relower.case(jax.grad(f), jnp.ones((16, 64)))\n"
    )
    more = ["--check", "bits"] if command == "bisect" else []
    more += ["--passes", "default"] if command == "lower" else []
    counts = []
    for contract in ([], ["--contract", "value"]):
        out, _ = said(capfd, command, "m.py:case", *more, *contract, "--json", code=0)
        schema = {"explain": "report", "lower": "program"}.get(command, command)
        found = parsed(schema, out)
        counts.append({
            "explain": lambda f: "top_k_scatter" not in f["passes"],
            "lower": lambda f: "stablehlo.scatter" in f["ops"],
            "bisect": lambda f: f["among"] < 2,
        }[command](found))  # fmt: skip
    assert counts == [True, False]
    _, err = said(capfd, command, "m.py:case", *more, "--passes", "late_cast",
                  "--contract", "value", code=2)  # fmt: skip
    assert "--contract says what 'default' stands for: found --passes late_cast" in err
    if command == "explain":
        out, _ = said(capfd, command, "m.py:case", "--passes", "none", "--counts", code=0)
        assert "0 applied, 0 declined" in out
        out, _ = said(capfd, command, "m.py:case", "--contract", "value", "--counts", code=0)
        assert re.search(r"^top_k_scatter +1 +0$", out, re.MULTILINE)
        more = ["--passes", "none"]
    if command != "bisect":
        more = more if command == "explain" else []
        _, err = said(capfd, command, "m.py:case", *more, "--contract", "value", code=2)
        assert "--contract is for passes: found none, wanted --passes default" in err


def test_a_single_site_is_turned_off_by_its_address(capfd):
    arguments = ["cases.py:sorts", "--arg", "f32[8]", "--arg", "i32[8]"]
    out, _ = said(capfd, "explain", *arguments, code=0)
    (address,) = [
        t.strip() for t in out.splitlines() if t.strip().startswith("argsort_unique_pairs@")
    ]
    out, _ = said(capfd, "explain", *arguments, "--disable", address, code=0)
    assert "disabled: this site is turned off" in out
    assert "0 applied" in out.splitlines()[-1]
    _, err = said(capfd, "explain", *arguments, "--disable", address[:-1] + "9", code=2)
    assert f"near ones: {address}" in err
    where = ["lower", *arguments, "--passes", "default", "-o", "unused.program"]
    _, err = said(capfd, *where, "--disable", address[:-1] + "9", code=2)
    assert f"near ones: {address}" in err
    assert err.startswith("relower: disable: no site of")  # nothing is wrong with the program


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--passes", "a,b", "--disable", "b"], "b is asked for by name, too: wanted it in one of"),
        (["--passes", "default,b", "--disable", "b"], "b is asked for by name, too"),
        (["--passes-b", "b", "--disable", "b"], "b is asked for by name, too"),
        (["--passes", "a,b", "--disable", "c"], "c doesn't run here; the passes are a, b"),
        (["--passes", "a", "--passes-b", "b", "--disable", "c@f#1"],
         "c@f#1 turns nothing off: the pass c doesn't run here; the passes are a"),
    ],
)  # fmt: skip
def test_what_is_turned_off_runs_otherwise(capfd, arguments, wanted):
    case = "cases.py:base"
    for command in ("explain", "lower", "verify", "bisect", "diff"):
        if "--passes-b" in arguments and command != "diff":
            continue
        more = {"bisect": ["--check", "bits"], "diff": [case]}.get(command, [])
        _, err = said(capfd, command, case, *more, *arguments, code=2)
        assert err.startswith(f"relower: --disable: {wanted}")
        assert err.count("\n") == 1
