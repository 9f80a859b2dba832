"""Rewrites of somebody's own pass that are wrong in one respect only: none is VERIFIED."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import neg_p

from relower import assume_range, explain, optimize, verify
from relower.gates.verify.themes import MOST_SPECIAL, special_values
from relower.gates.verify.verdict import Verdict
from relower.passes import Contract, Example, Match, Pass, Replacement, registry
from relower.passes.guarded import PassFault

BITWISE, VALUE, ROUNDING = Contract.BITWISE, Contract.VALUE, Contract.ROUNDING


def own(fn, contract=VALUE):
    """A pass that puts ``fn``, which returns a list, in place of every negation."""
    return Pass(
        name="own", contract=contract, summary="-x → fn(x)", measure="negations",
        roots=lambda: frozenset({neg_p}), find=lambda scope, index: Match(scope, index, {}),
        requirements=(), profitable=lambda match: None,
        replace=lambda m: Replacement(tuple(m.eqn.invars), tuple(m.eqn.outvars), fn, ()),
        before=lax.neg, after=lambda x: x * -1,
        examples=lambda: (Example((jax.ShapeDtypeStruct((8,), jnp.float32),), "a vector"),),
    )  # fmt: skip


def checked(fn, x, quick, contract=VALUE):
    found = verify(lax.neg, x, passes=[own(lambda x: [fn(x)], contract)], limits=quick)
    (site,) = found.sites
    return site.checked


def test_no_elements_are_not_verified(quick):
    found = checked(lambda x: x * 7, np.zeros((0, 3), np.float32), quick)
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, "no elements to compare")


F8 = [n for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz")
      if hasattr(jnp, n)]  # fmt: skip


@pytest.mark.parametrize("name", F8)
def test_special_values_of_eight_bits(name):
    dtype = jnp.dtype(getattr(jnp, name))
    values = special_values(dtype)
    assert len(values) <= MOST_SPECIAL
    wide = values.astype(np.float64)
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    assert np.isnan(wide).sum() == np.isnan(every).sum() > 0
    assert np.isinf(wide).sum() == np.isinf(every).sum()
    assert np.signbit(wide[wide == 0]).sum() == np.signbit(every[every == 0]).sum()
    finite = every[np.isfinite(every)]
    assert {finite.max(), finite.min(), np.abs(finite[finite != 0]).min()} <= set(wide.tolist())


@pytest.mark.parametrize("wrong", [jnp.isnan, lambda x: abs(x.astype(jnp.float32)) == 448])
def test_a_special_value_of_eight_bits_that_is_lost(quick, wrong):
    minus = lambda x: x * jnp.asarray(-1, x.dtype)
    x = np.zeros(4, jnp.float8_e4m3fn)
    assert checked(minus, x, quick).verdict is Verdict.VERIFIED
    lost = lambda x: jnp.where(wrong(x), jnp.zeros_like(x), minus(x))
    assert checked(lost, x, quick).verdict is Verdict.VIOLATION


@pytest.mark.parametrize("contract", [BITWISE, VALUE])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_complex_numbers(quick, shape, contract):
    x = np.zeros(shape, np.complex64)
    parts = lambda x: lax.complex(-x.real, -x.imag)
    assert checked(parts, x, quick, contract).verdict is Verdict.VERIFIED
    for wrong in (jnp.isnan, jnp.isinf, lambda x: jnp.isnan(x.imag)):
        lost = lambda x, wrong=wrong: jnp.where(wrong(x), 0j, parts(x))
        assert checked(lost, x, quick, contract).verdict is Verdict.VIOLATION
    # The sign of a zero is a bit, and no number.
    zeros = checked(lambda x: lax.complex(0 - x.real, 0 - x.imag), x, quick, contract)
    assert zeros.verdict is (Verdict.VIOLATION if contract is BITWISE else Verdict.VERIFIED)


ONE_ARRAY = "wanted a list of 1 array, one for each of `results`"


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: -x, rf"returned .*float32\[3\].* on neg → f32\[3\] of .*; {ONE_ARRAY}"),
        (lambda x: [x, x], rf"returned a list of 2 on neg → f32\[3\] of .*; {ONE_ARRAY}"),
        (lambda x: [], rf"returned a list of 0 on neg → f32\[3\] of .*; {ONE_ARRAY}"),
        (lambda x: [None], rf"returned None of type NoneType as result 0 on neg .*; {ONE_ARRAY}"),
        (lambda x: 1 / 0, r"failed on neg → f32\[3\] of .*: ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("call", [verify, lambda f, x, passes: optimize(f, passes=passes)(x)])
def test_a_fault_of_a_replacement_is_one_line_with_its_site(fn, said, call):
    with pytest.raises(PassFault, match=f"^the pass own: its fn of its Replacement, .*{said}"):
        call(lambda x: lax.neg(x), np.ones(3, np.float32), passes=[own(fn)])


def test_a_site_that_was_declined_is_told(quick):
    fn = lambda x: [x.astype(jnp.bfloat16)]
    found = verify(lambda x: lax.neg(x) * 3, np.ones(3, np.float32), passes=[own(fn)], limits=quick)
    assert found.exit_code == 2
    (note,) = found.notes
    assert "own@<lambda>#1 matched and was declined: type-change: " in note
    assert "found bfloat16[3]" in note


def with_derivative(pull):
    """``-x``, whose derivative is ``pull(x, cotangent)``."""
    fn = jax.custom_vjp(lambda x: x * -1)
    fn.defvjp(lambda x: (x * -1, x), lambda x, g: (pull(x, g),))
    return fn


@pytest.mark.parametrize("contract", [VALUE, ROUNDING])
def test_a_derivative_that_is_wrong_of_what_is_no_integer(quick, contract):
    x = np.zeros(8, np.float32)
    right = with_derivative(lambda x, g: -g)
    assert checked(right, x, quick, contract).verdict is Verdict.VERIFIED
    for pull in (
        lambda x, g: jnp.where(x == jnp.round(x), -g, -g / 2),
        lambda x, g: jnp.where(g == jnp.round(g), -g, g),
    ):
        found = checked(with_derivative(pull), x, quick, contract)
        assert found.verdict is Verdict.VIOLATION
        assert found.counterexample.of == "derivative"


def test_cotangents_may_be_added_in_another_order(quick):
    """What is exact of small integers moves by a rounding of others, and by no more."""
    x = np.zeros(8, np.float32)
    further = lambda x, g: -((g + jnp.float32(1024)) - jnp.float32(1024))
    nearly = lambda x, g: -((g + jnp.float32(4)) - jnp.float32(4))
    assert checked(with_derivative(nearly), x, quick).verdict is Verdict.VERIFIED
    assert checked(with_derivative(further), x, quick).verdict is Verdict.VIOLATION


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_large_value_that_is_lost(quick, dtype):
    """Errors are measured near one; a rounding contract is kept elsewhere, too."""
    x = np.zeros(16, dtype)
    lost = lambda x: jnp.where(jnp.abs(x) > 1e30, 0, x * -1).astype(x.dtype)
    assert checked(lost, x, quick, ROUNDING).verdict is Verdict.VIOLATION
    assert checked(lambda x: x * -1, x, quick, ROUNDING).verdict is Verdict.VERIFIED


def test_where_a_value_leaves_the_range_nothing_is_compared(quick):
    """A product may overflow at another point."""
    x = np.zeros(16, np.float32)
    early = lambda x: (x * 2.0**60) * -(2.0**-60)
    assert checked(early, x, quick, ROUNDING).verdict is Verdict.VERIFIED


def test_a_pass_that_matches_what_it_puts_there_is_told_once(quick):
    found = verify(lambda x: lax.neg(x) * 3, np.ones(8, np.float32), passes=[own(lambda x: [-x])],
                   limits=quick)  # fmt: skip
    assert found.verdict is Verdict.UNKNOWN
    assert len(found.sites) == 16
    text = str(found)
    assert text.count("own@<lambda>#1  neg") == 1
    assert "f32[8], 16 times" in text
    assert "own@<lambda>#1 is a site again and again, 16 times: its pass matches what it" in text
    report = explain(lambda x: lax.neg(x) * 3, np.ones(8, np.float32), passes=[own(lambda x: [-x])])
    text = str(report)
    assert "16 applied" in text
    assert text.count("own  neg → f32[8], 16 times") == text.count("own  neg") == 1
    assert "stopped after 16 rounds with sites still applying" in text


def tampered(name, wrong):
    """One of relower's passes with ``wrong(operands, result)`` in place of its last result."""
    whole = registry.by_name(name)

    def replaced(match):
        way = whole.replace(match)

        def fn(*operands):
            outs = list(way.fn(*operands)) if way.fn is not None else list(operands)
            return [*outs[:-1], wrong(operands, outs[-1])]

        return dataclasses.replace(way, fn=fn, key="tampered")

    return dataclasses.replace(whole, name="own", replace=replaced, mutants={})


def indexed(table, places):
    return table[assume_range(places, 0, table.size - 1)]


def where_a_group_is_one_tile(operands, out):
    (sizes,) = (x for x in operands if x.dtype == jnp.int32)
    return jnp.where(jnp.any(sizes == 128), 0, out)


def where_one_infinity_is_left(operands, out):
    (scores,) = operands
    left = scores > -jnp.inf
    alone = (left.sum(-1) == 1) & (scores.max(-1) == jnp.inf)
    return jnp.where(alone[:, None], 0, out)


def put(wrong, index):
    return lambda operands, out: jnp.where(out == index, wrong, out)


F32, I32 = jnp.float32, jnp.int32
PLACES = jax.ShapeDtypeStruct((64,), I32)
RARE = {
    "the last index": ("nonnegative_index", put(4094, 4095), indexed, [(4096,), PLACES]),
    "one index of many": ("nonnegative_index", put(778, 777), indexed, [(4096,), PLACES]),
    "a power of two": ("nonnegative_index", put(0, 1 << 16), indexed, [(1 << 20,), PLACES]),
    "a group of one tile": ("gmm_swiglu", where_a_group_is_one_tile, None, [(256, 128)]),
    "a masked row": ("top_k_by_argmax", where_one_infinity_is_left, None, [(512, 64)]),
}


@pytest.mark.parametrize("case", RARE)
def test_what_is_wrong_at_rare_places_only(case, quick):
    name, wrong, fn, shapes = RARE[case]
    made = tampered(name, wrong)
    own = registry.by_name(name)
    given = [jax.ShapeDtypeStruct(s, F32) if isinstance(s, tuple) else s for s in shapes]
    args = [*given, *own.examples()[0].args[len(given) :]]
    found = verify(fn or own.before, *args, passes=[made], limits=quick)
    assert found.sites[0].checked.verdict is Verdict.VIOLATION


@pytest.mark.parametrize("contract", [VALUE, ROUNDING])
def test_a_derivative_that_is_wrong_for_large_values_only(quick, contract):
    x = np.zeros(64, np.float32)
    halved = with_derivative(lambda x, g: -jnp.where(jnp.abs(x) > 100, g / 2, g))
    assert checked(halved, x, quick, contract).verdict is Verdict.VIOLATION
    assert checked(with_derivative(lambda x, g: -g), x, quick, contract).verdict is Verdict.VERIFIED


def test_what_is_stated_of_a_value_holds_in_every_run(quick):
    """A violation is shown on values that the program allows, with all that makes them."""

    made = tampered("nonnegative_index", put(4094, 4095))
    (site,) = verify(indexed, jnp.zeros(4096), PLACES, passes=[made], limits=quick).sites
    example = site.checked.counterexample
    assert all(0 <= a.min() <= a.max() <= 4095 for a in example.arrays if a.dtype == np.int32)
