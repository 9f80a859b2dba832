"""What stands around pieces: calls, loops, branches, transforms and meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ...passes.keep import keep
from .pool import NAMES, Array, Made, Pool

Inner = Callable[[Pool], Made]
Wrap = Callable[[Random, Pool, Inner], Made]
WRAPS: dict[str, Wrap] = {}


def _wrap(fn: Wrap) -> Wrap:
    WRAPS[fn.__name__.strip("_")] = fn
    return fn


@dataclass(frozen=True)
class _Body:
    """What stands inside, as a function of arrays."""

    fn: Callable[..., list[Array]]
    args: tuple[Array, ...]
    tags: list[str]
    """Of the results, known once ``fn`` has been traced."""

    def made(self, results: Sequence[Array]) -> Made:
        return list(zip(self.tags, results))


def _body(r: Random, p: Pool, inner: Inner, *, closes: bool = True, scalars: Any = None) -> _Body:
    """Some values as arguments, rows first; others stay in reach if ``closes``."""
    rows = [v for v in p.values if v[0] == "rows"]
    others = [v for v in p.values if v[0] in ("order", "ints", "bounded", "ids")]
    first = rows[max(r.randrange(len(rows)), r.randrange(len(rows)))]
    given = [first, *r.sample(rows, min(len(rows), 1)), *r.sample(others, min(len(others), 3))]
    outside = tuple(v for v in p.values if not any(v[1] is g[1] for g in given))
    outside = tuple(r.sample(outside, min(len(outside), 3))) if closes else ()
    entry = [t for t, _ in given]
    tags: list[str] = []

    def fn(*values: Array) -> list[Array]:
        here = replace(p, values=(*zip(entry, values), *outside))
        made = inner(here) or [("rows", values[0] * 1)]
        tags[:] = [t for t, _ in made]
        return [v for _, v in made]

    return _Body(fn, tuple(v for _, v in given), tags)


def _disturbed(args: Sequence[Array]) -> list[Array]:
    """Other arguments of the same types, and of the same ranges."""
    return [v[::-1] if v.ndim else v for v in args]


@_wrap
def _jit(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner)
    return b.made(jax.jit(b.fn)(*b.args))


@_wrap
def _twice(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner)
    fn = jax.jit(b.fn)
    one, two = fn(*b.args), fn(*_disturbed(b.args))
    return [*b.made(one), *b.made(two)]


@_wrap
def _remat(r: Random, p: Pool, inner: Inner) -> Made:
    policies = jax.checkpoint_policies
    policy = r.choice((
        None, None, policies.everything_saveable, policies.nothing_saveable,
        policies.dots_saveable, policies.save_only_these_names(*r.sample(NAMES, 2)),
        policies.save_anything_except_these_names(r.choice(NAMES)),
    ))  # fmt: skip
    b = _body(r, p, inner)
    return b.made(jax.checkpoint(b.fn, policy=policy)(*b.args))


@_wrap
def _keep(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner)
    return b.made(keep(b.fn)(*b.args))


def _last_rows(p: Pool, tags: Sequence[str], results: Sequence[Array], otherwise: Array) -> Array:
    found = [v for t, v in zip(tags, results) if t == "rows"]
    return p.alike(found[-1]) if found else otherwise


@_wrap
def _scan(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner)
    half = jnp.asarray(0.5, b.args[0].dtype)
    given = [v for v in b.args[1:]]
    sliced = [r.random() < 0.4 for _ in given]
    steps = r.choice((1, 2, 2, 3))
    xs = [jnp.stack([v if i % 2 else v[::-1] for i in range(steps)]) if s else None
          for v, s in zip(given, sliced)]  # fmt: skip

    def step(carry: Array, parts: Sequence[Any]) -> tuple[Array, list[Array]]:
        values = [x if s else v for x, v, s in zip(parts, given, sliced)]
        results = b.fn(carry, *values)
        return _last_rows(p, b.tags, results, carry) * half, results

    last, ys = lax.scan(step, b.args[0], xs, length=steps, reverse=r.random() < 0.3)
    at = r.choice((0, -1))
    return [*((t, y[at]) for t, y in zip(b.tags, ys)), ("rows", last)]


@_wrap
def _loop(r: Random, p: Pool, inner: Inner) -> Made:
    """A counted loop; its counter is in scope."""
    counter: list[Array] = []
    b = _body(r, p, lambda here: inner(replace(here, scalars=tuple(counter))))
    half = jnp.asarray(0.5, b.args[0].dtype)

    def step(i: Array, carry: Array) -> Array:
        counter[:] = [i]
        results = b.fn(carry, *b.args[1:])
        return _last_rows(p, b.tags, results, carry) * half

    return [("rows", lax.fori_loop(0, r.choice((1, 2, 3)), step, b.args[0]))]


@_wrap
def _while(r: Random, p: Pool, inner: Inner) -> Made:
    """A loop that data ends; only where nothing is differentiated."""
    if p.differentiated:
        return _loop(r, p, inner)
    b = _body(r, p, inner)
    half = jnp.asarray(0.5, b.args[0].dtype)

    def goes_on(state: Any) -> Array:
        i, carry = state
        total = jnp.sum(carry)
        return (i < 3) & ~((total if p.axis is None else lax.psum(total, p.axis)) > 1e4)

    def step(state: Any) -> Any:
        i, carry = state
        return i + 1, _last_rows(p, b.tags, b.fn(carry, *b.args[1:]), carry) * half

    return [("rows", lax.while_loop(goes_on, step, (0, b.args[0]))[1])]


@_wrap
def _cond(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner)
    other = lambda *args: b.fn(*_disturbed(args))
    total = jnp.sum(b.args[0])
    # Where devices could go different ways, no collective may stand inside.
    which = (total if p.axis is None else lax.psum(total, p.axis)) > 0
    if r.random() < 0.3 and p.axis is None:
        index = jnp.clip(jnp.sum(b.args[0] > 0), 0, 2)
        return b.made(lax.switch(index, [b.fn, other, b.fn], *b.args))
    return b.made(lax.cond(which, b.fn, other, *b.args))


@_wrap
def _vmap(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner)
    mapped = [i == 0 or r.random() < 0.6 for i in range(len(b.args))]
    args = [jnp.stack([v, v[::-1]]) if m else v for v, m in zip(b.args, mapped)]
    outs = jax.vmap(b.fn, in_axes=tuple(0 if m else None for m in mapped))(*args)
    at = r.choice((0, 1))
    return [(t, out[at]) for t, out in zip(b.tags, outs)]


@_wrap
def _custom_vjp(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner, closes=False)
    fn = jax.custom_vjp(b.fn)
    fn.defvjp(lambda *args: jax.vjp(b.fn, *args), lambda back, cts: back(cts))
    return b.made(fn(*b.args))


@_wrap
def _custom_jvp(r: Random, p: Pool, inner: Inner) -> Made:
    b = _body(r, p, inner, closes=False)
    fn = jax.custom_jvp(b.fn)
    fn.defjvp(lambda primals, tangents: jax.jvp(b.fn, primals, tangents))
    return b.made(fn(*b.args))


@_wrap
def _gradient(r: Random, p: Pool, inner: Inner) -> Made:
    """The gradient of what stands inside, and its value."""
    b = _body(r, replace(p, differentiated=True), inner)

    def loss(x: Array, *others: Array) -> tuple[Array, list[Array]]:
        results = b.fn(x, *others)
        total = sum((scalar(v) for v in results), jnp.zeros((), jnp.float32) * x[0, 0])
        return total.astype(jnp.float32), results

    (total, results), dx = jax.value_and_grad(loss, has_aux=True)(*b.args)
    ints = [(t, v) for t, v in b.made(results) if not jnp.issubdtype(v.dtype, jnp.floating)]
    return [*ints, ("rows", p.alike(dx)), ("other", total)]


def scalar(x: Array) -> Array:
    """One number that depends on every element of a float array; zero for others."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
        return jnp.zeros((), jnp.float32)
    flat = x.reshape(-1).astype(jnp.float32)
    return jnp.sum(flat * (1 + lax.iota(jnp.int32, flat.shape[0]) % 5).astype(jnp.float32))


@_wrap
def _shard_map(r: Random, p: Pool, inner: Inner) -> Made:
    """Over the mesh's first axis; only where there is a mesh and this isn't split yet."""
    mesh = jax.sharding.get_abstract_mesh()
    if p.axis is not None or mesh.empty:
        return _jit(r, p, inner)
    axis, n = mesh.axis_names[0], mesh.axis_sizes[0]
    explicit = "Explicit" in str(mesh.axis_types[0])
    checked = r.random() < 0.8
    b = _body(r, replace(p, axis=axis, axis_size=n), inner, closes=False)
    split = b.args[0].shape[0] % n == 0 and r.random() < 0.7
    specs = []
    for v in b.args:
        whole = not v.ndim or v.shape[0] % n or (v.ndim == 1 and r.random() < 0.4)
        rows = v.shape == b.args[0].shape
        specs.append(P(axis) if (split if rows else not whole) else P())

    def local(*args: Array) -> list[Array]:
        if checked:
            args = tuple(v if s != P() else lax.pcast(v, (axis,), to="varying")
                         for v, s in zip(args, specs))  # fmt: skip
        return [v if v.ndim else v[None] for v in b.fn(*args)]

    args = [jax.sharding.reshard(v, s) for v, s in zip(b.args, specs)] if explicit else b.args
    fn = jax.shard_map(local, in_specs=tuple(specs), out_specs=P(axis), check_vma=checked)
    outs = fn(*args)
    outs = [jax.sharding.reshard(v, P()) for v in outs] if explicit else outs
    whole_rows = p.of("rows")[0].shape
    return [
        (t, v if t != "rows" or v.shape == whole_rows else p.alike(v)) for t, v in zip(b.tags, outs)
    ]
