"""`assume_range` is an identity under every transform, and a fact, and a check."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower.matchers.assume_range import assume_range
from relower.matchers.fact import Fact
from relower.matchers.facts import Analysis


def without(x, lo, hi):
    return x


def text(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def same_lowering(build, *args):
    """``build`` makes a program from `assume_range` or from an identity; both lower alike."""
    stated, plain = build(assume_range), build(without)
    assert "assume_range" in str(jax.make_jaxpr(stated)(*args))
    assert text(stated, *args) == text(plain, *args)


INTS = jnp.arange(6, dtype=jnp.int32)
FLOATS = jnp.linspace(0.1, 0.9, 6)


def wave(state):
    """A function with two residuals that go through the statement."""
    return lambda x: jnp.sin(state(jnp.cos(x), -1.0, 1.0)) ** 2


def test_eager_it_returns_its_operand():
    assert assume_range(INTS, 0, 5) is INTS
    assert assume_range(3, 0, 5) == 3
    np.testing.assert_array_equal(assume_range(np.arange(3), 0, 2), [0, 1, 2])


def test_it_lowers_to_nothing():
    same_lowering(lambda a: lambda x: a(x, 0, 5) * 2, INTS)
    same_lowering(lambda a: lambda x: a(x, 0, 5), INTS)
    same_lowering(lambda a: jax.vmap(lambda x: a(x, 0, 5) + x), INTS.reshape(2, 3))


def test_it_lowers_to_nothing_under_loops_and_derivatives():
    def loop(a):
        def body(carry, row):
            return a(carry + row, 0, 100), a(row, 0, 5) * 2

        return lambda x: lax.scan(body, jnp.int32(0), x)

    same_lowering(loop, INTS)
    same_lowering(lambda a: jax.grad(lambda x: wave(a)(x).sum()), FLOATS)
    same_lowering(lambda a: lambda x: jax.jvp(wave(a), (x,), (x,))[1], FLOATS)
    same_lowering(lambda a: jax.hessian(lambda x: wave(a)(x).sum()), FLOATS)
    same_lowering(
        lambda a: jax.grad(lambda x: lax.scan(lambda c, y: (wave(a)(c) + y, c), x[0], x)[0]),
        FLOATS,
    )


def test_gradients_pass_through():
    gradient = jax.grad(lambda x: assume_range(x, 0.0, 1.0).sum() * 3)(FLOATS)
    np.testing.assert_array_equal(gradient, jnp.full(6, 3.0))
    transposed = jax.linear_transpose(lambda x: assume_range(x, 0.0, 1.0) * 2, FLOATS)
    np.testing.assert_array_equal(transposed(FLOATS)[0], FLOATS * 2)


# Under a policy that saves everything the same values are saved, in another order: see below.
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
    "any_names": jax.checkpoint_policies.save_any_names_but_these("other"),
}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_it_is_never_a_residual(name):
    def build(a):
        @functools.partial(jax.checkpoint, policy=POLICIES[name])
        def block(w, x):
            kept = checkpoint_name(a(x @ w, -10.0, 10.0), "kept")
            inner = a(jnp.sin(kept), -1.0, 1.0)
            return jnp.sin(inner * kept) @ w

        return jax.grad(lambda w: block(w, jnp.ones((4, 4))).sum())

    same_lowering(build, jnp.eye(4))


def test_remat_saves_the_operand_rather_than_the_result():
    def build(a):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
        def block(x):
            y = jnp.sin(x)  # each product saves its factors: y, and what is stated of y
            return y * jnp.exp(x) + a(y, -1.0, 1.0) * jnp.tanh(x)

        return block

    stated, plain = (
        len(jax.tree.leaves(jax.vjp(build(a), FLOATS)[1])) for a in (assume_range, without)
    )
    assert stated == plain


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_and_shardings_are_kept(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(16), NamedSharding(mesh, P("d")))

    def build(a):
        @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        def inner(x):
            y = a(x, 0, 15)
            assert jax.typeof(y) == jax.typeof(x)
            return y + lax.psum(y, "d")

        def outer(x):
            y = a(x, 0, 15)
            assert jax.typeof(y) == jax.typeof(x)
            return inner(y) * 2

        return outer

    with jax.set_mesh(mesh):
        same_lowering(build, x)
        np.testing.assert_array_equal(jax.jit(build(assume_range))(x), jax.jit(build(without))(x))


def test_export_keeps_nothing_of_it():
    modules = [
        jax.export.export(jax.jit(lambda x, a=a: a(x, 0, 5) + 1))(INTS).mlir_module()
        for a in (assume_range, without)
    ]
    assert modules[0] == modules[1]


def kernel(state):
    def body(x_ref, o_ref):
        o_ref[...] = state(x_ref[...], 0, 9) + 1

    return body


def call(state, **kw):
    return pl.pallas_call(kernel(state), out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32), **kw)


def test_in_an_interpreted_kernel():
    x = jnp.ones((8, 128), jnp.int32)
    np.testing.assert_array_equal(call(assume_range, interpret=True)(x), x + 1)


def test_in_a_kernel_for_the_tpu():
    x = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    modules = [
        jax.export.export(jax.jit(call(state, name="add")), platforms=["tpu"])(x).mlir_module()
        for state in (assume_range, without)
    ]
    assert "tpu_custom_call" in modules[0]
    assert len(modules[0]) == len(modules[1])


@pytest.mark.parametrize(
    ("x", "bounds", "found"),
    [
        (jnp.array([1, 7, 9]), (0, 5), "7"),
        (jnp.array([1, -2, 9]), (0, 5), "-2"),
        (jnp.array([0.5, jnp.nan]), (0.0, 1.0), "nan"),
    ],
)
def test_checkify_names_the_value_and_the_range(x, bounds, found):
    def fn(x):
        return assume_range(x, *bounds) * 2

    for run in (fn, jax.jit(fn), lambda x: lax.map(fn, x[None])):
        error, _ = checkify.checkify(run)(x)
        message = error.get()
        assert message is not None
        assert f"found {found}, wanted a value in [{bounds[0]}, {bounds[1]}]" in message


def test_checkify_is_quiet_where_the_statement_holds():
    error, out = checkify.checkify(jax.jit(lambda x: assume_range(x, 0, 5) + 1))(INTS)
    assert error.get() is None
    np.testing.assert_array_equal(out, INTS + 1)
    error, _ = checkify.checkify(lambda x: assume_range(x, 0, 5))(jnp.zeros(0, jnp.int32))
    assert error.get() is None
    error, _ = checkify.checkify(lambda x: assume_range(x, 0, 1), checkify.nan_checks)(INTS)
    assert error.get() is None


@pytest.mark.parametrize(
    ("x", "lo", "hi", "message"),
    [
        (INTS, 5, 0, r"found lo=5 > hi=0; wanted lo <= hi"),
        (INTS, 0, 1 << 31, r"found hi=2147483648; wanted a bound that int32 can hold"),
        (jnp.zeros(2, jnp.uint8), -1, 5, r"found lo=-1; wanted a bound that uint8 can hold"),
        (INTS, 0.0, 5, r"found lo=0.0; wanted a Python int"),
        (INTS > 1, 0, 1, r"found an array of dtype bool; wanted an integer or real"),
        (jnp.zeros(2, jnp.complex64), 0, 1, r"found an array of dtype complex64"),
        (FLOATS, float("nan"), 1.0, r"found lo=nan"),
        (FLOATS.astype(jnp.float16), 0.0, 1e6, r"found hi=1000000.0; wanted a bound that float16"),
        (FLOATS, "a", 1.0, r"found lo='a'; wanted a Python float"),
    ],
)
def test_bad_bounds(x, lo, hi, message):
    with pytest.raises(ValueError, match=message):
        assume_range(x, lo, hi)


def facts_of(fn, *args):
    analysis = Analysis()
    return analysis, analysis.enter(jax.make_jaxpr(fn)(*args)).outputs[0]


def test_the_statement_is_a_fact():
    _, fact = facts_of(lambda x: assume_range(x, 2, 9), INTS)
    assert fact == Fact(2, 9)


def test_the_statement_narrows_what_is_known():
    _, fact = facts_of(lambda x: assume_range(jnp.maximum(x, 3), 0, 9), INTS)
    assert fact == Fact(3, 9)
    _, fact = facts_of(lambda x: assume_range(x & 7, 0, 9), INTS)
    assert fact == Fact(0, 7)


def test_a_contradiction_keeps_what_is_proven_and_is_listed():
    analysis, fact = facts_of(lambda x: assume_range(x & 7, 10, 20), INTS)
    assert fact == Fact(0, 7)
    (found,) = analysis.contradictions
    assert found.known == Fact(0, 7)
    assert found.eqn.params == {"lo": 10, "hi": 20}


def test_float_bounds_give_no_fact():
    analysis, fact = facts_of(lambda x: assume_range(x, 0.0, 1.0), FLOATS)
    assert fact == Fact()
    assert analysis.contradictions == ()
