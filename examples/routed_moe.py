"""A mixture-of-experts decoder, trained step by step.

Embedding, decoder layers under `jax.lax.scan` with rematerialisation (causal attention, then a
routed mixture of SwiGLU experts), cross-entropy over the next token, AdamW. It is written as a
model author writes it, and nothing in it knows that relower exists: the router takes the top k
of a softmax, the rows are sorted by expert with `jnp.argsort`, the experts run as grouped matrix
multiplications (megablox on a TPU, `jax.lax.ragged_dot` elsewhere), and the argsort's inverse
brings the rows back.

Run it:

    python examples/routed_moe.py                   train the tiny model and print the losses
    python examples/routed_moe.py --optimize        the same with `relower.optimize` around the step
    python examples/routed_moe.py --real            trace and lower the real size; allocate nothing

Cases for the command line (`relower explain examples/routed_moe.py:tiny`), each a function that
takes nothing:

    tiny         the whole train step, as `python examples/routed_moe.py` runs it
    tiny_grad    the loss and its gradients
    tiny_padded  the whole train step on sequences of unequal length
    real         the whole train step at the real size
    real_grad    the loss and its gradients at the real size
    sharded      the whole tiny train step, data-parallel over four devices
    sharded_experts
                 the same over eight devices, the experts sharded four ways, tokens in two chunks
    real_sharded_experts
                 that at the real size
    real_on_32_devices
                 the same, the experts sharded sixteen ways (--target TPU7x:4x4x1): the compiler
                 takes it
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
Batch = Mapping[str, jax.Array]


def sort_by_expert(ids: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """The order that sorts rows by expert id, and the inverse that takes sorted rows back.

    Args:
        ids: int32[rows], -1 for rows of no expert, else in [0, config.experts).
        config: The model; unused here.

    Returns:
        int32[rows] twice: ``ids[order]`` ascends, rows of one expert keep their order, and
        ``inverse[order] == arange(rows)``.
    """
    del config
    order = jnp.argsort(ids)
    return order, jnp.argsort(order)


@dataclass(frozen=True)
class Config:
    """The sizes of the model, its dtypes and how it trains."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    batch: int
    sequence: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    """What activations and matrix multiplications use; parameters are kept in float32."""
    router_dtype: jax.typing.DTypeLike = jnp.float32
    padding: bool = False
    """Whether a batch carries a mask; masked tokens are routed to no expert."""
    chunks: int = 1
    """With sharded experts, in how many parts a device's tokens go to the experts and back."""
    buffer: int | None = None
    """With sharded experts, how many rows a device computes for a chunk: the rows of its experts
    that don't fit are dropped. If None, there is room for every row that could come."""
    scan_layers: bool = True
    """Whether the layers are one loop in the program, or a copy each."""
    learning_rate: float = 3e-4
    sort_by_expert: Callable[[jax.Array, Config], tuple[jax.Array, jax.Array]] = sort_by_expert


TINY = Config(
    vocab=61,
    hidden=64,
    layers=2,
    heads=2,
    head_dim=32,
    experts=8,
    experts_per_token=2,
    expert_width=128,
    batch=8,
    sequence=32,
    dtype=jnp.float32,
    learning_rate=3e-3,
)
"""Trains on a CPU in seconds."""

REAL = Config(
    vocab=151_936,
    hidden=4096,
    layers=4,
    heads=32,
    head_dim=128,
    experts=512,
    experts_per_token=10,
    expert_width=1024,
    batch=2,
    sequence=4096,
)
"""8,192 tokens a step through layers of a frontier model's size; for tracing and lowering."""


class State(NamedTuple):
    """What a train step takes and returns."""

    step: jax.Array
    params: Params
    optimizer: optax.OptState


# The model


def init_params(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters; those of the layers are stacked along a leading axis."""
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) / math.sqrt(fan_in)

    c, stack = config, config.layers
    width = c.heads * c.head_dim
    return {
        "embedding": normal(c.vocab, c.hidden, fan_in=1),
        "layers": {
            "attention_norm": jnp.ones((stack, c.hidden)),
            "qkv": normal(stack, c.hidden, 3, c.heads, c.head_dim, fan_in=c.hidden),
            "out": normal(stack, c.heads, c.head_dim, c.hidden, fan_in=width),
            "moe_norm": jnp.ones((stack, c.hidden)),
            "router": normal(stack, c.hidden, c.experts, fan_in=c.hidden),
            "gate": normal(stack, c.experts, c.hidden, c.expert_width, fan_in=c.hidden),
            "up": normal(stack, c.experts, c.hidden, c.expert_width, fan_in=c.hidden),
            "down": normal(stack, c.experts, c.expert_width, c.hidden, fan_in=c.expert_width),
        },
        "final_norm": jnp.ones((c.hidden,)),
        "unembedding": normal(c.hidden, c.vocab, fan_in=c.hidden),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / rms(x) * scale`` over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of ``x``: [batch, sequence, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(params: Params, x: jax.Array) -> jax.Array:
    """Causal self-attention over ``x``: [batch, sequence, hidden]."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", x, params["qkv"].astype(x.dtype)), 2, 0)
    scores = jnp.einsum("bqhk,bthk->bhqt", rotate(q), rotate(k)).astype(jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores / math.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    y = jnp.einsum("bhqt,bthk->bqhk", weights, v)
    return jnp.einsum("bqhk,hkd->bqd", y, params["out"].astype(x.dtype))


def route(
    router: jax.Array, x: jax.Array, mask: jax.Array | None, config: Config
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights.

    Args:
        router: [hidden, experts].
        x: [tokens, hidden].
        mask: bool[tokens], False for padding; None if every token is real.
        config: The model.

    Returns:
        ``(weights, ids)``, each [tokens, experts_per_token]: the weights of a token sum to one;
        a masked token has ids -1 and weights 0.
    """
    logits = x.astype(config.router_dtype) @ router.astype(config.router_dtype)
    weights, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if mask is not None:
        weights = jnp.where(mask[:, None], weights, 0)
        ids = jnp.where(mask[:, None], ids, -1)
    return weights.astype(x.dtype), ids


def gmm_tiling(m: int, k: int, n: int) -> tuple[int, int, int]:
    """Tile sizes for megablox, which wants the rows to be a multiple of theirs."""
    return math.gcd(m, 512), min(k, 1024), min(n, 1024)


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group of consecutive rows times its expert's matrix.

    Args:
        rows: [rows, in], sorted by group.
        weights: [experts, in, out].
        sizes: int32[experts], the rows of each group; or int32[experts + 1], where the first
            group has no expert and its result is zero.

    Returns:
        [rows, out] in the dtype of ``rows``.
    """
    weights = weights.astype(rows.dtype)
    first = sizes.shape[0] - weights.shape[0]
    if jax.default_backend() == "tpu":
        from jax.experimental.pallas.ops.tpu.megablox import gmm

        offset = jnp.array(first, jnp.int32) if first else None
        return gmm(rows, weights, sizes, rows.dtype, gmm_tiling, offset)
    weights = jnp.pad(weights, ((first, 0), (0, 0), (0, 0)))
    return lax.ragged_dot(rows, weights, sizes)


def mixture_of_experts(
    params: Params, x: jax.Array, mask: jax.Array | None, config: Config
) -> jax.Array:
    """The routed experts' weighted sum for each token of ``x``: [tokens, hidden]."""
    weights, ids = route(params["router"], x, mask, config)
    ids = ids.reshape(-1)
    order, inverse = config.sort_by_expert(ids, config)
    if mask is None:
        sizes = jnp.bincount(ids, length=config.experts)
    else:  # The ids of padding, -1, sort before all others and make a group of their own.
        sizes = jnp.bincount(ids + 1, length=config.experts + 1)

    rows = x[order // config.experts_per_token]
    gate = grouped_matmul(rows, params["gate"], sizes)
    up = grouped_matmul(rows, params["up"], sizes)
    rows = grouped_matmul(jax.nn.silu(gate) * up, params["down"], sizes)

    y = rows[inverse].reshape(*weights.shape, x.shape[-1])
    return jnp.einsum("tkd,tk->td", y, weights)


def own_experts(
    params: Params, x: jax.Array, weights: jax.Array, ids: jax.Array, config: Config
) -> jax.Array:
    """What the experts of this device add to the tokens of its row of the mesh.

    Args:
        params: ``gate``, ``up`` and ``down`` of this device's experts.
        x: [tokens, hidden].
        weights: [tokens, experts_per_token].
        ids: int32, shaped as the weights; -1, or an expert of any device.
        config: The model.

    Returns:
        [tokens, hidden], zero for a token none of whose experts are here.
    """
    experts = params["gate"].shape[0]
    ids = ids.reshape(-1) - lax.axis_index("expert") * experts
    # The rows of other devices' experts, and of padding, sort behind all others.
    ids = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    order, inverse = config.sort_by_expert(ids, config)
    sizes = jnp.bincount(ids, length=experts + 1)[:experts]
    if config.buffer is not None:
        order = order[: config.buffer]
        sizes = jnp.diff(jnp.minimum(jnp.cumsum(sizes), config.buffer), prepend=0)
    held = jnp.sum(sizes)

    # A kernel leaves the rows of no group as they were in memory, so they are masked both ways.
    rows = x[order // config.experts_per_token]
    rows = jnp.where(jnp.arange(order.shape[0])[:, None] < held, rows, 0)
    gate = grouped_matmul(rows, params["gate"], sizes)
    up = grouped_matmul(rows, params["up"], sizes)
    rows = grouped_matmul(jax.nn.silu(gate) * up, params["down"], sizes)

    y = jnp.where(inverse[:, None] < held, rows[inverse], 0)
    return jnp.einsum("tkd,tk->td", y.reshape(*weights.shape, x.shape[-1]), weights)


def mixture_of_sharded_experts(
    params: Params, x: jax.Array, mask: jax.Array | None, config: Config
) -> jax.Array:
    """`mixture_of_experts` under a `jax.shard_map`, the experts sharded along axis "expert".

    Each device routes its own tokens, chunk by chunk. Those of all devices along the axis are
    gathered, every device computes what its experts add, and each gets back the sums for its own.
    """
    chunks = jnp.array_split(x, config.chunks)
    masks = [None] * config.chunks if mask is None else jnp.array_split(mask, config.chunks)
    gather = partial(lax.all_gather, axis_name="expert", tiled=True)
    results = []
    for chunk, real in zip(chunks, masks, strict=True):
        weights, ids = route(params["router"], chunk, real, config)
        y = own_experts(params, gather(chunk), gather(weights), gather(ids), config)
        results.append(lax.psum_scatter(y, "expert", tiled=True))
    return jnp.concatenate(results)


def forward(params: Params, batch: Batch, config: Config) -> jax.Array:
    """Float32 logits of the next token: [batch, sequence, vocab]."""
    mask = batch["mask"].reshape(-1) if config.padding else None
    x = params["embedding"].astype(config.dtype)[batch["tokens"]]

    @jax.checkpoint
    def layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
        x = x + attention(params, rms_norm(x, params["attention_norm"]))
        y = rms_norm(x, params["moe_norm"]).reshape(-1, config.hidden)
        sharded = params["gate"].shape[0] < config.experts
        moe = mixture_of_sharded_experts if sharded else mixture_of_experts
        return x + moe(params, y, mask, config).reshape(x.shape), None

    if config.scan_layers:
        x, _ = lax.scan(layer, x, params["layers"])
    else:
        for i in range(config.layers):
            x, _ = layer(x, jax.tree.map(lambda stacked, i=i: stacked[i], params["layers"]))
    x = rms_norm(x, params["final_norm"])
    return (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)


def loss_fn(params: Params, batch: Batch, config: Config) -> jax.Array:
    """The mean cross-entropy of the next token, in nats."""
    logits = forward(params, batch, config)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    if not config.padding:
        return losses.mean()
    mask = batch["mask"][:, 1:]
    return jnp.sum(losses, where=mask) / jnp.maximum(jnp.sum(mask), 1)


# Training


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate))


def init_state(key: jax.Array, config: Config) -> State:
    """A fresh state: step 0, random parameters, zero moments."""
    params = init_params(key, config)
    return State(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params))


def param_specs(params: Params, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Params:
    """How each parameter lies on the mesh: experts along an axis "expert", all else everywhere."""
    sharded = ("gate", "up", "down") if "expert" in mesh.axis_names else ()

    def spec(path: tuple[Any, ...], _: Any) -> P:
        return P(None, "expert") if path[-1].key in sharded else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def make_step(
    config: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """The train step, not yet jitted: ``(state, batch) -> (state, loss)``.

    With a ``mesh``, each device takes its part of the batch, and along an axis "expert" its part of
    each layer's experts too; the parts have one size, and with ``config.padding`` the loss is the
    mean of the parts' means.
    """

    def loss_and_grads(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(loss_fn)(params, batch, config)

    def mean_over_devices(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        loss, grads = loss_and_grads(params, batch)

        def mean(spec: P, grad: jax.Array) -> jax.Array:
            # The gradient of an expert is whole but for the tokens of other rows of the mesh.
            own = {name for name in spec if name is not None}
            others = [name for name in mesh.axis_names if name not in own]
            parts = math.prod(mesh.shape[name] for name in own)
            return lax.pmean(grad / parts if own else grad, others)

        return lax.pmean(loss, mesh.axis_names), jax.tree.map(mean, param_specs(grads, mesh), grads)

    def sharded_loss_and_grads(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        specs = param_specs(params, mesh)
        return jax.shard_map(
            mean_over_devices,
            mesh=mesh,
            in_specs=(specs, P(mesh.axis_names)),
            out_specs=(P(), specs),
            check_vma=False,  # The megablox kernels don't say over which axes they vary.
        )(params, batch)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        both = loss_and_grads if mesh is None else sharded_loss_and_grads
        loss, grads = both(state.params, batch)
        updates, optimizer = make_optimizer(config).update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, optimizer), loss

    return step


def make_train_step(
    config: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """The jitted train step; it takes over the buffers of its state."""
    return jax.jit(make_step(config, mesh), donate_argnums=0)


def synthetic_batch(key: jax.Array, config: Config) -> dict[str, jax.Array]:
    """Sequences in which each token is an affine function of the one before.

    With ``config.padding``, each sequence has a random length and ``mask`` tells the real tokens.
    """
    first, lengths = jax.random.split(key)
    token = jax.random.randint(first, (config.batch,), 0, config.vocab)

    def following(token: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return (5 * token + 3) % config.vocab, token

    _, tokens = lax.scan(following, token, length=config.sequence)
    batch = {"tokens": tokens.T}
    if config.padding:
        length = jax.random.randint(lengths, (config.batch, 1), 2, config.sequence + 1)
        batch["mask"] = jnp.arange(config.sequence) < length
    return batch


def abstract_inputs(config: Config) -> tuple[State, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes and dtypes of a state and a batch; nothing is allocated."""
    return jax.eval_shape(
        lambda: (init_state(jax.random.key(0), config), synthetic_batch(jax.random.key(0), config))
    )


def train(config: Config, step: Callable[..., Any], steps: int, seed: int = 0) -> list[float]:
    """Train a fresh model with a jitted ``step`` on synthetic batches; the losses, one a step."""
    key, init = jax.random.split(jax.random.key(seed))
    state = jax.jit(init_state, static_argnums=1)(init, config)
    make_batch = jax.jit(synthetic_batch, static_argnums=1)
    losses = []
    for i in range(steps):
        state, loss = step(state, make_batch(jax.random.fold_in(key, i), config))
        losses.append(float(loss))
    return losses


# Cases for relower


def step_case(config: Config) -> Any:
    """The train step as a `relower.case`."""
    from relower.lowering.case import case

    return case(make_train_step(config), *abstract_inputs(config))


def grad_case(config: Config) -> Any:
    """The loss and its gradients as a `relower.case`."""
    from relower.lowering.case import case

    def loss_and_grads(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(loss_fn)(params, batch, config)

    state, batch = abstract_inputs(config)
    return case(jax.jit(loss_and_grads), state.params, batch)


def tiny() -> Any:
    return step_case(TINY)


def tiny_grad() -> Any:
    return grad_case(TINY)


def tiny_padded() -> Any:
    return step_case(replace(TINY, padding=True))


def real() -> Any:
    return step_case(REAL)


def real_grad() -> Any:
    return grad_case(REAL)


def sharded_step_case(config: Config, mesh: dict[str, int]) -> Any:
    """The train step over a mesh as a `relower.case`."""
    from relower.lowering.case import case

    return case(lambda mesh: (make_train_step(config, mesh), abstract_inputs(config)), mesh=mesh)


def sharded() -> Any:
    return sharded_step_case(TINY, {"data": 4})


def sharded_experts() -> Any:
    return sharded_step_case(replace(TINY, chunks=2), {"data": 2, "expert": 4})


def sharded_experts_at_once() -> Any:
    return sharded_step_case(TINY, {"data": 2, "expert": 4})


def real_sharded_experts() -> Any:
    return sharded_step_case(replace(REAL, batch=16, chunks=2), {"data": 2, "expert": 4})


def real_on_32_devices() -> Any:
    return sharded_step_case(replace(REAL, batch=32, chunks=2), {"data": 2, "expert": 16})


# The command


def describe(config: Config) -> None:
    """Trace and lower a train step from shapes alone; print its size."""
    state, batch = abstract_inputs(config)
    lowered = make_train_step(config).trace(state, batch).lower(lowering_platforms=("tpu",))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}")
    print(f"state       {size:,} bytes, not allocated")
    print(f"StableHLO   {len(lowered.as_text().splitlines()):,} lines")


def main(config: Config = TINY, real: Config = REAL) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="train steps (default: 60)")
    parser.add_argument("--optimize", action="store_true", help="wrap relower.optimize round it")
    parser.add_argument("--real", action="store_true", help="trace and lower the real size only")
    options = parser.parse_args()
    if options.real:
        describe(real)
        return

    step = make_step(config)
    if options.optimize:
        import relower

        step = relower.optimize(step)
    losses = train(config, jax.jit(step, donate_argnums=0), options.steps)
    for i, loss in enumerate(losses):
        if i % 10 == 0 or i == len(losses) - 1:
            print(f"step {i:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
