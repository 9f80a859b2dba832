"""Pieces around top_k: what is chosen, how often, and how it comes back to its places."""

from __future__ import annotations

from random import Random

import jax
import jax.numpy as jnp
from jax import lax

from .pool import Made, Pool, piece, sizes, stop
from .routing import choose


@piece("routing")
def groups(r: Random, p: Pool) -> Made:
    """How many ids there are of each expert, or something that sums up likewise."""
    _, d = sizes(p)
    ids = lax.top_k(p.rows(r), 2)[1].reshape(-1)
    if r.random() < 0.4 and p.pick(r, "ints") is not None:
        ids = p.pick(r, "ints")
    length = r.choice((d, d, 40, 1, 700))
    match r.choice(("bincount", "add", "weights", "floats", "segments", "base", "drop", "twice")):
        case "bincount":
            return [("ints", jnp.bincount(ids, length=length))]
        case "add":
            return [("ints", jnp.zeros(length, jnp.int32).at[ids].add(1))]
        case "weights":
            heavy = jnp.resize(p.rows(r).reshape(-1), ids.shape)
            return [("other", jnp.bincount(ids, weights=heavy, length=length))]
        case "floats":
            return [("other", jnp.zeros(length, p.rows(r).dtype).at[ids].add(1))]
        case "segments":
            ones = jnp.ones_like(ids)
            return [("ints", jax.ops.segment_sum(ones, ids, num_segments=length))]
        case "base":
            return [("ints", jnp.ones(length, jnp.int32).at[ids].add(1))]
        case "drop":
            return [("ints", jnp.zeros(length, jnp.int32).at[ids - 1].add(1, mode="drop"))]
    return [("ints", jnp.zeros(length, jnp.int32).at[ids].add(r.choice((2, -1, 3))))]


@piece("routing")
def chosen(r: Random, p: Pool) -> Made:
    """top_k of some sort."""
    t, d = sizes(p)
    h = p.rows(r)
    match r.choice(("rows", "rows", "softmax", "ints", "many", "flat", "narrow", "columns", "one")):
        case "softmax":
            top, ids = lax.top_k(jax.nn.softmax(h, axis=-1), 2)
        case "ints":
            whole = jnp.clip(stop(h), -100, 100).astype(jnp.int32)
            _, ids = lax.top_k(whole, 2)
            return [("ids", ids), ("ints", ids.reshape(-1))]
        case "many":
            top, ids = lax.top_k(jnp.concatenate([h, -h], -1), d + r.choice((0, 1)))
        case "flat":
            top, ids = lax.top_k(h.reshape(-1), 2)
        case "narrow":
            top, ids = lax.top_k(h.astype(jnp.bfloat16), 2)
        case "columns":
            top, ids = lax.top_k(h.T, min(2, t))
        case "one":
            top, ids = lax.top_k(h, 1)
        case _:
            top, ids = lax.top_k(h, r.choice((2, 3)))
    return [("rows", p.alike(top)), ("ids", ids), ("ints", ids.reshape(-1))]


@piece("routing")
def unchosen(r: Random, p: Pool) -> Made:
    """Values brought to the places that a top_k found, one row each."""
    t, d = sizes(p)
    top, ids, k = choose(r, p)
    ct = (top * 2).astype(p.rows(r).dtype)
    place = jnp.arange(t)[:, None]
    match r.choice(("vmap", "vmap", "rows", "vjp", "twice", "along", "ones", "other", "wide")):
        case "rows":
            out = jnp.zeros((t, d), ct.dtype).at[place, ids].add(ct)
        case "vjp":
            out = jax.vjp(lambda s: lax.top_k(s, k)[0], p.rows(r))[1](ct.astype(p.rows(r).dtype))[0]
        case "twice":
            same = jnp.concatenate([ids, ids[:, :1]], -1)
            more = jnp.concatenate([ct, ct[:, :1]], -1)
            out = jax.vmap(lambda i, c: jnp.zeros(d, ct.dtype).at[i].add(c))(same, more)
        case "along":
            out = jnp.take_along_axis(p.rows(r), ids, axis=-1)
        case "ones":
            out = jax.vmap(lambda i, c: jnp.ones(d, ct.dtype).at[i].add(c))(ids, ct)
        case "other":
            some = jnp.argsort(p.rows(r), axis=-1)[:, :k]
            out = jax.vmap(lambda i, c: jnp.zeros(d, ct.dtype).at[i].add(c))(some, ct)
        case "wide":
            out = jax.vmap(lambda i, c: jnp.zeros(d + 3, ct.dtype).at[i].add(c))(ids, ct)
        case _:
            out = jax.vmap(lambda i, c: jnp.zeros(d, ct.dtype).at[i].add(c))(ids, ct)
    return [("rows", p.alike(out)), ("ids", ids)]
