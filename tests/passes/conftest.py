"""Bitwise comparison of functions with their optimized forms, shared by the tests of passes."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from relower import PassNotApplicable, explain, optimize


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """Type, shape and bytes of every leaf; NaN payloads and the signs of zeros count."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(a.dtype, a.shape, a.tobytes()) for a in arrays]


def assert_bits(got: Any, want: Any, what: str = "") -> None:
    """Equal to the bit, with a short message where not."""
    left, right = bits(got), bits(want)
    assert len(left) == len(right), what
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a[:2] == b[:2], f"{what}: output {i} is {a[:2]}, wanted {b[:2]}"
        same = a[2] == b[2]  # not inside the assert: pytest would print both
        assert same, f"{what}: output {i} differs in its bits"


def assert_same(
    fn: Callable[..., Any],
    *args: Any,
    passes: list[str] | None = None,
    applied: dict[str, int] | None = None,
    eager: bool = False,
) -> Any:
    """``optimize(fn)`` returns the bits of ``fn``, jitted and, if asked, eager; gives the report.

    ``applied`` counts the sites that must have been rewritten.
    """
    report = explain(fn, *args, passes=passes)
    if applied is not None:
        assert report.counts() == applied, str(report)
    try:
        optimized = optimize(fn, passes=passes)
        got = jax.jit(optimized)(*args)
    except PassNotApplicable:
        assert applied == {}, str(report)
        return report
    assert_bits(got, jax.jit(fn)(*args), "jitted")
    if eager:
        assert_bits(optimized(*args), fn(*args), "eager")
    return report


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of bodies included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                    yield from equations(part)


def count(fn: Callable[..., Any], *args: Any, name: str) -> list[Any]:
    """The equations of one primitive in ``fn``."""
    return [e for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive.name == name]


def reasons(report: Any, pass_name: str) -> list[list[str]]:
    """The reasons for each declined site of a pass, as ``code: sentence (…)``."""
    return [
        [f"{r.code}: {r}" for r in s.reasons] for s in report.declined if s.pass_name == pass_name
    ]


@pytest.fixture(scope="session")
def same() -> Callable[..., Any]:
    return assert_same


@pytest.fixture(scope="session")
def equal_bits() -> Callable[..., None]:
    return assert_bits


@pytest.fixture(scope="session")
def eqns_of() -> Callable[..., list[Any]]:
    return count


@pytest.fixture(scope="session")
def why() -> Callable[..., list[list[str]]]:
    return reasons


@pytest.fixture
def x64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
