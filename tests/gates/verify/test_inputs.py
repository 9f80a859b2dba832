"""Inputs obey every fact, and reach what they are for."""

import jax.numpy as jnp
import numpy as np
import pytest

from relower.gates.verify.inputs import Input, NoInputs, make, obeys
from relower.gates.verify.themes import EXACT, FINITE, ROUNDED, SUMMED, special_values
from relower.matchers.fact import UNKNOWN, Affine, Constant, Fact

I32, F32, BF16 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(jnp.bfloat16)
FACTS = {
    "range": Input((7,), I32, Fact(-1, 5)),
    "permutation": Input((4, 6), I32, Fact(0, 5, permutation=1)),
    "columns": Input((4, 6), I32, Fact(0, 3, permutation=0)),
    "rising": Input((3, 8), I32, Fact(0, 9, rising=(1,))),
    "affine": Input((5,), I32, Fact(3, 11, Affine(3, (2,)))),
    "some offset": Input((5,), I32, Fact(0, 100, Affine(None, (2,)))),
    "constant": Input((3,), F32, Fact(0, 0, constant=Constant(-0.0, True))),
    "whole floats": Input((9,), F32, Fact(0, 7)),
    "mask": Input((9,), np.dtype(bool), Fact(0, 1)),
    "nothing": Input((9,), I32, UNKNOWN, most=9),
    "unsigned": Input((9,), np.dtype(np.uint32), Fact(0)),
    "one element": Input((), I32, Fact(0, 4)),
    "empty": Input((0, 3), I32, Fact(0, 4)),
}


@pytest.mark.parametrize("name", FACTS)
def test_every_theme_obeys_every_fact(name):
    one = FACTS[name]
    for theme in (*EXACT, *FINITE, *SUMMED, *ROUNDED):
        for seed in range(3):
            (array,) = make(theme, [one], seed)
            assert array.dtype == one.dtype
            assert array.shape == one.shape
            assert obeys(array, one.fact) is None, theme.name


def test_ends_of_ranges_are_reached():
    one = FACTS["range"]
    seen = {int(v) for t in EXACT for v in make(t, [one], 0)[0]}
    assert seen == set(range(-1, 6))


@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype(np.float16), np.dtype(np.float64)])
def test_special_values(dtype):
    values = special_values(dtype)
    assert values.dtype == dtype
    wide = values.astype(np.float64)
    assert np.isnan(wide).sum() == 4
    assert np.isinf(wide).sum() == 2
    bits = values.view(np.dtype(f"uint{dtype.itemsize * 8}"))
    assert len(set(bits.tolist())) == len(values)  # NaNs of four payloads, zeros of both signs


def test_group_sizes():
    one = Input((4,), I32, UNKNOWN, groups_of=30)
    sums = [int(make(t, [one], 0)[0].sum()) for t in EXACT]
    assert max(sums) == 30
    assert min(sums) == 0
    assert any(0 < s < 30 for s in sums)
    with pytest.raises(NoInputs, match="known to lie in"):
        make(EXACT[0], [Input((4,), I32, Fact(0, 3), groups_of=30)], 0)


def test_what_does_not_obey_is_told():
    a = np.array([0, 2, 1])
    assert obeys(a, Fact(0, 1)) == "2 is above 1"
    assert obeys(a, Fact(1, 2)) == "0 is below 1"
    assert obeys(a, Fact(0, 2, rising=(0,))) == "it falls along axis 0"
    assert obeys(np.array([0, 1, 1]), Fact(0, 2, permutation=0)) == (
        "it is no permutation along axis 0"
    )
    assert obeys(a, Fact(affine=Affine(0, (1,)))) == "it doesn't rise by 1 along axis 0"
    assert obeys(np.array([0.5]), Fact(0, 2)) == "a value is no integer"
