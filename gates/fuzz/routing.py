"""Pieces around orders and indices: what the routing passes look for, and what only looks so."""

from __future__ import annotations

from random import Random

import jax
import jax.numpy as jnp
from jax import lax

from ...matchers.assume_range import assume_range
from .pool import Array, Made, Pool, named, piece, sizes


def keys(r: Random, p: Pool) -> tuple[Array, str]:
    """Something to sort by, of one dimension, and what is known of it."""
    _, d = sizes(p)
    h = p.rows(r)
    kind = r.choice(("floats", "column", "chosen", "best", "mask", "assumed", "wrapped", "ints",
                     "unsigned", "small", "halves", "clamped", "reused"))  # fmt: skip
    ints = p.pick(r, "bounded")
    match kind:
        case "floats":
            return h.reshape(-1), kind
        case "column":
            return h[:, r.randrange(d)], kind
        case "chosen":
            return lax.top_k(h, r.choice((1, 2)))[1].reshape(-1), kind
        case "best":
            return jnp.argmax(h, axis=-1), kind
        case "mask":
            mask = (h > 0).reshape(-1)
            return (~mask if r.random() < 0.5 else mask), kind
        case "assumed" if ints is not None:
            top = r.choice((d - 1, d, 1000, 2**26, 2**30))
            return assume_range(ints, r.choice((0, 0, -1)), top), kind
        case "wrapped" if ints is not None:
            return lax.rem(ints * 7 + 3, jnp.int32(r.choice((1, 3, d)))), kind
        case "unsigned" if ints is not None:
            return ints.astype(r.choice((jnp.uint8, jnp.uint32, jnp.uint16))), kind
        case "small" if ints is not None:
            return ints.astype(jnp.int8), kind
        case "halves":
            return h.reshape(-1).astype(jnp.bfloat16), kind
        case "clamped" if ints is not None:
            return jnp.clip(ints - 2, r.choice((-2, -1, 0)), d - 3), kind
        case "reused" if p.pick(r, "order") is not None:
            return p.pick(r, "order"), kind
    found = p.pick(r, "ints")
    return (h.reshape(-1) if found is None else found), "ints"


@piece("routing")
def argsort(r: Random, p: Pool) -> Made:
    """A sort that carries positions, or something like them."""
    k, _ = keys(r, p)
    n = k.shape[0]
    form = r.choice(("argsort",) * 5 + ("descending", "pair", "data", "two keys", "unstable",
                    "falling", "strided", "alone", "threefold", "wide", "columns"))  # fmt: skip
    iota = lax.iota(jnp.int32, n)
    match form:
        case "descending":
            return [("order", jnp.argsort(k, descending=True))]
        case "pair":
            ordered, order = lax.sort_key_val(k, iota)
            return [("order", named(r, "order", order)), ("other", ordered)]
        case "data":
            carried = jnp.resize(p.rows(r).reshape(-1), (n,))
            ordered, order, data = lax.sort((k, iota, carried), num_keys=1)
            return [("order", order), ("other", data), ("other", ordered)]
        case "two keys":
            return [("order", lax.sort((k, iota), num_keys=2)[1])]
        case "unstable":
            return [("ints", lax.sort((iota % 3, iota), num_keys=2, is_stable=False)[1])]
        case "falling":
            return [("ints", lax.sort((k, iota[::-1]), num_keys=1)[1])]
        case "strided":
            stride, offset = r.choice((2, 3, -1, 1)), r.choice((0, 5, -4))
            return [("ints", lax.sort((k, iota * stride + offset), num_keys=1)[1])]
        case "alone":
            return [("other", jnp.sort(k))]
        case "threefold":
            _, order, again = lax.sort((k, iota, iota), num_keys=1)
            return [("order", order), ("ints", again)]
        case "wide":
            _, data = lax.sort((k, jnp.resize(p.rows(r).reshape(-1), (n,))), num_keys=1)
            return [("other", data)]
        case "columns":
            table = jnp.stack([k, k[::-1]], r.choice((0, 1)))
            return [("other", jnp.argsort(table, axis=r.choice((0, 1))))]
    return [("order", named(r, "order", jnp.argsort(k)))]


@piece("routing")
def inverse(r: Random, p: Pool) -> Made:
    """The argsort of an order, masked, disturbed or carrying data."""
    order = p.pick(r, "order")
    k = None
    if order is None or r.random() < 0.5:
        k, _ = keys(r, p)
        order = jnp.argsort(k)
    n = order.shape[0]
    form = r.choice(("plain",) * 4 + ("data", "shifted", "reversed", "folded", "window", "again",
                    "gathered", "slots"))  # fmt: skip
    match form:
        case "data":
            carried = jnp.resize(p.rows(r).reshape(-1), (n,))
            return [("other", lax.sort((order, carried), num_keys=1)[1])]
        case "shifted":
            return [("ints", jnp.argsort(order + 1))]
        case "reversed":
            return [("order", jnp.argsort(order[::-1]))]
        case "folded":
            return [("ints", jnp.argsort(order % max(n // 2, 1)))]
        case "window" if k is not None and jnp.issubdtype(k.dtype, jnp.integer):
            lo = jnp.asarray(r.choice((0, 1)), k.dtype)
            mine = (k >= lo) & (k < lo + jnp.asarray(2, k.dtype))
            return [("ints", jnp.where(mine, jnp.argsort(order), -1))]
        case "again":
            return [("order", jnp.argsort(jnp.argsort(order)))]
        case "gathered":
            back = jnp.argsort(order)
            return [("order", back), ("ints", order[back])]
        case "slots":
            return [("order", jnp.zeros_like(order).at[order].set(lax.iota(jnp.int32, n)))]
    return [("order", named(r, "order", jnp.argsort(order)))]


def choose(r: Random, p: Pool) -> tuple[Array, Array, int]:
    """A router: weights and experts of each token, and how many."""
    _, d = sizes(p)
    k = r.choice((1, 2, 2, 3))
    top, ids = lax.top_k(p.rows(r), min(k, d))
    return top, named(r, "ids", ids), min(k, d)


def _tokens(r: Random, order: Array, t: int, k: int) -> Array:
    """The token of each sorted row, in one of the ways in which people write it."""
    n = order.shape[0]
    match r.choice(("div", "div", "take", "index", "tile", "rem", "off")):
        case "take":
            return jnp.take(jnp.repeat(jnp.arange(t), k), order)
        case "index":
            return jnp.repeat(jnp.arange(t), k)[order]
        case "tile":
            return jnp.take(jnp.tile(jnp.arange(t), k), order)
        case "rem":
            return order % t
        case "off":
            return jnp.minimum((order + 1) // k, t - 1)
    return order // (n // t)


@piece("routing")
def layer(r: Random, p: Pool) -> Made:
    """A routed layer: choose, sort, gather, weigh, and combine."""
    t, d = sizes(p)
    top, ids, k = choose(r, p)
    order = named(r, "order", jnp.argsort(ids.reshape(-1)))
    h = p.rows(r)
    tokens = _tokens(r, order, t, k)
    rows = h[tokens]
    if r.random() < 0.6:
        rows = rows * jnp.take(top.reshape(-1), order)[:, None].astype(rows.dtype)
    if r.random() < 0.3:
        rows = rows * h[ids.reshape(-1)[order] % t]
    made: Made = [("order", order), ("ids", ids)]
    if r.random() < 0.5:
        made.append(("ints", jnp.bincount(ids.reshape(-1), length=d)))
    match r.choice(("inverse", "inverse", "add", "segments", "back")):
        case "add":
            out = jnp.zeros_like(h).at[tokens].add(rows)
        case "segments":
            out = jax.ops.segment_sum(rows, tokens, num_segments=t)
        case "back":
            back = jnp.zeros_like(rows).at[order].add(rows)
            out = back.reshape(t, k, d).sum(1)
        case _:
            back = rows[jnp.argsort(order)]
            out = back.reshape(t, k, d).sum(1)
    return [*made, ("rows", named(r, "rows", out.astype(h.dtype)))]


@piece("routing")
def indexed(r: Random, p: Pool) -> Made:
    """Rows of a table by indices that are never negative, or may be."""
    t, d = sizes(p)
    table = p.rows(r)
    ints = p.pick(r, "bounded")
    form = r.choice(("best", "best", "chosen", "maybe", "shifted", "counter", "assumed", "order",
                     "single"))  # fmt: skip
    match form:
        case "chosen":
            index = lax.top_k(p.rows(r).T, 1)[1].reshape(-1)
        case "maybe":
            index = jnp.argmax(p.rows(r), axis=0) - r.choice((1, t))
        case "shifted":
            index = jnp.minimum(jnp.argmax(p.rows(r), axis=0) + 1, t - 1)
        case "counter" if p.scalars:
            return [("rows", table + table[jnp.minimum(p.scalars[-1], t - 1)])]
        case "assumed" if ints is not None:
            index = jnp.minimum(assume_range(ints, 0, d), t - 1)
        case "order" if p.pick(r, "order") is not None:
            index = jnp.clip(p.pick(r, "order"), 0, t - 1)
        case "single":
            return [("rows", table * table[jnp.argmax(table[:, 0])])]
        case _:
            index = jnp.argmax(p.rows(r), axis=0)
    return [("rows", p.alike(table[index]))]


@piece("routing")
def counted(r: Random, p: Pool) -> Made:
    """A gather from a table that counts its own places, or nearly."""
    order = p.pick(r, "order")
    index = order if order is not None else lax.top_k(p.rows(r).reshape(-1), 4)[1]
    n = max(index.shape[0], 1)
    k = r.choice((1, 2, 3))
    base = jnp.arange(-(-n // k), dtype=r.choice((jnp.int32, jnp.int32, jnp.float32)))
    match r.choice(("repeat", "tile", "line", "squares", "short", "columns", "offset")):
        case "repeat":
            table = jnp.repeat(base, k)
        case "tile":
            table = jnp.tile(base, k)
        case "line":
            table = jnp.arange(n) * r.choice((1, 3, -2)) + r.choice((0, 7))
        case "squares":
            table = base * base
        case "short":
            table = base[: max(n // 2, 1)]
        case "columns":
            table = jnp.stack([base, base], -1)
        case _:
            table = lax.iota(jnp.int32, n + 3)[r.choice((0, 1, 3)) :]
    match r.choice(("take", "clip", "fill", "index", "wrap")):
        case "take":
            found = jnp.take(table, index, axis=0)
        case "fill":
            found = table.at[index].get(mode="fill", fill_value=-1)
        case "wrap":
            found = jnp.take(table, index - 1, axis=0, mode="wrap")
        case "index":
            found = table[jnp.minimum(index, table.shape[0] - 1)]
        case _:
            found = table.at[index].get(mode="clip")
    return [("other", found)] if found.dtype == jnp.float32 else [("ints", found.reshape(-1))]


@piece("routing")
def permuted(r: Random, p: Pool) -> Made:
    """Rows written where an order says: into zeros, masked, or into something else."""
    _, d = sizes(p)
    order = p.pick(r, "order")
    if order is None or r.random() < 0.4:
        k, _ = keys(r, p)
        order = jnp.argsort(k)
    n = order.shape[0]
    u = jnp.resize(p.rows(r), (n, d)) if n else jnp.zeros((0, d), p.rows(r).dtype)
    if r.random() < 0.2:
        u = jnp.arange(n * d, dtype=jnp.int32).reshape(n, d)
    zeros = jnp.zeros_like(u)
    made: Made = []
    if r.random() < 0.6:
        made.append(("order", jnp.argsort(order)))
    match r.choice(("plain", "plain", "masked", "ones", "longer", "shifted", "set", "wide",
                    "single", "dropped", "times")):  # fmt: skip
        case "masked":
            mask = p.alike(jnp.resize(p.rows(r), (n,)) if n else zeros).reshape(-1)
            if mask.shape[0] < n:
                mask = jnp.resize(mask, (n,))
            out = zeros.at[jnp.where(mask[:n] > 0, order, n)].add(u, mode="drop")
        case "ones":
            out = jnp.ones_like(u).at[order].add(u)
        case "longer":
            out = jnp.zeros((n + 2, d), u.dtype).at[order].add(u)
        case "shifted":
            out = zeros.at[order - 1].add(u, mode="drop")
        case "set":
            out = zeros.at[order].set(u)
        case "wide":
            out = jnp.zeros((n,), u.dtype).at[order].add(u[:, 0])
        case "single":
            out = zeros.at[order[: n // 2]].add(u[: n // 2])
        case "dropped":
            out = jnp.zeros((max(n - 2, 1), d), u.dtype).at[order].add(u, mode="drop")
        case "times":
            out = jnp.ones_like(u).at[order].multiply(u)
        case _:
            out = zeros.at[order].add(u)
    return [*made, ("rows", p.alike(out))] if out.dtype != jnp.int32 else [*made, ("other", out)]


@piece("routing")
def spread(r: Random, p: Pool) -> Made:
    """Rows of several choices added to their tokens."""
    t, d = sizes(p)
    k = r.choice((1, 2, 3))
    order = p.pick(r, "order")
    if order is None or order.shape[0] != t * k or r.random() < 0.5:
        values, _ = keys(r, p)
        values = jnp.resize(values, (t * k,)) if values.shape[0] else jnp.zeros(t * k)
        order = jnp.argsort(values)
    u = jnp.resize(p.rows(r) * 2, (t * k, d))
    tokens = _tokens(r, order, t, k)
    base = jnp.zeros((t, d), u.dtype)
    made: Made = [("order", jnp.argsort(order))] if r.random() < 0.5 else []
    match r.choice(("add", "add", "add", "base", "max", "shifted", "ints")):
        case "base":
            out = p.rows(r).at[tokens].add(u)
        case "max":
            out = base.at[tokens].max(u)
        case "shifted":
            out = base.at[tokens + 1].add(u, mode="drop")
        case "ints":
            ones = jnp.ones((t * k, 2), jnp.int32)
            return [*made, ("other", jnp.zeros((t, 2), jnp.int32).at[tokens].add(ones))]
        case _:
            out = base.at[tokens].add(u)
    return [*made, ("rows", out)]
