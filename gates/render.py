"""How a difference reads as text: a tree of what and where, the verdict last.

The command line and the pytest plugin print the same.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..lowering.change import Change, Difference, Group, Verdict
from ..lowering.program import Location
from ..lowering.words import plural
from .wrap import lines

PLAIN_WIDTH = 96
MAX_CHARACTERS = 16_000
"""What `plain` gives of one difference."""

_STYLE = {Verdict.IDENTICAL: "green", Verdict.DIFFERENT: "red", Verdict.UNKNOWN: "yellow"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could move the cursor or recolour a terminal; artifacts may come from strangers."""


def show(out: Console, found: Difference, limit: int | None, rest_is: str, by: int = 0) -> None:
    """Prints a difference: what and where first, the verdict last.

    ``rest_is`` says where the groups beyond ``limit`` can be read; ``by`` indents.
    """
    groups = found.groups[:limit]
    show_groups(out, groups, by)
    if len(groups) < len(found.groups):
        rest = plural(len(found.groups) - len(groups), "more group")
        indented(out, Text(f"… and {rest} of differences; {rest_is}"), by)
    for note in found.notes:
        indented(out, Text(f"note: {note}", style="yellow"), by)
    for reason in found.reasons:
        indented(out, Text(reason), by)
    if found.verdict is Verdict.DIFFERENT:
        for side, unknown in found.unknowns:
            text = f"unknown in {side}: {unknown.construct}: {unknown.reason}"
            indented(out, Text(text, style="yellow"), by)
    if found.allowed:
        indented(out, Text(f"allowed to differ: {', '.join(found.allowed)}"), by)
    indented(out, verdict_line(found), by)


def plain(found: Difference, limit: int, rest_is: str) -> str:
    """`show` without colours, cut at `MAX_CHARACTERS` with the verdict kept."""
    sink = io.StringIO()
    out = Console(
        file=sink, width=PLAIN_WIDTH, highlight=False, color_system=None, force_terminal=False
    )
    show(out, found, limit, rest_is)
    text = sink.getvalue().rstrip()
    if len(text) <= MAX_CHARACTERS:
        return text
    verdict = text.rpartition("\n")[2]
    kept = text[:MAX_CHARACTERS].rpartition("\n")[0]
    return f"{kept}\n… cut after {len(kept):,} of {len(text):,} characters\n{verdict}"


def verdict_line(found: Difference) -> Text:
    """The verdict in one line."""
    name = found.verdict.name
    text = Text.assemble((name, f"bold {_STYLE[found.verdict]}"), f" at level {found.level}")
    if found.verdict is Verdict.IDENTICAL:
        text.append(f"  sha256 {found.digests[0][:16]}…")
    elif found.changes:
        kernels = found.touched().kernels
        text.append(f": {plural(len(found.changes), 'difference')}")
        if kernels:
            text.append(f", in kernels {', '.join(sorted(kernels))} among others"
                        if any(c.section_kind != "kernel" for c in found.changes)
                        else f", all in kernels {', '.join(sorted(kernels))}")  # fmt: skip
    return text


def show_groups(out: Console, groups: Sequence[Group], by: int = 0) -> None:
    """Prints groups under the names of their functions and kernels."""
    section = ""
    for group in groups:
        title = f"{group.first.section_kind} {group.first.section}"
        if title != section:
            section = title
            indented(out, Text(title, style="bold"), by)
        show_group(out, group, by + 2)


def show_group(out: Console, group: Group, by: int = 2) -> None:
    """Prints one group: what differs, both sides, the source, and how many are alike."""
    change = group.first
    path, name = heading(change)
    head = Text()
    head.append("".join(f"{outer} › " for outer in path), style="dim")
    head.append(name, style="bold")
    head.append(f"  {what(change)}")
    indented(out, head, by, hang=2)
    for sign, side, style in (("-", change.a, "red"), ("+", change.b, "green")):
        if side:
            indented(out, Text(f"{sign} {side}", style=style), by + 2)
    for place in places(change):
        indented(out, Text(place, style="cyan"), by + 2)
    if len(group.changes) > 1:
        indented(out, Text(alike(group), style="dim"), by + 2)


def heading(change: Change) -> tuple[tuple[str, ...], str]:
    """The operations around a change, outermost first, and what it is a change of."""
    if change.op in ("argument", "result") and change.path:
        return change.path[:-1], change.path[-1]  # "argument 3" says it all
    return change.path, change.op


def what(change: Change) -> str:
    """What is not the same, in a few words."""
    if change.kind in ("added", "removed"):
        side = "b" if change.kind == "added" else "a"
        return f"only in {side}" + (f", {change.detail}" if change.detail else "")
    if change.kind == "operation":
        return "is another operation"
    if change.kind == "moved":
        return "stands at another place among its neighbours"
    if change.detail.startswith("operands "):
        return change.detail
    return f"{change.detail} {'differ' if change.detail.startswith('arguments') else 'differs'}"


def places(change: Change) -> list[str]:
    """The source line and name scope on each side, once where they agree."""
    found = []
    for where in (change.where_a, change.where_b):
        text = source(where)
        scope = where.scope if where is not None and where.scope else ""
        line = f"{text}  {scope}".strip()
        if line and line not in found:
            found.append(line)
    return found


def alike(group: Group) -> str:
    """How often a group's change occurs, and in how many functions or kernels."""
    sections = len(group.sections)
    count = len(group.changes)
    if sections == 1:
        return f"{plural(count, 'time')} alike"
    kind = group.first.section_kind
    if count == sections:
        return f"in {sections:,} {kind}s alike"
    return f"{plural(count, 'time')} in {plural(sections, kind)}, all alike"


def indented(out: Console, text: str | Text, by: int = 2, hang: int = 0) -> None:
    """Prints ``text`` wrapped at the width, every line indented alike and nothing cut.

    Lines after the first are indented by ``hang`` more.
    """
    body = Text(text) if isinstance(text, str) else text
    if _CONTROL.search(body.plain):
        body = Text(_CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", body.plain))
    body.expand_tabs()
    width = max(20, out.width - by)
    for number, (start, end) in enumerate(lines(body.plain, width, hang)):
        line = Text(" " * (by + (hang if number else 0))).append_text(body[start:end])
        out.print(line, no_wrap=True, overflow="ignore", crop=False)


def relative(path: str) -> str:
    """``path`` as seen from the current folder, or from where packages are installed."""
    _, installed, inside = path.rpartition("site-packages/")
    if installed:
        return inside
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def source(where: Location | None) -> str:
    """``file.py:3`` of a location, or an empty text."""
    if where is None or where.file is None:
        return ""
    return relative(where.file) + ("" if where.line is None else f":{where.line}")


def source_text(text: str | None) -> str:
    """``file.py:3`` with the file as seen from the current folder."""
    if not text:
        return "unknown line"
    file, colon, line = text.rpartition(":")
    return f"{relative(file)}:{line}" if colon else text
