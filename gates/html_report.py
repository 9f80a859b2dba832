"""A comparison or a gate as one HTML file that needs no server and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ..lowering.change import Change, Difference, Group
from ..lowering.program import Program
from ..lowering.words import plural
from .page import badge, folded, page, table, text
from .render import alike, heading, places, what
from .results import CellResult, GateResult

OPEN_GROUPS = 200
"""Groups of differences that are unfolded from the start; a function beyond is a click away."""
LONG_TABLE = 20
"""Rows beyond which the table of functions is folded."""
PLACES = 50
"""Functions that one group names; the count is always whole."""


def diff_page(found: Difference, names: tuple[str, str], programs: tuple[Program, Program]) -> str:
    """The report of one comparison.

    Args:
        found: what `relower.lowering.diff` returned.
        names: what the user calls the two programs.
        programs: the two.
    """
    rows = [
        ("", *(f"<code>{text(name)}</code>" for name in names)),
        ("operations", *(f"{sum(p.ops.values()):,}" for p in programs)),
        (
            "kernels",
            *(
                f"{len(p.kernels):,} in {plural(sum(p.kernel_calls.values()), 'call')}"
                for p in programs
            ),
        ),
        ("set aside as noise", *(f"{sum(p.ledger.values()):,}" for p in programs)),
        ("sha256", *(f"<code>{text(digest[:16])}…</code>" for digest in found.digests)),
    ]
    body = [
        f"<h1>{text(names[0])} → {text(names[1])}</h1>",
        f"<p>{badge(found.verdict.name)} at level {text(found.level)}{_count(found)}</p>",
        table(rows, head=True),
        *_remarks(found),
        *_changes(found.groups),
        *_noise(names, programs),
        _stamps(names, programs),
    ]
    return page(f"{found.verdict.name}: {names[0]} → {names[1]}", "\n".join(body))


def gate_page(result: GateResult) -> str:
    """The report of a gate: every cell, and under each that doesn't hold what differs."""
    status = ("holds", "broken", "undecided")[result.exit_code]
    rows = [
        (
            badge(cell.status),
            text(cell.cell.name),
            "<br>".join(map(text, cell.messages)),
        )
        for cell in result.cells
    ]
    body = [
        "<h1>relower gate</h1>",
        f"<p>{badge(status)} {text(result.closing)}</p>",
        *(f'<p class="note">{text(guard)}</p>' for guard in result.guards),
        *(f'<p class="note">{text(note)}</p>' for note in result.notes),
        table([("", "cell", ""), *rows], head=True),
    ]
    unfolded = OPEN_GROUPS
    failing = [c for c in result.cells if c.status != "holds" and c.difference is not None]
    if any(cell.difference.groups for cell in failing if cell.difference is not None):
        body.append(_search())
    for cell in failing:
        body.append(_cell(cell, unfolded))
        unfolded -= len(cell.difference.groups) if cell.difference is not None else 0
    return page(f"{status}: {result.closing}", "\n".join(body))


def _cell(cell: CellResult, unfolded: int) -> str:
    found = cell.difference
    assert found is not None
    head = f"<h2>{text(cell.cell.name)}</h2>\n<p>{badge(found.verdict.name)}{_count(found)}</p>"
    head += f'\n<p class="dim mono">{"<br>".join(map(text, cell.sides))}</p>'
    return "\n".join([head, *_remarks(found), *_sections(found.groups, unfolded)])


def _count(found: Difference) -> str:
    if not found.changes:
        return ""
    groups = plural(len(found.groups), "group")
    return f": {plural(len(found.changes), 'difference')} in {groups}"


def _remarks(found: Difference) -> Iterable[str]:
    """All that qualifies the verdict."""
    said = [*(f"note: {note}" for note in found.notes), *found.reasons]
    said += [f"unknown in {side}: {u.construct}: {u.reason}" for side, u in found.unknowns]
    said += [f"allowed to differ: {', '.join(found.allowed)}"] if found.allowed else []
    return (f'<p class="note">{text(remark)}</p>' for remark in said)


def _changes(groups: Sequence[Group]) -> Iterable[str]:
    if not groups:
        return
    yield "<h2>Where they differ</h2>"
    rows = [("", "groups", "differences")]
    rows += [
        (f"<code>{text(title)}</code>", f"{len(own):,}", f"{sum(len(g.changes) for g in own):,}")
        for title, own in _by_section(groups)
    ]
    listing = table(rows, head=True, numbers=True)
    if len(rows) > LONG_TABLE:
        yield folded(f"In {len(rows) - 1:,} functions and kernels", listing)
    elif len(rows) > 2:
        yield listing
    yield _search()
    yield from _sections(groups, OPEN_GROUPS)


def _by_section(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    def title(group: Group) -> str:
        return f"{group.first.section_kind} {group.first.section}"

    return [(name, list(own)) for name, own in groupby(groups, title)]


def _search() -> str:
    return (
        '<p><input type="search" placeholder="only what mentions …" aria-label="filter" hidden> '
        '<span id="shown" class="dim"></span></p>'
    )


def _sections(groups: Sequence[Group], unfolded: int) -> Iterable[str]:
    for title, own in _by_section(groups):
        opened = " open" if unfolded > 0 else ""
        unfolded -= len(own)
        differences = plural(sum(len(group.changes) for group in own), "difference")
        yield (
            f'<details class="section"{opened}><summary><code>{text(title)}</code> '
            f'<span class="dim">{differences}</span></summary><div class="body">'
        )
        yield from map(_group, own)
        yield "</div></details>"


def _group(group: Group) -> str:
    change = group.first
    path, name = heading(change)
    outer = "".join(f"{text(part)} › " for part in path)
    lines = [
        f'<p><span class="dim mono">{outer}</span><b class="mono">{text(name)}</b> '
        f"{text(what(change))}</p>",
        *_both_sides(change),
        *(f'<p class="place mono">{text(place)}</p>' for place in places(change)),
    ]
    if len(group.changes) > 1:
        lines.append(f'<p class="dim">{text(alike(group))}</p>')
        others = group.sections
        if len(others) > 1:
            rest = f" … and {len(others) - PLACES:,} more" if len(others) > PLACES else ""
            named = ", ".join(map(text, others[:PLACES]))
            lines.append(
                f'<details><summary class="dim">where</summary><div class="body mono">{named}{rest}'
                "</div></details>"
            )
    return f'<div class="change">{"".join(lines)}</div>'


def _both_sides(change: Change) -> Iterable[str]:
    """Both texts, with the part marked in which they differ."""
    a, b = change.a, change.b
    limit = min(len(a), len(b)) if a and b else 0
    start = next((i for i in range(limit) if a[i] != b[i]), limit)
    end = next((i for i in range(limit - start) if a[-1 - i] != b[-1 - i]), limit - start)
    for sign, side, style in (("-", a, "minus"), ("+", b, "plus")):
        if side:
            stop = len(side) - end
            marked = f"<mark>{text(side[start:stop])}</mark>" if limit and start < stop else ""
            plain = "" if marked else text(side[start:stop])
            yield (
                f'<pre class="{style}">{sign} {text(side[:start])}{marked}{plain}'
                f"{text(side[stop:])}</pre>"
            )


def _noise(names: tuple[str, str], programs: tuple[Program, Program]) -> Iterable[str]:
    rules = sorted({*programs[0].ledger, *programs[1].ledger})
    rows = [("rule", *map(text, names))]
    rows += [(text(rule), *(f"{p.ledger.get(rule, 0):,}" for p in programs)) for rule in rules]
    yield folded("What was set aside as noise", table(rows, head=True, numbers=True))


def _stamps(names: tuple[str, str], programs: tuple[Program, Program]) -> str:
    fields = sorted({*programs[0].stamp.fields, *programs[1].stamp.fields})
    rows = [("", *map(text, names))]
    rows += [
        (text(name), *(text(p.stamp.fields.get(name, "absent")) for p in programs))
        for name in fields
    ]
    return folded("How they were lowered", table(rows, head=True))
