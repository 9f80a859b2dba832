"""What an equation carries: every primitive with a body has a handler or is listed."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from relower.compat import bodies, jaxprs
from relower.compat.bodies import Flow, Role

X = jnp.ones(4)


def first(fn, name, *args):
    eqns = jaxprs.opened(jax.make_jaxpr(fn)(*args)).eqns
    return next(e for e in eqns if e.primitive.name == name)


def test_scan():
    def f(x, w):
        return lax.scan(
            lambda c, v: ((c[0] + v * w, c[1] * 2), (v, c[0])), (x, x * 2), jnp.stack([x, x])
        )

    eqn = first(f, "scan", X, X)
    (e,) = bodies.carried(eqn).entered
    assert bodies.scan_counts(eqn)[1:2] == (2,)
    assert [p.flow for p in e.inputs].count(Flow.CARRY) == 2
    assert [p.outer for p in e.inputs] == list(range(len(eqn.invars)))
    assert [p.outer for p in e.outputs] == list(range(len(eqn.outvars)))
    assert e.role is Role.LOOP
    assert bodies.arity(eqn) == (
        len(eqn.invars),
        len(eqn.outvars),
        {("jaxpr", None): len(e.inputs)},
    )


def test_while_has_constants_of_two_bodies():
    def f(x, stop, step):
        return lax.while_loop(lambda c: c[0] < stop, lambda c: c + step, x)

    eqn = first(f, "while", X, 3.0, X)
    test, body = bodies.carried(eqn).entered
    assert [p.outer for p in test.inputs] == [0, 2]
    assert [p.outer for p in body.inputs] == [1, 2]
    assert test.role is Role.PREDICATE
    assert bodies.arity(eqn)[:2] == (3, 1)


def test_cond_has_an_operand_of_its_own():
    eqn = first(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "cond", X)
    entered = bodies.carried(eqn).entered
    assert [e.key for e in entered] == [("branches", 0), ("branches", 1)]
    assert [p.outer for p in entered[0].inputs] == [1]
    assert bodies.arity(eqn)[:2] == (2, 1)


def test_a_cond_whose_branches_take_nothing():
    eqn = first(lambda x: lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0), "cond", X)
    assert bodies.arity(eqn)[:2] == (1, 1)


def test_kernel():
    def kernel(x_ref, o_ref, s_ref):
        o_ref[...] = x_ref[...]

    from jax.experimental.pallas import tpu as pltpu

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
    )
    eqn = first(call, "pallas_call", jnp.ones((8, 128)))
    (e,) = bodies.carried(eqn).entered
    assert e.role is Role.KERNEL
    assert bodies.arity(eqn) == (1, 1, {("jaxpr", None): 3})
    assert {n.param for n in bodies.carried(eqn).not_entered} == {"grid_mapping"}


@pytest.mark.parametrize("interpret", [True, False])
def test_kernel_with_scalar_prefetch_and_a_dynamic_grid(interpret):
    from jax.experimental.pallas import tpu as pltpu

    def f(n, x, s):
        return pl.pallas_call(
            lambda s_ref, x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] + s_ref[0]),
            out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(n,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, s: (i, 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, s: (i, 0)),
            ),
            interpret=interpret,
        )(s, x)

    eqn = first(f, "pallas_call", jnp.int32(2), jnp.ones((16, 128)), jnp.ones(2))
    assert bodies.arity(eqn)[:2] == (len(eqn.invars), 1) == (3, 1)


def test_every_primitive_with_a_body_is_handled_or_listed():
    def f(x):
        y = lax.custom_linear_solve(lambda v: v * 2, x, lambda _, b: b / 2)
        z = lax.reduce(y, 0.0, lambda a, b: a + b, (0,))
        r = lax.reduce_window(x, 0.0, lambda a, b: a * b, (2,), (1,), "SAME")
        return y.at[0].mul(z) + r + lax.associative_scan(jnp.add, x) + jax.nn.relu(x)

    for eqn in jaxprs.opened(jax.make_jaxpr(f)(X)).eqns:
        held = []
        for value in eqn.params.values():
            values = value if isinstance(value, tuple | list) else [value]
            held += [v for v in values if jaxprs.is_body(v)]
        found = bodies.carried(eqn)
        listed = [e.body for e in found.entered] + [n.body for n in found.not_entered]
        assert all(any(h is b for b in listed) for h in held), eqn.primitive


def test_with_bodies_changes_that_body_only():
    eqn = first(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "cond", X)
    zero, one = (e.body for e in bodies.carried(eqn).entered)
    new = bodies.with_bodies(eqn, {("branches", 0): one})
    assert new.params["branches"][0] is one
    assert new.params["branches"][1] is one
    assert eqn.params["branches"][0] is zero
    assert new.ctx is eqn.ctx
    assert new.source_info is eqn.source_info
