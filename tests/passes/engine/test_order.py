"""The order of equations where a replacement stands for several: what may come forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.passes.base import Match, Replacement, SiteDeclined
from relower.passes.engine.order import order_of

X = np.float32(3)


def sines(fn, *args):
    """The equations of ``fn``, and a site that takes all its sines at the first."""
    eqns = jaxprs.opened(jax.make_jaxpr(fn)(*args)).eqns
    found = [i for i, e in enumerate(eqns) if e.primitive.name == "sin"]
    return eqns, found


def site(engine, eqns, members):
    operands = tuple(eqns[i].invars[0] for i in members)
    results = tuple(eqns[i].outvars[0] for i in members)
    replacement = Replacement(operands, results, lambda *xs: [lax.sin(x) for x in xs], (),
                              also=tuple(members[1:]))  # fmt: skip
    from relower.passes.base import Accepted

    return Accepted(Match(None, members[0], {}), replacement, engine.SIN)


def names(eqns, order):
    return [eqns[i].primitive.name for i in order]


def test_without_such_a_site_nothing_moves(engine):
    eqns, found = sines(lambda x: jnp.sin(x) + jnp.cos(x), X)
    assert order_of(eqns, {}) == range(len(eqns))
    assert order_of(eqns, {found[0]: site(engine, eqns, found)}) == range(len(eqns))


def test_what_the_others_need_comes_first_and_the_rest_stays(engine):
    def fn(x):
        a = jnp.sin(x)
        b = jnp.cos(a)
        c = jnp.tanh(x)
        return b + jnp.sin(c * 2)

    eqns, found = sines(fn, X)
    order = order_of(eqns, {found[0]: site(engine, eqns, found)})
    assert names(eqns, order) == ["tanh", "mul", "sin", "cos", "add"]


def test_two_sites(engine):
    def fn(x):
        a, b = jnp.sin(x), jnp.sin(x + 1)
        c, d = jnp.sin(a), jnp.sin(b + 2)
        return c + d

    eqns, found = sines(fn, X)
    sites = {found[0]: site(engine, eqns, found[:2]), found[2]: site(engine, eqns, found[2:])}
    assert names(eqns, order_of(eqns, sites)) == ["add", "sin", "add", "sin", "add"]


def refused(engine, fn, groups, *args):
    eqns, found = sines(fn, *args)
    sites = {found[g[0]]: site(engine, eqns, [found[i] for i in g]) for g in groups}
    with pytest.raises(SiteDeclined) as caught:
        order_of(eqns, sites)
    assert caught.value.blamed
    return caught.value.reason.code


def test_a_part_that_needs_a_part(engine):
    assert refused(engine, lambda x: jnp.sin(jnp.sin(x)), [(0, 1)], X) == "dependent"


def test_sites_that_need_each_other(engine):
    def fn(x):
        a, b = jnp.sin(x), jnp.sin(x + 1)
        return jnp.sin(b), jnp.sin(a)  # each later one goes with the earlier it doesn't read

    assert refused(engine, fn, [(0, 2), (1, 3)], X) == "dependent"


def test_an_operand_out_of_a_barrier(engine):
    def fn(x):
        a = jnp.sin(x)
        (y,) = lax.optimization_barrier((x,))
        return a, jnp.sin(y * 2)

    assert refused(engine, fn, [(0, 1)], X) == "barrier"


def test_an_operand_that_depends_on_an_effect(engine):
    def fn(x):
        a = jnp.sin(x)
        y = jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct((), np.float32), x)
        return a, jnp.sin(y * 2)

    assert refused(engine, fn, [(0, 1)], X) == "effects"


def test_a_part_that_another_site_takes(engine):
    eqns, found = sines(lambda x: (jnp.sin(x), jnp.sin(x + 1)), X)
    sites = {found[0]: site(engine, eqns, found), found[1]: site(engine, eqns, found[1:])}
    with pytest.raises(SiteDeclined, match="another pass replaces a part"):
        order_of(eqns, sites)


def test_a_long_chain_needs_no_recursion(engine):
    def fn(x):
        a = jnp.sin(x)
        y = x
        for _ in range(3000):
            y = y + 1
        return a, jnp.sin(y)

    eqns, found = sines(fn, X)
    order = order_of(eqns, {found[0]: site(engine, eqns, found)})
    assert names(eqns, order)[-1] == "sin"
    assert len(order) == 3001
