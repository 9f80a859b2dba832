"""The table of a run, as Markdown for the documentation."""

from __future__ import annotations

from ...lowering.program import LEVELS
from .score import Row, Score

BEGIN = "<!-- Written by `relower selftest --write`; edit the programs and mutants instead. -->"
END = "<!-- End of what is written. -->"
_MARKS = {"caught": "✓", "matched": "✓", "survived": "✗", "not matched": "✗", "not applicable": "–"}


def table(score: Score) -> str:
    """A row for each mutant and variation, a column for each program."""
    programs = list(dict.fromkeys(row.program for row in score.rows))
    lines = [f"**{score.line()}.**", ""]
    for kind, title in (("mutant", "must differ"), ("noise", "must match")):
        rows = [row for row in score.rows if row.kind == kind]
        lines += [
            f"| {title} | at | {' | '.join(programs)} |",
            f"|---|---|{'---|' * len(programs)}",
        ]
        for name in dict.fromkeys(row.name for row in rows):
            alike = [row for row in rows if row.name == name]
            cells = [cell(alike, program) for program in programs]
            lines.append(f"| {name} | {levels(alike)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def cell(rows: list[Row], program: str) -> str:
    """The mark of one program."""
    return next((_MARKS[row.state] for row in rows if row.program == program), "–")


def levels(rows: list[Row]) -> str:
    """The levels at which it must differ, or match."""
    found = {level for row in rows for level in row.levels}
    if found == set(LEVELS):
        return "all levels"
    return ", ".join(level for level in LEVELS if level in found) or "–"


def written(page: str, score: Score) -> str:
    """``page`` with the table of ``score`` between the two marks.

    Raises:
        ValueError: the page doesn't have the marks.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"wanted one line {BEGIN!r} and one line {END!r}")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n\n{table(score)}\n{END}{tail}"
