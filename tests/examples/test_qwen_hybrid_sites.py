"""At the real size every pass finds what it should, and the gate's matrix is whole.

A pass that stops to see its pattern in realistic code says nothing by itself: the counts do.
"""

import io
import sys
import tomllib
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from qwen_hybrid import by_hand, cases, trainer
from qwen_hybrid.config import BLOCK, REAL
from rich.console import Console

import relower
from relower.cli import explain, gate
from relower.gates.config import load_matrix
from relower.gates.results import CellResult, GateResult

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from literate import NEWEST, shown_of

GATE = Path(cases.__file__).with_name("relower.toml")
TOGETHER = GATE.with_name("together.toml")
FROZEN = relower.Frozen(trainer.FROZEN, grads=lambda out: out[1])
KINDS, FORWARD_AND_RECOMPUTED = 2, 2
"""Bodies of layers, one of each kind; and how often what isn't saved is in the program."""


def page(name):
    return (Path(__file__).parents[2] / name).read_text()


def printed(show, *what):
    """What a command prints in 80 columns."""
    out = Console(file=io.StringIO(), width=80)
    show(out, *what)
    return out.file.getvalue()


@pytest.fixture(scope="module")
def report():
    mesh = trainer.make_mesh()
    state, batch = cases.abstract_inputs(REAL, mesh)
    forward_backward = trainer.make_forward_backward(REAL, mesh)
    return relower.explain(
        forward_backward, state.params, batch, contract="rounding", frozen=FROZEN
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("argsort_packed_key", KINDS * FORWARD_AND_RECOMPUTED),  # the chunks share one body
        ("inverse_permutation", KINDS * (FORWARD_AND_RECOMPUTED + 2 * REAL.chunks)),
        ("counting_scatter", KINDS * FORWARD_AND_RECOMPUTED * (REAL.chunks + 1)),
        ("frozen_gradient", KINDS),
        ("gmm_swiglu", KINDS * FORWARD_AND_RECOMPUTED * REAL.chunks),
        ("router_grad_from_wo_input", KINDS * (REAL.chunks + 1)),  # the shared expert's gate too
        ("late_cast", FORWARD_AND_RECOMPUTED),
        ("permutation_scatter", KINDS * 3 * REAL.chunks),
        ("sorted_scatter", KINDS * REAL.chunks),
        ("split_fused_wi", KINDS * (FORWARD_AND_RECOMPUTED + 1)),
        ("top_k_by_argmax", KINDS * FORWARD_AND_RECOMPUTED),  # its derivative reads unnamed ids
        ("top_k_scatter", KINDS),
        ("triangular_inverse", 3),
    ],
)
def test_each_pass_finds_its_sites(report, name, count):
    assert report.counts().get(name) == count, str(report)


@pytest.mark.skipif(not NEWEST, reason="the page shows the newest jax")
def test_the_page_shows_the_counts(report):
    command = "relower explain examples/qwen_hybrid/cases.py:real --contract rounding "
    _, shown = shown_of(page("docs/qwen_hybrid.md"), command + "--frozen router --counts")
    assert shown == printed(explain.counts, report.to_json(), "examples/qwen_hybrid/cases.py:real")


def test_a_layer_by_itself_has_the_sites_of_the_model(report):
    """What is compiled and budgeted as a layer is what the blocks run."""
    found = Counter()
    for case in cases.layers().values():
        fn, args, _ = case.built(trainer.make_mesh())
        frozen = relower.Frozen(trainer.FROZEN, grads=lambda out: out[3])
        found += Counter(relower.explain(fn, *args, contract="rounding", frozen=frozen).counts())
    assert found == report.counts()


def test_the_gathers_of_a_layer_go_together(report):
    assert report.counts()["packed_all_gather"] >= KINDS * FORWARD_AND_RECOMPUTED * 2


def test_no_routing_pattern_is_left(report):
    """What is still declined of the routing's passes is the vocabulary's, and says so."""
    routing = {"argsort_packed_key", "sorted_scatter", "permutation_scatter", "top_k_by_argmax"}
    left = {
        Path(site["source"].rpartition(":")[0]).name
        for site in report.to_json()["sites"]
        if site["pass"] in routing and site["status"] == "declined" and not site.get("taken_by")
    }
    assert left <= {"model.py"}, left


def test_nine_pass_sets_in_five_programs():
    cells = load_matrix(GATE).cells
    same = [c for c in cells if c.identical]
    assert Counter(c.program for c in same) == dict.fromkeys((*cases.VARIANTS, "update"), 9)
    assert {c.node.pass_set for c in same} == {*by_hand.FORMS, "frozen"}
    assert sum(not c.identical for c in cells) == 14
    for cell in same:  # each against the twin of its own name
        assert cell.other.variant == ("plain" if cell.program == "update" else cell.node.pass_set)
    programs = tomllib.loads(GATE.read_text())["program"]
    assert all(p["passes"] == programs[0]["passes"] for p in programs)


def test_all_that_is_by_hand_goes_together():
    """The twin of the nine sets has every form, and nothing of the plain model's."""
    whole, control = load_matrix(TOGETHER).cells
    assert whole.identical
    alone = tomllib.loads(GATE.read_text())["program"][0]["passes"].values()
    assert sorted(whole.node.choice.passes) == sorted(name for p in alone for name in p["names"])
    assert whole.other.spec.endswith("twins[real-all]")
    assert not control.identical
    assert control.node.choice.contract == "rounding"
    ops = by_hand.by_hand(REAL, *by_hand.FORMS).ops
    changed = {f.name for f in fields(ops) if getattr(ops, f.name) != getattr(REAL.ops, f.name)}
    assert changed == {f.name for f in fields(ops)} - {"activated"}  # SwiGLU has no twin


@pytest.mark.parametrize("name", ["README.md", "docs/qwen_hybrid.md"])
def test_the_pages_show_what_the_matrix_prints_where_all_hold(name):
    """That all do hold takes minutes to see: `.ci/flagship` runs the command itself."""
    _, shown = shown_of(page(name), "relower gate examples/qwen_hybrid/relower.toml --jobs 2")
    cells = load_matrix(GATE).cells
    result = GateResult(tuple(CellResult(c, "holds", ()) for c in cells), (), total=len(cells))
    assert shown == printed(gate.show, result)
    assert result.closing == "45 of 45 identical, 14 of 14 controls differ"


def test_the_numbers_have_a_cell_that_agrees_and_a_control():
    """Read only: running it takes minutes (docs/qwen_hybrid.md)."""
    agrees, rounding, control = load_matrix(GATE.with_name("numerics.toml")).cells
    assert rounding.identical
    assert rounding.node.choice.contract == "rounding"
    assert rounding.node.spec.endswith("step[wide]")
    assert agrees.identical
    assert agrees.node.choice.passes == "default"
    assert agrees.numerics.steps == 3
    assert not control.identical
    assert control.numerics.caught_by == ("grads/delta/wi l2",)
    steps = cases.step()
    for node in (agrees.node, agrees.other, control.node, control.other):
        name = node.spec.partition("[")[2].rstrip("]")
        assert set(steps[name].numerics.metrics) >= {"loss"}


def test_the_budgets_are_of_the_real_size():
    """Read only: they are compiled where libtpu is (.ci/libtpu)."""
    choice, inverse = load_matrix(GATE.with_name("cost.toml")).cells
    for cell in (choice, inverse):
        assert cell.node.choice.contract == "rounding"
        assert not cell.identical
    assert {b.metric for b in choice.budgets} == {"cycles", "temp", "sorts.operands"}
    shapes = {n: [a.shape for a in c.args] for n, c in cases.parts().items()}
    assert shapes == {"choice": [(4096, 512)], "inverse": [(2, 32, 64, 64, 64)]}


@pytest.fixture(scope="module")
def rewritten():
    case = cases.real()

    def build(mesh):
        fn, args, _ = case.built(mesh)
        return relower.optimize(fn, contract="rounding", frozen=FROZEN), args

    return relower.lower(replace(case, build=build), levels=("inlined",))


def test_the_real_size_lowers_with_all_passes_on(rewritten):
    assert not rewritten.unknowns
    fused = KINDS * FORWARD_AND_RECOMPUTED * REAL.chunks
    assert sum(rewritten.kernel_calls.values()) == fused, rewritten.kernel_calls
    assert "chlo.top_k" not in rewritten.ops
    assert "stablehlo.triangular_solve" not in rewritten.ops
    assert rewritten.ops["stablehlo.scatter"] == 2  # the embedding's rows, and the targets
    assert BLOCK == 4
