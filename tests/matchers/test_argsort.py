"""What counts as an argsort, and which operand holds the positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs, tracing
from relower.matchers.argsort import find_argsort, sort_primitive
from relower.matchers.dataflow import Dataflow
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.pattern import Mismatch

N = 12


def sites(fn, *args):
    """Every live sort of ``fn`` with its scope."""
    avals = [tracing.type_of(a) for a in jax.tree.leaves(args)]
    closed = tracing.trace(fn, args, {}, avals).closed
    flow = Dataflow(closed, Analysis(), (UNKNOWN,) * len(jaxprs.invars(closed)))
    return [(scope, i) for scope in flow.scopes for i in scope.live
            if scope.eqns[i].primitive is sort_primitive()]  # fmt: skip


def only(fn, *args):
    ((scope, index),) = sites(fn, *args)
    return find_argsort(scope, index)


def iota(dtype=np.int32):
    return lax.iota(dtype, N)


KEYS = np.zeros(N, np.float32)


def test_a_plain_argsort():
    found = only(jnp.argsort, np.zeros((3, N), np.float32))
    assert (found.axis, found.length, found.stable, found.num_keys) == (1, N, True, 1)
    assert (found.order, found.rising, found.repeats, found.others) == (1, True, (), ())
    assert found.positions is found.eqn.invars[1]
    assert found.key is found.eqn.invars[0]


def test_a_sort_of_one_operand_is_none():
    assert only(jnp.sort, KEYS) is None


@pytest.mark.parametrize(
    ("make", "rising"),
    [
        (lambda: iota(), True),
        (lambda: iota(np.uint8), True),
        (lambda: iota() * 3 + 7, True),
        (lambda: lax.rev(iota(), (0,)), False),
        (lambda: 5 - 2 * iota(), False),
        (lambda: jnp.arange(N, dtype=np.int16), True),
    ],
)
def test_positions_are_any_integers_that_rise_or_fall(make, rising):
    found = only(lambda k: lax.sort_key_val(k, make()), KEYS)
    assert (found.order, found.rising) == (1, rising)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iota() // 2,  # repeats
        lambda: iota() % 5,  # starts again
        lambda: jnp.zeros(N, np.int32),
        lambda: jnp.arange(N, dtype=np.float32),  # no fact is kept of floats
        lambda: iota().at[3].set(9),
        lambda: iota(np.int8) * np.int8(100),  # wraps around
    ],
)
def test_what_is_no_position(make):
    found = only(lambda k: lax.sort_key_val(k, make()), KEYS)
    assert (found.order, found.rising, found.others) == (None, False, (1,))


def test_positions_may_stand_anywhere_and_repeat_in_another_dtype():
    def fn(k, d):
        return lax.sort((k, d, iota(), iota(np.uint32), d, iota() + 1), num_keys=1)

    found = only(fn, KEYS, KEYS)
    assert found.order == 2
    assert found.repeats == (3,)
    assert found.others == (1, 4, 5)


def test_positions_from_an_unknown_offset_repeat_only_themselves():
    def fn(k, start):
        a, b = start + iota(), (start ^ 1) + iota()
        return lax.sort((k, a, a, b), num_keys=1)

    # Where the sum may wrap around nothing is known; bounded, it rises from an unknown offset.
    assert only(fn, KEYS, np.int32(0)).order is None
    found = only(lambda k, s: fn(k, s & 7), KEYS, np.int32(0))
    assert (found.order, found.repeats, found.others) == (1, (2,), (3,))


def test_a_single_element_of_float_is_data():
    def fn(k, d):
        return lax.sort((k, d, lax.iota(np.int32, 1)), num_keys=1)

    one = np.zeros(1, np.float32)
    found = only(fn, one, one)
    assert (found.order, found.others) == (2, (1,))


def test_positions_from_an_outer_scope():
    def fn(rows):
        i = iota()
        step = lambda c, row: (c, lax.sort_key_val(row, i))
        return lax.scan(step, 0, rows)[1]

    found = only(fn, np.zeros((3, N), np.float32))
    assert (found.order, found.rising) == (1, True)


def test_a_param_that_is_not_known_is_a_mismatch():
    ((scope, index),) = sites(jnp.argsort, KEYS)
    eqn = scope.eqns[index]

    class WithStrangeSort:
        eqns = {index: eqn.replace(params={**eqn.params, "nan_first": True})}  # noqa: RUF012

    found = find_argsort(WithStrangeSort(), index)
    assert found == Mismatch(("sort", "param nan_first"), "True", "no such param")
