"""Counts and budgets of a cell, and what becomes of its status."""

import pytest

from relower.gates.budget import FAMILIES
from relower.gates.child import ChildFailed
from relower.gates.config import load_matrix
from relower.gates.expectations import expectations
from relower.gates.matrix import Ready, judge, run_matrix
from relower.lowering.artifact_index import form_digest
from relower.lowering.program import Form, Program, Section, Stamp

HEAD = """
[[program]]
name = "p"
variants.new = "m.py:new"
variants.old = "m.py:old"
variants.base = "m.py:base"
passes.packed = ["argsort_packed_key"]
[[program.cell]]
variant = "new"
differs-from = "old"
"""


def program(text, kernels=0, **ops):
    sections = (Section("main", "function", text, "main"),)
    body = Section("kernel:1", "kernel", "", "gmm")
    names = {"kernel:1": body} if kernels else {}
    counts = {f"stablehlo.{name}": count for name, count in ops.items()}
    form = Form("exact", sections, form_digest(sections))
    return Program({"exact": form}, names, {"kernel:1": kernels} if kernels else {}, counts, {},
                   Stamp({"jax": "1"}))  # fmt: skip


PROGRAMS = {
    "new": program("%0 = a", 2, add=10, sort=1),
    "old": program("%0 = b", 2, add=12, sort=2),
    "base": program("%0 = c", 0, add=9),
    "base+packed": program("%0 = d", 1, add=11),
}


@pytest.fixture
def judged(tmp_path):
    def found(text):
        (tmp_path / "relower.toml").write_text(HEAD + text)
        matrix = load_matrix(tmp_path / "relower.toml")
        lowered = {node: Ready(PROGRAMS[node.name]) for node in matrix.nodes()}
        result = judge(matrix.cells[0], lowered, matrix, "check")
        return result.status, result.messages

    return found


HOLDS = """
kernels = ">= 1, <= 2"
kernels.gmm = 2
ops."stablehlo.sort" = "<= 1"
ops.total = 11
budget = "ops.total <= 1.00x"
budget = ["ops.total <= 1.00x base+packed", "ops.stablehlo.sort <= 0.5x old"]
"""


def test_each_by_itself(judged):
    lines = HOLDS.strip().splitlines()
    assert [judged(line) for line in lines] == [("holds", ())] * len(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kernels = 1", "new calls 2 kernels; wanted 1"),
        ("kernels.gmm = 1", "new calls kernel 'gmm' 2 times; wanted 1"),
        ("kernels.gmm = '< 2'", "new: kernels.gmm is 2; wanted < 2"),
        ('ops."stablehlo.add" = 9', "new has 10 stablehlo.add; wanted 9"),
        ('ops."stablehlo.add" = "<= 9"', "new: ops.stablehlo.add is 10; wanted <= 9"),
        ("ops.total = 12", "new: ops.total is 11; wanted == 12"),
        ('ops.total = "<= 0.7x"', "new: ops.total is 11; wanted <= 0.7x of old, 14"),
        ('ops.total = "<= 1x base"', "new: ops.total is 11; wanted <= 1x base, which has 9"),
        ('budget = "kernels <= 0.5x base"', "new: kernels is 2; wanted <= 0.5x base, which has 0"),
        (
            'budget = "kernels >= 1x base"',
            "new: kernels >= 1x base: base has none, so it can't fail",
        ),
    ],
)
def test_misses(judged, line, message):
    assert judged(line) == ("broken", (message,))


def test_what_is_not_known_is_undecided(judged, monkeypatch):
    monkeypatch.setitem(FAMILIES, "cycles", None)
    assert judged('budget = "cycles <= 1x base"') == (
        "undecided",
        ("new: cycles isn't known",),
    )


def test_a_reference_that_can_not_be_lowered(tmp_path):
    (tmp_path / "relower.toml").write_text(HEAD + 'ops.total = "<= 1x base"\n')
    matrix = load_matrix(tmp_path / "relower.toml")
    lowered = {node: Ready(PROGRAMS[node.name]) for node in matrix.nodes()}
    base = next(node for node in lowered if node.name == "base")
    result = judge(
        matrix.cells[0], {**lowered, base: ChildFailed("gone", "input")}, matrix, "check"
    )
    assert (result.status, result.messages) == ("undecided", ("base: gone",))
    programs = {node: ready.program for node, ready in lowered.items()}
    assert [miss.kind for miss in expectations(matrix.cells[0], programs)] == ["broken"]


def test_what_can_not_even_begin_is_undecided(tmp_path):
    """Mistakes that no child is started for."""
    text = HEAD.replace('"m.py:new"', '{ case = "m.py:new", inputs = ["*.json"] }')
    (tmp_path / "relower.toml").write_text(text.replace('"m.py:old"', '"m.py:old@main"'))
    result = run_matrix(load_matrix(tmp_path / "relower.toml"))
    new, old = result.cells[0].messages
    assert new.startswith("new: inputs '*.json': matches no file in ")
    assert old.startswith("old: m.py:old@main: m.py is in no git work tree")
    assert result.exit_code == 2
