"""How far apart two results may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.gates.fuzz import check
from relower.gates.fuzz.compare import _compared, decided_by_rounding, difference
from relower.gates.fuzz.plan import Node, Plan
from relower.gates.fuzz.run import Found
from relower.passes.base import Contract


def compared(exact, other):
    plain = np.zeros(2, np.float32)
    return _compared([np.array(exact)], [np.array(other)], [plain], [plain], [0.0], 1e-5)


def test_what_a_type_takes_for_zero_is_no_difference():
    assert compared([0.0, 1e-285], [0.0, 0.0]) is None
    assert "in float64 the two are" in compared([0.0, 1e-30], [0.0, 0.0])


def traced(fn, x):
    return jax.make_jaxpr(fn)(x)


def chosen(left, right):
    """Which of two sums is greater."""
    return lambda x: jnp.argmax(jnp.stack([left(x), right(x)]))


ONE, OTHER = lambda x: (x[0] + x[1]) + x[2], lambda x: x[0] + (x[1] + x[2])
ROUNDED = np.array([2.0**24, 1.0, -(2.0**24)], np.float32)  # 0 and 1; both 1 in float64
WHOLE = np.array([3.0, -1.0, 2.0], np.float32)


def test_what_rounding_alone_decides():
    """Two sums that are equal but for rounding: which of them is chosen, no contract says."""
    old = traced(chosen(ONE, OTHER), ROUNDED)
    for exact in (False, True):
        said = decided_by_rounding(old, [ROUNDED], exact=exact)
        assert said == "the program's own argmax falls out otherwise in float64"


def test_what_is_exact_no_rounding_decides():
    """A tie of whole numbers: a rewrite that breaks it is wrong, though noise would break it."""
    old = traced(chosen(ONE, OTHER), WHOLE)
    later = traced(lambda x: 1 - chosen(ONE, OTHER)(x), WHOLE)
    assert "result 0" in difference(old, later, [WHOLE], Contract.ROUNDING)
    assert decided_by_rounding(old, [WHOLE], exact=True) is None
    assert decided_by_rounding(old, [WHOLE], exact=False) is not None


SHIFT = {jnp.sign: 1}


@pytest.mark.parametrize("kind", [jnp.floor, jnp.sign, lambda x: x.astype(jnp.int32),
                                  lambda x: x > 1, jnp.argsort])  # fmt: skip
def test_decisions_are_told_from_what_is_computed(kind):
    x = np.array([1.0, 1.0], np.float32)
    near = lambda x: jnp.stack([x[0] / 3 * 3 - SHIFT.get(kind, 0), x[1]])
    assert decided_by_rounding(traced(lambda x: kind(near(x)), x), [x], exact=False) is not None
    assert decided_by_rounding(traced(near, x), [x], exact=False) is None
    far = lambda x: kind(x + jnp.array([0.5, 1.7], jnp.float32))
    assert decided_by_rounding(traced(far, x), [x], exact=False) is None


def test_the_sign_of_a_zero_decides_nothing_but_bits():
    """`top_k` puts -0 behind 0: a contract that promises no sign promises no such order."""
    x = np.array([0.0, 0.0, -1.0], np.float32)
    choose = lambda y: lax.top_k(y, 2)[1]
    old, new = traced(lambda x: choose(x * 1), x), traced(lambda x: choose(x * jnp.array(
        [-1, 1, 1], jnp.float32)), x)  # fmt: skip
    assert difference(old, new, [x], Contract.ROUNDING) is None
    assert difference(old, new, [x], Contract.VALUE) is None
    assert difference(old, new, [x], Contract.BITWISE) is not None


def test_such_a_program_is_counted_by_itself(monkeypatch):
    """It neither holds nor is violated; what a violation is stays one."""
    nodes = (Node("fused", 190755096),)
    plan = Plan(t=4, d=4, dtype="float32", transform="none", contract="bitwise", eager=False,
                seed=0, mesh=None, some=None, nodes=nodes)  # fmt: skip
    monkeypatch.setattr(check, "difference", lambda *args: "they differ")
    monkeypatch.setattr(check, "contract_of", lambda *args: Contract.ROUNDING)
    monkeypatch.setattr(check, "decided_by_rounding", lambda *args: "a lt falls out otherwise")
    outcome = check.check(plan)
    assert outcome.report.applied
    assert (outcome.state, outcome.violation) == ("decided by rounding", None)
    assert outcome.detail == "a lt falls out otherwise: they differ"
    found = Found(())
    found.add({"seed": 1, "state": outcome.state, "detail": outcome.detail})
    assert found.checked == 0
    assert sum(found.refusals.values()) == 1
    monkeypatch.setattr(check, "decided_by_rounding", lambda *args: None)
    assert check.check(plan).violation.property == "contract"
    monkeypatch.setattr(check, "contract_of", lambda *args: Contract.BITWISE)
    monkeypatch.setattr(check, "decided_by_rounding", lambda *args: "never asked")
    assert check.check(plan).violation.property == "contract"
