"""The body of a Mosaic kernel: from bytecode in a custom call to canonical text.

Pallas serialises a kernel to MLIR bytecode of the ``stable_mosaic`` dialect. Here it is parsed in a
context of its own, turned back into ordinary dialects by jaxlib's ``mosaic-serde`` pass, and
printed like any other module, with function names numbered in module order. Whatever stays in
``stable_mosaic``, or in no registered dialect, is `Unknown`, and so is a body that doesn't parse;
such a kernel is then known by the digest of its bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from ..compat.mlir import NEWEST, PassManager, ir, mosaic_context
from .exact import ExactPrinter
from .printed import Printer
from .printer import PREFIXES, Names, Page
from .program import SEVERAL, Section, digest_of
from .read import KERNEL_DIALECTS
from .session import Session

_VERSION = "stable_mosaic.version"


class KernelTable:
    """The distinct kernels of one program, each body decoded once.

    ``mosaic_version`` is the version of the encoding that the stamp states; a kernel encoded in
    another keeps its version in its text. With `NEWEST`, the stamp's libtpu and jaxlib decide it.
    """

    def __init__(self, session: Session, mosaic_version: str) -> None:
        self.sections: dict[str, Section] = {}
        self._session = session
        self._version = mosaic_version
        self._tokens: dict[bytes, str] = {}
        self._context: Any = None

    def token(self, body: bytes, label: str, loc: int) -> str:
        """``kernel:<sha256>`` of the canonical text of ``body``, whose section is kept."""
        key = hashlib.sha256(body).digest()
        if key not in self._tokens:
            page = self._decode(body, label or "kernel", loc)
            digest = digest_of(page.text)
            section = Section(
                f"kernel:{digest[:12]}", "kernel", page.text, label, tuple(page.locations)
            )
            self.sections.setdefault(section.name, section)
            self._tokens[key] = f"kernel:{digest}"
        self._called(self._tokens[key], label)
        return self._tokens[key]

    def _called(self, token: str, label: str) -> None:
        """Adds a name by which a kernel is called; several mostly mean one body in several uses."""
        section = self.sections[token[: len("kernel:") + 12]]
        if label not in section.names:
            together = SEVERAL.join((*section.names, label))
            self.sections[section.name] = replace(section, label=together)

    def _decode(self, body: bytes, label: str, loc: int) -> Page:
        if self._context is None:
            self._context = mosaic_context()
        try:
            with self._context, ir.Location.unknown():
                module = ir.Module.parse(body)
                # The verifier would reject nothing that the comparison needs, and is slow.
                passes = PassManager.parse("builtin.module(mosaic-serde{serialize=false})")
                passes.run(module.operation)
                return self._page(module)
        except (ir.MLIRError, ValueError, RuntimeError) as error:
            reason = f"the kernel's body can't be decoded: {str(error).splitlines()[0][:160]}"
            self._session.unknown(f"kernel {label}", reason, loc)
            page = Page()
            page.add(f"undecoded sha256 {hashlib.sha256(body).hexdigest()}")
            return page

    def _page(self, module: Any) -> Page:
        attributes = module.operation.attributes
        version = str(attributes[_VERSION]).split(" ")[0] if _VERSION in attributes else None
        if version is not None and self._version in (version, NEWEST):
            self._session.ledger.add("mosaic-version")
            del attributes[_VERSION]
        self._registered(module.operation)
        printer = Printer(module, self._session)
        self._session.ledger.add("kernel-symbol", len(printer.keys))
        names = Names({**PREFIXES, "func": "s"}, {})
        for key in printer.keys:
            names.name("func", key)
        page = Page()
        for name, text in printer.attributes().items():
            page.add(f"module {name} = {names.resolve(text)}")
        exact = ExactPrinter(self._session, printer.tails, names, KERNEL_DIALECTS)
        for key in printer.keys:
            section, _ = exact.section(printer.function(key), "", keep=False)
            page.add(f"@{names.name('func', key)}")
            page.extend(section.text, section.locations)
        return page

    def _registered(self, root: Any) -> None:
        seen: set[str] = set()

        def visit(op: Any) -> Any:
            seen.add(op.name)
            return ir.WalkResult.ADVANCE

        root.walk(visit)
        for name in sorted(seen):
            if name.startswith("stable_mosaic.") or not self._context.is_registered_operation(name):
                self._session.unknown(name, "left over in a kernel's body after decoding")
