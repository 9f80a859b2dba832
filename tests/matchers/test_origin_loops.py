"""Values followed through loops and shard_maps, and never confused between iterations."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from relower.matchers.dataflow import Dataflow
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.grouped import find_grouped
from relower.matchers.origin import origin

KEYS = np.zeros((3, 8), np.int32)


def origins(fn, *args, name="add"):
    """Of the last equation called ``name`` in an innermost loop: its operands' origins."""
    closed = jax.make_jaxpr(fn)(*args)
    flow = Dataflow(closed, Analysis(), (UNKNOWN,) * len(closed.jaxpr.invars))
    found = [
        (scope, eqn) for scope in flow.scopes for i in scope.live
        if (eqn := scope.eqns[i]).primitive.name == name
    ]  # fmt: skip
    assert len(found) == 1
    scope, eqn = found[0]
    return [origin(scope, atom) for atom in eqn.invars], flow


def stacks(keys):
    """Two results of one loop: the same order twice, by different ways out."""

    def step(_, k):
        order = jnp.argsort(k)
        return (), (order, order[:, None])

    return lax.scan(step, (), keys)[1]


def test_the_same_iteration_gives_the_same_value():
    def fn(keys):
        a, _ = stacks(keys)
        return lax.scan(lambda c, ab: (c, ab[0] + ab[1]), 0, (a, a), reverse=True)[1]

    (a, b), _flow = origins(fn, KEYS)
    assert a == b
    assert a.value.scope.producer(a.value.atom).eqn.primitive.name == "sort"


def test_different_iterations_are_not_confused():
    """The inner loop reads iteration j of the stack, and is handed that of the outer loop, i."""

    def fn(keys):
        a, _ = stacks(keys)

        def outer(c, mine):
            return c, lax.scan(lambda d, each: (d, mine + each), 0, a)[1]

        return lax.scan(outer, 0, a)[1]

    (mine, each), _flow = origins(fn, KEYS)
    assert mine != each


def test_a_shifted_or_shorter_stack_is_not_followed():
    for change in (lambda a: jnp.roll(a, 1, 0), lambda a: a[1:], lambda a: a[::-1]):

        def fn(keys, change=change):
            a, _ = stacks(keys)
            length = change(a).shape[0]
            both = change(a), a[:length]
            return lax.scan(lambda c, ab: (c, ab[0] + ab[1]), 0, both)[1]

        (a, b), _flow = origins(fn, KEYS)
        assert a != b
        assert a.value.scope.producer(a.value.atom) is None


def test_a_carried_value_is_not_followed():
    def fn(keys):
        a, _ = stacks(keys)
        return lax.scan(lambda c, x: (x, c + x), a[0], a)[1]

    (carried, x), _flow = origins(fn, KEYS)
    assert carried != x
    assert carried.value.scope.producer(carried.value.atom) is None


def test_grouped_indices_are_known_behind_a_loop():
    def fn(keys):
        a = lax.scan(lambda c, k: (c, jnp.argsort(k) // 2), 0, keys)[1]
        return lax.scan(lambda c, x: (c, jnp.sin(x)), 0, a)[1]

    closed = jax.make_jaxpr(fn)(KEYS)
    flow = Dataflow(closed, Analysis(), (UNKNOWN,))
    found = [
        find_grouped(s, s.eqns[i].invars[0], 4) for s in flow.scopes for i in s.live
        if s.eqns[i].primitive.name == "convert_element_type" and s.eqns[i].invars[0].aval.shape
    ]  # fmt: skip
    assert [(g.total, g.div, g.groups, g.start, g.dropped) for g in found] == [(8, 2, 4, 0, False)]
