"""From an MLIR module to plain data (`ir.Module`), noise rules applied on the way.

The reader walks every operation and takes everything it has: name, operands, result types, all
attributes (MLIR hands out properties among them), successors and regions. What it leaves out is
counted in the ledger; what it can't vouch for becomes an `Unknown`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..compat.mlir import printed_attribute
from . import custom_calls
from .attributes import MESH_MARK, AttributePrinter, shortened
from .ir import Block, Function, Module, Op, key_text
from .ledger import Ledger
from .locations import LocationTable
from .program import Unknown

PROGRAM_DIALECTS = frozenset({"builtin", "chlo", "func", "sdy", "stablehlo"})
KERNEL_DIALECTS = frozenset(
    {"affine", "arith", "builtin", "cf", "func", "llvm", "math", "memref", "scf", "tpu", "vector"}
)
_CONFIGS = ("backend_config", "mhlo.backend_config")
KERNEL_TARGET = "tpu_custom_call"
"""The custom call whose backend config is known to be JSON and to hold a Mosaic kernel."""
_TRACES = frozenset({"tpu.trace", "tpu.trace_start"})
_SYMBOL_ATTRS = frozenset({"sym_name", "arg_attrs", "res_attrs", "sym_visibility"})


@dataclass
class Session:
    """What the reading of one program and all its kernels shares."""

    ledger: Ledger
    locations: LocationTable
    unknowns: dict[tuple[str, str], Unknown]

    def unknown(self, construct: str, reason: str, loc: int = -1) -> None:
        """Records an unknown construct once per construct and reason."""
        where = self.locations.entries[loc] if loc >= 0 else None
        self.unknowns.setdefault((construct, reason), Unknown(construct, reason, where))


class Reader:
    """Reads one module of ``dialects``.

    ``kernel_of(body, label, loc)`` turns the encoded body of a kernel into its token.
    """

    def __init__(
        self,
        session: Session,
        dialects: frozenset[str],
        kernel_of: Callable[[bytes, str, int], str] | None = None,
    ) -> None:
        self._session = session
        self._dialects = dialects
        self._kernel_of = kernel_of
        self._printer = AttributePrinter(session.unknown)
        self._module = Module({}, {}, {}, [])
        self._values: dict[Any, int] = {}

    def read(self, module: Any) -> Module:
        """The module's plain data. Meshes must bear the names that `mark_meshes` gives."""
        for name in module.operation.attributes:
            if name not in ("sym_name", "sym_visibility"):
                text = self._printer.text(module.operation.attributes[name])
                self._module.attrs[key_text(name)] = text
        self._module.attrs = dict(sorted(self._module.attrs.items()))
        for view in module.body.operations:
            self._top_level(view.operation)
        return self._module

    def _top_level(self, op: Any) -> None:
        if op.name == "func.func":
            function = self._function(op)
            self._module.functions[function.key] = function
        elif op.name == "sdy.mesh":
            attrs = self._attrs(op)
            key = op.attributes["sym_name"].value.removeprefix(MESH_MARK)
            attrs.pop("sym_name")
            self._module.meshes[key] = _braced(attrs)
        else:
            reason = "an operation beside the functions of a module"
            self._session.unknown(op.name, reason, self._session.locations.index_of(op.location))

    def _attrs(self, op: Any) -> dict[str, str]:
        return {key_text(name): self._attr(op, name) for name in sorted(op.attributes)}

    def _attr(self, op: Any, name: str) -> str:
        try:
            attribute = op.attributes[name]
        except TypeError:
            # jaxlib has no Python class for some attributes, those of complex constants among them.
            text = printed_attribute(op, name)
            if text is None:
                loc = self._session.locations.index_of(op.location)
                self._session.unknown(f"{op.name} {name}", "jaxlib can't show this attribute", loc)
                return "unreadable"
            return shortened(text)
        return self._printer.text(attribute)

    def _function(self, op: Any) -> Function:
        attributes = op.attributes
        visibility = attributes["sym_visibility"].value if "sym_visibility" in attributes else None
        attrs = {
            key_text(name): self._printer.text(attributes[name])
            for name in sorted(attributes)
            if name not in _SYMBOL_ATTRS and name != "function_type"
        }
        function_type = op.attributes["function_type"].value
        blocks = self._region(op.regions[0])
        results = [self._printer.type_text(t) for t in function_type.results]
        return Function(
            key=op.attributes["sym_name"].value,
            public=visibility in (None, "public"),  # public is MLIR's default
            attrs=attrs,
            arg_attrs=self._dictionaries(op, "arg_attrs", len(function_type.inputs)),
            result_types=results,
            result_attrs=self._dictionaries(op, "res_attrs", len(results)),
            blocks=blocks,
            loc=self._session.locations.index_of(op.location),
        )

    def _dictionaries(self, op: Any, name: str, count: int) -> list[dict[str, str]]:
        if name not in op.attributes:
            return [{} for _ in range(count)]
        found: list[dict[str, str]] = []
        for entry in op.attributes[name]:
            items = {key_text(item.name): self._printer.text(item.attr) for item in entry}
            if items.pop("jax.result_info", None) is not None:
                self._session.ledger.add("result-info")
            found.append(dict(sorted(items.items())))
        return found

    def _region(self, region: Any) -> list[Block]:
        blocks = list(region.blocks)
        read = [Block([self._define(arg) for arg in block.arguments]) for block in blocks]
        numbers = {block: index for index, block in enumerate(blocks)} if len(blocks) > 1 else {}
        for block, target in zip(blocks, read, strict=True):
            target.ops.extend(self._op(view.operation, numbers) for view in block.operations)
        return read

    def _define(self, value: Any) -> int:
        number = self._values.get(value)
        if number is None:  # in a region of several blocks a use may be read before its definition
            number = self._module.new_value(self._printer.type_text(value.type))
            self._values[value] = number
        return number

    def _op(self, op: Any, numbers: dict[Any, int]) -> Op:
        name = op.name
        session = self._session
        loc = session.locations.index_of(op.location)
        operands = [self._define(value) for value in op.operands]
        results = [self._define(value) for value in op.results]
        session.ledger.add("location")
        session.ledger.add("value-name", len(results))
        regions = [self._region(region) for region in op.regions]
        read = Op(name, operands, results, self._attrs(op), loc, regions=regions)
        if numbers:
            read.successors = [numbers[block] for block in op.successors]
        if name.partition(".")[0] not in self._dialects:
            session.unknown(name, "an operation of a dialect that no rule of the form knows", loc)
        self._particulars(op, read)
        return read

    def _particulars(self, op: Any, read: Op) -> None:
        if "mhlo.frontend_attributes" in read.attrs:
            del read.attrs["mhlo.frontend_attributes"]
            entries = op.attributes["mhlo.frontend_attributes"]
            read.frontend = {key_text(e.name): self._printer.text(e.attr) for e in entries}
        if read.name == "func.call":
            read.callee = op.attributes["callee"].value
            del read.attrs["callee"]
        elif read.name == "stablehlo.custom_call":
            self._custom_call(op, read)
        elif read.name in _TRACES and read.attrs.pop("message", None) is not None:
            self._session.ledger.add("kernel-scope")  # the user's name scope, for the profiler
        elif read.name in ("stablehlo.send", "stablehlo.recv"):
            if read.attrs.get("is_host_transfer", "false") != "false":
                reason = "the host's side of the transfer is a callback outside the module"
                self._session.unknown(read.name, reason, read.loc)

    def _custom_call(self, op: Any, read: Op) -> None:
        target = op.attributes["call_target_name"].value
        config = None
        if "backend_config" in op.attributes:
            attribute = op.attributes["backend_config"]
            if type(attribute).__name__ == "StringAttr":
                config = custom_calls.read_config(attribute.value, "\0body\0")
        if config is not None and (config.body is not None or target == KERNEL_TARGET):
            # Only of a kernel's config is it known that the order of its keys means nothing.
            label = ""
            if read.attrs.pop("kernel_name", None) is not None:
                label = op.attributes["kernel_name"].value
                self._session.ledger.add("kernel-name")
            self._session.ledger.add("json-key-order", int(config.reordered))
            self._kernel(read, config, label)
        self._foreign(op, read, target)

    def _foreign(self, op: Any, read: Op, target: str) -> None:
        """What every custom call is asked, kernel or not."""
        read.pure_call = custom_calls.is_pure(read, target)
        names = [name for name in _CONFIGS if name in op.attributes]
        texts = {name: str(op.attributes[name]) for name in names}
        reason = custom_calls.unknown_reason(read, target, texts)
        if reason is not None:
            self._session.unknown(f"custom call {target}", reason, read.loc)

    def _kernel(self, read: Op, config: custom_calls.Config, label: str) -> None:
        text = config.text
        if config.body is not None and self._kernel_of is not None:
            token = self._kernel_of(config.body, label, read.loc)
            read.kernel = token[: len("kernel:") + 12]
            text = text.replace("\\u0000body\\u0000", token)
            ledger = self._session.ledger
            ledger.add("kernel-encoding")
            ledger.add("kernel-location", int(config.has_debug_locations))
            ledger.add("collective-id", int(config.collective_id))
        read.attrs["backend_config"] = "json " + text
        read.attrs = dict(sorted(read.attrs.items()))


def _braced(attrs: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name} = {text}" for name, text in attrs.items()) + "}"
