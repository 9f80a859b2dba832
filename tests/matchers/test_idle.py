"""What is live and not needed is followed from the operands that no body reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.compat.primitives import primitive
from relower.matchers.dataflow import Dataflow
from relower.matchers.demand import Demands
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.idle import none_idle

X = np.ones((3, 3), np.float32)
DOT = frozenset({primitive("dot_general_p")})
first = jax.jit(lambda a, b: a + 1)
both = jax.jit(lambda a, b: (a + 1, a @ b))
inner = jax.jit(lambda a, b: first(a, b @ b))


def _idle(fn, *args):
    """By `none_idle`, and whether a dot_general that is live isn't needed, by `Demands`."""
    closed = jax.make_jaxpr(fn)(*args)
    flow = Dataflow(closed, Analysis(), (UNKNOWN,) * len(jaxprs.invars(closed)))
    demand = Demands().of(flow.root, (True,) * len(closed.jaxpr.outvars))
    live, waiting = set(), [demand]
    while waiting:
        d = waiting.pop()
        live |= {(id(d.scope), i) for i in d.live}
        waiting += [child for found in d.children.values() for child in found.values()]
    dots = {(id(s), i) for s in flow.scopes for kind in DOT for i in s.places.get(kind, ())}
    return none_idle(flow, DOT), not dots <= live


IDLE = {
    "handed to a body that doesn't read it": lambda x: first(x, x @ x),
    "by way of another": lambda x: first(x, jnp.sin(x @ x) + 1),
    "twice": lambda x: (y := x @ x, first(x, y) + first(x + 1, y))[1],
    "made in a call": lambda x: (z := both(x, x), first(z[0], z[1]))[1],
    "handed in from outside": lambda x: inner(x, x),
    "a barrier's": lambda x: lax.optimization_barrier((x, x @ x))[0],
    "summed up in a loop": lambda x: lax.scan(
        lambda c, _: ((c[0] + 1, c[1] + c[0] @ x), None), (x, x), None, length=3
    )[0][0],
}
NEEDED = {
    "nothing is handed in for nothing": lambda x: jnp.sin(x @ x),
    "read elsewhere too": lambda x: (y := x @ x, first(x, y) + y)[1],
    "what it is made of is": lambda x: (y := x @ x, first(x, jnp.sin(y)) + y)[1],
    "read by the call at another place": lambda x: (y := x @ x, first(y, y))[1],
    "the other result": lambda x: (z := both(x, x), first(x, z[0]) + z[1])[1],
}


@pytest.mark.parametrize("name", IDLE)
def test_what_is_not_needed_is_never_overlooked(name):
    assert _idle(IDLE[name], X) == (False, True)


def test_a_result_that_nothing_reads_is_for_others_to_tell():
    assert _idle(lambda x: both(x, x)[0], X) == (False, False)


@pytest.mark.parametrize("name", NEEDED)
def test_where_all_is_needed_that_is_mostly_seen(name):
    seen = (
        name != "read by the call at another place"
    )  # taken as not needed, to be on the safe side
    assert _idle(NEEDED[name], X) == (seen, False)
