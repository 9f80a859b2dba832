"""``assert_snapshot`` in pytest runs of their own."""

import pytest

TESTS = """
import jax, jax.numpy as jnp, pytest
X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
def f(x): return jnp.sin(x) * FACTOR
FACTOR = 2.0

@pytest.mark.parametrize("rows", [8, "1/2 odd"])
def test_one(program, rows):
    program.assert_snapshot((f, X))

class TestGroup:
    def test_two(self, program):
        program.assert_snapshot((f, X), level="dataflow")
        program.assert_snapshot((jnp.cos, X), name="cos")
"""


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def run(pytester):
    pytester.makepyfile(test_snap=TESTS)
    return lambda *a: pytester.runpytest_subprocess("-p", "no:cacheprovider", *a)


def stored(pytester, suffix=".snapshot"):
    return sorted(pytester.path.glob(f"relower.snapshots/test_snap/*{suffix}"))


def ended(result, code, **outcomes):
    result.assert_outcomes(**outcomes)
    assert result.ret == code
    return result.stdout.str()


def test_propose_accept_change(pytester, run, monkeypatch):
    said = ended(run(), 1, failed=3)
    assert "Failed: relower: there is no snapshot of it" in said
    assert "proposed as relower.snapshots/test_snap/" in said
    assert stored(pytester) == []
    assert len(stored(pytester, ".proposed")) == 3  # the second test ended at its first
    said = ended(run("--relower-accept", "-n", "2"), 0, passed=3)
    assert "relower: 4 snapshots accepted: look before you commit" in said
    files = stored(pytester)
    assert len(files) == 4
    assert stored(pytester, ".proposed") == []
    before = [p.read_bytes() for p in files]
    said = ended(run("-n", "2"), 0, passed=3)
    assert "relower: " not in said
    pytester.makepyfile(test_snap=TESTS.replace("FACTOR = 2.0", "FACTOR = 3.0"))
    monkeypatch.setenv("CI", "true")
    said = ended(run(), 1, failed=3)
    assert "AssertionError: not the program of its snapshot (" in said
    assert "function main changed: " in said
    assert "proposed" not in said
    assert [p.read_bytes() for p in stored(pytester)] == before
    assert stored(pytester, ".proposed") == []
    result = run("--relower-accept")
    assert result.ret == 4
    assert "CI is set, and snapshots are never written there" in result.stderr.str()
    for path in files:
        path.unlink()
    said = ended(run(), 1, failed=3)
    assert "Failed: relower: there is no snapshot of it" in said
    assert not list(pytester.path.glob("relower.snapshots/test_snap/*"))


def test_unused(pytester, run):
    ended(run("--relower-accept"), 0, passed=3)
    lean = TESTS.replace('[8, "1/2 odd"]', "[8]").replace("cos", "cosh", 1).replace('"cos"', '"c"')
    pytester.makepyfile(test_snap=lean)
    ended(run("--relower-accept"), 0, passed=2)
    home = pytester.path / "relower.snapshots"
    (home / "test_gone").mkdir()
    (home / "test_gone" / "a.exact.jax-1.snapshot").write_text("")
    said = ended(run("-n", "2", "--relower-strict"), 1, passed=2)
    unused = [line for line in said.splitlines() if "no test uses" in line]
    assert len(unused) == 3
    assert "relower.snapshots/test_snap/TestGroup.test_two.cos.exact.jax-" in said
    assert "relower.snapshots/test_gone/a.exact.jax-1.snapshot: delete it" in said
    said = ended(run("-k", "one"), 0, passed=1, deselected=1)  # says nothing of the others
    assert said.count("no test uses") == 1
    said = ended(run("test_snap.py::TestGroup"), 0, passed=1)
    assert said.count("no test uses") == 1
    pytester.makepyfile(test_snap=lean.replace("rows):", "rows):\n    pytest.skip()"))
    said = ended(run("--relower-strict"), 1, passed=1, skipped=1)  # the one skipped may use them
    assert said.count("no test uses") == 1


def test_what_a_snapshot_can_not_show(pytester, run):
    pytester.makepyfile(
        test_snap=TESTS
        + """
def test_twice(program):
    program.assert_snapshot((f, X))
    program.assert_snapshot((f, X))
def test_nothing(program):
    program.assert_snapshot((lambda: (),))
def test_callback(program):
    def g(x):
        jax.debug.callback(lambda y: None, x)
        return x + 1
    program.assert_snapshot((g, X))
"""
    )
    said = ended(run("--relower-accept"), 1, passed=3, failed=3)
    assert "test_twice: two snapshots of one name; give each a name=" in said
    assert "the program has no operations" in said
    assert len(stored(pytester)) == 5
    (pytester.path / "test_snap.py").write_text(TESTS)
    pytester.makeconftest("import jax\njax.config.update('jax_enable_x64', True)\n")
    said = ended(run(), 1, failed=3)
    assert "no snapshot of this environment (jax-" in said
    assert "x64 is False there and True here" in said
    path = stored(pytester)[0]
    for other in stored(pytester):
        other.write_bytes(path.read_bytes()[:100])
    pytester.makeconftest("")
    assert "not a whole snapshot" in ended(run(), 1, failed=3)
