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
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_holds_now(name):
    plan, passes = FOUND[name]
    outcome = check(plan, passes)
    assert outcome.violation is None
    assert outcome.state == "held"
    assert outcome.report.applied
