"""A gated delta-net language model, trained step by step.

Embedding, layers under `jax.lax.scan` with rematerialisation, cross-entropy over the next token,
AdamW. Each layer is a gated delta net as in hybrid models that alternate it with attention: a
projection to queries, keys, values and gates, a causal depthwise convolution with SiLU over
[conv_state | qkv], the gated delta rule, and a gated norm before the output projection. It is
written as a model author writes it, and nothing in it knows that relower exists: the convolution
widens its input to float32 and reads it through four shifted slices, on a TPU a Pallas kernel takes
its forward and stacks the tokens' rows; the delta rule runs in chunks, whose triangular systems
`jax.scipy.linalg.solve_triangular` inverts, and scans over them with the state.

Run it:

    python examples/gated_delta_net.py              train the tiny model and print the losses
    python examples/gated_delta_net.py --optimize   the same with `relower.optimize` around the step
    python examples/gated_delta_net.py --real       trace and lower the real size; allocate nothing

Cases for the command line (`relower explain examples/gated_delta_net.py:tiny`), each a function
that takes nothing:

    tiny, tiny_grad               the whole train step; the loss and its gradients
    real, real_grad               the same at the real size, chunks of 64
    real_128, real_128_grad       the same, chunks of 128
    conv, conv_grad               the convolution alone in jnp, and with its gradients
    conv_kernel                   the convolution's Pallas kernel alone
    inverse_64, inverse_128       one layer's triangular inverses alone
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Params = dict[str, Any]
Batch = Mapping[str, jax.Array]

TAPS = 4
"""Tokens that one output of the convolution sees: itself and the three before it."""

STACKED = 16
"""Tokens that the kernel stacks and writes at once: the rows of one bfloat16 tile."""


@dataclass(frozen=True)
class Config:
    """The sizes of the model, its dtype and how it trains."""

    vocab: int
    hidden: int
    layers: int
    key_heads: int
    value_heads: int
    head_dim: int
    chunk: int
    batch: int
    sequence: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    """What activations and matrix multiplications use; parameters are kept in float32."""
    learning_rate: float = 3e-4

    @property
    def key_width(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Channels that the convolution runs over."""
        return 2 * self.key_width + self.value_width


TINY = Config(
    vocab=61,
    hidden=32,
    layers=2,
    key_heads=1,
    value_heads=2,
    head_dim=16,
    chunk=64,
    batch=4,
    sequence=128,
    dtype=jnp.float32,
    learning_rate=1e-2,
)
"""Trains on a CPU in seconds."""

REAL = Config(
    vocab=151_936,
    hidden=4096,
    layers=2,
    key_heads=16,
    value_heads=64,
    head_dim=128,
    chunk=64,
    batch=1,
    sequence=16_384,
)
"""16,384 tokens a step through layers of a frontier model's size; for tracing and lowering."""


class State(NamedTuple):
    """What a train step takes and returns."""

    step: jax.Array
    params: Params
    optimizer: optax.OptState


# The convolution


def conv_reference(qkv: jax.Array, state: jax.Array, taps: jax.Array) -> jax.Array:
    """SiLU of a causal depthwise convolution over the tokens of ``[state | qkv]``, in float32.

    Args:
        qkv: [batch, tokens, channels].
        state: [batch, TAPS - 1, channels], the tokens before.
        taps: float32[TAPS, channels]; the last is for the token itself.

    Returns:
        Shape and dtype of ``qkv``.
    """
    x = jnp.concatenate([state, qkv], axis=1).astype(jnp.float32)
    tokens = qkv.shape[1]
    y = x[:, :tokens] * taps[0]
    for i in range(1, TAPS):
        y = y + x[:, i : i + tokens] * taps[i]
    return jax.nn.silu(y).astype(qkv.dtype)


def conv_kernel_body(qkv_ref: Any, state_ref: Any, taps_ref: Any, out_ref: Any, last: Any) -> None:
    """One block of tokens and channels; ``last`` holds the tokens before it."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        last[...] = state_ref[0].astype(jnp.float32)

    taps = taps_ref[...]
    x = qkv_ref[0].astype(jnp.float32)
    window = [last[i : i + 1, :] for i in range(TAPS - 1)]
    for start in range(0, x.shape[0], STACKED):
        rows = []
        for token in range(start, start + STACKED):
            window.append(x[token : token + 1])
            y = window[0] * taps[:1]
            for i in range(1, TAPS):
                y = y + window[i] * taps[i : i + 1]
            rows.append(y * jax.nn.sigmoid(y))
            window = window[1:]
        stacked = jnp.stack(rows).reshape(STACKED, -1)
        out_ref[0, start : start + STACKED, :] = stacked.astype(out_ref.dtype)
    for i, row in enumerate(window):
        last[i : i + 1, :] = row


def conv_kernel_call(
    qkv: jax.Array, state: jax.Array, taps: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """`conv_reference` as a Pallas TPU kernel, which reads each token once."""
    batch, tokens, channels = qkv.shape
    rows, width = math.gcd(tokens, 64), math.gcd(channels, 4096)
    block = pl.BlockSpec((1, rows, width), lambda b, c, t: (b, t, c))
    return pl.pallas_call(
        conv_kernel_body,
        grid=(batch, channels // width, tokens // rows),
        in_specs=[
            block,
            pl.BlockSpec((1, TAPS - 1, width), lambda b, c, t: (b, 0, c)),
            pl.BlockSpec((TAPS, width), lambda b, c, t: (0, c)),
        ],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
        scratch_shapes=[pltpu.VMEM((TAPS - 1, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="causal_conv",
        interpret=interpret,
    )(qkv, state, taps)


@jax.custom_vjp
def causal_conv(qkv: jax.Array, state: jax.Array, taps: jax.Array) -> jax.Array:
    """`conv_reference`; on a TPU by the kernel, whose gradient is that of the reference."""
    return lax.platform_dependent(qkv, state, taps, tpu=conv_kernel_call, default=conv_reference)


def _conv_forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return causal_conv(*args), args


def _conv_backward(args: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(conv_reference, *args)[1](g)


causal_conv.defvjp(_conv_forward, _conv_backward)


# The gated delta rule


def triangular_inverse(lower: jax.Array) -> jax.Array:
    """``(I + lower)⁻¹`` of strictly lower triangular matrices ``[..., n, n]``."""
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return jax.scipy.linalg.solve_triangular(eye + lower, eye, lower=True, unit_diagonal=True)


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, chunk: int
) -> jax.Array:
    """The gated delta rule, chunk by chunk.

    With the state ``S`` a matrix from keys to values, each token does ``S = decay · S``, then
    ``S = S + beta · k (v - kᵀ S)``, and reads ``qᵀ S``. Within a chunk that is a triangular system.

    Args:
        q: float32[batch, heads, tokens, key_dim], as is ``k``.
        k: of unit length along the last axis.
        v: float32[batch, heads, tokens, value_dim].
        log_decay: float32[batch, heads, tokens], at most 0.
        beta: float32[batch, heads, tokens], in [0, 1].
        chunk: how many tokens are one chunk; divides the tokens.

    Returns:
        Shape and dtype of ``v``.
    """
    shape = v.shape
    q, k, v, log_decay, beta = (
        a.reshape(*a.shape[:2], -1, chunk, *a.shape[3:]) for a in (q, k, v, log_decay, beta)
    )
    total = jnp.cumsum(log_decay, axis=-1)
    until = jnp.exp(total)[..., None]
    before = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Where a token is not before another, the exponent could overflow: it is masked inside too.
    between = jnp.where(before, total[..., :, None] - total[..., None, :], 0.0)
    between = jnp.where(before, jnp.exp(between), 0.0)

    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    overlap = jnp.tril(jnp.einsum("bhntk,bhnsk->bhnts", k_beta, k) * between, -1)
    inverse = triangular_inverse(overlap)
    values = inverse @ v_beta
    keys = inverse @ (k_beta * until)
    scores = jnp.einsum("bhntk,bhnsk->bhnts", q, k) * between
    rest = jnp.exp(total[..., -1:] - total)[..., None]

    def step(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, keys, scores, q, k, whole = xs
        new = values - keys @ state
        out = q @ state + scores @ new
        return state * whole + jnp.swapaxes(k, -1, -2) @ new, out

    xs = (values, keys, scores, q * until, k * rest, until[..., -1:, :])
    first = jnp.zeros((*shape[:2], k.shape[-1], shape[-1]), v.dtype)
    _, out = lax.scan(step, first, jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), xs))
    return jnp.moveaxis(out, 0, 2).reshape(shape)


# The model


def init_params(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters; those of the layers are stacked along a leading axis."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) / math.sqrt(fan_in)

    c, stack = config, config.layers
    return {
        "embedding": normal(c.vocab, c.hidden, fan_in=1),
        "layers": {
            "norm": jnp.ones((stack, c.hidden)),
            "qkv": normal(stack, c.hidden, c.qkv_width, fan_in=c.hidden),
            "gate": normal(stack, c.hidden, c.value_width, fan_in=c.hidden),
            "beta": normal(stack, c.hidden, c.value_heads, fan_in=c.hidden),
            "decay": normal(stack, c.hidden, c.value_heads, fan_in=c.hidden),
            "decay_bias": jnp.full((stack, c.value_heads), -2.0),
            "decay_rate": jnp.zeros((stack, c.value_heads)),
            "taps": normal(stack, TAPS, c.qkv_width, fan_in=TAPS),
            "out_norm": jnp.ones((stack, c.head_dim)),
            "out": normal(stack, c.value_width, c.hidden, fan_in=c.value_width),
        },
        "final_norm": jnp.ones((c.hidden,)),
        "unembedding": normal(c.hidden, c.vocab, fan_in=c.hidden),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / rms(x) * scale`` over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def unit(x: jax.Array) -> jax.Array:
    """``x`` at unit length along its last axis."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def split_heads(qkv: jax.Array, config: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of each value head: float32[batch, heads, tokens, head_dim]."""
    c = config
    q, k, v = jnp.split(qkv, (c.key_width, 2 * c.key_width), axis=-1)
    q, k, v = (
        jnp.moveaxis(a.reshape(*a.shape[:2], -1, c.head_dim), 2, 1).astype(jnp.float32)
        for a in (q, k, v)
    )
    shared = c.value_heads // c.key_heads
    q, k = (jnp.repeat(unit(a), shared, axis=1) for a in (q, k))
    return q / math.sqrt(c.head_dim), k, v


def gated_delta_net(
    params: Params, x: jax.Array, conv_state: jax.Array, config: Config
) -> jax.Array:
    """One layer's update of ``x``: [batch, tokens, hidden].

    Args:
        params: those of one layer.
        x: normalised activations.
        conv_state: [batch, TAPS - 1, qkv_width], the projections of the tokens before.
        config: The model.
    """
    dtype = x.dtype
    qkv = x @ params["qkv"].astype(dtype)
    qkv = causal_conv(qkv, conv_state, params["taps"])
    beta, decay = (
        jnp.moveaxis((x @ params[name].astype(dtype)).astype(jnp.float32), -1, 1)
        for name in ("beta", "decay")
    )
    rate = jnp.exp(params["decay_rate"])[:, None]
    log_decay = -rate * jax.nn.softplus(decay + params["decay_bias"][:, None])
    y = delta_rule(*split_heads(qkv, config), log_decay, jax.nn.sigmoid(beta), config.chunk)
    gate = (x @ params["gate"].astype(dtype)).reshape(*x.shape[:2], -1, config.head_dim)
    y = rms_norm(jnp.moveaxis(y, 1, 2), params["out_norm"]) * jax.nn.silu(gate.astype(jnp.float32))
    return y.reshape(*x.shape[:2], -1).astype(dtype) @ params["out"].astype(dtype)


def forward(params: Params, batch: Batch, config: Config) -> jax.Array:
    """Float32 logits of the next token: [batch, sequence, vocab]."""
    x = params["embedding"].astype(config.dtype)[batch["tokens"]]
    conv_state = jnp.zeros((x.shape[0], TAPS - 1, config.qkv_width), x.dtype)

    @jax.checkpoint
    def layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
        return x + gated_delta_net(params, rms_norm(x, params["norm"]), conv_state, config), None

    x, _ = lax.scan(layer, x, params["layers"])
    x = rms_norm(x, params["final_norm"])
    return (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)


def loss_fn(params: Params, batch: Batch, config: Config) -> jax.Array:
    """The mean cross-entropy of the next token, in nats."""
    logits = forward(params, batch, config)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


# Training


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate))


def init_state(key: jax.Array, config: Config) -> State:
    """A fresh state: step 0, random parameters, zero moments."""
    params = init_params(key, config)
    return State(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params))


def make_step(config: Config) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """The train step, not yet jitted: ``(state, batch) -> (state, loss)``."""

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, config)
        updates, optimizer = make_optimizer(config).update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, optimizer), loss

    return step


def synthetic_batch(key: jax.Array, config: Config) -> dict[str, jax.Array]:
    """Sequences in which each token is an affine function of the one before."""
    token = jax.random.randint(key, (config.batch,), 0, config.vocab)

    def following(token: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return (5 * token + 3) % config.vocab, token

    _, tokens = lax.scan(following, token, length=config.sequence)
    return {"tokens": tokens.T}


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


def _case(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from relower.lowering.case import case

    return case(jax.jit(fn, **options), *args)


def step_case(config: Config) -> Any:
    """The train step as a `relower.case`."""
    return _case(make_step(config), *abstract_inputs(config), donate_argnums=0)


def grad_case(config: Config) -> Any:
    """The loss and its gradients as a `relower.case`."""

    def loss_and_grads(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(loss_fn)(params, batch, config)

    state, batch = abstract_inputs(config)
    return _case(loss_and_grads, state.params, batch)


def tiny() -> Any:
    return step_case(TINY)


def tiny_grad() -> Any:
    return grad_case(TINY)


def real() -> Any:
    return step_case(REAL)


def real_grad() -> Any:
    return grad_case(REAL)


def real_128() -> Any:
    return step_case(replace(REAL, chunk=128))


def real_128_grad() -> Any:
    return grad_case(replace(REAL, chunk=128))


def conv_inputs(
    batch: int = 1, tokens: int = 16_384, channels: int = 4096
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the convolution's operands."""
    shape = jax.ShapeDtypeStruct
    return (
        shape((batch, tokens, channels), jnp.bfloat16),
        shape((batch, TAPS - 1, channels), jnp.bfloat16),
        shape((TAPS, channels), jnp.float32),
    )


def conv() -> Any:
    return _case(conv_reference, *conv_inputs())


def conv_grad() -> Any:
    def gradients(g: jax.Array, *args: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(conv_reference, *args)[1](g)

    return _case(gradients, conv_inputs()[0], *conv_inputs())


def conv_kernel() -> Any:
    return _case(conv_kernel_call, *conv_inputs())


def _inverse_case(chunk: int) -> Any:
    chunks = (REAL.batch, REAL.value_heads, REAL.sequence // chunk)
    return _case(triangular_inverse, jax.ShapeDtypeStruct((*chunks, chunk, chunk), jnp.float32))


def inverse_64() -> Any:
    return _inverse_case(64)


def inverse_128() -> Any:
    return _inverse_case(128)


# The command


def describe(config: Config) -> None:
    """Trace and lower a train step from shapes alone; print its size."""
    state, batch = abstract_inputs(config)
    step = jax.jit(make_step(config), donate_argnums=0)
    lowered = step.trace(state, batch).lower(lowering_platforms=("tpu",))
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
