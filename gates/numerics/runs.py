"""Run N steps of a function, on copies of the same arguments each time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...lowering.case import Case
from ...lowering.errors import InputError
from ...lowering.load import describe
from ...lowering.targets import mesh_context
from .noise import noisy, shaken
from .outputs import Reading, read

Fn = Callable[..., Any]
_FAST_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For a program that runs a few times and may round anywhere."""


@dataclass(frozen=True)
class Program:
    """A function of a case, with arguments that are arrays."""

    fn: Fn
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    numerics: Any
    """`Numerics`; None where nobody asked for it."""
    mesh: Any


def program(case: Case, spec: str) -> Program:
    """What a case gives to run on this host.

    Raises:
        InputError: it says nothing of its outputs, has no arrays to run on, or wants more devices
            than there are.
    """
    if case.numerics is None:
        raise InputError(
            f"{spec}: the case says nothing of what its step returns; give it "
            "numerics=relower.Numerics(...) (docs/numerics.md)"
        )
    return arrays_of(case, spec)


def arrays_of(case: Case, spec: str) -> Program:
    """What a case gives to run, whether or not it says what its outputs are.

    Raises:
        InputError: as for `program`.
    """
    mesh = _mesh(case, spec)
    fn, args, kwargs = case.built(mesh)
    if case.numerics is not None and case.numerics.args is not None:
        args = _made(case.numerics.args, mesh, spec)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
        raise InputError(
            f"{spec}: the arguments are shapes, and a run needs arrays; give "
            "relower.Numerics(args=...) a function that makes them"
        )
    return Program(fn, args, kwargs, case.numerics, mesh)


def _mesh(case: Case, spec: str) -> Any:
    if case.mesh is None:
        return None
    wanted = int(np.prod([*case.mesh.values()]))
    devices = jax.devices()
    if len(devices) < wanted:
        raise InputError(
            f"{spec}: its mesh has {wanted} devices, found {len(devices)} on this host; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    kinds = (jax.sharding.AxisType.Auto,) * len(case.mesh)
    return jax.make_mesh(
        tuple(case.mesh.values()), tuple(case.mesh), axis_types=kinds, devices=devices[:wanted]
    )


def _made(make: Callable[..., tuple[Any, ...]], mesh: Any, spec: str) -> tuple[Any, ...]:
    try:
        made = make(mesh) if mesh is not None and inspect.signature(make).parameters else make()
    except Exception as error:
        raise InputError(f"{spec}: numerics args() fails: {describe(error)}") from error
    if not isinstance(made, (tuple, list)):
        raise InputError(
            f"{spec}: numerics args() returned a {type(made).__name__}; wanted a tuple of arguments"
        )
    return tuple(made)


def run(base: Program, steps: int, fn: Fn | None = None, args: Any = None) -> list[Reading]:
    """What each of ``steps`` steps gives; ``fn`` and ``args`` in place of the program's own.

    Raises:
        InputError: it can't be run, or nothing says how one step leads to the next.
    """
    numerics = base.numerics
    if steps > 1 and numerics.advance is None:
        raise InputError(
            f"{steps} steps need relower.Numerics(advance=...): what the arguments of the next "
            "step are; or set steps = 1"
        )
    chosen = base.fn if fn is None else fn
    jitted = chosen if hasattr(chosen, "lower") else jax.jit(chosen)
    now = copied(base.args if args is None else args)
    found: list[Reading] = []
    try:
        with mesh_context(base.mesh) if base.mesh is not None else nothing():
            for step in range(steps):
                kwargs = copied(dict(base.kwargs))
                kept = copied(now) if numerics.advance is not None else now
                out = jax.block_until_ready(jitted(*now, **kwargs))
                found.append(read(out, numerics))
                if step + 1 < steps and numerics.advance is not None:
                    now = tuple(numerics.advance(out, kept))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"it can't be run: {describe(error)}") from error
    return found


def nothing() -> Any:
    """No context at all."""
    return contextlib.nullcontext()


def replicates(base: Program, steps: int, count: int) -> list[list[Reading]]:
    """Runs of the reference that are as good as it and not the same."""
    how = base.numerics.replicate
    found: list[list[Reading]] = []
    fn = jax.jit(base.fn)
    if how == "rounding":
        fn = jax.jit(noisy(base.fn), compiler_options=_FAST_TO_COMPILE)
    for seed in range(count):
        if callable(how):
            args = _replicated(how, base, seed)
        else:
            args = base.args if how == "rounding" and seed == 0 else moved(base.args, seed + 1)
        found.append(run(base, steps, fn, args))
    return found


def _replicated(how: Any, base: Program, seed: int) -> tuple[Any, ...]:
    try:
        made = how(copied(base.args), seed)
    except Exception as error:
        raise InputError(f"numerics replicate({seed}) fails: {describe(error)}") from error
    return tuple(made)


def moved(args: Any, seed: int) -> Any:
    """Arguments of which each float has gone to a neighbour, or stays."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)) or not jax.numpy.issubdtype(
            leaf.dtype, jax.numpy.floating
        ):
            return leaf
        return jax.jit(shaken, static_argnums=1)(leaf, seed)

    return jax.tree.map(one, args)


def copied(tree: Any) -> Any:
    """The same arrays in buffers of their own: a step may take its arguments' over."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def same_bits(a: Sequence[Reading], b: Sequence[Reading]) -> bool:
    """Whether two runs gave the same bits everywhere."""
    for one, other in zip(a, b, strict=True):
        for left, right in ((one.scalars, other.scalars), (one.grads, other.grads),
                            (one.params, other.params)):  # fmt: skip
            if left.keys() != right.keys():
                return False
            for name, x in left.items():
                y = right[name]
                if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                    return False
    return True
