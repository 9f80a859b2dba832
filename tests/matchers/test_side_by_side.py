"""How operands lie side by side, against what a collective does to each alone."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from relower.matchers.side_by_side import forms, layout_of


def gathered(x, dimension, tiled, n=3):
    """What an all_gather over ``n`` devices that all hold ``x`` returns."""
    every = np.stack([x + 1000 * i for i in range(n)], dimension)
    return every if not tiled else np.concatenate([x + 1000 * i for i in range(n)], dimension)


def scattered(x, dimension, tiled, n=2):
    """The second device's part of a sum of ``x``."""
    if tiled:
        return np.split(x, n, dimension)[1]
    return x.take(1, dimension)


def together(xs, dimension, tiled, gather):
    layout = layout_of([x.shape for x in xs], dimension, tiled, gather)
    if layout is None:
        return None
    alone = gathered if gather else scattered
    joined = np.concatenate([x.reshape(v) for x, v in zip(xs, layout.views, strict=True)],
                            layout.axis)  # fmt: skip
    result = alone(joined, layout.dimension, tiled)
    cuts = np.cumsum(layout.sizes)[:-1]
    parts = np.split(result, cuts, layout.split)
    return [p.reshape(alone(x, dimension, tiled).shape) for p, x in zip(parts, xs, strict=True)]


@st.composite
def operands(draw):
    gather, tiled = draw(st.booleans()), draw(st.booleans())
    rank = draw(st.integers(1, 3))
    dimension = draw(st.integers(0, rank - 1 + (gather and not tiled)))
    shape = [draw(st.integers(1, 3)) * 2 for _ in range(rank)]
    if not gather and not tiled:
        shape[dimension] = 2
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        other = list(shape)
        if rank > dimension + 1:
            cut = draw(st.integers(dimension + 1, rank))
            other = other[:cut] + [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
        shapes.append(tuple(other))
    xs = [np.arange(int(np.prod(s))).reshape(s) + 100 * i for i, s in enumerate(shapes)]
    return xs, dimension, tiled, gather


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(operands())
def test_each_gets_what_it_gets_alone(drawn):
    xs, dimension, tiled, gather = drawn
    alone = gathered if gather else scattered
    got = together(xs, dimension, tiled, gather)
    assert got is not None  # equal up to the dimension worked on
    for part, x in zip(got, xs, strict=True):
        np.testing.assert_array_equal(part, alone(x, dimension, tiled))


@pytest.mark.parametrize(("shapes", "dimension", "axis", "views"), [
    ([(8, 2), (8, 5)], 0, 1, ((8, 2), (8, 5))),
    ([(8, 2), (8, 2)], 1, 0, ((8, 2), (8, 2))),
    ([(8,), (8,)], 0, 0, ((1, 8), (1, 8))),  # the long dimension stays the minor one
    ([(8,), (8, 3)], 0, 1, ((8, 1), (8, 3))),
    ([(8, 3, 2), (8, 4)], 0, 1, ((8, 6), (8, 4))),
])  # fmt: skip
def test_which_axis_is_taken(shapes, dimension, axis, views):
    layout = layout_of(shapes, dimension, True, True)
    assert (layout.axis, layout.views) == (axis, views)


@pytest.mark.parametrize(("shapes", "dimension", "tiled", "gather"), [
    ([(8, 2), (4, 2)], 0, True, True),
    ([(8,), (4,)], 0, True, True),
    ([(8, 2), (7, 3)], 1, True, True),
    ([(2, 8), (8,)], 1, True, True),
    ([(), (8,)], 0, True, True),
    ([(8, 2), (4, 2)], 0, False, False),
])  # fmt: skip
def test_what_does_not_fit(shapes, dimension, tiled, gather):
    assert layout_of(shapes, dimension, tiled, gather) is None


@hypothesis.given(
    st.lists(
        st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
    ),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_a_layout_is_known_where_operands_have_a_form_in_common(shapes, dimension, tiled, gather):
    dimension = min(dimension, *map(len, shapes)) - (not gather or tiled)
    dimension = max(dimension, 0)
    common = frozenset.intersection(*(forms(s, dimension, tiled, gather) for s in shapes))
    assert bool(common) == (layout_of(shapes, dimension, tiled, gather) is not None)
