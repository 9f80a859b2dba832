"""``relower cost``: exit codes and reports, on costs that are made rather than compiled."""

import importlib.util
import io
import re
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from relower.cli import cost as command
from relower.cli.main import main
from relower.lowering import compile as compiling
from relower.lowering.compile import Compiled, StagedModule
from relower.lowering.cost.estimate import Figures
from relower.lowering.cost.ladder import build_cost

HLO = Path(__file__).parents[1] / "lowering" / "cost" / "data" / "scan_sort.hlo"
MEMORY = {"arguments": 8, "outputs": 4, "alias": 1, "temp": 2, "code": 3, "peak": 0}
CASES = """
import jax, jax.numpy as jnp

def add(x):
    return x + 1
"""


def made(cycles):
    staged = StagedModule(b"", {}, "TPU7x:2x2x1", "step")
    found = Compiled(HLO.read_text(), MEMORY, {}, 1.0)
    figures = Figures("salvaged", cycles, {})
    return build_cost(staged, found, figures, ["no profile of the whole program: it died"])


A = made({"sort.8": 6000, "copy.10": 1000})
FULL = {op.name: 100 for op in A.ops}


@pytest.fixture
def costs(monkeypatch):
    """Costs by the case's text and its passes, in the compiler's place."""

    def install(**by_name):
        def measured(options, spec, passes):
            return by_name[passes or spec.partition(":")[2]]

        monkeypatch.setattr(command, "measured", measured)

    return install


def test_one_program(costs, capfd):
    costs(a=A)
    assert main(["cost", "x.py:a"]) == 0
    out = capfd.readouterr().out
    assert "rung salvaged: what the analysis had written when it was cut short" in out
    assert "43,000 cycles" in out
    assert "covers 2 of 8 operations" in out
    assert "note: no profile of the whole program: it died" in out
    assert "sorts by operands: 1 of 2" in out


def test_columns_without_a_figure_are_left_out(costs, capfd):
    costs(a=A, b=made({}))
    heads = []
    for name in "ab":
        assert main(["cost", f"x.py:{name}"]) == 0
        out = capfd.readouterr().out
        heads += [line.split() for line in out.splitlines() if "HBM bytes  " in line]
    rest = ["×", "HBM", "bytes", "operation"]
    assert heads == [["cycles", "bound", "by", *rest], ["cycles", "at", "least", *rest]]
    assert "note: no cycles: the static analysis gives none for any of its operations" in out


@pytest.mark.parametrize(
    ("b", "code", "said"),
    [
        (made({**FULL, "sort.8": 50}), 0, "B costs no more: "),
        (made(FULL), 0, "B costs no more: "),
        (made({}), 2, "cycles can't be compared: A's figures stand on the rung"),
        (made({"while.1": 1, "copy.10": 5}), 2, "undecided: no place has a figure on both sides"),
    ],
)
def test_exit_codes(costs, capfd, b, code, said):
    costs(a=made(FULL), b=b)
    assert main(["cost", "x.py:a", "x.py:b"]) == code
    assert said in capfd.readouterr().out


def test_a_regression_is_marked_and_exits_with_1(costs, capfd):
    costs(a=made(FULL), b=made({**FULL, "dynamic_update_slice.3": 500}))
    assert main(["cost", "x.py:a", "x.py:b"]) == 1
    out = capfd.readouterr().out
    assert "-2,800 REGRESSION" in out
    assert "B costs more: " in out


def test_regressions_are_red_on_a_terminal_and_on_the_page(costs, monkeypatch, tmp_path):
    costs(a=made(FULL), b=made({**FULL, "dynamic_update_slice.3": 500}))
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=True, color_system="standard")
    monkeypatch.setattr(command, "console", lambda: terminal)
    assert main(["cost", "x.py:a", "x.py:b", "--html", str(tmp_path / "a.html")]) == 1
    shown = out.getvalue()
    assert "\x1b[1;31m-2,800 REGRESSION" in shown
    assert "\x1b[1;31mB costs more: " in shown
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in shown.splitlines()) <= 80
    page = (tmp_path / "a.html").read_text()
    assert '<span class="worse">-2,800 REGRESSION</span>' in page
    assert '<span class="verdict broken">more</span>' in page


def sites(*sources):
    site = {"pass": "packed", "status": "applied", "calls": 1}
    return {"sites": [{**site, "source": source, "lines": [source]} for source in sources]}


def test_a_program_against_itself_rewritten(costs, capfd, monkeypatch, parsed, tmp_path):
    line = next(op.source for op in A.ops if op.name == "sort.8")
    monkeypatch.setattr(command, "run", lambda job, timeout: sites(line, "gone.py:1"))
    a, b = made(FULL), made({**FULL, "sort.8": 20})
    saving = a.total().cycles - b.total().cycles
    costs(a=a, packed=b)
    html = tmp_path / "cost.html"
    assert main(["cost", "x.py:a", "--passes-b", "packed", "--html", str(html)]) == 0
    out = capfd.readouterr().out
    assert "B  x.py:a with packed\n" in out
    assert "B costs no more" in out
    assert f"{saving:,.0f}" in out.split("by rewrite")[1].splitlines()[1]
    assert "100 % of the change is at the rewrites' places" in out
    assert "nothing is left there" in out
    page = html.read_text()
    assert page.startswith("<!doctype html>")
    assert "<b>packed</b>" in page
    assert "://" not in page
    assert main(["cost", "x.py:a", "--passes-b", "packed", "--json"]) == 0
    found = parsed("cost_comparison", capfd.readouterr().out)["rewrites"]
    assert [s["saving"] for s in found["sites"]] == [pytest.approx(saving), 0]
    assert found["share"] == 1.0


def test_where_the_whole_has_no_cycles_the_sites_are_summed(costs, capfd, monkeypatch, parsed):
    measured = {"rung": "fragment", "before": 100.0, "after": {"rewrite": 40.0}, "runs": 3}
    report = sites("a.py:1", "a.py:2")
    report["sites"][0]["measured"] = {**measured, "chosen": "rewrite", "bytes": 8}
    report["sites"][1]["measured"] = {"why": "it stands in a kernel's body"}
    monkeypatch.setattr(command, "run", lambda job, timeout=None: report)
    costs(a=made({}), packed=made({}))
    assert main(["cost", "x.py:a", "--passes-b", "packed"]) == 2
    out = " ".join(capfd.readouterr().out.split())
    assert "the rewritten sites alone: 300 → 120 cycles in one run, rung fragment" in out
    assert "1 of 2 sites has a figure (1 without: it stands in a kernel's body)" in out
    assert main(["cost", "x.py:a", "--passes-b", "packed", "--json"]) == 2
    found = parsed("cost_comparison", capfd.readouterr().out)
    assert found["rewrites"] is None
    assert found["sites"]["saving"] == 180


def test_two_programs_have_no_rewrites(costs, capfd, parsed):
    costs(a=made(FULL), b=made({**FULL, "sort.8": 20}))
    assert main(["cost", "x.py:a", "x.py:b", "--json"]) == 0
    assert parsed("cost_comparison", capfd.readouterr().out)["rewrites"] is None


def test_one_programs_page(costs, tmp_path):
    costs(a=A)
    assert main(["cost", "x.py:a", "--html", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text()
    assert "43,000 cycles" in page
    assert "no profile of the whole program: it died" in page
    assert main(["cost", "x.py:a", "--html", str(tmp_path / "no" / "a.html")]) == 2


def test_json_follows_its_schema(costs, capfd, parsed):
    costs(a=A, b=made({**FULL, "sort.8": 2000}))
    assert main(["cost", "x.py:a", "--json"]) == 0
    found = parsed("cost", capfd.readouterr().out)
    assert found["total"]["estimate"] == 43_000
    assert main(["cost", "x.py:a", "x.py:b", "--json"]) == 2
    parsed("cost_comparison", capfd.readouterr().out)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.py").write_text(CASES)
    (tmp_path / "base.program").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["base.program"], "an artifact holds a program's normal form, which can't be compiled"),
        (["cases.py:none"], "no 'none'"),
        (["cases.py:add", "--arg", "f32[8]", "--target", "TPU9:1x1x1"], "no such kind 'TPU9'"),
        (["cases.py:add", "--arg", "f32[8]", "--passes", "no_such"], "no pass called 'no_such'"),
    ],
)
def test_bad_input_is_one_line(folder, capfd, arguments, said):
    assert main(["cost", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


HANGS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("half of its noise", flush=True)
if os.fork() == 0:
    os.setsid()
with open(os.environ["PIDS"], "a") as pids:
    pids.write(f"{os.getpid()}\\n")
pathlib.Path(sys.argv[1], "hlo.txt").write_text("HloModule half")
pathlib.Path(sys.argv[1], "answer.part").write_text("{")
time.sleep(600)
"""


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_over_the_limit_nothing_is_left(folder, capfd, monkeypatch):
    """Neither a process nor half a file, of a compiler that hangs, forks and ignores SIGTERM."""
    pids, temporary, cache = (folder / name for name in ("pids", "temporary", "cache"))
    temporary.mkdir()
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("RELOWER_CACHE", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(command, "run", _staged)
    monkeypatch.setattr(
        compiling, "child_command", lambda place: [sys.executable, "-c", HANGS, place]
    )
    said = "cases.py:add: the TPU compiler was stopped after 1 s; raise the limit\n"
    for _ in range(2):  # that it was stopped is kept whole, for limits no larger
        assert main(["cost", "cases.py:add", "--limit", "1", "--html", "page.html"]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.endswith(said)
        assert err.count("\n") == 1
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 4  # with the analysis and without, each with one that it forked
        assert not any(map(alive, started))
        assert list(temporary.iterdir()) == []
        assert not (folder / "page.html").exists()
        assert [path.name[-8:] for path in (cache / "cost").iterdir()] == [".json.gz"]


def _staged(job, timeout=None):
    StagedModule(b"ML", {}, "TPU7x:2x2x1", job.spec).save(job.output)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed: nothing is missing"
)
def test_a_missing_compiler_is_one_line(folder, capfd):
    assert main(["cost", "cases.py:add", "--arg", "f32[8]"]) == 2
    err = capfd.readouterr().err
    assert "libtpu isn't installed: install relower[tpu]" in err
    assert err.count("\n") == 1


@pytest.mark.libtpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu isn't installed, so nothing is compiled: install relower[tpu]",
)
def test_with_the_compiler(folder, capfd, parsed):
    assert main(["cost", "cases.py:add", "--arg", "f32[1024,1024]", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert parsed("cost", out)["memory"]["arguments"] == 4 * 1024 * 1024
    assert main(["cost", "cases.py:add", "--arg", "f32[8]", "--limit", "0.01"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
