"""What the gate's and the command's tests lower; the line numbers below are asserted."""

import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from relower.lowering.case import case

print("noise on stdout")
print("noise on stderr", file=sys.stderr)


def add_kernel(x, out):
    out[...] = x[...] + 1.5


def mul_kernel(x, out):
    out[...] = x[...] * 1.5


def step(kernel=add_kernel, factor=2.0, swap=False):
    def f(x, y):
        with jax.named_scope("router"):
            z = x * factor  # a constant
            z = y - z if swap else z - y  # a subtract

        def body(carry, _):
            with jax.named_scope("loop"):
                shape = jax.ShapeDtypeStruct(carry.shape, carry.dtype)
                return pl.pallas_call(kernel, out_shape=shape, name="scaled")(carry), None

        return jax.lax.scan(body, z, None, length=3)[0]

    return f


X = jax.ShapeDtypeStruct((16, 128), jnp.float32)


def made(donate=True, **options):
    return case(jax.jit(step(**options), donate_argnums=(0,) if donate else ()), X, X)


base = made()
renamed = made()
mul = made(kernel=mul_kernel)
constant = made(factor=3.0)
undonated = made(donate=False)
swapped = made(swap=True)
greedy = case(step(), X, X, expect={"kernels": 2})
nothing = case(
    lambda: (),
)


def plain(x):
    return jnp.sin(x)


def sorts(x, i):
    return jnp.argsort(x), x[i]  # an argsort


def fails(x):
    return x @ jnp.ones((7, 7))


def sleeps():
    import os
    import time
    from pathlib import Path

    Path("begun.part").write_text(str(os.getpid()))
    os.replace("begun.part", "begun")
    time.sleep(60)
    return base


def dies():
    import os

    print("last words", flush=True)
    os.abort()
