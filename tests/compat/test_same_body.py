"""Two jaxprs are one program, or they aren't."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from relower.compat.same_body import same_body, same_params

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def traced(fn, *args):
    jax.clear_caches()  # so that no body is the same object
    return jax.make_jaxpr(fn)(*(args or (X, X)))


def kernel(step=1.0, block=8, index=0):
    def body(x, y, out):
        out[...] = x[...] * step + y[...]

    spec = pl.BlockSpec((block, 128), lambda i: (i, index))
    return lambda x, y: pl.pallas_call(
        body, out_shape=X, grid=(8 // block,), in_specs=[spec] * 2, out_specs=spec
    )(x, y)


def looped(length=3, unroll=1):
    def fn(x, y):
        return lax.scan(lambda c, _: (jnp.where(c > 0, c * y, jnp.sin(c)), None), x, None,
                        length=length, unroll=unroll)[0]  # fmt: skip

    return fn


TABLE = np.arange(128, dtype=np.float32)


@pytest.mark.parametrize("make", [
    lambda: kernel(), lambda: looped(), lambda: lambda x, y: x @ y.T,
    lambda: lambda x, y: x + jnp.asarray(TABLE),
])  # fmt: skip
def test_the_same_function_traced_twice(make):
    assert same_body(traced(make()), traced(make()))


@pytest.mark.parametrize(("a", "b"), [
    (kernel(), kernel(step=2.0)),
    (kernel(), kernel(block=4)),
    (kernel(), kernel(index=1)),
    (looped(), looped(length=4)),
    (looped(), looped(unroll=3)),
    (lambda x, y: x - y, lambda x, y: y - x),
    (lambda x, y: x - y, lambda x, y: x + y),
    (lambda x, y: (x, y), lambda x, y: (y, x)),
    (lambda x, y: x, lambda x, y: (x, y)),
    (lambda x, y: jnp.sin(jnp.cos(x)) + y, lambda x, y: jnp.cos(jnp.sin(x)) + y),
    (lambda x, y: x + jnp.asarray(TABLE), lambda x, y: x + jnp.asarray(TABLE + 1)),
    (lambda x, y: x * 2.0 + y, lambda x, y: x * -2.0 + y),
    (lambda x, y: x * 0.0 + y, lambda x, y: x * -0.0 + y),
    (lambda x, y: x.astype("bfloat16"), lambda x, y: x.astype("float16")),
    (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
])  # fmt: skip
def test_one_difference(a, b):
    assert not same_body(traced(a), traced(b))


def test_types_differ():
    other = jax.ShapeDtypeStruct((4, 128), jnp.float32)
    assert not same_body(traced(lambda x, y: x + y), traced(lambda x, y: x + y, other, other))


def test_params_are_compared_and_not_their_text():
    """The text of a large array leaves its middle out."""
    table = np.zeros(5000)
    other = table.copy()
    other[2500] = 1
    assert str({"table": table}) == str({"table": other})
    assert same_params({"table": table, "axis": 0}, {"table": table.copy(), "axis": 0})
    assert not same_params({"table": table}, {"table": other})
    assert not same_params({"axis": 0}, {"axis": 0, "table": table})
    assert not same_params({"axis": 0}, {"axis": 1})
