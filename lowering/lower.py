"""A function to a `Program`: traced as the target, lowered for it, brought to normal form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..compat import nnx
from ..compat.callbacks import host_callbacks
from ..compat.environment import libtpu_version, settings, versions
from ..compat.fresh import traced_anew
from ..compat.layouts import stated_layouts
from ..compat.lowered import (
    calling_convention,
    device_count,
    hoisted_constants,
    kernel_locations,
)
from ..compat.mlir import mosaic_version
from ..compat.outputs import on_arrays
from ..compat.tracing import is_jitted
from .as_target import WHILE_LOWERING, as_target
from .case import Case, case
from .errors import InputError
from .load import describe
from .normalize import normalize
from .own_mesh import advice, of_host, refusal, untraceable
from .program import LEVELS, Level, Program, Stamp, Unknown
from .targets import (
    DEFAULT_TARGET,
    AxisTypes,
    Route,
    Target,
    make_mesh,
    mesh_context,
    parse_target,
    topology_devices,
)

_LAST_TARGET: list[Target] = []
"""What this process lowered for last, if anything."""
_ANSWERED: list[str] = []
"""Queries that the last lowering answered, which jax's traces may hold from now on."""


def lower(
    case_or_fn: Case | Callable[..., Any],
    /,
    *args: Any,
    target: str = DEFAULT_TARGET,
    route: Route = "abstract",
    axis_types: AxisTypes = "auto",
    levels: Sequence[Level] = LEVELS,
    **kwargs: Any,
) -> Program:
    """Lowers a case, or a function with its arguments, for a TPU.

    Args:
        case_or_fn: a `Case`, or a function; one that isn't jitted yet is jitted here.
        *args: the function's arguments: arrays, ``jax.ShapeDtypeStruct``s or pytrees of them.
        target: kind and topology, as in ``TPU7x:2x2x1``.
        route: ``abstract`` needs no TPU software; ``topology`` takes its devices from libtpu.
        axis_types: the type of all mesh axes; jax's default differs between versions.
        levels: the levels of the normal form to build.
        **kwargs: the function's keyword arguments.

    Returns:
        The program in normal form. jax's global state is as it was.

    Raises:
        InputError: bad target or mesh, ``build`` failed, or the function can't be traced or
            lowered; one line with the cause and the user's source line.
    """
    if isinstance(case_or_fn, Case):
        if args or kwargs:
            raise InputError("lower: a case has its own arguments; found more beside it")
        chosen = case_or_fn
    else:
        chosen = case(case_or_fn, *args)
        chosen = Case(chosen.fn, chosen.args, kwargs)
    unknown_levels = [level for level in levels if level not in LEVELS]
    if unknown_levels:
        raise InputError(f"level {unknown_levels[0]!r}: wanted one of {', '.join(LEVELS)}")
    goal = parse_target(target)
    mesh = make_mesh(goal, chosen.mesh, axis_types, route)
    lowered, queries = stage(chosen, goal, mesh, route)
    normal = normalize(
        lowered.compiler_ir("stablehlo"),
        mosaic_version=mosaic_version(route),
        levels=levels,
        constants=hoisted_constants(lowered),
        calling=calling_convention(lowered),
    )
    return Program(
        forms=normal.forms,
        kernels=normal.kernels,
        kernel_calls=normal.kernel_calls,
        ops=normal.ops,
        ledger=normal.ledger,
        stamp=_stamp(
            goal, _extents(mesh, lowered), axis_types, route, queries, chosen.host_queries
        ),
        unknowns=normal.unknowns + _host_answers(chosen.host_queries),
        locations=normal.locations,
    )


def stage(chosen: Case, target: Target, mesh: Any, route: Route) -> tuple[Any, tuple[str, ...]]:
    """Jax's ``Lowered`` for a case under ``mesh``, and the platform queries seen on the way.

    Raises:
        InputError: as for `lower`.
    """
    devices = target.devices() if route == "abstract" else topology_devices(target)
    _forget_answers(target)
    with as_target(devices) as queries, traced_anew():
        try:
            lowered = _staged(chosen, mesh)
        finally:
            _ANSWERED.extend(query for query in queries if not query.endswith(WHILE_LOWERING))
    own = of_host(lowered)
    refused = "" if own is None else refusal(own, chosen.mesh)
    if refused:
        raise InputError(f"case {chosen.name}: {refused}")
    wanted = device_count(lowered)
    if wanted > target.device_count:
        raise InputError(
            f"case {chosen.name}: the function runs on a mesh of its own, of {wanted} devices, and "
            f"target {target} has {target.device_count}: choose a larger target"
        )
    return lowered, tuple(queries)


def _forget_answers(target: Target) -> None:
    """Drops jax's caches where a trace in them holds answers about its devices.

    jax keys its traces by the mesh, which two targets may share; what the code asked while it was
    traced would be answered for the target before. For the same target the answers are the same,
    but only a trace made anew shows what the code asks.
    """
    if _LAST_TARGET and (_ANSWERED or _LAST_TARGET != [target]):
        jax.clear_caches()
    _LAST_TARGET[:] = [target]
    _ANSWERED.clear()


def _staged(chosen: Case, mesh: Any) -> Any:
    try:
        fn, args, kwargs = chosen.built(mesh)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"case {chosen.name}: build(mesh) failed: {describe(error)}") from error
    name = getattr(fn, "__name__", chosen.name)
    if not callable(fn):
        raise InputError(f"case {chosen.name}: build(mesh) returned no function")
    fn, args, kwargs = _on_arrays(fn, args, kwargs, name)
    jitted = fn if hasattr(fn, "trace") and hasattr(fn, "lower") else jax.jit(fn)
    try:
        with mesh_context(mesh):
            traced = jitted.trace(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        raise untraceable(name, error, chosen.mesh is not None) from error
    try:
        with mesh_context(mesh), kernel_locations(), host_callbacks(), stated_layouts():
            return nnx.unwrapped(traced.lower(lowering_platforms=("tpu",)))
    except Exception as error:
        if "require devices to be present" in str(error):
            raise InputError(
                f"{name} can't be lowered on the abstract route: a host callback or a "
                "custom_partitioning over several devices needs real ones; take --route topology"
            ) from error
        own = advice(error, chosen.mesh is not None)
        raise InputError(f"{name} can't be lowered for the TPU: {describe(error)}{own}") from error


def _on_arrays(fn: Any, args: Any, kwargs: Any, name: str) -> tuple[Any, Any, Any]:
    """A function and arguments that jax can trace, arrays of the host as their types."""
    if not nnx.holds_objects(args, kwargs):
        bare = None if hasattr(fn, "trace") else on_arrays(fn, args, dict(kwargs))
        fn, args, kwargs = (fn, args, dict(kwargs)) if bare is None else (*bare, {})
        return fn, *jax.tree.map(_abstract, (args, kwargs))
    if nnx.is_jitted(fn):
        return fn, *nnx.map_arrays(_abstract, args, kwargs)
    if is_jitted(fn):
        raise InputError(
            f"{name} is jitted by jax.jit, which drops what it assigns to the flax NNX objects "
            "among its arguments: take nnx.jit, or leave the jit out"
        )
    on_state, _ = nnx.split(args, kwargs)
    return nnx.on_state(fn), jax.tree.map(_abstract, on_state), {}


def _abstract(leaf: Any) -> Any:
    """Shape and dtype of an array of the host; anything else as it is.

    Raises:
        InputError: the array is spread over devices of the host.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    if not leaf.is_fully_addressable or len(leaf.sharding.device_set) > 1:
        raise InputError(
            f"an argument {leaf.dtype}{list(leaf.shape)} is sharded over devices of the host: give "
            "a jax.ShapeDtypeStruct with a NamedSharding on the mesh that build(mesh) gets"
        )
    weak = bool(getattr(leaf.aval, "weak_type", False))
    struct: Any = jax.ShapeDtypeStruct
    return struct(leaf.shape, leaf.dtype, weak_type=weak)


def _stamp(
    target: Target,
    extents: str,
    axis_types: AxisTypes,
    route: Route,
    queries: tuple[str, ...],
    host_queries: tuple[str, ...],
) -> Stamp:
    # Axis names are no part of the stamp: they are compared where the program holds them.
    fields = {
        **versions(),
        "libtpu": "not used" if route == "abstract" else libtpu_version(),
        "mosaic": mosaic_version(route),
        "route": route,
        "target": str(target),
        "mesh": extents,
        "axis_types": axis_types,
        "mesh_context": "use_abstract_mesh" if route == "abstract" else "set_mesh",
        **settings(),
    }
    seen = queries + tuple(f"{query} (for the host, while loading)" for query in host_queries)
    return Stamp(fields, seen)


def _extents(mesh: Any, lowered: Any) -> str:
    """The mesh's extents; the number of devices, where the function runs on a mesh of its own."""
    count = device_count(lowered)
    if count not in (1, mesh.size):  # a function that uses no axis lowers for one device
        return f"{count}, the function's own"
    extents: Mapping[str, int] = dict(mesh.shape)
    return "x".join(map(str, extents.values()))


def _host_answers(queries: tuple[str, ...]) -> tuple[Unknown, ...]:
    reason = "asked while the file was loaded, so answered for the host: ask while tracing instead"
    return tuple(Unknown(query, reason) for query in queries)
