"""Values followed through scans that stack them and scans that take them apart."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.matchers.dataflow import Dataflow
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.inverse import came_by_loop, find_inverse, find_inverse_elsewhere
from relower.matchers.origin import origin, reach
from relower.passes.optimize import _trace

KEYS = np.zeros((3, 8), np.int32)


def flow_of(fn, *args):
    closed = _trace(fn, args, {}).closed
    return Dataflow(closed, Analysis(), (UNKNOWN,) * len(jaxprs.invars(closed)))


def scans(scope):
    """Scopes that a scan runs, in the order in which the scans stand."""
    return [scope.inside(i)[0] for i in scope.live if scope.eqns[i].primitive.name == "scan"]


def orders(c, k):
    order = jnp.argsort(k)
    return c + jnp.argsort(order)[0], order


def both(between):
    def fn(keys):
        c, stacked = lax.scan(orders, jnp.int32(0), keys)
        used = lambda d, o: (d + o[0], o * 2)
        return c, lax.scan(used, jnp.int32(0), between(stacked), reverse=True)

    return fn


def test_a_slice_of_what_a_scan_stacked_is_what_it_made():
    source, target = scans(flow_of(both(lambda s: s), KEYS).root)
    (order,) = [v for v in jaxprs.opened(target.body).invars if v.aval.shape == (8,)]
    found = origin(target, order)
    assert found.crossed
    assert came_by_loop(target, order)
    assert found.value == source.resolve(jaxprs.opened(source.body).outvars[1])
    there = find_inverse_elsewhere(target, order)
    assert there is not None
    assert there.scope is source
    assert find_inverse(target, order, len(target.eqns)) is None


@pytest.mark.parametrize("between", [lambda s: s[::-1], lambda s: s[:2], lambda s: s + 0 * s])
def test_another_array_is_not_followed(between):
    _, target = scans(flow_of(both(between), KEYS).root)
    (order,) = [v for v in jaxprs.opened(target.body).invars if v.aval.shape == (8,)]
    assert not origin(target, order).crossed
    assert find_inverse_elsewhere(target, order) is None


def test_slices_by_two_loops_are_two_values():
    """The same stack, taken apart by an outer and by an inner scan: iterations of their own."""

    def fn(keys):
        c, stacked = lax.scan(orders, jnp.int32(0), keys)
        inner = lambda d, o: (d + o[0], o)
        outer = lambda d, o: (lax.scan(inner, d, stacked)[0] + o[1], o)
        return c, lax.scan(outer, jnp.int32(0), stacked)

    _, target = scans(flow_of(fn, KEYS).root)
    (nested,) = [
        target.inside(i)[0] for i in target.live if target.eqns[i].primitive.name == "scan"
    ]
    by_outer = [v for v in jaxprs.opened(target.body).invars if v.aval.shape == (8,)]
    by_inner = [v for v in jaxprs.opened(nested.body).invars if v.aval.shape == (8,)]
    a, b = origin(target, by_outer[0]), origin(nested, by_inner[0])
    assert a.value == b.value
    assert a != b


def test_reach_finds_the_atom_of_this_body():
    root = flow_of(lambda k: jnp.argsort(k) + 1, KEYS[0]).root
    order = next(v for i in root.live for v in root.eqns[i].outvars)
    assert reach(root, root.resolve(order)) is order
    (key,) = jaxprs.opened(root.body).invars
    assert reach(root, root.resolve(key)) is key
