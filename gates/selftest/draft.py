"""A copy of a lowered program that may be edited: its module, and the kernels inside."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...compat.mlir import PassManager, ir, mosaic_context
from ...lowering.normalize import Normal, normalize

KERNEL_TARGET = "tpu_custom_call"
_SERIALIZE = "builtin.module(mosaic-serde{{serialize={} target-version={}}})"


@dataclass
class Staged:
    """What jax lowered: the input of the normal form."""

    module: Any
    mosaic_version: str
    constants: Sequence[str] = ()
    calling: dict[str, str] = field(default_factory=dict)

    def draft(self) -> Draft:
        """A copy to edit."""
        return Draft(self.module.operation.clone(), self.mosaic_version, self.constants, {
            **self.calling
        })  # fmt: skip


@dataclass
class Draft:
    """A module of its own; what is edited in it touches no other draft."""

    operation: Any
    mosaic_version: str
    constants: Sequence[str]
    calling: dict[str, str]

    @property
    def context(self) -> Any:
        """The context of the module, to be entered while editing."""
        return self.operation.context

    @property
    def body(self) -> Any:
        """The module's block, as `normalize` reads it."""
        return self.operation.regions[0].blocks[0]

    @cached_property
    def functions(self) -> dict[str, Any]:
        """Functions by symbol."""
        return {
            view.operation.attributes["sym_name"].value: view.operation
            for view in self.body.operations
            if view.operation.name == "func.func"
        }

    @property
    def main(self) -> Any:
        """The entry function."""
        return self.functions["main"]

    def ops(self, *names: str) -> list[Any]:
        """Operations in the order of the text; all of them, or those of these names."""
        return [op for op in walk(self.operation) if not names or op.name in names]

    def kernels(self) -> list[Any]:
        """The calls of Mosaic kernels."""
        return [
            op
            for op in self.ops("stablehlo.custom_call")
            if op.attributes["call_target_name"].value == KERNEL_TARGET
        ]

    def reparsed(self, change: Callable[[str], str]) -> None:
        """Replaces the module by what ``change`` makes of its text."""
        text = self.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
        self.operation = ir.Module.parse(change(text)).operation.clone()
        self.__dict__.pop("functions", None)

    def normal(self) -> Normal:
        """The normal form."""
        return normalize(
            self,
            mosaic_version=self.mosaic_version,
            constants=self.constants,
            calling=self.calling,
        )


def walk(root: Any) -> Iterator[Any]:
    """Every operation below ``root``, outer ones first."""
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from walk(view.operation)


# Kernels


def config_of(call: Any) -> dict[str, Any]:
    """The backend config of a kernel's call."""
    found = json.loads(call.attributes["backend_config"].value)
    assert isinstance(found, dict)
    return found


def set_config(call: Any, config: dict[str, Any], **how: Any) -> None:
    """Writes a backend config back."""
    call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config, **how))


class Kernel:
    """The decoded body of one call; `store` encodes it again."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._config = config_of(call)
        body = base64.b64decode(self._config["custom_call_config"]["body"])
        self.context = mosaic_context()
        with self.context, ir.Location.unknown():
            self.module = ir.Module.parse(body)
            found = self.module.operation.attributes["stable_mosaic.version"]
            self.version = int(str(found).split(" ")[0])
            self._run("false", self.version)

    def _run(self, serialize: str, version: int) -> None:
        passes = PassManager.parse(_SERIALIZE.format(serialize, version))
        passes.enable_verifier(False)
        passes.run(self.module.operation)

    @property
    def main(self) -> Any:
        """The kernel's function; index maps are functions beside it."""
        return self.functions[0]

    @property
    def functions(self) -> list[Any]:
        """All functions of the kernel's module."""
        return [op for op in walk(self.module.operation) if op.name == "func.func"]

    def store(self, version: int | None = None) -> None:
        """Puts the body back into the call, in its own version of the encoding or in another."""
        with self.context, ir.Location.unknown():
            self._run("true", version or self.version)
            buffer = io.BytesIO()
            self.module.operation.write_bytecode(buffer, desired_version=0)
        self._config["custom_call_config"]["body"] = base64.b64encode(buffer.getvalue()).decode()
        with self._call.context:
            set_config(self._call, self._config)
