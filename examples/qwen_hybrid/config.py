"""The sizes of the model, and how it is spread and trained."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .ops import PLAIN, Ops

MESH = {"fsdp": 2, "context": 2, "expert": 2}
"""Sequences are split over "fsdp" and "expert", their tokens over "context"; matrices over "fsdp",
and experts over "expert"."""

BLOCK = 4
"""Layers of a block: three gated delta nets and one of full attention."""

SAVED = ("mixed", "routing_weights", "routing_ids")
"""Names of what a layer may save for its backward pass."""


@dataclass(frozen=True)
class Config:
    """The sizes of the model, its dtypes and how it trains."""

    vocab: int
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    linear_dim: int
    """Of a delta net's keys and of its values."""
    delta_chunk: int
    """Tokens that the delta rule takes at once."""
    experts: int
    experts_per_token: int
    width: int
    """Of an expert; its input weight has twice as many columns, gate and up."""
    batch: int
    """Sequences of a micro-batch."""
    sequence: int
    micro_batches: int
    rotary: float = 0.25
    """The part of a head's dimensions that is rotated by position."""
    chunks: int = 2
    """In how many parts a device's tokens go through the experts."""
    saved: tuple[str, ...] | None = SAVED
    """By name, what a layer's backward pass finds saved; all else is computed again. If None,
    everything is saved."""
    balance: float = 0.001
    """How much the load-balance loss counts."""
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    """What activations and matrix multiplications use; parameters are kept in float32."""
    router_dtype: jax.typing.DTypeLike = jnp.float32
    learning_rate: float = 3e-4
    ops: Ops = PLAIN
    """In which form some operations are written; by_hand/ has others."""

    @property
    def key_width(self) -> int:
        """Channels of all of a delta net's queries, and of all its keys."""
        return self.key_heads * self.linear_dim

    @property
    def value_width(self) -> int:
        """Channels of all of a delta net's values."""
        return self.value_heads * self.linear_dim

    @property
    def qkv_width(self) -> int:
        """Channels that a delta net's convolution runs over."""
        return 2 * self.key_width + self.value_width


TINY = Config(
    vocab=62,
    hidden=32,
    blocks=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    key_heads=2,
    value_heads=4,
    linear_dim=8,
    delta_chunk=32,
    experts=8,
    experts_per_token=2,
    width=16,
    batch=4,
    sequence=64,
    micro_batches=2,
    rotary=0.5,
    dtype=jnp.float32,
    learning_rate=1e-2,
)
"""Trains on a CPU in seconds."""

REAL = Config(
    vocab=248_320,
    hidden=4096,
    blocks=2,
    heads=32,
    kv_heads=2,
    head_dim=256,
    key_heads=16,
    value_heads=64,
    linear_dim=128,
    delta_chunk=64,
    experts=512,
    experts_per_token=10,
    width=1024,
    batch=8,
    sequence=4096,
    micro_batches=4,
)
"""Layers of a frontier model's size, 4,096 tokens a device; for tracing and lowering."""
