"""The kernel cases lower for the TPU, decode, and differ where they say they do."""

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import kernels
from relower.lowering import lower

NAMES = {
    "gmm": 1,
    "gmm_grad": 3,
    "flash_attention": 1,
    "flash_attention_grad": 3,
}
"""Cases with a variant of other tiles, and the kernels each calls."""


@pytest.fixture(scope="module")
def programs():
    names = [*NAMES, *(name + "_wide" for name in NAMES), "add", "mul"]
    return {name: lower(getattr(kernels, name)(), levels=("inlined",)) for name in names}


def digest(program):
    return program.forms["inlined"].digest


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", ["", "_wide"])
def test_lowers_with_its_kernels_decoded(programs, name, suffix):
    program = programs[name + suffix]
    assert program.unknowns == ()
    assert sum(program.kernel_calls.values()) == NAMES[name]
    for kernel in program.kernels.values():
        assert "stable_mosaic" not in kernel.text
        assert "func.func" in kernel.text


@pytest.mark.parametrize("name", NAMES)
def test_is_identical_to_itself_and_differs_with_other_tiles(programs, name):
    assert digest(programs[name]) == digest(lower(getattr(kernels, name)(), levels=("inlined",)))
    assert digest(programs[name]) != digest(programs[name + "_wide"])
    # The kernels alone tell them apart, too.
    assert programs[name].kernels.keys() != programs[name + "_wide"].kernels.keys()


def test_add_and_mul_differ_in_one_operation_of_the_kernel(programs):
    (add,), (mul,) = (programs[name].kernels.values() for name in ("add", "mul"))
    pairs = zip(add.text.splitlines(), mul.text.splitlines(), strict=True)
    (changed,) = [(a, b) for a, b in pairs if a != b]
    assert "arith.addf" in changed[0]
    assert "arith.mulf" in changed[1]


def test_states_what_it_expects():
    for name, kernel_calls in NAMES.items():
        assert getattr(kernels, name)().expect == {"kernels": kernel_calls}


def test_elementwise_kernels_compute_what_they_say():
    x, y = np.arange(64 * 256, dtype=np.float32).reshape(2, 64, 128).repeat(2, -1)
    with pltpu.force_tpu_interpret_mode():
        added = kernels.elementwise(x, y, kernel=kernels.add_kernel)
        multiplied = kernels.elementwise(x, y, kernel=kernels.mul_kernel)
    np.testing.assert_array_equal(added, x + y)
    np.testing.assert_array_equal(multiplied, x * y)
