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

from ..compat.collector import full_collections_postponed
from .dataflow import numbered
from .exact import Body, ExactPrinter
from .inline import TooLarge, inlined
from .ir import Function, Module
from .ledger import Ledger
from .locations import LocationTable
from .mosaic import KernelTable
from .printed import Printer
from .printer import PREFIXES, Names, Page, in_order, print_in_order
from .program import LEVELS, Form, Level, Location, Section, Unknown, form_digest
from .read import PROGRAM_DIALECTS, FunctionReader, Unreadable
from .session import Session


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


@full_collections_postponed()
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
        printer = Printer(module, session, kernels.token)
        attrs = {**printer.attributes(), **(calling or {})}
        ledger = session.ledger
        ledger.add("module-name")
        ledger.add("mesh-name", len(printer.meshes()))
        apart = not {"inlined", "dataflow"}.isdisjoint(levels)
        exact, bodies, read = _exact(printer, attrs, constants, session, apart)
    ops, calls = _counts(bodies, list(printer.public))
    forms: dict[Level, Form] = {"exact": exact} if "exact" in levels else {}
    if read is not None:
        forms.update(_taken_apart(read, levels, session))
    return Normal(
        forms=forms,
        kernels=kernels.sections,
        kernel_calls=calls,
        ops=ops,
        ledger=ledger.counts(),
        unknowns=tuple(session.unknowns.values()),
        locations=tuple(session.locations.entries),
    )


def _exact(
    printer: Printer,
    attrs: Mapping[str, str],
    constants: Sequence[str],
    session: Session,
    keep: bool,
) -> tuple[Form, dict[str, Body], Module | None]:
    """The form at level exact, what each body holds, and the module's plain data if asked for."""
    names = Names(PREFIXES, {})
    meshes = printer.meshes()
    sections = [_head(attrs, meshes, names)]
    exact = ExactPrinter(session, printer.tails, names, PROGRAM_DIALECTS)
    read = Module(dict(attrs), meshes, {}, []) if keep else None
    reader = FunctionReader(read, printer.tails) if read is not None else None
    bodies: dict[str, Body] = {}
    for name, key in in_order(names, list(printer.public), printer.keys):
        printed = printer.function(key)
        if printed.header.public:
            _attach_constants(printed.header, constants)
        section, bodies[key] = exact.section(printed, name, keep)
        sections.append(section)
        if read is None or reader is None:
            continue
        try:
            read.functions[key] = reader.read(printed)
        except Unreadable as error:
            session.unknown(f"function {key}", f"its printed form can't be read: {error}")
            session.ledger.add("level-not-built")
            read = None
    session.ledger.add("function-name", len(printer.keys) - len(printer.public))
    session.ledger.add("channel-id", names.count("channel"))
    if read is not None:
        read.functions = {key: read.functions[key] for key in printer.keys}
    return _form("exact", sections), bodies, read


def _attach_constants(header: Function, constants: Sequence[str]) -> None:
    """Writes the digests of hoisted constants onto the arguments that take them."""
    if not constants:
        return
    takers = [attrs for attrs in header.arg_attrs if "jax.const" in attrs]
    for attrs, digest in zip(takers, constants, strict=True):
        attrs["jax.const"] = f"sha256<{digest}>"


def _taken_apart(exact: Module, levels: Sequence[Level], session: Session) -> dict[Level, Form]:
    """The forms of the levels that move operations."""
    ledger = session.ledger
    forms: dict[Level, Form] = {}
    try:
        flat = inlined(exact, ledger, session.locations)
    except TooLarge:
        ledger.add("level-not-built", len({"inlined", "dataflow"} & set(levels)))
        return forms
    classes = _mesh_classes(flat)
    ledger.add("mesh-merged", len(flat.meshes) - len(set(classes.values())))
    flat.meshes = {key: text for key, text in flat.meshes.items() if classes[key] == key}
    if "inlined" in levels:
        forms["inlined"] = _printed_form("inlined", flat, classes)
    if "dataflow" in levels:
        forms["dataflow"] = _printed_form("dataflow", numbered(flat, ledger), classes)
    return forms


def _mesh_classes(module: Module) -> dict[str, str]:
    """For each mesh the first one with the same axes."""
    first: dict[str, str] = {}
    return {key: first.setdefault(text, key) for key, text in module.meshes.items()}


def _printed_form(level: Level, module: Module, classes: dict[str, str]) -> Form:
    names = Names(PREFIXES, classes)
    sections = [_head(module.attrs, module.meshes, names)]
    for name, function, page in print_in_order(module, names):
        label = function.key
        sections.append(Section(name, "function", page.text, label, tuple(page.locations)))
    return _form(level, sections)


def _form(level: Level, sections: Sequence[Section]) -> Form:
    """A form and its digest; what a comparison asks of each section first is looked up as well."""
    for section in sections:
        _ = section.kernels
    return Form(level, tuple(sections), form_digest(sections))


def _head(attrs: Mapping[str, str], meshes: Mapping[str, str], names: Names) -> Section:
    """The attributes and meshes of the whole module."""
    head = Page()
    for name, text in attrs.items():
        head.add(f"module {name} = {names.resolve(text)}")
    for key, text in meshes.items():
        head.add(f"sdy.mesh @{names.name('mesh', key)} {text}")
    return Section("module", "module", head.text, "", tuple(head.locations))


def _counts(bodies: Mapping[str, Body], public: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Operations and kernel calls, each function counted as often as calls reach it."""
    totals: dict[str, Counter[tuple[str, str]]] = {}

    def total(key: str, stack: tuple[str, ...]) -> Counter[tuple[str, str]]:
        if key not in totals:
            body = bodies[key]
            found = Counter({("op", name): count for name, count in body.ops.items()})
            found.update({("kernel", name): count for name, count in body.kernels.items()})
            for callee, times in body.callees.items():
                if callee not in stack:
                    for name, count in total(callee, (*stack, key)).items():
                        found[name] += count * times
            totals[key] = found
        return totals[key]

    everything: Counter[tuple[str, str]] = Counter()
    for key in public:
        everything.update(total(key, (key,)))
    ops = {name: n for (kind, name), n in sorted(everything.items()) if kind == "op"}
    kernels = {name: n for (kind, name), n in sorted(everything.items()) if kind == "kernel"}
    return ops, kernels
