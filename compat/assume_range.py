"""The primitive behind `assume_range`: an identity that carries two bounds.

It is an identity under every transform, lowers to nothing, and is recomputed under every remat
policy rather than saved a second time. Under `jax.experimental.checkify` it is a user check.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

assume_range_p: Any = Primitive("assume_range")
assume_range_p.def_impl(lambda x, *, lo, hi: x)
assume_range_p.def_abstract_eval(lambda x, *, lo, hi: x)
mlir.register_lowering(assume_range_p, lambda ctx, x, *, lo, hi: [x])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **bounds: Any) -> tuple[Any, Any]:
    # The bounds are about the value: they say nothing of its tangent.
    return assume_range_p.bind(*primals, **bounds), tangents[0]


def _batch(args: Sequence[Any], dims: Sequence[Any], **bounds: Any) -> tuple[Any, Any]:
    return assume_range_p.bind(*args, **bounds), dims[0]


ad.primitive_jvps[assume_range_p] = _jvp
ad.primitive_transposes[assume_range_p] = lambda ct, x, **bounds: [ct]
batching.primitive_batchers[assume_range_p] = _batch


def _partial_eval(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Recompute from the operand, whatever the policy: the result is the operand."""
    if unknown[0]:
        return None, eqn, [True], [True], []
    (x,) = eqn.invars
    needed = [] if instantiated[0] else [x]
    return eqn, eqn, [False], [True], needed


pe.partial_eval_jaxpr_custom_rules[assume_range_p] = _partial_eval


_registered: set[str] = set()


def register_where_loaded() -> None:
    """Adds the rules of the parts of jax that are loaded by now, so that none is imported early.

    Whoever uses checkify or Pallas has imported it before the function at hand is traced.
    """
    for module, register in _LATE.items():
        if module in sys.modules and module not in _registered:
            register()
            _registered.add(module)


def _register_checkify() -> None:
    from jax._src import checkify

    checkify.error_checks[assume_range_p] = _checked


def _checked(*args: Any, lo: Any, hi: Any) -> tuple[Any, Any]:
    *context, error, enabled, x = args  # a context leads from jax 0.12 on
    import jax.numpy as jnp
    from jax._src import checkify
    from jax._src.source_info_util import current

    result = assume_range_p.bind(x, lo=lo, hi=hi)
    if checkify.FailedCheckError not in enabled or x.size == 0:
        return error, result
    outside = jnp.logical_not((x >= lo) & (x <= hi)).reshape(-1)  # so that NaN is outside
    found = x.reshape(-1)[jnp.argmax(outside)]
    message = f"assume_range: found {{found}}, wanted a value in [{lo}, {hi}]"
    failure = checkify.FailedCheckError(current().traceback, message, found=found)
    fail: Any = checkify.assert_func
    return fail(*context, error, outside.any(), failure), result


def _register_mosaic() -> None:
    # Pallas loads its TPU lowering only when it lowers, after the kernel has been traced.
    from jax._src.pallas.mosaic import core as tpu
    from jax._src.pallas.mosaic import lowering

    lowering.register_lowering_rule(assume_range_p, kernel_types=tuple(tpu.CoreType))(
        lambda ctx, x, *, lo, hi: x
    )


_LATE = {
    "jax._src.checkify": _register_checkify,
    "jax._src.pallas.pallas_call": _register_mosaic,
}
