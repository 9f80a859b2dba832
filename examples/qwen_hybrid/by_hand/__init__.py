"""The same model with some of its operations in the form that somebody found to be faster."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from . import conv, counts, gathers, inverse, rows, sorts, top_k, weights

FORMS = {
    "sorts": {"sort_by_group": sorts.sort_by_group},
    "top_k": {"top_k": top_k.top_k},
    "counts": {"group_sizes": counts.group_sizes},
    "gathers": {"exchange": gathers.exchange, "ring": gathers.ring},
    "weights": {"gathered_wi": weights.gathered_wi},
    "rows": {"take_out": rows.take_out, "put_back": rows.put_back},
    "conv": {"causal_conv": conv.causal_conv},
    "inverse": {"triangular_inverse": inverse.triangular_inverse},
}
"""Operations by the name of what was done to them."""


def by_hand(config: Config, *names: str) -> Config:
    """The same model with the operations of `FORMS` of these names."""
    ops = config.ops
    for name in names:
        ops = replace(ops, **FORMS[name])
    return replace(config, ops=ops)
