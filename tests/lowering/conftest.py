"""Shared helpers: modules from text in normal form, and kernels small enough to lower at will."""

from collections.abc import Callable

import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from relower.lowering.normalize import Normal, normalize


def _normal(text: str) -> Normal:
    context = mlir.make_ir_context()
    with context:
        return normalize(ir.Module.parse(text), mosaic_version="0")


@pytest.fixture(scope="session")
def normal() -> Callable[[str], Normal]:
    """StableHLO text to its normal form."""
    return _normal


@pytest.fixture(scope="session")
def digests() -> Callable[[str], dict[str, str]]:
    """StableHLO text to the digest at each level."""
    return lambda text: {level: form.digest for level, form in _normal(text).forms.items()}
