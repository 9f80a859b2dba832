"""Where programs come from, and what a comparison can't see because of it."""

from __future__ import annotations

import re
from dataclasses import replace

from .artifact_index import form_digest
from .program import FOREIGN, Form, Level, Program

_CALLING = re.compile(r"^module call\..*\n", re.MULTILINE)
_CUSTOM_CALL = re.compile(r'"stablehlo\.custom_call"\([^\n]*')
_TARGET = re.compile(r'call_target_name = "([^"]*)"')
# A configuration that isn't empty and, unlike a kernel's, isn't read as JSON.
_OPAQUE = re.compile(r'backend_config = (?!""|json )')


def _is_file(program: Program) -> bool:
    return program.stamp.fields.get("origin") == FOREIGN


def alike_called(a: Program, b: Program) -> tuple[Program, Program, tuple[str, ...]]:
    """Both without what a file of MLIR can't say, if one of them is such a file."""
    if _is_file(a) == _is_file(b):
        return a, b, ()
    note = f"how it is called isn't stated in {'a' if _is_file(a) else 'b'} and wasn't compared"
    return _uncalled(a), _uncalled(b), (note,)


def _uncalled(program: Program) -> Program:
    forms: dict[Level, Form] = {}
    for level, form in program.forms.items():
        sections = tuple(
            replace(s, text=_CALLING.sub("", s.text), locations=()) if s.kind == "module" else s
            for s in form.sections
        )
        forms[level] = Form(level, sections, form_digest(sections))
    return replace(program, forms=forms)


def unstated(a: Program, b: Program) -> str:
    """Why the stamps can't be compared, if just one program is a file of MLIR; else empty."""
    if _is_file(a) == _is_file(b):
        return ""
    return f"stamp: {'a' if _is_file(a) else 'b'} is {FOREIGN}, which states no environment"


def opaque_calls(a: Program, b: Program, level: Level) -> tuple[str, ...]:
    """Says which custom calls have a configuration that was compared without being understood."""
    found: dict[str, None] = {}
    for program in (a, b):
        calls = program.ops.get("stablehlo.custom_call", 0)
        if calls > sum(program.kernel_calls.values()):
            for section in program.forms[level].sections:
                for call in _CUSTOM_CALL.findall(section.text):
                    if _OPAQUE.search(call):
                        found.update(dict.fromkeys(_TARGET.findall(call)))
    if not found:
        return ()
    names = ", ".join(sorted(found))
    return (f"the configuration of these custom calls was compared byte by byte: {names}",)
