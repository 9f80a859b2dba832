"""Two costs against each other."""

from dataclasses import replace

import pytest

from relower.lowering.compile import Compiled, StagedModule
from relower.lowering.cost.compare import NOWHERE, compare
from relower.lowering.cost.estimate import Figures
from relower.lowering.cost.ladder import build_cost

STAGED = StagedModule(b"", {}, "TPU7x:2x2x1", "step")
MEMORY = {"arguments": 8, "outputs": 4, "alias": 1, "temp": 2, "code": 3, "peak": 0}
CYCLES = {"sort.8": 6000, "copy.10": 1000, "copy.15": 500}


def cost_of(text, cycles=CYCLES, rung="salvaged"):
    found = Compiled(text, MEMORY, {}, 1.0)
    return build_cost(STAGED, found, Figures(rung, cycles, {}), [])


def test_a_total_says_what_it_covers(scan_text):
    cost = cost_of(scan_text)
    total = cost.total()
    assert (total.rung, total.estimate) == ("salvaged", 7 * 6000 + 1500)
    assert (total.ops, total.ops_of, total.complete) == (3, 8, False)
    assert total.coverage.startswith("3 of 8 operations, ")
    assert total.coverage.endswith("0 % of FLOPs")
    assert cost.total("profile").ops == 0


def test_without_any_figure_the_rung_is_a_lower_one(scan_text):
    assert cost_of(scan_text, {}).rung == "counts"
    # INT64_MAX and the like never reach a sum: the recorded HLO has window estimates only.
    assert cost_of(scan_text, {}, "profile").rung == "counts"


def test_peak_memory_is_summed_where_the_compiler_does_not_say(scan_text):
    assert cost_of(scan_text).memory.peak == 8 + 4 - 1 + 2


def test_a_part_of_a_program(scan_text):
    cost = cost_of(scan_text)
    assert {op.name for op in cost.within("jit(argsort)").ops} == {"iota.3", "sort.8"}
    assert {op.name for op in cost.within("argsort").ops} == {"iota.3", "sort.8"}
    assert cost.within("argsor").ops == ()


def test_savings_by_source_line(scan_text):
    before = cost_of(scan_text, {**CYCLES, "dynamic_update_slice.3": 50})
    after = cost_of(scan_text, {**CYCLES, "dynamic_update_slice.3": 80, "copy.15": 100,
                                "copy.16": 10})  # fmt: skip
    found = compare(before, after)
    assert found.unlike is None
    saved = {g.place: g.saving for g in found.groups}
    assert saved == {
        NOWHERE: None,  # A has no figure for copy.16
        "/home/user/model.py:10": None,
        "/home/user/model.py:11": 7 * (50 - 80),
    }
    assert found.worse is True
    assert found.groups[0].place == "/home/user/model.py:11"
    assert found.undecided == ()  # the places without a figure are alike on both sides


def test_a_changed_place_without_a_figure_leaves_it_undecided(scan_text):
    cycles = {op.name: 5 for op in cost_of(scan_text).ops if op.name != "iota.3"}
    before, after = (
        cost_of(scan_text, cycles),
        cost_of(scan_text.replace("s32[512]", "s32[256]"), cycles),
    )
    found = compare(before, after)
    assert [g.place for g in found.undecided] == ["/home/user/model.py:10"]
    assert found.worse is None


def test_by_scope_where_the_files_differ(scan_text):
    other = scan_text.replace("/home/user/model.py", "/home/user/other.py")
    before, after = cost_of(scan_text), cost_of(other.replace("jit(scan)", "jit(g)"))
    assert {"while/body/eval_jaxpr/jit(argsort)"} <= {
        g.place for g in compare(before, after).groups
    }


def test_equal_programs_are_no_worse(scan_text):
    cost = cost_of(scan_text, {op.name: 5 for op in cost_of(scan_text).ops})
    found = compare(cost, cost)
    assert found.worse is False
    assert {g.saving for g in found.groups} == {0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rung": "profile"}, "rung 'salvaged', B's on 'profile'"),
        ({"target": "TPU7x:1x1x1"}, "A is for TPU7x:2x2x1, B for TPU7x:1x1x1"),
        (
            {"versions": {"jax": "1", "jaxlib": "1", "libtpu": "9"}},
            "B by jax 1, jaxlib 1, libtpu 9",
        ),
    ],
)
def test_what_is_not_alike_is_not_compared(scan_text, change, said):
    cost = cost_of(scan_text)
    found = compare(cost, replace(cost, **change))
    assert said in found.unlike
    assert (found.worse, found.groups) == (None, ())


def test_counts_alone_are_no_cycles(scan_text):
    cost = cost_of(scan_text, {})
    assert compare(cost, cost).unlike == "neither has cycles: both stand on the rung 'counts'"


def test_fragments_whose_analysis_was_cut_short_say_so(scan_text):
    from relower.lowering.cost.fragment import comparable

    a, b = cost_of(scan_text, {"sort.8": 1, "copy.10": 5}), cost_of(scan_text, {"copy.10": 5})
    assert comparable((a, a)) is None
    assert comparable((a, b)) == "the analysis was cut short, without a figure for: sort of 2"
