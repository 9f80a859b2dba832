"""The pytest plugin, in pytest runs of their own."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases.py"
PAGE = Path(__file__).parents[2] / "docs" / "pytest.md"

HEAD = """
import jax, jax.numpy as jnp, pytest
from relower import case, lower, Program
X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
def f(x):
    with jax.named_scope("router"):
        return x * 2.0 - jnp.sin(x)
def g(x):
    with jax.named_scope("router"):
        y = jnp.sin(x)
        return x * 3.0 - y
def many(x):
    for i in range(60):
        x = jnp.sin(x) + i * x if i % 2 else x - jnp.cos(x) * i
    return x
def none(x): return x * jnp.float32(7)
"""

VERDICTS = (
    HEAD
    + """
def test_same(program):
    found = program.assert_identical((f, X), case(f, X))
    assert found.verdict.name == "IDENTICAL"

def test_differs(program):
    found = program.assert_differs((f, X), (g, X), only_in="scope:router")
    assert len(found.changes) >= 1

def test_levels_and_programs(program):
    once = program.lower((f, X))
    assert isinstance(once, Program) and set(once.forms) == {"exact", "inlined", "dataflow"}
    program.assert_identical(once, (f, X), level="dataflow")
    assert set(program.lower((f, X), "inlined").forms) == {"inlined"}

def test_fails_differs(program):
    program.assert_identical((f, X), (g, X))

def test_fails_matches(program):
    program.assert_differs((f, X), case(f, X))

def test_fails_elsewhere(program):
    program.assert_differs((f, X), (g, X), only_in=["scope:loss", "kernel:gmm"])

def test_fails_bounded(program):
    program.assert_identical((many, X), (none, X))

def test_fails_unknown(program):
    with pytest.raises(AssertionError):  # a control isn't satisfied by UNKNOWN
        program.assert_identical(lower(f, X, target="TPU7x:2x2x2"), (f, X))

def test_allowed(program):
    program.assert_identical(lower(f, X, target="TPU7x:2x2x2"), (f, X), allow=["target"])

def test_fails_itself(program):
    p = (f, X)
    program.assert_identical(p, p)

def test_fails_itself_again(program):
    program.assert_identical((f, X), (f, X))

def test_fails_itself_spelt(program):
    program.assert_identical("prog.py:p", "./x/../prog.py:p")

def test_another_name_of_a_file(program):
    assert not program._same("prog.py:p", "prog.py:q")
    assert not program._same("prog.py:p", "prog.py:p@main")
    assert not program._same((f, X), (g, X))

def test_fails_untupled(program):
    program.lower(f, X)

def test_fails_nothing(program):
    program.assert_differs(case(lambda: ()), (f, X))

def test_fails_expectation(program):
    program.assert_differs(case(f, X, expect={"kernels": 1}), (g, X))

def test_fails_type(program):
    program.assert_identical(f, (f, X))

def test_fails_trace(program):
    program.assert_identical((f,), (f, X))

@pytest.mark.parametrize("only_in", ["router", []])
def test_fails_pattern(program, only_in):
    program.assert_differs((f, X), (g, X), only_in=only_in)

def test_fails_level(program):
    program.assert_differs((f, X), (g, X), level="loose")
"""
)

SAID = {
    "differs": ["AssertionError: the programs must be identical, and differ", "stablehlo.constant",
                "test_verdicts.py:10  jit(g)/router", "DIFFERENT at level exact"],
    "matches": ["AssertionError: the programs must differ, and are identical", "IDENTICAL at"],
    "elsewhere": ["AssertionError: ", "are outside scope:loss, kernel:gmm", "jit(g)/router"],
    "bounded": ["… and", "more groups of differences", "DIFFERENT at level exact"],
    "unknown": ["Failed: relower: it can't be decided", "stamp: target is TPU7x:2x2x2 in a"],
    "itself": ["Failed: relower: a program is compared with itself"],
    "itself_again": ["Failed: relower: a program is compared with itself"],
    "itself_spelt": ["Failed: relower: a program is compared with itself"],
    "untupled": ["Failed: relower: found a function and an argument", "program.lower((f, x))"],
    "nothing": ["Failed: relower: a has no operations: nothing was compared"],
    "expectation": ["Failed: relower: the program has 0 kernels; its case expects at least 1"],
    "type": ["Failed: relower: found a function; wanted a Program"],
    "trace": ["Failed: relower: f can't be traced: TypeError"],
    "pattern": ["Failed: relower: only_in: 'router'; wanted 'kernel:NAME'",
                "Failed: relower: only_in is empty"],
    "level": ["Failed: relower: level 'loose': wanted one of exact"],
}  # fmt: skip


def of_test(output, name):
    """The part of pytest's report on one failing test, or on all with its parameters."""
    parts = output.split("\n___")
    return "\n".join(p for p in parts if f" test_fails_{name}" in p.partition("\n")[0])


def test_verdicts(pytester):
    pytester.makepyfile(test_verdicts=VERDICTS)
    result = pytester.runpytest_subprocess("--import-mode=importlib", "--strict-markers")
    result.assert_outcomes(passed=5, failed=16)
    for name, wanted in SAID.items():
        said = of_test(result.stdout.str(), name)
        for text in wanted:
            assert text in said, (name, said)
        assert "assertions.py" not in said, "a frame of the plugin is shown"
        assert len(said) < 25_000


TARGETS = (
    HEAD
    + """
from pathlib import Path
pytestmark = pytest.mark.relower(target="TPU7x:2x2x2")

def devices(x): return x * jax.device_count()
def by_hand(n):
    def devices(x): return x * n
    return devices

def test_module(program):
    assert program.lower((f, X)).stamp.fields["target"] == "TPU7x:2x2x2"
    program.assert_identical((devices, X), (by_hand(16), X))

@pytest.mark.relower(target="TPU7x:2x2x1", route="abstract")
def test_closest(program):
    fields = program.lower((f, X)).stamp.fields
    assert (fields["target"], fields["route"]) == ("TPU7x:2x2x1", "abstract")
    program.assert_identical((devices, X), (by_hand(8), X))

@pytest.mark.relower(chip="TPU7x")
def test_fails_key(program): pass

@pytest.mark.relower("TPU7x:2x2x1")
def test_fails_unnamed(program): pass

@pytest.mark.relower(target=7)
def test_fails_value(program): pass

@pytest.mark.relower(target="TPU9")
def test_fails_target(program):
    program.lower((f, X))

def test_file(program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # files are seen from pytest's root folder, wherever a test is
    found = program.assert_differs("sub/cases.py:base", "sub/cases.py:mul", only_in="kernel:scaled")
    assert found.changes

def test_fails_file(program):
    program.assert_identical("sub/cases.py:bse", "sub/cases.py:mul")

def test_fails_artifact(program):
    program.lower("none.program")
"""
)


@pytest.mark.parametrize("options", [("-n", "2"), ("--import-mode=prepend",)], ids=["xdist", "one"])
def test_marks_and_files(pytester, options):
    pytester.makepyfile(test_targets=TARGETS)
    pytester.makeini("[pytest]\n")
    pytester.mkdir("sub")
    shutil.copy(CASES, pytester.path / "sub")
    result = pytester.runpytest_subprocess("--strict-markers", *options)
    result.assert_outcomes(passed=3, failed=3, errors=3)
    said = result.stdout.str()
    for text in (
        "@pytest.mark.relower: 'chip'; wanted target or route",
        "@pytest.mark.relower: an argument without a name; wanted target or route",
        "@pytest.mark.relower: target is 7; wanted a string",
        "Failed: relower: target 'TPU9': wanted KIND:AxBxC",
        "no 'bse'; it has",
        "none.program: no such file",
    ):
        assert text in said, text
    assert "noise on std" not in said


def test_the_example_of_the_page(pytester):
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    pytester.makepyfile(test_page=code)
    pytester.runpytest_subprocess("--strict-markers").assert_outcomes(passed=3)


def test_runs_that_do_not_use_it_import_nothing(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_loaded(request):
            assert request.config.pluginmanager.hasplugin("relower.gates.pytest_plugin")
            heavy = {"jax", "numpy", "rich", "relower.lowering.diff", "relower.gates.assertions"}
            assert sorted(heavy & set(sys.modules)) == []
        """
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others' plugins may import jax
    alone = ("-p", "relower.gates.pytest_plugin")
    pytester.runpytest_subprocess(*alone).assert_outcomes(passed=1)
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    markers = pytester.runpytest_subprocess("--markers").stdout.str()
    assert "@pytest.mark.relower(target, route): " in markers


def test_a_difference_is_cut_at_a_bound():
    from relower.gates.render import MAX_CHARACTERS, plain
    from relower.lowering.change import Change, Difference, Group, Verdict

    change = Change("operation", "a.b", "", "x" * 5000, "y" * 5000, "main", "function")
    found = Difference(Verdict.DIFFERENT, "exact", ("a", "b"), groups=(Group((change,)),) * 9)
    text = plain(found, 20, "")
    assert MAX_CHARACTERS * 0.9 < len(text) < MAX_CHARACTERS + 200
    *_, cut, verdict = text.split("\n")
    assert cut.startswith("… cut after 15,")
    assert verdict == "DIFFERENT at level exact: 9 differences"


def test_the_entry_point():
    (entry,) = (e for e in importlib.metadata.entry_points(group="pytest11") if e.name == "relower")
    assert entry.value == "relower.gates.pytest_plugin"
    code = "import sys, relower.gates.pytest_plugin; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
