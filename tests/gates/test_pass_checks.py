"""What every pass must show: a pass that holds, and one broken in each way that is looked for."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core.primitives import rev_p

from relower import check_pass, optimize
from relower.gates.reason_codes import written_codes, written_faults
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
from relower.passes.guarded import PassFault
from relower.passes.registry import all_passes

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


CODE = "named_elsewhere"
MISNAMED = {
    "a literal": lambda match: Reason("sizes", "differ", "a", "b") if match.index < 0 else None,
    "by keyword": lambda match: Reason(code="sizes", sentence="", found="", wanted="") or None,
    "a name": lambda match: Reason(CODE, "differ", "a", "b") if match.index < 0 else None,
}


def refuses_by_another_name(match):
    code = "-".join(["other", "sizes"])  # known only once it runs
    return Reason(code, "differ", "a", "b")


def renamed(check):
    return {"requirements": (Requirement("axes", "Same axes.", check),)}


def fails(*args):
    """Whatever of a pass this stands for."""
    return {}["nothing"]


def returns(value):
    def given(*args):
        return value

    return given


WRONG = {
    "find fails": ({"find": fails}, "its find, fails (HERE), failed on rev → f32[8,4] of HERE: "
                   "KeyError: 'nothing' at HERE"),
    "a check fails": (renamed(fails), "its check of the requirement 'axes', fails (HERE), failed "
                      "on rev → f32[8,4] of HERE: KeyError: 'nothing' at HERE"),
    "profitable fails": ({"profitable": fails}, "its profitable, fails (HERE), failed on "
                         "rev → f32[8,4] of HERE: KeyError: 'nothing' at HERE"),
    "replace fails": ({"replace": fails}, "its replace, fails (HERE), failed on rev → f32[8,4] of "
                      "HERE: KeyError: 'nothing' at HERE"),
    "fn fails": ({"replace": by(fails)}, "its fn of its Replacement, <lambda> (HERE), failed "
                 "on rev → f32[8,4] of HERE: KeyError: 'nothing' at HERE"),
    "find returns": ({"find": returns(True)}, "its find, given (HERE), returned True of type bool "
                     "on rev → f32[8,4] of HERE; wanted a Match, a Mismatch, or None"),
    "a check returns": (renamed(returns(True)), "its check of the requirement 'axes', given "
                        "(HERE), returned True of type bool on rev → f32[8,4] of HERE; wanted "
                        "None where it holds, or a Reason why it doesn't"),
    "profitable returns": ({"profitable": returns(False)}, "its profitable, given (HERE), returned "
                           "False of type bool on rev → f32[8,4] of HERE; wanted None where the "
                           "rewrite pays, or a Reason why it doesn't"),
    "replace returns": ({"replace": returns(None)}, "its replace, given (HERE), returned None of "
                        "type NoneType on rev → f32[8,4] of HERE; wanted a Replacement"),
    "roots returns": ({"roots": returns(rev_p)}, "its roots, given (HERE), returned rev of type "
                      "Primitive; wanted a frozenset of primitives"),
}  # fmt: skip


def nowhere(text):
    """The text, every line of this file called HERE."""
    return re.sub(re.escape(__file__) + r":\d+", "HERE", text)


@pytest.mark.parametrize("kind", WRONG)
def test_a_function_that_fails_is_named_with_its_line(kind):
    changes, said = WRONG[kind]
    wrong = dataclasses.replace(PASS, **changes)
    with pytest.raises(AssertionError) as caught:
        check_pass(wrong)
    assert f"  rows: the pass double_reverse: {said}" in nowhere(str(caught.value))
    with pytest.raises(PassFault) as caught:
        optimize(before, passes=[wrong])(jnp.ones((8, 4)))
    assert nowhere(str(caught.value)).startswith(f"the pass double_reverse: {said}")
    assert "\n" not in str(caught.value)


def test_the_line_is_where_it_fails_not_where_the_function_begins():
    line = inspect.getsourcelines(fails)[1]
    with pytest.raises(PassFault) as caught:
        optimize(before, passes=[dataclasses.replace(PASS, find=fails)])(jnp.ones((8, 4)))
    said = str(caught.value)
    assert f"fails ({__file__}:{line})" in said
    assert said.endswith(f"{__file__}:{line + 2}")


def test_a_fn_that_returns_an_array_alone_is_not_taken_apart():
    """Its rows are as many values as there are rows."""

    def alone(match):
        return dataclasses.replace(replace(match), fn=lambda x: x)

    with pytest.raises(PassFault, match=r"wanted a list of 1 array, one for each of `results`"):
        optimize(before, passes=[dataclasses.replace(PASS, replace=alone)])(jnp.ones((8, 4)))


def test_examples_and_functions_that_fail():
    with pytest.raises(AssertionError, match=r"its examples, fails .*: KeyError: 'nothing' at "):
        check_pass(dataclasses.replace(PASS, examples=fails))
    with pytest.raises(AssertionError, match=r"`after` can't be traced: .* KeyError: 'nothing' at"):
        check_pass(dataclasses.replace(PASS, after=fails))


@pytest.mark.parametrize("kind", MISNAMED)
def test_a_reason_of_another_code_than_its_requirement_is_seen_in_the_source(kind):
    with pytest.raises(AssertionError) as caught:
        check_pass(dataclasses.replace(PASS, **renamed(MISNAMED[kind])))
    code = CODE if kind == "a name" else "sizes"
    assert "the requirement 'axes': its check, <lambda> (" in str(caught.value)
    assert f"has in its source a Reason of the code {code!r}; wanted 'axes'" in str(caught.value)


def test_a_reason_of_another_code_than_its_requirement_is_seen_where_it_is_returned():
    with pytest.raises(AssertionError) as caught:
        check_pass(dataclasses.replace(PASS, **renamed(refuses_by_another_name)))
    assert "its check, refuses_by_another_name (" in str(caught.value)
    assert "returned a Reason of the code 'other-sizes'; wanted 'axes'" in str(caught.value)


def test_relowers_own_reasons_have_their_requirements_codes():
    seen = 0
    for p in all_passes():
        assert not list(written_faults(p))
        seen += sum(written_codes(q.check) == {q.code} for q in p.requirements)
    assert seen > 100  # most are written out


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
