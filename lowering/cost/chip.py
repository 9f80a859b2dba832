"""What a chip can do at most, from its maker's public figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InputError


@dataclass(frozen=True)
class Chip:
    """The limits of one device as jax shows it: half a TPU7x chip is one TensorCore.

    TPU7x: Google Cloud's page "TPU7x (Ironwood)", https://docs.cloud.google.com/tpu/docs/tpu7x,
    states per chip 2,307 TFLOP/s in bf16, 4,614 in fp8, 192 GiB of HBM at 7,380 GB/s, 1,200 GB/s of
    inter-chip links counting both directions, and two TensorCores. A device is one TensorCore and
    gets half of each.
    """

    kind: str
    flops: float
    """Per second, bf16 operands; wider ones take several passes, so this bounds them too."""
    flops_8bit: float
    """Per second, fp8 operands."""
    hbm_bandwidth: float
    """Bytes per second."""
    hbm_bytes: int
    link_bandwidth: float
    """Bytes per second that leave the device, one direction, over all its links."""
    clock: float
    """Hz. Not published: 1.75 GHz is what two published timings of TPU7x sorts imply (1.70 to 1.83
    GHz), s32[655360] with three operands in 0.61 to 0.63 ms and as a two-key pair in 0.42 ms, for
    1,117,714 and 712,985 estimated cycles."""

    @property
    def bytes_per_cycle(self) -> float:
        """HBM bytes in one cycle at the stated clock."""
        return self.hbm_bandwidth / self.clock

    @property
    def flops_per_cycle(self) -> float:
        """FLOPs in one cycle at the stated clock, bf16."""
        return self.flops / self.clock


_CHIPS: Mapping[str, Chip] = {
    "TPU7x": Chip(
        kind="TPU7x",
        flops=2307e12 / 2,
        flops_8bit=4614e12 / 2,
        hbm_bandwidth=7380e9 / 2,
        hbm_bytes=192 * 2**30 // 2,
        link_bandwidth=1200e9 / 2 / 2,
        clock=1.75e9,
    )
}


def chip_of(target: str) -> Chip:
    """The chip of a target such as ``TPU7x:2x2x1``.

    Raises:
        InputError: no figures are known for that kind.
    """
    kind = target.partition(":")[0]
    if kind not in _CHIPS:
        raise InputError(f"target {target!r}: no figures for {kind!r}; known: {', '.join(_CHIPS)}")
    return _CHIPS[kind]
