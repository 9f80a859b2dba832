"""Arrays that never fall along an axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.matchers.facts import Analysis

X = np.array([[5, -3, 7, 7], [2**31 - 1, -(2**31), 0, 1], [3, 2, 1, 0]], np.int32)


def claims(fn):
    """Whether the result is known to be sorted along its last axis; its values."""
    (fact,) = Analysis().enter(jax.make_jaxpr(fn)(X)).outputs
    values = np.asarray(fn(X)).astype(np.int64)
    return fact.rises(values.ndim - 1, values.shape[-1]), values


def ordered(x):
    return jnp.sort(x, axis=1)


SORTED = {
    "sort": ordered,
    "sort_pairs": lambda x: lax.sort((x, x[::-1]), num_keys=1)[0],
    "iota": lambda x: lax.broadcasted_iota(jnp.int32, (3, 4), 1) * 2 + x[0, 0] * 0,
    "level": lambda x: x[:, :1] * 0 + jnp.zeros((3, 4), jnp.int32),
    "counts_so_far": lambda x: jnp.cumsum(x > 0, axis=1),
    "offsets": lambda x: jnp.cumsum(jnp.bincount(x.reshape(-1), length=5)),
    "maximum_so_far": lambda x: lax.cummax(x, axis=1),
    "clipped": lambda x: jnp.clip(ordered(x), 0, 9),
    "greater_of_two": lambda x: jnp.maximum(ordered(x), ordered(x[::-1])),
    "sum": lambda x: ordered(x & 7) + ordered(x & 3) + 5,
    "half": lambda x: lax.div(ordered(x), jnp.int32(2)),
    "wide": lambda x: ordered(x.astype(jnp.int8)).astype(jnp.int32),
    "part": lambda x: ordered(x)[:, 1:3],
    "in_a_call": lambda x: jax.jit(lambda a: jnp.minimum(a, 3))(ordered(x)),
    "barrier": lambda x: lax.optimization_barrier(ordered(x)),
}

UNSORTED = {
    "input": lambda x: x + 0,
    "other_axis": lambda x: jnp.sort(x, axis=0),
    "second_operand": lambda x: lax.sort((x, x[::-1]), num_keys=1)[1],
    "sum_may_wrap": lambda x: ordered(x) + jnp.int32(2**30),
    "count_may_wrap": lambda x: lax.cumsum(jnp.full((1, 200), 1, jnp.int8) + (x[:1, :1] * 0).astype(
        jnp.int8), axis=1),
    "sums_of_negatives": lambda x: lax.cumsum(x & -2 | -8, axis=1),
    "sums_from_the_end": lambda x: lax.cumsum(x & 7, axis=1, reverse=True),
    "narrowed": lambda x: ordered(x).astype(jnp.int8),
    "negative_quotient": lambda x: lax.div(ordered(x), jnp.int32(-2)),
    "falling": lambda x: jnp.flip(ordered(x), 1),
    "greater_of_one_unsorted": lambda x: jnp.maximum(ordered(x), x),
    "floats": lambda x: jnp.sort(x.astype(jnp.float32)),
    "search_for_unsorted": lambda x: jnp.searchsorted(jnp.arange(9), x),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SORTED))
def test_sorted(name):
    known, values = claims(SORTED[name])
    assert known
    assert (np.diff(values, axis=-1) >= 0).all()


@pytest.mark.parametrize("name", sorted(UNSORTED))
def test_not_claimed(name):
    assert not claims(UNSORTED[name])[0]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="an older search is a loop")
def test_places_of_sorted_queries():
    assert claims(lambda x: jnp.searchsorted(jnp.arange(9), ordered(x)))[0]
    assert not claims(lambda x: jnp.searchsorted(x[0], ordered(x)))[0]
