"""Pieces around collectives, for programs that are split over a mesh."""

from __future__ import annotations

from random import Random

import jax.numpy as jnp
from jax import lax

from .pool import Made, Pool, piece, times


@piece("mesh")
def gathers(r: Random, p: Pool) -> Made:
    """Several all_gathers over one axis."""
    if p.axis is None:
        return []
    x, y = p.rows(r), p.rows(r)
    kind = r.choice(("same",) * 4 + ("types", "types", "chained", "untiled", "dimension", "ints"))
    first = lax.all_gather(x, p.axis, tiled=True)
    if kind == "types":
        y = y.astype(r.choice((jnp.bfloat16, jnp.int32, jnp.float32)))
    if kind == "ints" and p.pick(r, "ints") is not None:
        y = jnp.resize(p.pick(r, "ints"), x.shape)
    if kind == "chained":
        y = y + first[: y.shape[0]]
    axis = 1 if kind == "dimension" else 0
    second = lax.all_gather(y, p.axis, tiled=kind != "untiled", axis=axis)
    made: Made = [("rows", p.alike(first * 2)), ("other", second.reshape(-1)[: x.size])]
    if r.random() < 0.3:
        made.append(("other", lax.all_gather(times(x), p.axis, tiled=True)))
    return made


@piece("mesh")
def scatters(r: Random, p: Pool) -> Made:
    """Several psum_scatters over one axis, or a psum."""
    if p.axis is None:
        return []
    x, y = jnp.tile(p.rows(r), (p.axis_size, 1)), jnp.tile(p.rows(r), (p.axis_size, 1))
    kind = r.choice(("same", "same", "narrow", "narrow", "narrow", "psum", "types", "max"))
    if kind == "narrow":
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    if kind == "types":
        y = y.astype(jnp.bfloat16)
    if kind == "psum":
        return [("rows", p.alike(p.rows(r) + lax.psum(p.rows(r), p.axis)))]
    if kind == "max":
        i = lax.axis_index(p.axis)
        return [("rows", p.rows(r) + i.astype(p.rows(r).dtype))]
    a, b = (lax.psum_scatter(v, p.axis, tiled=True) for v in (x, y * 2))
    return [("rows", p.alike(a)), ("rows", p.alike(b))]
