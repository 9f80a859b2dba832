"""The primitives behind checked facts: a mark of what a rewrite leaned on, and the check of it.

While a program is rewritten, `claim_p` reads the values and nothing reads it, so that no pattern
sees another reader or another producer. At the end, `checked_p` takes its place: an identity on
the outputs of the body, so that the check lives as long as any of them, that reads the values too.
It lowers to nothing; under `jax.experimental.checkify` it is a user check.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax._src.source_info_util import current
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Failure = tuple[Any, str, dict[str, Any]]
"""Whether it failed, a scalar bool; a message with names in braces; the values of these names."""


class Claim(Protocol):
    """Hashable: what is said of one value."""

    def failures(self, value: Any, skip: int) -> list[Failure]:
        """What there is to test of a value, each of whose first ``skip`` dimensions is a batch."""


claim_p: Any = Primitive("relower_claim")
claim_p.def_impl(lambda *values, claims: jnp.bool_(True))
# Matchers look at the first result of an equation, so that there is one.
claim_p.def_abstract_eval(lambda *values, claims: ShapedArray((), jnp.dtype(bool)))

checked_p: Any = Primitive("relower_checked")
checked_p.multiple_results = True
"""Params: ``claims``, and ``skips``, of each value the number of leading batch dimensions."""


def _passed(operands: Sequence[Any], claims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The operands that are returned, and those that claims are about."""
    at = len(operands) - len(claims)
    return list(operands[:at]), list(operands[at:])


def _same(*operands: Any, claims: Any, skips: Any) -> list[Any]:
    return _passed(operands, claims)[0]


checked_p.def_impl(_same)
checked_p.def_abstract_eval(_same)
mlir.register_lowering(checked_p, lambda ctx, *operands, **params: _same(*operands, **params))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    # Claims are about the values: they say nothing of the tangents.
    return checked_p.bind(*primals, **params), _passed(tangents, params["claims"])[0]


def _transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    return [*cts, *[None] * len(params["claims"])]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, claims: Any, skips: Any
) -> tuple[Any, Any]:
    through, values = _passed(operands, claims)
    outer, about = _passed(dims, claims)
    moved, more = [], []
    for value, dim, skip in zip(values, about, skips, strict=True):
        batched = dim is not None
        moved.append(jnp.moveaxis(value, dim, 0) if batched else value)
        more.append(skip + batched)
    return checked_p.bind(*through, *moved, claims=claims, skips=tuple(more)), outer


ad.primitive_jvps[checked_p] = _jvp
ad.primitive_transposes[checked_p] = _transpose
batching.primitive_batchers[checked_p] = _batch


def register_where_loaded() -> None:
    """Adds checkify's rule where checkify is loaded; whoever uses it has imported it by then."""
    module = sys.modules.get("jax._src.checkify")
    if module is not None:
        module.error_checks[checked_p] = _checked


def _checked(*args: Any, claims: Any, skips: Any) -> tuple[Any, Any]:
    from jax._src import checkify

    at = next(i for i, a in enumerate(args) if isinstance(a, checkify.Error))
    context, error, enabled, operands = args[:at], args[at], args[at + 1], args[at + 2 :]
    results = checked_p.bind(*operands, claims=claims, skips=skips)
    if checkify.FailedCheckError not in enabled:
        return error, results
    values = _passed(operands, claims)[1]
    fail: Any = checkify.assert_func
    for claim, value, skip in zip(claims, values, skips, strict=True):
        for failed, message, found in claim.failures(value, skip):
            failure = checkify.FailedCheckError(current().traceback, message, **found)
            error = fail(*context, error, failed, failure)
    return error, results
