"""The functions and kernels of one program at one level, and what they refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from .excerpt import UNSURE
from .optext import Block, read
from .program import KERNEL, Form, Program, Section, digest_of

CALLEE = re.compile(r'@("[^"]*"|[\w$.-]+)')
_COUNTER = re.compile(r"_\d+$")


class Sections:
    """A form's sections by name, with digests that don't depend on how functions are numbered."""

    def __init__(self, program: Program, form: Form, shared: dict[str, str]) -> None:
        self.program = program
        self.form = form
        self.by_name = {s.name: s for s in form.sections}
        self._shared = shared

    def tree(self, section: Section) -> Block:
        """The operations of a section of this program, or of an excerpt from one."""
        return read(section.text, self._shared)

    def kernel(self, name: str) -> Section | None:
        """The kernel that ``kernel:<12 digits>…`` names."""
        return self.program.kernels.get(name[: len("kernel:") + 12])

    def kernel_names(self) -> set[str]:
        """The kernels that any section refers to."""
        return {name for section in self.form.sections for name in section.kernels}

    def callees(self, text: str) -> Iterator[str]:
        """The functions of this form that ``text`` names, in order."""
        for match in CALLEE.finditer(text):
            if match[1] in self.by_name and match[1] != "module":
                yield match[1]

    @cached_property
    def closed(self) -> dict[str, str]:
        """A digest of each section in which callees stand for what they hold."""
        found: dict[str, str] = {}
        for root in self.by_name:
            stack = [(root, False)]
            entered: set[str] = set()
            while stack:
                name, done = stack.pop()
                if name in found:
                    continue
                if done:
                    found[name] = digest_of(self._substituted(self.by_name[name].text, found))
                elif name not in entered:  # a cycle, which MLIR allows, keeps its names
                    entered.add(name)
                    stack.append((name, True))
                    stack.extend((c, False) for c in self.callees(self.by_name[name].text))
        return found

    def opened(self, rest: str) -> tuple[str, str]:
        """``rest`` with callees by what they hold, and with callees and kernels by their labels."""
        if "@" not in rest and "kernel:" not in rest:
            return rest, rest
        loose = CALLEE.sub(lambda m: f"@{self.label(m[1])}", rest)
        loose = KERNEL.sub(lambda m: f"kernel:{self._kernel_label(m[0])}", loose)
        return self._substituted(rest, self.closed), loose

    def opened_beside(self, other: Sections, text: str) -> str:
        """``text`` with references by what those hold, where ``other`` holds that as well."""
        if "@" in text:
            there = set(other.closed.values())

            def callee(match: re.Match[str]) -> str:
                digest = self.closed.get(match[1])
                if digest is None:
                    return match[0]
                return f"@{digest if digest in there else UNSURE}"

            text = CALLEE.sub(callee, text)
        if "kernel:" in text:

            def kernel(match: re.Match[str]) -> str:
                mine, its = self.kernel(match[0]), other.kernel(match[0])
                same = mine is not None and its is not None and mine.text == its.text
                return match[0] if same else UNSURE

            text = KERNEL.sub(kernel, text)
        return text

    def label(self, name: str) -> str:
        """What the user calls a function, without the number that JAX gives a second one."""
        section = self.by_name.get(name)
        return name if section is None else _COUNTER.sub("", section.label or section.name)

    def _kernel_label(self, name: str) -> str:
        section = self.kernel(name)
        return "" if section is None else section.label

    def _substituted(self, text: str, digests: dict[str, str]) -> str:
        return CALLEE.sub(lambda m: f"@{digests.get(m[1], m[1])}", text)
