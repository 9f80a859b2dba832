"""Pieces around weights, activations and gradients."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .pool import Array, Made, Pool, barrier, named, piece, sizes, times


def _chain(r: Random) -> list[Any]:
    """Functions that work column by column."""
    scaled = lambda x: x / (jnp.max(jnp.abs(x), axis=0, keepdims=True) + 1)
    summed = lambda x: x * jnp.sum(x, axis=0, keepdims=True)
    steps = [
        jnp.abs, times, lambda x: jnp.maximum(x, 0), scaled, jax.nn.relu, jax.nn.silu, barrier,
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), lambda x: x.T.reshape(x.shape[::-1]).T,
        lambda x: jnp.clip(x, -2, 2), summed, lambda x: jnp.where(x > 0, x, -x),
               jax.jit(jnp.negative), lambda x: x[None][0], lambda x: x + 1,
    ]  # fmt: skip
    return [r.choice(steps) for _ in range(r.choice((1, 1, 2, 3)))]


@piece("weights")
def fused(r: Random, p: Pool) -> Made:
    """Parts of one array that go through one chain each and are joined again."""
    _, d = sizes(p)
    w = p.rows(r)
    at = r.choice((d // 2, 1, d - 1))
    chain = _chain(r)
    first, second = (w[:, :at], w[:, at:]) if r.random() < 0.5 else jnp.split(w, [at], axis=1)
    kind = r.choice(("same",) * 5 + ("other", "swapped", "missing", "overlap", "read"))
    for fn in chain:
        first = fn(first)
        second = fn(second) if kind != "other" or fn is not chain[-1] else jnp.negative(second)
    made: Made = [("other", first)] if kind == "read" else []
    parts = [second, first] if kind == "swapped" else [first, second]
    if kind == "overlap":
        parts = [first, times(w)[:, max(at - 1, 0) :]]
    if kind == "missing":
        parts = [first, w[:, at:]]
    return [*made, ("rows", named(r, "gate", p.alike(jnp.concatenate(parts, axis=1))))]


def _padded(x: Array, axis: int, low: int, high: int, inside: int = 0, value: float = 0.0) -> Array:
    widths = [(0, 0, 0), (0, 0, 0)]
    widths[axis] = (low, high, inside)
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


@piece("weights")
def pads(r: Random, p: Pool) -> Made:
    """A sum of padded arrays: side by side, apart, overlapping, or something else."""
    h = p.rows(r)
    axis = r.choice((0, 1))
    n = h.shape[axis]
    count = r.choice((2, 2, 3, 5, 6))
    cuts = [i * n // count for i in range(count + 1)] if n >= count else [0, n]
    kind = r.choice(("whole",) * 4 + ("gap", "overlap", "inside", "value", "axes", "order", "read"))
    total: Any = None
    spans = list(itertools.pairwise(cuts))
    if kind == "order":
        r.shuffle(spans)
    made: Made = []
    for i, (lo, hi) in enumerate(spans):
        part = times(lax.slice_in_dim(h, lo, hi, axis=axis))
        low, high = lo, n - hi
        if kind == "gap" and i == 0 and hi > lo:
            part = lax.slice_in_dim(part, 0, hi - lo - 1, axis=axis)
            high += 1
        if kind == "overlap" and i == 0 and high:
            grown = lax.slice_in_dim(h, lo, hi + 1, axis=axis)
            part, high = grown, high - 1
        term = _padded(part, axis, low, high, value=1.0 if kind == "value" and i else 0.0)
        if kind == "axes" and i == 1:
            term = _padded(_padded(h[:1, :1], 0, 0, h.shape[0] - 1), 1, 0, h.shape[1] - 1)
        if kind == "read" and i == 1:
            made.append(("other", term))
        total = term if total is None else total + term
    if kind == "inside":
        part = lax.slice_in_dim(h, 0, (n + 1) // 2, axis=axis)
        total = total + _padded(part, axis, 0, 1 - n % 2, 1)
    return [*made, ("rows", p.alike(total))]


@piece("weights")
def taken_apart(r: Random, p: Pool) -> Made:
    """An array read in slices, whose derivative adds padded cotangents up."""
    _, d = sizes(p)
    w = p.rows(r)
    count = r.choice((2, 2, d))
    cuts = [i * d // count for i in range(count + 1)]
    parts = [fn for fn in (w[:, a:b] for a, b in itertools.pairwise(cuts)) if fn.shape[1]]
    fn = r.choice((jnp.tanh, times, lambda x: x * x))
    total = sum((fn(x).sum(axis=1, keepdims=True) for x in parts[1:]), w * 1)
    return [("rows", p.alike(total + w * 0 if r.random() < 0.2 else total))]


def _sizes(r: Random, rows: int, groups: int) -> Array:
    ends = sorted(r.randrange(rows + 1) for _ in range(groups - 1))
    last = rows - r.choice((0, 0, 1))
    ends = [min(e, last) for e in ends]
    found = np.diff([0, *ends, max(last, 0)]).astype(np.int32)
    return jnp.asarray(found)


@piece("weights")
def grouped(r: Random, p: Pool) -> Made:
    """Grouped products of one array with the parts of another."""
    t, d = sizes(p)
    x, w = p.rows(r), jnp.stack([p.rows(r).T @ p.rows(r)] * 2) * 0.25
    group = _sizes(r, t, 2)
    gate, up = jnp.split(w, [r.choice((d // 2, 1))], axis=-1)
    kind = r.choice(("ragged",) * 4 + ("dense", "other lhs", "part", "contracted", "casts"))
    if kind == "dense":
        a, b = x @ gate[0], x @ up[0]
    elif kind == "other lhs":
        a, b = lax.ragged_dot(x, gate, group), lax.ragged_dot(x * 2, up, group)
    elif kind == "part":
        a, b = lax.ragged_dot(x, gate[..., :1], group), lax.ragged_dot(x, up, group)
    elif kind == "contracted" and not p.differentiated:  # jax has no second derivative of it
        one, two = w[:, : d // 2], w[:, d // 2 :]
        a = lax.ragged_dot(x[:, : d // 2], one, group)
        b = lax.ragged_dot(x[:, d // 2 :], two, group)
    elif kind == "casts":
        low = up.astype(jnp.bfloat16).astype(x.dtype)
        a, b = lax.ragged_dot(x, gate, group), lax.ragged_dot(x, low, group)
    else:
        a, b = lax.ragged_dot(x, gate, group), lax.ragged_dot(x, up, group)
    joined = jnp.concatenate([jnp.tanh(a), jnp.tanh(b)], axis=-1)
    return [("rows", named(r, "gate", p.alike(joined))), ("other", b)]


@piece("slow")
def swiglu(r: Random, p: Pool) -> Made:
    """A grouped product and the SwiGLU of its halves, or of something else."""
    t, _ = sizes(p)
    lanes = r.choice((128, 128, 128, 64))
    x = _widened(p.rows(r), lanes)
    w = _wave(x, 2 * lanes)
    both = named(r, "gate", lax.ragged_dot(x, w, _sizes(r, t, 2)))
    gate, up = jnp.split(both, 2, axis=-1)
    made: Made = []
    match r.choice(("silu",) * 5 + ("swapped", "gelu", "read", "uneven")):
        case "swapped":
            out = jax.nn.silu(up) * gate
        case "gelu":
            out = jax.nn.gelu(gate) * up
        case "read":
            out = jax.nn.silu(gate) * up
            made.append(("other", both[:2, ::16]))
        case "uneven":
            out = jax.nn.silu(both[:, :lanes]) * both[:, lanes - 1 : -1]
        case _:
            out = jax.nn.silu(gate) * up
    return [*made, ("rows", p.alike(out))]


def _widened(x: Array, lanes: int) -> Array:
    return jnp.tile(x, (1, lanes // x.shape[1] + 1))[:, :lanes]


def _wave(x: Array, columns: int) -> Array:
    """Weights of two groups for ``x``, which depend on it."""
    shape = (2, x.shape[1], columns)
    row, column = (lax.broadcasted_iota(jnp.float32, shape, axis) for axis in (1, 2))
    wave = jnp.cos(row * 0.7 + column * 0.3) * x.shape[1] ** -0.5
    return wave.astype(x.dtype) * (1 + x[0, 0])


@piece("slow")
def swiglu_back(r: Random, p: Pool) -> Made:
    """The backward of a grouped MLP, which makes the gradients of a SwiGLU's two halves."""
    if p.differentiated:
        return []  # jax has no second derivative of some grouped products
    t, _ = sizes(p)
    x, group = _widened(p.rows(r), 128), _sizes(r, t, 2)
    act = r.choice((jax.nn.silu,) * 4 + (jax.nn.gelu,))
    kind = r.choice(("plain",) * 4 + ("swapped", "read", "apart"))

    def layer(x: Array, w: Array, wo: Array) -> Array:
        if kind == "apart":
            gate, up = (lax.ragged_dot(x, part, group) for part in jnp.split(w, 2, axis=-1))
        else:
            gate, up = jnp.split(lax.ragged_dot(x, w, group), 2, axis=-1)
        gate, up = (up, gate) if kind == "swapped" else (gate, up)
        h = act(gate) * up
        return lax.ragged_dot(h * 2 if kind == "read" else h, wo, group)

    out, back = jax.vjp(layer, x, _wave(x, 256), _wave(x, 128))
    dx, dw, dwo = back(_widened(p.rows(r), 128))
    made: Made = [("rows", p.alike(dx)), ("other", dw[:, ::32, ::32])]
    return [*made, ("other", dwo[:, ::32, ::32]), ("rows", p.alike(out))]


@piece("weights")
def weighed(r: Random, p: Pool) -> Made:
    """The gradients of rows that were multiplied and then weighted."""
    t, _ = sizes(p)
    h, g = p.rows(r), p.rows(r)
    # Products as wide as the rows make sums longer than those that they replace.
    columns = r.choice((h.shape[1] // 2, h.shape[1] // 2, h.shape[1]))
    wo, g = (p.rows(r).T @ p.rows(r))[:, :columns] * 0.25, g[:, :columns]
    weights = h[:, 0]
    kind = r.choice(("dense", "ragged", "ragged", "read", "no h", "other"))
    if kind == "ragged":
        group, stack = _sizes(r, t, 2), jnp.stack([wo, wo * 2])
        made = lambda h, wo, w: lax.ragged_dot(h, stack * wo, group) * w[:, None]
    elif kind == "read":
        made = lambda h, wo, w: (h @ wo) * w[:, None] + jnp.tanh(h @ wo)
    elif kind == "other":
        made = lambda h, wo, w: (h @ wo) * w[:, None] * (h @ wo)
    else:
        made = lambda h, wo, w: (h @ wo) * w[:, None]
    out, back = jax.vjp(made, h, wo, weights)
    dh, dwo, dw = back(g)
    if kind == "no h":
        return [("rows", p.alike(dwo)), ("other", dw)]
    return [("rows", dh), ("other", dw), ("other", dwo)] + (
        [("rows", p.alike(out))] if kind == "read" else []
    )


@piece("weights")
def frozen(r: Random, p: Pool) -> Made:
    """Gradients of two layers of which one is not used, or not only."""
    _, d = sizes(p)
    x = p.rows(r)
    one, two = (jnp.tanh(p.rows(r)[:1].T * p.rows(r)[-1:]) for _ in range(2))

    def loss(ws: Any) -> Array:
        return jnp.sum(jnp.tanh(x @ ws[0]) @ ws[1])

    value, (first, second) = jax.value_and_grad(loss)((one, two))
    made: Made = []
    match r.choice(("select", "unread", "zeros", "norm", "mask", "times", "both")):
        case "select":
            first = lax.select_n(False, jnp.zeros_like(first), first)
        case "zeros":
            first = jnp.zeros_like(first)
        case "norm":
            made.append(("other", jnp.sum(first * first) + jnp.sum(second * second)))
            first = lax.select_n(False, jnp.zeros_like(first), first)
        case "mask":
            first = jnp.where(jnp.arange(d) < r.choice((0, 1, d)), first, 0)
        case "times":
            first = first * 0
        case "unread":
            return [("rows", p.alike(second)), ("other", value)]
    return [*made, ("rows", p.alike(second)), ("other", first), ("other", value)]


@piece("weights")
def taps(r: Random, p: Pool) -> Made:
    """A convolution's taps of an array that was widened first."""
    t, _ = sizes(p)
    x = p.rows(r)
    narrow = x.astype(r.choice((jnp.bfloat16, jnp.bfloat16, jnp.float16)))
    wide = narrow.astype(jnp.float32)
    n = max(t - 2, 1)
    kind = (
        "padded"
        if t < 3
        else r.choice(("plain", "plain", "padded", "read", "one", "narrowing", "rows"))
    )
    if kind == "padded":
        wide = jnp.concatenate([jnp.zeros((2, x.shape[1]), jnp.float32), wide])
        n = t
    if kind == "one":
        return [("rows", p.alike(wide[:n] * 2))]
    if kind == "narrowing":
        wide = x.astype(jnp.float32).astype(jnp.bfloat16)
    parts = [lax.slice_in_dim(wide, i, i + n, axis=0) * (i + 1) for i in range(3)]
    made: Made = [("other", wide + 1)] if kind == "read" else []
    if kind == "rows":
        made.append(("other", wide[0]))
    return [*made, ("rows", p.alike(parts[0] + parts[1] + parts[2]))]


@piece("weights")
def solved(r: Random, p: Pool) -> Made:
    """A triangular solve that inverts, or solves for something else."""
    n = r.choice((4, 4, 8, 6))
    base = jnp.tanh(jnp.resize(p.rows(r).astype(jnp.float32), (2, n, n)))
    lower = r.random() < 0.7
    part = jnp.tril(base, -1) if lower else jnp.triu(base, 1)
    eye = jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), part.shape)
    kind = r.choice(("inverse",) * 4 + ("rhs", "diagonal", "transposed", "scaled"))
    a, b = eye + part, eye
    if kind == "rhs":
        b = base
    if kind == "scaled":
        a = 2 * eye + part
    trans = 1 if kind == "transposed" else 0
    out = jax.scipy.linalg.solve_triangular(
        a, b, lower=lower, unit_diagonal=kind not in ("diagonal", "scaled"), trans=trans
    )
    return [("rows", p.alike(out[0])), ("other", out)]


@piece("slow")
def kernel_stack(r: Random, p: Pool) -> Made:
    """A Pallas kernel that stacks rows, or something close to it."""
    from jax.experimental import pallas as pl

    if p.axis is not None or p.differentiated or p.scalars:
        return []
    kind = r.choice(("stack",) * 3 + ("expanded",) * 2 + (
        "narrow", "half", "pairs", "last", "flat", "alone", "joined"))  # fmt: skip
    width = 512 if kind == "narrow" else r.choice((1024, 1024, 2048))
    dtype = jnp.bfloat16 if kind == "half" else jnp.float32
    count = r.choice((2, 3))
    x = jnp.resize(p.rows(r).astype(dtype), (2 * count, width))
    twice = r.random() < 0.3

    def body(x_ref: Any, out_ref: Any) -> None:
        step = 2 if kind == "pairs" else 1
        rows = [x_ref[i : i + step, :] * 2.0 for i in range(0, count * step, step)]
        match kind:
            case "last":
                made = jnp.stack(rows, -1)
            case "flat":
                made = jnp.stack([row[0] for row in rows])
            case "expanded":
                made = jnp.concatenate([row[None] for row in rows])
            case "joined":
                made = jnp.concatenate(rows)
            case "alone":
                made = jnp.stack(rows[:1])
            case _:
                made = jnp.stack(rows)
        rest = made.size // width
        out_ref[...] = jnp.zeros(x.shape, x.dtype)
        out_ref[:rest, :] = made.reshape(rest, width)
        if twice:
            out_ref[:1, :] += jnp.stack(rows[::-1]).reshape(-1, width)[:1]

    made = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    out = made(x)
    return [("rows", p.alike(out)), ("other", out[:, ::128])]
