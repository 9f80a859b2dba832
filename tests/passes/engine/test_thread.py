"""Carry values across bodies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.compat import bodies, jaxprs, tracing
from relower.passes.base import SiteDeclined
from relower.passes.engine.check import check_closed
from relower.passes.engine.thread import thread

F32 = jnp.float32


@functools.cache
def mesh_of():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def paths(body, name, path=()):
    """Paths of the bodies that hold an equation of a primitive, with the equation."""
    for index, eqn in enumerate(jaxprs.opened(body).eqns):
        if eqn.primitive.name == name:
            yield path, index, eqn
        for e in bodies.carried(eqn).entered:
            yield from paths(e.body, name, (*path, (index, e.key)))


def at_path(body, path):
    for index, key in path:
        eqn = jaxprs.opened(body).eqns[index]
        body = next(e.body for e in bodies.carried(eqn).entered if e.key == key)
    return body


def put_at(body, path, change):
    if not path:
        return change(body)
    (index, key), rest = path[0], path[1:]
    eqns = list(jaxprs.opened(body).eqns)
    inner = next(e.body for e in bodies.carried(eqns[index]).entered if e.key == key)
    eqns[index] = bodies.with_bodies(eqns[index], {key: put_at(inner, rest, change)})
    return jaxprs.rebuild(body, eqns=eqns)


def from_sine_to_cosine(engine, fn, *args, source="sin", target="cos"):
    """Thread the (last) sine's value to where the (last) cosine is, and let that be the sine."""
    closed = engine.trace(fn, *args)
    up, _, sine = list(paths(closed, source))[-1]
    down, index, _ = list(paths(closed, target))[-1]
    threaded = thread(closed, up, sine.outvars[0], down)
    check_closed(threaded.closed)

    def use(body):
        eqns = list(jaxprs.opened(body).eqns)
        old = eqns[index].outvars[0]
        assert threaded.var.aval.shape == old.aval.shape
        eqns = [jaxprs.substitute(e, {old: threaded.var}) for e in eqns]
        outvars = [threaded.var if a is old else a for a in jaxprs.opened(body).outvars]
        return jaxprs.rebuild(body, eqns=eqns, outvars=outvars)

    used = put_at(threaded.closed, down, use)
    check_closed(used)
    return closed, threaded, used


def agree(engine, used, want, *args):
    got = jax.jit(engine.function(used))(*args)
    for g, w in zip(got, jax.tree.leaves(jax.jit(want)(*args)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


X = jnp.linspace(0.1, 1.0, 4, dtype=F32)


def program(trig):
    """A family of programs whose second function is cos, and which thread turns into sin."""

    def from_jit_to_outside(x):
        a = jax.jit(lambda y: jnp.sin(y) + 1)(x)
        return a + trig(x)

    def from_jit_to_jit(x):
        a = jax.jit(lambda y: jnp.sin(y) + 1)(x)
        return a + jax.jit(lambda y: trig(y) * 2)(x)

    def from_outside_to_jit(x):
        a = jnp.sin(x)
        return a, jax.jit(lambda y: jax.jit(lambda z: trig(z) * 2)(y))(x)

    def from_deep_to_deep(x):
        @jax.jit
        def f(y):
            return jax.checkpoint(lambda z: jax.jit(jnp.sin)(z) * 2)(y)

        return f(x) + jax.checkpoint(lambda z: jax.jit(lambda w: trig(w) - 1)(z))(x)

    def from_scan_to_scan(x):
        a = lax.scan(lambda c, v: (c * jnp.sin(v), c), x[0], x)
        b = lax.scan(lambda c, v: (c * trig(v), c), x[0], x, reverse=True)
        return a, b

    def from_scan_to_scan_with_consts(x):
        a = lax.scan(lambda c, v: (c + jnp.sum(jnp.sin(x * v)), ()), x[0], x)
        return a, lax.scan(lambda c, v: (c + jnp.sum(trig(x * v) * x), c), x[0], x)

    def between_nested_scans(x):
        def outer(g, c, v):
            inner = lambda d, w: (d * 0.5 + g(v * w), d)
            return lax.scan(inner, c, x[:3])

        a = lax.scan(functools.partial(outer, jnp.sin), x[0], x)
        return a, lax.scan(functools.partial(outer, trig), x[0], x)

    def from_outside_into_a_scan(x):
        a = jnp.sin(x)
        return a, lax.scan(lambda c, v: (c + trig(x), v), x, x)

    def within_one_scan_body(x):
        def body(c, v):
            a = jax.jit(lambda y: jnp.sin(y) + 1)(v)
            return c + a, jax.checkpoint(lambda y: trig(y) * 2)(v)

        return lax.scan(body, x[0], x)

    def between_shard_maps(x):
        spec = dict(mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))
        a = jax.shard_map(lambda y: jnp.sin(y) + lax.psum(y, "data"), **spec)(x)
        return a + jax.shard_map(lambda y: trig(y) * 2, **spec)(x)

    def between_shard_maps_invariant(x):
        spec = dict(mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))
        a = jax.shard_map(lambda y: jnp.sin(lax.psum(y, "data")) + y, **spec)(x)
        return a + jax.shard_map(lambda y: trig(lax.psum(y, "data")) * 2 + y, **spec)(x)

    def between_scans_in_shard_maps(x):
        def device(g, y):
            return lax.scan(lambda c, v: (c, g(v * y)), y, jnp.stack([y, y + 1]))[1]

        spec = dict(mesh=mesh_of(), in_specs=P("data"), out_specs=P(None, "data"))
        a = jax.shard_map(functools.partial(device, jnp.sin), **spec)(x)
        return a + jax.shard_map(functools.partial(device, trig), **spec)(x)

    return {k: f for k, f in locals().items() if callable(f) and k != "trig"}


NAMES = list(program(jnp.cos))


@pytest.mark.parametrize("name", NAMES)
def test_value_arrives(engine, name):
    # The second cosine becomes the first one's value: as if sin had been written there.
    _, threaded, used = from_sine_to_cosine(engine, program(jnp.cos)[name], X)
    agree(engine, used, program(jnp.sin)[name], X)
    assert threaded.added_bytes >= 0


@pytest.mark.parametrize("name", NAMES)
def test_grad_goes_through(engine, name):
    _, _, used = from_sine_to_cosine(engine, program(jnp.cos)[name], X)

    def total(outs):
        return sum(jnp.sum(o) for o in jax.tree.leaves(outs))

    got = jax.grad(lambda x: total(engine.function(used)(x)))(X)
    want = jax.grad(lambda x: total(program(jnp.sin)[name](x)))(X)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_added_bytes(engine):
    f = program(jnp.cos)
    assert from_sine_to_cosine(engine, f["from_jit_to_outside"], X)[1].added_bytes == 16
    # A stacked value is counted whole.
    assert from_sine_to_cosine(engine, f["between_nested_scans"], X)[1].added_bytes == 4 * 3 * 4
    assert from_sine_to_cosine(engine, f["from_outside_into_a_scan"], X)[1].added_bytes == 0


def test_from_the_forward_to_the_backward_scan_of_grad(engine):
    """Real autodiff: the backward pass computes the order of the keys again; it needn't."""

    def loss(w, keys):
        @jax.checkpoint
        def layer(h, k):
            order = jnp.argsort(k)
            return jnp.tanh(h[order] * w), jnp.sum(h)

        h, s = lax.scan(layer, w, keys)
        return jnp.sum(h * jnp.arange(4.0)) + jnp.sum(s)

    keys = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 4)), jnp.int32)
    w = jnp.linspace(0.5, 1, 4)
    closed = engine.trace(jax.value_and_grad(loss), w, keys)
    sorts = list(paths(closed, "sort"))
    assert len(sorts) == 2, "forward, and recomputed by remat"
    (up, _, forward), (down, index, backward) = sorts
    assert up[0] != down[0]
    threaded = thread(closed, up, forward.outvars[-1], down)
    check_closed(threaded.closed)

    def use(body):
        order = backward.outvars[-1]
        eqns = [e for i, e in enumerate(jaxprs.opened(body).eqns) if i != index]
        return jaxprs.rebuild(
            body,
            eqns=[jaxprs.substitute(e, {order: threaded.var}) for e in eqns],
            outvars=[threaded.var if a is order else a for a in jaxprs.opened(body).outvars],
        )

    used = put_at(threaded.closed, down, use)
    check_closed(used)
    assert len(list(paths(used, "sort"))) == 1
    assert threaded.added_bytes == 3 * 4 * 4
    agree(engine, used, jax.value_and_grad(loss), w, keys)


def test_options_of_jit_stay(engine):
    rows = jax.sharding.NamedSharding(mesh_of(), P("data"))

    def f(x):
        a = jax.jit(
            lambda y: jnp.sin(y) + 1, in_shardings=rows, out_shardings=rows, donate_argnums=0
        )(x * 2)
        return a + jax.jit(lambda y: jnp.cos(y) * 2, in_shardings=rows)(x)

    closed, threaded, used = from_sine_to_cosine(engine, f, X)
    olds = [e for e in jaxprs.opened(closed).eqns if e.primitive.name == "jit"]
    news = [e for e in jaxprs.opened(threaded.closed).eqns if e.primitive.name == "jit"]
    for old, new in zip(olds, news, strict=True):
        for name in ("in_shardings", "out_shardings", "donated_invars"):
            assert new.params[name][: len(old.params[name])] == old.params[name]
        assert len(new.params["donated_invars"]) == len(new.invars)
        assert len(new.params["in_shardings"]) == len(new.invars)
        assert len(new.params["out_shardings"]) == len(new.outvars)
    assert news[0].params["donated_invars"] == (True,)
    assert news[1].params["donated_invars"] == (False, False)
    agree(engine, used, lambda x: jnp.sin(x * 2) + 1 + jnp.sin(x * 2) * 2, X)


def test_shared_bodies_are_specialised_on_one_path_only(engine):
    @jax.jit
    def layer(x):
        return jnp.sin(x) + 1

    def f(x):
        return layer(layer(layer(x))) + jnp.cos(x)

    closed = engine.trace(f, X)
    calls = [i for i, e in enumerate(jaxprs.opened(closed).eqns) if e.primitive.name == "jit"]
    shared = {id(jaxprs.opened(closed).eqns[i].params["jaxpr"]) for i in calls}
    assert len(shared) == 1
    sine = next(paths(closed, "sin"))[2]
    source = ((calls[1], ("jaxpr", None)),)
    threaded = thread(closed, source, sine.outvars[0], ())
    check_closed(threaded.closed)
    news = [jaxprs.opened(threaded.closed).eqns[i].params["jaxpr"] for i in calls]
    assert id(news[0]) in shared
    assert id(news[1]) not in shared
    assert news[0] is news[2]


def test_remat_with_prevent_cse_per_operand(engine):
    def f(x):
        a = jnp.sin(x)
        return a, jax.checkpoint(lambda y: jnp.cos(y) * 2, prevent_cse=(False,))(x)

    _, _, used = from_sine_to_cosine(engine, f, X)
    agree(engine, used, lambda x: (jnp.sin(x), jnp.sin(x) * 2), X)


def test_refs_beside_an_added_operand(engine):
    def f(x):
        ref = jax.new_ref(x)
        a = jnp.sin(x)

        def body(c, v):
            ref[...] = ref[...] + jnp.cos(x)
            return c + v, ref[0]

        return a, lax.scan(body, x[0], x), ref[...]

    _, _, used = from_sine_to_cosine(engine, f, X)

    def want(x):
        return (
            jnp.sin(x),
            (x[0] + jnp.sum(x), x[0] + jnp.sin(x[0]) * jnp.arange(1, 5)),
            (x + 4 * jnp.sin(x)),
        )

    agree(engine, used, want, X)


@jax.custom_vjp
def hard(x):
    return jnp.sin(x) * 2


hard.defvjp(lambda x: (hard(x), x), lambda x, g: (g,))

DECLINED = {
    "cond": (
        lambda x: lax.cond(x[0] > 0, lambda y: jnp.sin(y) + 1, lambda y: y, x) + jnp.cos(x),
        "out of cond: no rule adds an output to cond",
    ),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 0, lambda c: jnp.sin(c) + 1, x) + jnp.cos(x),
        "out of while: no rule adds an output to while",
    ),
    "into cond": (
        lambda x: jnp.sin(x) + lax.cond(x[0] > 0, lambda y: jnp.cos(y) + 1, lambda y: y, x),
        "into cond: no rule adds an operand to cond",
    ),
    "remat policy": (
        lambda x: (
            jax.checkpoint(
                lambda y: jnp.sin(y) + 1, policy=jax.checkpoint_policies.everything_saveable
            )(x)
            + jnp.cos(x)
        ),
        "out of remat2: a remat policy decides what is saved: an added output would be saved",
    ),
    "custom_vjp": (
        lambda x: hard(x) + jnp.cos(x),
        "out of custom_vjp_call: no rule adds an output to custom_vjp_call",
    ),
    "scan length": (
        lambda x: (
            lax.scan(lambda c, v: (c + jnp.sin(v), c), x[0], x),
            lax.scan(lambda c, v: (c + jnp.cos(v), c), x[0], x[:3]),
        ),
        "into ('scan', 3)",
    ),
    "scan to outside": (
        lambda x: (lax.scan(lambda c, v: (c + jnp.sin(v), c), x[0], x), jnp.cos(x[0])),
        "a value that left scan of 4",
    ),
    "target before source": (
        lambda x: jax.jit(lambda y: jnp.cos(y) + 1)(x) + jax.jit(lambda y: jnp.sin(y) + 1)(x),
        "computes it",
    ),
    "target before source, outside": (
        lambda x: jax.jit(lambda y: jnp.cos(y) + 1)(x) + jnp.sin(x),
        "equation 1 computes it, 0 needs it",
    ),
    "two bodies of one equation": (
        lambda x: lax.cond(x[0] > 0, lambda y: jnp.cos(y) + 1, lambda y: jnp.sin(y), x),
        "computes it",
    ),
    "another mesh": (
        lambda x: (
            jax.shard_map(
                lambda y: jnp.sin(y) + y, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data")
            )(x)
            + jax.shard_map(
                lambda y: jnp.cos(y) + y,
                mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
                in_specs=P("data"),
                out_specs=P("data"),
            )(x)
        ),
        "into ('shard_map'",
    ),
    "a scalar that differs between devices": (
        lambda x: (
            jax.shard_map(
                lambda y: jnp.sin(y[0]) + y, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data")
            )(x)
            + jnp.cos(x)
        ),
        "a scalar that differs between devices has no axis to leave shard_map by",
    ),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declined(engine, case):
    fn, found = DECLINED[case]
    closed = engine.trace(fn, X)
    up, _, sine = list(paths(closed, "sin"))[-1]
    down, _, _ = list(paths(closed, "cos"))[-1]
    with pytest.raises(SiteDeclined) as declined:
        thread(closed, up, sine.outvars[0], down)
    assert declined.value.reason.code == "cannot-thread"
    assert found in declined.value.reason.found


def test_a_value_that_the_source_does_not_bind(engine):
    closed = engine.trace(program(jnp.cos)["from_jit_to_jit"], X)
    down = next(paths(closed, "cos"))[0]
    sine = next(paths(closed, "sin"))[2]
    with pytest.raises(SiteDeclined, match="bind"):
        thread(closed, (), sine.outvars[0], down)


def test_constants_of_the_program_stay(engine):
    table = jnp.arange(4.0)
    f = lambda x: jax.jit(lambda y: jnp.sin(y) + 1)(x) + jnp.cos(x) + table
    _, _, used = from_sine_to_cosine(engine, f, X)
    agree(engine, used, lambda x: jnp.sin(x) * 2 + 1 + table, X)
    assert tracing.evaluate(used, X)
