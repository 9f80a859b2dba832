"""Turn a plan into a function, and give it arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .plan import Node, Plan
from .pool import PIECES, Array, Made, Pool
from .surroundings import WRAPS, scalar

MOST_RESULTS = 7


def _run(nodes: Sequence[Node], p: Pool) -> Made:
    """Everything that the nodes make, one after another."""
    made: Made = []
    for node in nodes:
        here, r = p.with_more(made), Random(node.seed)
        if node.kind in PIECES:
            made += PIECES[node.kind](r, here)
        else:
            made += WRAPS[node.kind](r, here, functools.partial(_run, node.body))
    return made


def function(plan: Plan) -> Callable[..., list[Array]]:
    """The program itself: rows, rows, integers and bounded integers to a list of arrays."""
    differentiated = "grad" in plan.transform

    def program(a: Array, b: Array, ints: Array, bounded: Array) -> list[Array]:
        values = (("rows", a), ("rows", b), ("ints", ints), ("bounded", bounded))
        made = _run(plan.nodes, Pool(values, differentiated=differentiated))
        r = Random(plan.seed)
        read = made if len(made) <= MOST_RESULTS else r.sample(made, MOST_RESULTS)
        if len(read) > 2 and r.random() < 0.4:
            read = read[r.randrange(len(read) - 1) :]
        results = [v for _, v in read]
        return results or [a + b]

    return program


def loss(fn: Callable[..., list[Array]]) -> Callable[..., Any]:
    """Gradients by the two float arguments, and the results that have none."""

    def total(a: Array, b: Array, *others: Array) -> tuple[Array, list[Array]]:
        results = fn(a, b, *others)
        whole = [v for v in results if not jnp.issubdtype(v.dtype, jnp.floating)]
        terms = (scalar(v) for v in results)
        start = (a[0, 0] * 0 + b[0, 0] * 0).astype(jnp.float32)
        return sum(terms, start), whole

    made: Callable[..., Any] = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return made


def transformed(plan: Plan, fn: Callable[..., Any], outside: bool) -> Callable[..., Any]:
    """``fn`` with what the plan does before it is optimized, or to the optimized one."""
    name = plan.transform
    if name == "none" or name.endswith("outside") != outside:
        return fn
    made: Callable[..., Any]
    match name.split()[0]:
        case "grad":
            made = loss(fn)
        case "vmap":
            made = jax.vmap(fn, in_axes=(0, 0, None, 0))
        case _:
            made = jax.jit(fn)
    return made


def mesh_of(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """The plan's mesh in scope."""
    if plan.mesh is None:
        return contextlib.nullcontext()
    kind, n = plan.mesh
    types = (getattr(AxisType, kind),) * 2
    sizes = (n, 2 if n <= 4 else 1)
    mesh: contextlib.AbstractContextManager[Any] = jax.set_mesh(
        jax.make_mesh(sizes, ("d", "m"), axis_types=types)
    )
    return mesh


@dataclass(frozen=True)
class Values:
    """Arguments of a plan's program."""

    kind: str
    """``exact``: small whole numbers, of which sums and products are exact; ``hostile``: zeros of
    both signs, NaNs, infinities, subnormals and range ends among ties; ``even``: no two alike."""
    args: tuple[Any, ...]


_HOSTILE = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38,
            1.1754944e-38, 0.5, 2.0)  # fmt: skip


def values(plan: Plan, kind: str) -> Values:
    """Arguments of one kind."""
    r = np.random.RandomState(plan.seed % (1 << 31))
    batch = (2,) if plan.transform.startswith("vmap") else ()
    shape, dtype = (*batch, plan.t, plan.d), jnp.dtype(plan.dtype)

    def floats() -> Any:
        if kind == "exact":
            return r.randint(-2, 3, shape).astype(dtype)
        if kind == "hostile":
            some = r.choice(len(_HOSTILE), size=r.randint(2, 7))
            return np.asarray(_HOSTILE, np.float64)[r.choice(some, shape)].astype(dtype)
        return r.standard_normal(shape).astype(dtype)

    n = 2 * plan.t
    ends = [-3, 0, plan.d - 1, plan.d + 2] if kind == "hostile" else range(-3, plan.d + 3)
    ints = r.choice(list(ends), n).astype(np.int32)
    bounded = r.choice([0, plan.d - 1] if kind == "hostile" else plan.d, (*batch, n))
    return Values(kind, (floats(), floats(), ints, bounded.astype(np.int32)))
