"""A jaxpr's equations become those of the one being traced."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relower import optimize
from relower.compat import tracing
from relower.compat.collector import full_collections_postponed

X = np.arange(6, dtype=np.float32).reshape(2, 3)
TABLE = np.random.RandomState(0).rand(3, 4).astype(np.float32)


def model(x):
    """Reads an input, an array constant, a literal, and what other equations make."""
    y = jnp.sin(x) @ jnp.asarray(TABLE)
    with jax.named_scope("inner"):
        z = jax.jit(lambda v: v * 2.0 + 1.0)(y)
    return {"z": z, "x": x, "one": 1.0}


def outer(once):
    """``model`` evaluated inside another function, and the equations that it is made of."""
    found = tracing.trace(model, (X,), {}, [tracing.type_of(X)])

    def fn(x):
        with jax.named_scope("outer"):
            outs = tracing.evaluate(found.closed, x * 3.0, once=once)
        gc.collect()  # what holds a constant alive must be in the jaxpr by now
        return outs

    return fn, found.closed


def traced(once):
    """The jaxpr of `outer`, and the one that it was made of."""
    fn, closed = outer(once)
    return jax.make_jaxpr(fn)(X), closed


def test_both_ways_give_one_program():
    assert str(traced(once=True)[0]) == str(traced(once=False)[0])


@pytest.mark.parametrize("once", [True, False])
def test_constants_and_results_are_there(once):
    got, want = jax.jit(outer(once)[0])(X), jax.tree.leaves(model(3.0 * X))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("once", [True, False])
def test_name_stacks_begin_with_those_outside(once):
    stacks = {str(eqn.source_info.name_stack) for eqn in traced(once)[0].eqns}
    assert stacks == {"outer", "outer/inner"}


def test_the_variables_are_taken_over_once_only():
    taken, inner = traced(once=True)
    made = {id(v) for eqn in inner.eqns for v in eqn.outvars}
    assert made & {id(v) for eqn in taken.eqns for v in eqn.outvars}
    staged, inner = traced(once=False)
    made = {id(v) for eqn in inner.eqns for v in eqn.outvars}
    assert not made & {id(v) for eqn in staged.eqns for v in eqn.outvars}


def test_one_function_twice_in_one_trace():
    twice = optimize(model)
    closed = jax.make_jaxpr(lambda x: (twice(x), twice(x + 1.0)))(X)
    bound = [v for eqn in closed.eqns for v in eqn.outvars]
    assert len(bound) == len(set(bound))
    got = jax.jit(lambda x: (twice(x), twice(x + 1.0)))(X)
    want = jax.jit(lambda x: (model(x), model(x + 1.0)))(X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_effects_on_a_ref_name_the_ref_outside():
    def adds(ref, x):
        ref[...] += x
        return ref[...] * 2.0

    def outer(x):
        ref = jax.new_ref(x)
        return optimize(adds)(ref, x)

    np.testing.assert_array_equal(jax.jit(outer)(X), 4.0 * X)


class TestCollector:
    """Thresholds come back, and what was frozen stays so."""

    def test_thresholds_come_back(self):
        before = gc.get_threshold()
        with full_collections_postponed():
            assert gc.get_threshold() != before
        assert gc.get_threshold() == before

    def test_nothing_stays_frozen(self):
        before = gc.get_freeze_count()
        with full_collections_postponed():
            kept = [[i] for i in range(100)]
        assert gc.get_freeze_count() <= before
        assert len(kept) == 100

    def test_what_the_caller_froze_stays_frozen(self):
        kept = [[i] for i in range(20_000)]
        gc.freeze()
        try:
            assert gc.get_freeze_count() >= len(kept)
            with full_collections_postponed():
                pass
            # Frozen objects may die all the same, so that their number says less than these do.
            assert gc.get_freeze_count() >= len(kept)
            assert not {id(one) for one in kept} & {id(o) for o in gc.get_objects()}
        finally:
            gc.unfreeze()
