"""What a gate found, for other programs: JUnit's XML and GitHub's step summary."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from xml.etree import ElementTree as xml

from .matrix import CellResult, GateResult
from .render import plain

SUMMARY_BYTES = 1 << 20
"""What GitHub takes as the summary of one step, in bytes."""
GROUPS_SHOWN = 20
_MARK = {"holds": "✅", "broken": "❌", "undecided": "❔"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(result: GateResult) -> str:
    """The cells as test cases by program: broken is a failure, undecided an error."""
    root = xml.Element("testsuites", name="relower gate")
    suites: dict[str, xml.Element] = {}
    seen: Counter[str] = Counter()
    for cell in result.cells:
        program, name = cell.cell.program, cell.cell.name
        if program not in suites:
            suites[program] = xml.SubElement(root, "testsuite", name=program)
        seen[name] += 1
        title = name if seen[name] == 1 else f"{name} #{seen[name]}"
        case = xml.SubElement(
            suites[program], "testcase", name=_printable(title), classname=f"relower.{program}"
        )
        if cell.status != "holds":
            kind = "failure" if cell.status == "broken" else "error"
            found = xml.SubElement(case, kind, message=_printable("; ".join(cell.messages)))
            found.text = _explained(cell)
    if result.guards:
        suite = xml.SubElement(root, "testsuite", name="guards")
        for guard in result.guards:
            case = xml.SubElement(
                suite, "testcase", name=_printable(guard), classname="relower.guards"
            )
            xml.SubElement(case, "failure", message=_printable(guard))
    for element in (*root, root):
        _count(element)
    xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, "unicode") + "\n"


def step_summary(result: GateResult, room: int = SUMMARY_BYTES) -> str:
    """Markdown for ``$GITHUB_STEP_SUMMARY``: the closing line, what doesn't hold, every cell.

    Args:
        result: what the gate found.
        room: bytes that may be used. Where they don't do, whole parts are left out from the end,
            and the last line says how many; empty where there is no room for even that.
    """
    parts = _parts(result)
    reserve = len(_cut(len(parts), len(parts)).encode())
    kept: list[str] = []
    used = fitting = 0
    for part in parts:  # rendered one by one: most of ten thousand will never be shown
        kept.append(part())
        used += len(kept[-1].encode())
        if used > room:
            break
        fitting += used + reserve <= room
    else:
        return "".join(kept)
    return "".join(kept[:fitting]) + _cut(len(parts) - fitting, len(parts)) if fitting else ""


def _cut(left_out: int, total: int) -> str:
    return (
        f"\n\n**Cut here**: {left_out:,} of {total:,} parts are left out, for GitHub takes 1 MiB. "
        "The log and `--junit` hold more.\n"
    )


def _parts(result: GateResult) -> list[Callable[[], str]]:
    """The summary in pieces that can be left out from the end."""
    parts: list[Callable[[], str]] = [partial(_head, result)]
    parts += [partial("- ❌ {}\n".format, _markdown(guard)) for guard in result.guards]
    parts += [partial("- {}\n".format, _markdown(note)) for note in result.notes]
    parts += [partial(_details, cell) for cell in result.cells if cell.status != "holds"]
    if result.cells:
        parts.append(lambda: "\n| | cell | |\n|---|---|---|\n")
    return parts + [partial(_row, cell) for cell in result.cells]


def _head(result: GateResult) -> str:
    mark = _MARK[("holds", "broken", "undecided")[result.exit_code]]
    return f"## {mark} relower gate: {_markdown(result.closing)}\n\n"


def _row(cell: CellResult) -> str:
    messages = _markdown("; ".join(cell.messages))
    return f"| {_MARK[cell.status]} | {_markdown(cell.cell.name)} | {messages} |\n"


def _details(cell: CellResult) -> str:
    text = _explained(cell)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    title = f"{_MARK[cell.status]} {_markdown(cell.cell.name)}"
    return f"\n<details><summary>{title}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>\n"


def _explained(cell: CellResult) -> str:
    """Messages, and the tree of differences, within the bounds of `plain`."""
    lines = list(cell.messages)
    if cell.difference is not None:
        lines += cell.sides
        lines.append(plain(cell.difference, GROUPS_SHOWN, "--json holds all"))
    return _printable("\n".join(lines))


def _markdown(text: str) -> str:
    """``text`` on one line, with nothing in it that Markdown or HTML would act on."""
    escaped = html.escape(_printable(" ".join(text.split())))
    return re.sub(r"[\\`*_{}\[\]|~#$@:]", lambda match: f"&#{ord(match[0])};", escaped)


def _printable(text: str) -> str:
    """``text`` with what neither XML nor a page can hold written as an escape."""
    return _NOT_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _count(element: xml.Element) -> None:
    element.set("tests", str(len(list(element.iter("testcase")))))
    element.set("failures", str(len(list(element.iter("failure")))))
    element.set("errors", str(len(list(element.iter("error")))))
