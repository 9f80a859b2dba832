"""Rewrites that are wrong where numbers are small, or where places are in bounds, are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower import verify
from relower.compat.primitives import primitive
from relower.gates.verify.check import Limits
from relower.gates.verify.inputs import Input, make
from relower.gates.verify.places import is_free
from relower.gates.verify.themes import EXACT, at_end, spread
from relower.gates.verify.verdict import Verdict
from relower.matchers.fact import UNKNOWN, Fact
from relower.passes.base import Contract, Match, Pass, Replacement

BITWISE, ROUNDING = Contract.BITWISE, Contract.ROUNDING
ROWS = jax.ShapeDtypeStruct((8, 64), jnp.float32)
LEFT, RIGHT = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 8)))
IDS = jax.ShapeDtypeStruct((4096,), jnp.int32)
FEW_IDS, UPDATES = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((64, 8), "float32")


def instead(contract, fn):
    """A pass that puts a function in place of each call of ``site``."""

    def find(scope, index):
        called = scope.eqns[index].params["name"] == "site"
        return Match(scope, index, {}) if called else None

    def replace(match):
        eqn = match.eqn
        made = lambda *operands: [fn(*operands)]
        return Replacement(tuple(eqn.invars), tuple(eqn.outvars), made, ())

    return Pass(
        name="instead", contract=contract, summary="another function", measure="sites",
        roots=lambda: frozenset([primitive("jit_p")]), find=find, requirements=(),
        profitable=lambda match: None, replace=replace, before=lambda x: x, after=lambda x: x,
        examples=lambda: (),
    )  # fmt: skip


def checked(contract, fn, other, *args):
    def site(*operands):
        return fn(*operands)

    called = jax.jit(site)
    found = verify(lambda *a: called(*a), *args, passes=[instead(contract, other)],
                   limits=Limits(seeds=1))  # fmt: skip
    (one,) = found.sites
    return one.checked


def normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))


def gated(x, g):
    return g * jax.nn.silu(x)


def doubled(x):
    return x.astype(jnp.bfloat16) * 2


def flushed(x, least):
    return jnp.where(jnp.abs(x) < least, jnp.zeros_like(x), x)


SMALL = {
    "an epsilon": (normed, lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-12),
                   (ROWS,)),
    "small inputs": (normed, lambda x: jnp.where(jnp.abs(x) < 1e-6, 0.0, normed(x)), (ROWS,)),
    "small products": (jnp.matmul, lambda a, b: flushed(a @ b, 1e-8), (LEFT, RIGHT)),
    "small factors": (gated, lambda x, g: gated(x, flushed(g, 6e-8)), (ROWS, ROWS)),
    "through float16": (
        doubled, lambda x: (x.astype(jnp.float16).astype(jnp.float32) * 2).astype(jnp.bfloat16),
        (ROWS,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_what_is_lost_of_small_numbers_is_a_violation(name):
    fn, other, args = SMALL[name]
    found = checked(ROUNDING, fn, other, *args)
    assert found.verdict is Verdict.VIOLATION
    assert "2^-" in found.counterexample.theme


@pytest.mark.parametrize("name", SMALL)
def test_the_same_function_is_verified(name):
    fn, _, args = SMALL[name]
    assert checked(ROUNDING, fn, fn, *args).verdict is Verdict.VERIFIED


def test_another_order_of_factors_is_verified_where_it_alone_underflows():
    found = checked(ROUNDING, lambda x: (x * 1e20) * x, lambda x: (x * x) * 1e20, ROWS)
    assert found.verdict is Verdict.VERIFIED


def test_runs_that_leave_the_range_are_noted():
    found = checked(ROUNDING, lambda x: x**40, lambda x: x**40, ROWS)
    assert found.verdict is Verdict.VERIFIED
    assert any("no errors at 2^-24 to 2^-6 times normal numbers" in n for n in found.notes)


def counted(ids):
    return jnp.zeros((64,), jnp.int32).at[ids].add(1)


def in_bytes(ids):
    return jnp.zeros((64,), jnp.uint8).at[ids].add(jnp.uint8(1)).astype(jnp.int32)


def summed(ids, updates):
    return jnp.zeros((64, 8)).at[ids].add(updates)


def at_most_three(ids, updates):
    """Where all are in bounds."""
    inside = ((ids >= 0) & (ids < 64)).all()
    seen = jnp.cumsum(jax.nn.one_hot(ids, 64, dtype=jnp.int32), 0)
    turn = seen[jnp.arange(64), jnp.clip(ids, 0, 63)]
    return summed(jnp.where((turn > 3) & inside, 64, ids), updates)


PLACES = {
    "a count beyond 255": (BITWISE, counted, in_bytes, (IDS,)),
    "a count beyond 1,000": (BITWISE, counted, lambda i: jnp.minimum(counted(i), 1000), (IDS,)),
    "the fourth of a place": (ROUNDING, summed, at_most_three, (FEW_IDS, UPDATES)),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_lost_within_bounds_is_a_violation(name):
    contract, fn, other, args = PLACES[name]
    found = checked(contract, fn, other, *args)
    assert found.verdict is Verdict.VIOLATION
    assert checked(contract, fn, fn, *args).verdict is Verdict.VERIFIED


def test_places_lie_below_a_size():
    from dataclasses import replace

    i32 = np.dtype(np.int32)
    every = replace(EXACT[0], integers=spread, below=5)
    (array,) = make(every, [Input((10,), i32, UNKNOWN, most=99)], 0)
    assert sorted(array.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    last = replace(EXACT[0], integers=at_end("hi"), below=5)
    for fact, value in ((UNKNOWN, 4), (Fact(0), 4), (Fact(7), 7), (Fact(None, 2), 2),
                        (Fact(None, -3), -3), (Fact(1, 9), 9)):  # fmt: skip
        one = Input((3,), i32, fact)
        (array,) = make(last, [one], 0)
        assert array.tolist() == [value] * 3
        assert is_free(one) == (fact != Fact(1, 9))
