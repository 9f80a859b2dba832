"""One case for each thing that a program must not depend on, and one that depends on none."""

import inspect
import os
import sys
import time

import jax
import jax.numpy as jnp
from probe_neighbour import FACTOR  # beside the file, and beside every copy of it

from relower.lowering.case import case

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def scaled(factor, **options):
    return case(lambda x: jnp.sin(x) * float(factor), X, **options)


def steady():
    return scaled(FACTOR)


def hashed():
    return scaled([*{"sin", "cos", "tan", "exp", "log", "abs"}].index("sin"))


def placed():
    return scaled(len(os.getcwd()))


def lined():
    return scaled(inspect.currentframe().f_lineno)


def after():
    return scaled("jax.experimental.pallas" in sys.modules)


def timed():
    return scaled(time.time_ns() % 1_000_003)


def reads():
    with open("probe_neighbour.py") as neighbour:  # works from its own folder only
        return scaled(len(neighbour.read()))


def ordered():
    names = [*{"sin", "cos", "tan", "exp", "log", "abs"}]

    def f(x):
        a, b = (jnp.sin(x), jnp.cos(x)) if names[0] < names[1] else (jnp.cos(x), jnp.sin(x))
        return a + b if names[0] < names[1] else b + a  # at dataflow the same

    return case(f, X)


def demanding():
    return scaled(2, expect={"kernels": 1})


empty = case(lambda: ())
