"""What is needed of nested bodies: round loops, through calls, and no further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.matchers.dataflow import Dataflow
from relower.matchers.demand import Cut, Demands
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.value_walk import Walker, backward
from relower.matchers.weight_gradient import Parameters, transposed_makers

ONE = np.ones(3, np.float32)


def flow_of(fn, *args):
    closed = jax.make_jaxpr(fn)(*args)
    return Dataflow(closed, Analysis(), (UNKNOWN,) * len(jaxprs.invars(closed)))


def needed(fn, *args, outputs, zeroed=(), cut=lambda scope, index: None):
    """The demand on the outermost body, and the names of needed equations in every body."""
    flow = flow_of(fn, *args)
    demand = Demands(cut).of(flow.root, outputs, frozenset(zeroed))
    names, waiting = [], [demand]
    while waiting:
        d = waiting.pop()
        names += [d.scope.eqns[i].primitive.name for i in d.live]
        waiting += [child for inner in d.children.values() for child in inner.values()]
    return demand, sorted(names)


def sums(x):
    """Three carried values; the second is computed from the third."""

    def step(carry, _):
        a, b, c = carry
        return (jnp.sin(a), b + jnp.cos(c), jnp.exp(c)), None

    return lax.scan(step, (x, x, x), None, length=3)[0]


def test_a_carried_value_is_needed_for_its_result_or_for_another():
    assert needed(sums, ONE, outputs=(True, False, False))[1] == ["scan", "sin"]
    assert needed(sums, ONE, outputs=(False, False, True))[1] == ["exp", "scan"]
    assert needed(sums, ONE, outputs=(False, True, False))[1] == ["add", "cos", "exp", "scan"]
    assert needed(sums, ONE, outputs=(False, False, False))[1] == []


def test_the_condition_of_a_while_needs_what_it_reads():
    def fn(x):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]), jnp.cos(c[2]))
        return lax.while_loop(lambda c: c[0] < 3, step, (0, x, x))

    demand, names = needed(fn, ONE, outputs=(False, True, False))
    assert names == ["add", "lt", "sin", "while"]
    ((index, results),) = demand.results.items()
    assert results == (True, True, False)
    assert demand.operands[index][-3:] == (True, True, False)


def test_an_effect_is_needed():
    def fn(x):
        def step(c, _):
            jax.debug.print("{}", jnp.sin(c))
            return jnp.cos(c), None

        return lax.scan(step, x, None, length=2)[0]

    names = needed(fn, ONE, outputs=(False,))[1]
    assert {"sin", "cos", "scan"} <= set(names)


def test_zeros_are_made_as_far_in_as_calls_go():
    def fn(x):
        return jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))(x)

    demand, names = needed(fn, ONE, outputs=(True, True), zeroed=(0,))
    assert names == ["cos", "jit"]
    assert demand.made_here == frozenset()
    demand, names = needed(sums, ONE, outputs=(True, True, True), zeroed=(0,))
    assert "sin" not in names
    assert demand.made_here == {0}  # a loop would make them in each iteration


def test_a_value_that_is_returned_twice_is_needed():
    def fn(x):
        y = jax.jit(jnp.sin)(x)
        return y, y

    assert "sin" in needed(fn, ONE, outputs=(True, True), zeroed=(0,))[1]


def test_a_cut_reads_what_it_chooses():
    def fn(x):
        return lax.select_n(np.zeros(3, bool), jnp.sin(x), jnp.cos(x))

    is_select = lambda scope, index: scope.eqns[index].primitive.name == "select_n"
    cut = lambda scope, index: Cut(1) if is_select(scope, index) else None
    assert needed(fn, ONE, outputs=(True,), cut=cut)[1] == ["select_n", "sin"]


# --- walks ----------------------------------------------------------------------------------


def dense(x, w):
    return jnp.tanh(x @ w)


def two_on_one_line(p, x):
    return jnp.sum((x @ p["a"]) * (x @ p["b"]))


def through_a_helper(p, x):
    return jnp.sum(dense(dense(x, p["a"]), p["b"]))


def scanned(p, x):
    stack = jnp.stack([p["a"], p["b"]])
    h, _ = lax.scan(jax.checkpoint(lambda h, w: (dense(h, w), None)), x, stack)
    return jnp.sum(h)


@pytest.mark.parametrize(("loss", "wanted"), [
    (two_on_one_line, [[0], [1]]),
    (through_a_helper, [[0], [1]]),
    (scanned, [[0, 1], [2]]),  # a loop makes that of the first layer's input too
])  # fmt: skip
def test_a_gradient_is_of_the_parameter_at_its_place_in_the_code(loss, wanted):
    p = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    flow = flow_of(jax.grad(loss), p, np.ones((8, 4), np.float32))
    parameters = Parameters.of(flow)
    found = [sorted(parameters.behind(place)) for place in transposed_makers(flow)]
    assert sorted(f for f in found if f) == wanted


def test_walks_go_round_loops_and_stop_at_readers():
    def fn(x):
        def step(total, x):
            return total + 2.0 * x, jnp.square(x)

        return lax.scan(step, jnp.zeros(()), x)

    flow = flow_of(fn, ONE)
    (x,) = jaxprs.invars(flow.root.body)
    walk = Walker().onward([(flow.root, x)])
    assert [s.eqns[i].primitive.name for s, i in walk.readers] in (["square"], ["integer_pow"])
    assert walk.outputs == [0]
    assert len(walk.carries) == 1
    sources, inputs = backward(flow.root, jaxprs.opened(flow.root.body).outvars[0])
    assert (sources, inputs) == ([], [0])


def test_a_barrier_keeps_the_constants_that_nothing_read_in_the_first_place():
    """As jax's derivative of a barrier has them for the gradients of integers."""

    def fn(x):
        unread, given_up = lax.full((3,), 2.0), lax.full((3,), 3.0)
        values = jnp.sin(x), unread, 1.0, jnp.exp(x), given_up, jnp.cos(x)
        a, _, _, _, e, f = lax.optimization_barrier(values)
        return a, e, f

    demand, names = needed(fn, ONE, outputs=(True, False, False))
    assert names == ["broadcast_in_dim", "optimization_barrier", "sin"]
    kept = (True, True, True, False, False, False)
    assert [*demand.results.values()] == [*demand.operands.values()] == [kept]
    assert needed(fn, ONE, outputs=(False, False, False))[1] == []
