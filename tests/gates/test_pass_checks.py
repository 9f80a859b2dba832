"""What every pass must show: a pass that holds, and one broken in each way that is looked for."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core.primitives import rev_p

from relower import check_pass
from relower.passes import (
    Bind,
    Contract,
    Example,
    Match,
    Op,
    Pass,
    Reason,
    Replacement,
    Requirement,
    reach,
)

TWICE = Op(
    rev_p,
    (Op(rev_p, (Bind("x"),), capture={"dimensions": "axes"}),),
    capture={"dimensions": "axes"},
)


def find(scope, index):
    captures = {}
    found = TWICE.match_equation(scope, index, captures) is None
    return Match(scope, index, captures) if found else None


def replace(match):
    x, results = match.captures["x"], tuple(match.eqn.outvars)
    here = reach(match.scope, x)
    if here is None:
        return Replacement((), results, None, (), wants=x)
    return Replacement((here,), results, None, ())


def by(fn):
    """A replacement that computes ``fn`` of what was reversed twice."""

    def replaced(match):
        return dataclasses.replace(replace(match), fn=lambda x: [fn(x)], key=fn)

    return replaced


def before(x):
    """A matrix reversed twice."""
    return 2 * lax.rev(lax.rev(x, (0,)), (0,))


PASS = Pass(
    name="double_reverse",
    contract=Contract.BITWISE,
    summary="rev(rev(x)) → x",
    measure="reversals",
    roots=lambda: frozenset({rev_p}),
    find=find,
    requirements=(),
    profitable=lambda match: None,
    replace=replace,
    before=before,
    after=lambda x: 2 * x,
    examples=lambda: (Example((jax.ShapeDtypeStruct((8, 4), jnp.float32),), "rows"),),
)
CHECK = Requirement("code", "It holds.", lambda match: None)
REFUSES = Requirement("never", "Never.", lambda match: Reason("never", "it never does", "a", "b"))


def again(x):
    """What is reversed twice, and so is its own site."""
    return lax.rev(lax.rev(x, (1,)), (1,))


def test_a_pass_that_holds():
    check_pass(PASS)
    check_pass("nonnegative_index")


BROKEN = {
    "no name": ({"name": "Double Reverse"}, "it is a pass called 'Double Reverse'"),
    "no texts": ({"summary": "", "measure": ""}, "its summary is empty"),
    "one code twice": ({"requirements": (CHECK, CHECK)}, "two requirements have the code 'code'"),
    "no full stop": (
        {"requirements": (Requirement("code", "it holds", CHECK.check),)},
        "reads 'it holds'; wanted a sentence with a full stop",
    ),
    "no examples": ({"examples": lambda: ()}, "it has no examples"),
    "no example": ({"examples": lambda: (3,)}, "an example is 3; wanted a relower.passes.Example"),
    "no site": (
        {"requirements": (REFUSES,)},
        "rows: no site is found in `before`: it never does (found a; wanted b)",
    ),
    "a before that fails": ({"before": lambda x: x.nope}, "rows: `before` can't be traced"),
    "a site in after": ({"after": again}, "`after` still has a site: rev → f32[8,4]"),
    "another program": ({"after": lambda x: x + x}, "`before` rewritten is DIFFERENT from `after`"),
    "a wrong value": (
        {"replace": by(lambda x: x + 1), "after": lambda x: 2 * (x + 1)},
        "its contract, bitwise, isn't shown to hold: VIOLATION",
    ),
    "a wrong zero": (
        {"replace": by(lambda x: x + 0), "after": lambda x: 2 * (x + 0)},
        "its contract, bitwise, isn't shown to hold: VIOLATION",
    ),
    "no end": (
        {"replace": by(again), "after": lambda x: 2 * again(x)},
        "a second optimize still rewrites: double_reverse at rev",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_pass_that_does_not_hold(kind):
    changes, said = BROKEN[kind]
    with pytest.raises(AssertionError) as caught:
        check_pass(dataclasses.replace(PASS, **changes))
    assert said in str(caught.value)


def test_a_looser_contract_admits_another_zero():
    changes = {"replace": by(lambda x: x + 0), "after": lambda x: 2 * (x + 0)}
    check_pass(dataclasses.replace(PASS, contract=Contract.VALUE, **changes))


def test_a_mesh():
    from relower.passes.packed_all_gather import PASS as gathers

    check_pass(gathers)
