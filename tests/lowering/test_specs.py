"""Shape specs."""

import jax
import jax.numpy as jnp
import pytest

from relower.lowering import InputError, parse_spec


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("bf16[8,128]", (8, 128), jnp.bfloat16),
        ("f32[]", (), jnp.float32),
        (" i32 [ 4 , 5 ] ", (4, 5), jnp.int32),
        ("s8[3]", (3,), jnp.int8),
        ("u32[0]", (0,), jnp.uint32),
        ("pred[2]", (2,), jnp.bool_),
        ("bool[2]", (2,), jnp.bool_),
        ("float32[2]", (2,), jnp.float32),
        ("float8_e4m3fn[16]", (16,), jnp.float8_e4m3fn),
        ("f8_e5m2[16]", (16,), jnp.float8_e5m2),
    ],
)
def test_specs(text, shape, dtype):
    found = parse_spec(text)
    assert (found.shape, found.dtype) == (shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "wanted DTYPE"),
        ("f32", "wanted DTYPE"),
        ("f32(2)", "wanted DTYPE"),
        ("f32[-1]", "wanted DTYPE"),
        ("f32[a]", "wanted DTYPE"),
        ("f32[2,,3]", "dimensions must be numbers"),
        ("f32[2 3]", "dimensions must be numbers"),
        ("f32[99999999999999999999]", "a dimension has more than 18 digits"),
        ("f31[2]", "no dtype 'f31'"),
        ("object[2]", "no dtype 'object'"),
        ("f64[2]", "float64 needs jax's 64-bit mode"),
        ("i64[2]", "int64 needs jax's 64-bit mode"),
    ],
)
def test_bad_specs(text, wanted):
    with pytest.raises(InputError, match=wanted):
        parse_spec(text)


def test_wide_types_in_64_bit_mode():
    with jax.enable_x64(True):
        assert parse_spec("f64[2]").dtype == jnp.float64
