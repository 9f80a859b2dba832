"""The normal form: one MLIR module to `Form`s, kernels, counts and a ledger.

The rules that set noise aside are listed, each with a sentence, in `ledger.RULES`:

=====================  ===========================================================
applied while reading  location, value-name, result-info, kernel-*, mosaic-version,
                       json-key-order, mesh-name (on a clone, by symbol), collective-id
applied at printing    function-name, channel-id, module-name, mesh-merged
inlined and beyond     call-inlined, call-kept, function-dropped
dataflow               dead-value, equal-value, loop-invariant, function-merged
=====================  ===========================================================

Everything that no rule names is text, and text is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compat.mlir import rename_symbols
from .attributes import MESH_MARK
from .dataflow import numbered
from .inline import TooLarge, inlined
from .ir import Module, walk
from .ledger import Ledger
from .locations import LocationTable
from .mosaic import KernelTable
from .printer import PREFIXES, Names, Page, print_in_order
from .program import LEVELS, Form, Level, Location, Section, Unknown, digest_of
from .read import PROGRAM_DIALECTS, Reader, Session


@dataclass(frozen=True)
class Normal:
    """Everything of a `Program` except its stamp."""

    forms: Mapping[Level, Form]
    kernels: Mapping[str, Section]
    kernel_calls: Mapping[str, int]
    ops: Mapping[str, int]
    ledger: Mapping[str, int]
    unknowns: tuple[Unknown, ...]
    locations: tuple[Location, ...]


def normalize(
    module: Any,
    *,
    mosaic_version: str,
    levels: Sequence[Level] = LEVELS,
    constants: Sequence[str] = (),
    calling: Mapping[str, str] | None = None,
) -> Normal:
    """The normal form of a StableHLO module, which is left as it was.

    Args:
        module: an ``ir.Module`` as ``Lowered.compiler_ir("stablehlo")`` gives it.
        mosaic_version: the version of kernel encoding that the stamp states.
        levels: the levels to build.
        constants: digests of the constants that JAX passes as leading arguments, in order.
        calling: what a caller depends on and the module doesn't hold, by name.
    """
    session = Session(Ledger(), LocationTable(), {})
    kernels = KernelTable(session, mosaic_version)
    with module.context:
        reader = Reader(session, PROGRAM_DIALECTS, kernels.token)
        exact = reader.read(_with_marked_meshes(module, session.ledger))
    _attach_constants(exact, constants)
    exact.attrs.update(calling or {})
    session.ledger.add("module-name")
    ops, calls = _counts(exact)
    forms = _forms(exact, levels, session)
    return Normal(
        forms=forms,
        kernels=kernels.sections,
        kernel_calls=calls,
        ops=ops,
        ledger=session.ledger.counts(),
        unknowns=tuple(session.unknowns.values()),
        locations=tuple(session.locations.entries),
    )


def _with_marked_meshes(module: Any, ledger: Ledger) -> Any:
    """A clone whose meshes are named by `MESH_MARK` and their position, or the module itself."""
    names = [
        view.operation.attributes["sym_name"].value
        for view in module.body.operations
        if view.operation.name == "sdy.mesh"
    ]
    ledger.add("mesh-name", len(names))
    if not names:
        return module
    return rename_symbols(module, {name: f"{MESH_MARK}{i}" for i, name in enumerate(names)})


def _attach_constants(module: Module, constants: Sequence[str]) -> None:
    """Writes the digests of hoisted constants onto the arguments that take them."""
    if not constants:
        return
    for function in module.functions.values():
        if function.public:
            takers = [attrs for attrs in function.arg_attrs if "jax.const" in attrs]
            for attrs, digest in zip(takers, constants, strict=True):
                attrs["jax.const"] = f"sha256<{digest}>"


def _forms(exact: Module, levels: Sequence[Level], session: Session) -> dict[Level, Form]:
    ledger = session.ledger
    forms: dict[Level, Form] = {}
    if "exact" in levels:
        forms["exact"] = _form("exact", exact, {}, ledger)
    if not {"inlined", "dataflow"} & set(levels):
        return forms
    try:
        flat = inlined(exact, ledger, session.locations)
    except TooLarge:
        ledger.add("level-not-built", len({"inlined", "dataflow"} & set(levels)))
        return forms
    classes = _mesh_classes(flat)
    ledger.add("mesh-merged", len(flat.meshes) - len(set(classes.values())))
    flat.meshes = {key: text for key, text in flat.meshes.items() if classes[key] == key}
    if "inlined" in levels:
        forms["inlined"] = _form("inlined", flat, classes, Ledger())
    if "dataflow" in levels:
        forms["dataflow"] = _form("dataflow", numbered(flat, ledger), classes, Ledger())
    return forms


def _mesh_classes(module: Module) -> dict[str, str]:
    """For each mesh the first one with the same axes."""
    first: dict[str, str] = {}
    return {key: first.setdefault(text, key) for key, text in module.meshes.items()}


def _form(level: Level, module: Module, classes: dict[str, str], ledger: Ledger) -> Form:
    names = Names(PREFIXES, classes)
    head = Page()
    for name, text in module.attrs.items():
        head.add(f"module {name} = {names.resolve(text)}")
    for key, text in module.meshes.items():
        head.add(f"sdy.mesh @{names.name('mesh', key)} {text}")
    sections = [Section("module", "module", head.text, "", tuple(head.locations))]
    for name, function, page in print_in_order(module, names):
        label = function.key
        sections.append(Section(name, "function", page.text, label, tuple(page.locations)))
    ledger.add("function-name", sum(not f.public for f in module.functions.values()))
    ledger.add("channel-id", names.count("channel"))
    digest = digest_of("".join(f"{s.kind} {s.name} {s.digest}\n" for s in sections))
    return Form(level, tuple(sections), digest)


def _counts(module: Module) -> tuple[dict[str, int], dict[str, int]]:
    """Operations and kernel calls, each function counted as often as calls reach it."""
    own: dict[str, Counter[tuple[str, str]]] = {}
    calls: dict[str, Counter[str]] = {}
    for key, function in module.functions.items():
        body = walk(function.blocks)
        own[key] = Counter(("op", op.name) for op in body)
        own[key].update(("kernel", op.kernel) for op in body if op.kernel is not None)
        calls[key] = Counter(op.callee for op in body if op.callee in module.functions)
    totals: dict[str, Counter[tuple[str, str]]] = {}

    def total(key: str, stack: tuple[str, ...]) -> Counter[tuple[str, str]]:
        if key not in totals:
            found = Counter(own[key])
            for callee, times in calls[key].items():
                if callee not in stack:
                    for name, count in total(callee, (*stack, key)).items():
                        found[name] += count * times
            totals[key] = found
        return totals[key]

    everything: Counter[tuple[str, str]] = Counter()
    for key, function in module.functions.items():
        if function.public:
            everything.update(total(key, (key,)))
    ops = {name: n for (kind, name), n in sorted(everything.items()) if kind == "op"}
    kernels = {name: n for (kind, name), n in sorted(everything.items()) if kind == "kernel"}
    return ops, kernels
