"""Programs that once broke a property, as small as they were found."""

import pytest

from relower.gates.fuzz.check import check
from relower.gates.fuzz.plan import Node, Plan

FOUND = {
    # The second call of a jitted function was taken for the first.
    "a function called twice on parts": (
        Plan(t=4, d=4, dtype="float32", transform="none", contract="bitwise", eager=False,
             mesh=None, some=None, nodes=(Node("fused", 190755096),), seed=262155808),
        ("split_fused_wi",),
    ),
    # What is better known after a rewrite wasn't passed on to the equations that stayed.
    "a product whose factor became zeros": (
        Plan(t=4, d=4, dtype="float32", transform="none", contract="named", eager=False,
             mesh=None, some=None, seed=880619720,
             nodes=(Node("shard_map", 355714464, (Node("swiglu_back", 1058754971),)),
                    Node("jit", 127338060, (Node("observed", 302017675),)))),
        ("gmm_swiglu", "frozen_gradient"),
    ),
    # What is known of a rewritten result was taken back to what its first replacement tells.
    "an order whose inverse a loop reads": (
        Plan(t=4, d=4, dtype="float32", transform="none", contract="named", eager=False,
             mesh=("Auto", 2), some=None, seed=715304418,
             nodes=(Node("shard_map", 69487133,
                         (Node("inverse", 147633894),
                          Node("loop", 164470641, (Node("permuted", 832138001),)))),)),
        ("argsort_packed_key", "inverse_permutation", "sorted_scatter"),
    ),
    # A group of collectives that couldn't be one was declined for good, when another group fitted.
    "gathers that wait for sums that wait for one of them": (
        Plan(t=4, d=4, dtype="float32", transform="none", contract="named", eager=False,
             mesh=("Auto", 2), some=None, seed=517671718,
             nodes=(Node("shard_map", 847073876,
                         (Node("gradient", 711468214,
                               (Node("gathers", 177299104), Node("scatters", 304816483),
                                Node("permuted", 1027537016))),)),)),
        ("packed_all_gather", "packed_psum_scatter"),
    ),
    # A site that a value couldn't be brought to was declined when the value was at hand, too.
    "an inverse that another rewrite leaves at hand": (
        Plan(t=4, d=4, dtype="float32", transform="grad", contract="rounding", eager=False,
             mesh=None, some=None, seed=471274619,
             nodes=(Node("while", 133508027,
                         (Node("fused", 371297643),
                          Node("while", 387931752,
                               (Node("twice", 322385756, (Node("layer", 14902695),)),)))),)),
        ("inverse_permutation", "permutation_scatter"),
    ),
    # A call that returns an inverse was replaced, and the callback in it was lost.
    "an inverse by a function that also reports": (
        Plan(t=4, d=4, dtype="float32", transform="none", contract="rounding", eager=False,
             mesh=None, some=None, seed=6848060,
             nodes=(Node("spread", 471070073),
                    Node("twice", 730204213,
                         (Node("observed", 163924177), Node("inverse", 1064273936))))),
        ("inverse_permutation",),
    ),
    # Of the checks: float64 didn't round what the rewritten program reads as bits.
    "a bfloat16 read as bits, compared in float64": (
        Plan(t=4, d=4, dtype="float32", transform="grad outside", contract="value", eager=True,
             mesh=None, some=None, nodes=(Node("chosen", 825104862),), seed=395767679),
        ("top_k_by_argmax",),
    ),
    # Of the checks: noise differed between devices that hold the same values.
    "a branch that all devices take": (
        Plan(t=8, d=6, dtype="float32", transform="none", contract="rounding", eager=False,
             mesh=("Auto", 2), some=None, seed=780851425,
             nodes=(Node("shard_map", 567724169,
                         (Node("cond", 17035224, (Node("gathers", 1015275512),)),
                          Node("scatters", 842548032))),)),
        ("packed_psum_scatter",),
    ),
    # Of the checks: `top_k` told zeros apart by a sign that a contract of rounding doesn't promise.
    "zeros of two signs": (
        Plan(t=6, d=8, dtype="float32", transform="none", contract="named", eager=True, mesh=None,
             some=None, seed=392736058, nodes=(
                 Node("while", 110087910, (
                     Node("unchosen", 941516493), Node("spread", 705155261),
                     Node("argsort", 994217010), Node("while", 640102559, (
                         Node("solved", 418428983), Node("layer", 591935686))))),
                 Node("scan", 293729735, (
                     Node("taps", 301938241), Node("loop", 436957665, (
                         Node("grouped", 137546838), Node("observed", 562772148))),
                     Node("weighed", 662366744))),
                 Node("layer", 482183623))),
        ("router_grad_from_wo_input",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_holds_now(name):
    plan, passes = FOUND[name]
    outcome = check(plan, passes)
    assert outcome.violation is None
    assert outcome.state == "held"
    assert outcome.report.applied


def test_nothing_is_left_of_a_value_that_was_brought_for_nothing():
    plan, _ = FOUND["an inverse that another rewrite leaves at hand"]
    outcome = check(plan, ("permutation_scatter",))
    assert outcome.violation is None
    assert "cannot-thread" in [r.code for s in outcome.report.declined for r in s.reasons]
