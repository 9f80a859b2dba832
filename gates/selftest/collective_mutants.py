"""Mutants of collectives: who takes part, which belong together, what they compute."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...compat.mlir import ir
from .draft import Draft
from .edits import having, named, rename
from .mutant import Mutant


def _sharing_channels(draft: Draft) -> list[Any]:
    found = draft.ops("stablehlo.all_reduce")
    return [op for op in found if "channel_handle" in op.attributes][1:]


def _other_channels(draft: Draft) -> None:
    """A channel of its own for every collective."""
    for number, op in enumerate(draft.ops("stablehlo.all_reduce"), 10):
        set_channel(op, number)


def set_channel(op: Any, number: int) -> None:
    """Gives a collective a channel."""
    text = str(op.attributes["channel_handle"])
    op.attributes["channel_handle"] = ir.Attribute.parse(
        re.sub(r"handle = \d+", f"handle = {number}", text)
    )


def _merge_channel(draft: Draft, op: Any) -> None:
    other = next(o for o in draft.ops("stablehlo.all_reduce") if o != op)
    op.attributes["channel_handle"] = other.attributes["channel_handle"]


def _split_channel(draft: Draft, op: Any) -> None:
    set_channel(op, 77)


def _regroup(draft: Draft, op: Any) -> None:
    devices = int(str(draft.operation.attributes["mhlo.num_partitions"]).split(" ")[0])
    groups = np.arange(devices, dtype=np.int64).reshape(2, -1)
    wanted = ir.DenseElementsAttr.get(groups)
    if str(op.attributes["replica_groups"]) == str(wanted):
        wanted = ir.DenseElementsAttr.get(groups.reshape(-1, 2).T.copy())
    op.attributes["replica_groups"] = wanted


def _reducers(draft: Draft) -> list[Any]:
    inner = []
    for op in draft.ops("stablehlo.all_reduce"):
        inner += [v.operation for v in op.regions[0].blocks[0].operations]
    return [op for op in inner if op.name == "stablehlo.add"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "replica_groups",
        "a collective with groups",
        having(named("stablehlo.all_reduce"), "replica_groups"),
        _regroup,
        "stablehlo.all_reduce",
    ),
    Mutant(
        "channels merged",
        "two collectives with channels",
        _sharing_channels,
        _merge_channel,
        "stablehlo.all_reduce",
        prepare=_other_channels,
    ),
    Mutant(
        "channels parted",
        "two collectives with one channel",
        _sharing_channels,
        _split_channel,
        "stablehlo.all_reduce",
    ),
    Mutant(
        "a collective's reducer, add to maximum",
        "an all_reduce that adds",
        _reducers,
        rename("stablehlo.maximum"),
    ),
)
