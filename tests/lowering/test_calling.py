"""What jit keeps beside the module, and a caller depends on, is part of a program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import relower
from relower.lowering.program import LEVELS

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
S = jax.ShapeDtypeStruct((), jnp.float32)


def verdicts(a, b):
    return {relower.diff(a, b, level=level).verdict.name for level in LEVELS}


def test_which_argument_is_read():
    """jit drops what nothing reads, so that argument 1 of the module may be lr or wd."""
    good = relower.lower(lambda p, lr, wd: p - lr * p, X, S, S)
    bug = relower.lower(lambda p, lr, wd: p - wd * p, X, S, S)
    assert verdicts(good, bug) == {"DIFFERENT"}
    assert verdicts(good, relower.lower(lambda w, rate, d: w - rate * w, X, S, S)) == {"IDENTICAL"}


def test_how_many_arguments_there_are():
    one, two = relower.lower(lambda a: a * 2, X), relower.lower(lambda a, b: a * 2, X, X)
    assert verdicts(one, two) == {"DIFFERENT"}


def test_compiler_options():
    options = [{}, {"xla_tpu_scoped_vmem_limit_kib": "1024"},
               {"xla_tpu_scoped_vmem_limit_kib": "65536"}]  # fmt: skip
    programs = [relower.lower(jax.jit(lambda a: a * 2, compiler_options=o), X) for o in options]
    assert len({p.forms["dataflow"].digest for p in programs}) == 3


@pytest.mark.parametrize("argument", [0, 1])
def test_a_donation_that_nothing_can_use(argument):
    fn = lambda a, b: (b * 2).astype(jnp.bfloat16).sum()
    plain, donated = (relower.lower(jax.jit(fn, donate_argnums=d), X, X) for d in ((), (argument,)))
    assert verdicts(plain, donated) == {"DIFFERENT"}


def test_effort_settings_are_stamped():
    flags = relower.lower(jnp.sin, X).stamp.fields["flags"]
    efforts = ("memory_fitting_level", "memory_fitting_effort", "exec_time_optimization_effort")
    known = [name for name in efforts if f"jax_{name}" in jax.config.values]
    assert known
    assert all(f"{name}=" in flags for name in known)


@pytest.mark.parametrize("constant", [np.complex64(1 + 2j), np.arange(8) * np.complex64(1j)])
def test_complex_constants(constant):
    wave = jax.ShapeDtypeStruct((8,), jnp.complex64)
    found = relower.lower(lambda a: a + constant, wave)
    assert not found.unknowns
    other = relower.lower(lambda a: a + constant.conjugate(), wave)
    assert verdicts(found, other) == {"DIFFERENT"}
    assert verdicts(found, relower.lower(lambda b: b + constant, wave)) == {"IDENTICAL"}


def test_a_name_scope_inside_a_kernel_is_noise():
    def kernel(name):
        def body(x, out):
            with jax.named_scope(name):
                out[...] = x[...] * 2

        return lambda a: pl.pallas_call(body, out_shape=X)(a)

    a, b = relower.lower(kernel("router"), X), relower.lower(kernel("gate"), X)
    assert verdicts(a, b) == {"IDENTICAL"}
    assert a.ledger["kernel-scope"] == b.ledger["kernel-scope"] > 0


def test_programs_and_differences_print_for_people():
    a, b = relower.lower(lambda x: x + 1, X), relower.lower(lambda x: x + 2, X)
    assert len(repr(a)) < 300
    text = str(relower.diff(a, b))
    assert text.splitlines()[-1] == "DIFFERENT at level exact: 1 difference"
    assert "stablehlo.constant" in text
    assert "test_calling.py:" in text
    assert str(relower.diff(a, a)).splitlines() == ["IDENTICAL at level exact"]
