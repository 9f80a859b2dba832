"""A piece of a program, staged for the compiler by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .compile import StagedModule
from .errors import InputError
from .load import describe
from .targets import make_mesh, mesh_context, parse_target


@dataclass(frozen=True)
class Port:
    """An input or output of a fragment, as one device has it."""

    shape: tuple[int, ...]
    dtype: Any
    varying: tuple[str, ...] = ()
    """The mesh axes along which devices hold different values, of those split by hand."""


@dataclass(frozen=True)
class Fragment:
    """A function of arrays that is compiled by itself."""

    fn: Callable[..., Sequence[Any]]
    """Takes one array for each input and returns one for each output."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    mesh: Any = None
    """The `AbstractMesh` that it was traced under; None where it runs on one device."""
    manual: tuple[str, ...] = ()
    """The axes of the mesh that are split by hand, as by `jax.shard_map`; over others everything
    is whole on every device."""
    check_vma: bool = True
    wide: bool = False
    """Whether 64-bit types are on."""


def stage_fragment(fragment: Fragment, target: str, name: str) -> StagedModule:
    """Lowers a fragment for a target, without the lines that it came from.

    Equal fragments give equal bytes. Nothing of the caller's trace, mesh or settings of its thread
    takes part.

    Raises:
        InputError: the fragment can't be traced or lowered by itself.
    """
    found: list[StagedModule | BaseException] = []

    def alone() -> None:
        try:
            found.append(_staged(fragment, target, name))
        except BaseException as error:
            found.append(error)

    # jax keeps the current trace, mesh and axis names for each thread.
    thread = threading.Thread(target=alone, name="relower-fragment")
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, StagedModule):
        return result
    if isinstance(result, (InputError, KeyboardInterrupt)):
        raise result
    raise InputError(f"{name} can't be lowered alone: {describe(result)}") from result


def _staged(fragment: Fragment, target: str, name: str) -> StagedModule:
    from ..compat.compiler import compile_settings, module_bytes

    goal = parse_target(target)
    mesh = fragment.mesh
    if mesh is None:
        mesh = make_mesh(goal, None, "auto", "abstract")
    elif mesh.size > goal.device_count:
        raise InputError(f"its mesh has {mesh.size} devices, target {goal} has {goal.device_count}")
    with jax.enable_x64(fragment.wide):
        fn, args = fragment.fn, [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in fragment.inputs]
        if fragment.manual:
            fn, args = by_hand_on(fragment, mesh)
        with mesh_context(mesh):
            lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",))
        module = module_bytes(lowered, locations=False)
    settings = compile_settings(lowered, mesh.size if fragment.manual else 1)
    return StagedModule(module, settings, str(goal), name)


def by_hand_on(fragment: Fragment, mesh: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The fragment under `jax.shard_map`, each device's part as large as its port says.

    Parts are laid side by side along the first dimension, a number's along one of its own.
    """
    extents: Mapping[str, int] = dict(mesh.shape)

    def whole(port: Port) -> Any:
        count = 1
        for axis in port.varying:
            count *= extents[axis]
        first, *rest = port.shape or (1,)
        shape = (first * count, *rest) if port.varying else port.shape
        sharding = NamedSharding(mesh, _spec(port))
        return jax.ShapeDtypeStruct(shape, port.dtype, sharding=sharding)

    def parts(*values: Any) -> tuple[Any, ...]:
        given = [
            value.reshape(()) if port.varying and not port.shape else value
            for port, value in zip(fragment.inputs, values, strict=True)
        ]
        results = fragment.fn(*given)
        return tuple(
            value.reshape((1,)) if port.varying and not port.shape else value
            for port, value in zip(fragment.outputs, results, strict=True)
        )

    fn = jax.shard_map(
        parts,
        mesh=mesh,
        in_specs=tuple(map(_spec, fragment.inputs)),
        out_specs=tuple(map(_spec, fragment.outputs)),
        axis_names=set(fragment.manual),
        check_vma=fragment.check_vma,
    )
    return fn, [whole(port) for port in fragment.inputs]


def _spec(port: Port) -> Any:
    return P(port.varying) if port.varying else P()
