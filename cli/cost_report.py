"""How costs and their comparison look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..gates.render import indented, source_text
from ..lowering.cost.attribute import Attribution
from ..lowering.cost.compare import Comparison, Group
from ..lowering.cost.model import RUNGS, Cost, OpCost
from ..lowering.words import agreeing, plural
from .show import tabled

NOISE = 0.01
"""The share of a place's cycles below which a loss is printed without the word."""

_COUNTS = (
    "sort", "fusion", "all-gather", "reduce-scatter", "all-reduce", "all-to-all",
    "collective-permute", "gather", "scatter", "copy", "convert", "custom-call", "while",
)  # fmt: skip


def show_cost(out: Console, cost: Cost, title: str, shown: int) -> None:
    """Prints one program's cost."""
    out.print(Text(title, style="bold"))
    _head(out, cost)
    ranked = sorted(cost.ops, key=_weight, reverse=True)
    ranked = [op for op in ranked if _weight(op) > 0 or op.sparse]
    if ranked:
        tabled(out, _operations(ranked[:shown]))
    if len(ranked) > shown:
        out.print(f"  and {plural(len(ranked) - shown, 'smaller one')}; --ops shows more")
    _tail(out, cost)


def _operations(ops: Sequence[OpCost]) -> Table:
    """A row for each; cycles and bundles where one of them has any."""
    cycles = any(op.estimate is not None for op in ops)
    bundles = any(op.bundles is not None for op in ops)
    first = ("cycles", "bound by") if cycles else ("cycles at least",)
    table = _table(*first, "×", "HBM bytes", *(["bundles"] if bundles else []), "operation")
    for op in ops:
        figures = [_cycles(op.total if op.times is not None else op.figure)]
        figures.append(op.bound if op.estimate is not None else _floor(op))
        if not cycles:
            figures = [f"{op.roofline * (1 if op.times is None else op.times):,.0f}"]
        table.add_row(
            *figures,
            "?" if op.times is None else f"{op.times:,}",
            f"{op.hbm_bytes:,}",
            *(["" if op.bundles is None else f"{op.bundles:,}"] if bundles else []),
            _operation(op),
        )
    return table


def show_comparison(
    out: Console,
    found: Comparison,
    titles: Sequence[str],
    shown: int,
    attribution: Attribution | None = None,
) -> None:
    """Prints two programs' costs against each other, and whose each saving is."""
    for side, title, cost in zip("AB", titles, (found.a, found.b)):
        out.print(Text.assemble((f"{side}  ", "dim"), (title, "bold")))
        _head(out, cost)
    if found.unlike is not None:
        out.print(Text(f"cycles can't be compared: {found.unlike}", style="bold yellow"))
    else:
        changed = [g for g in found.groups if g.before != g.after or g.saving is None]
        table = _table("A", "B", "saved", "where")
        for group in changed[:shown]:
            table.add_row(*_row(group))
        if changed:
            tabled(out, table)
        if len(changed) > shown:
            out.print(f"  and {plural(len(changed) - shown, 'more place')}; --ops shows more")
        same = len(found.groups) - len(changed)
        if same:
            out.print(f"  {plural(same, 'place')} with equal cycles")
        if attribution is not None:
            _by_rewrite(out, attribution, shown)
        out.print(_verdict(found))
    _memories(out, found)
    for side, cost in (("A", found.a), ("B", found.b)):
        for note in cost.notes:
            indented(out, Text(f"note on {side}: {note}", style="dim"), 0)


def _head(out: Console, cost: Cost) -> None:
    total = cost.total()
    line = Text.assemble((f"rung {cost.rung}", "cyan"), f": {RUNGS[cost.rung]}")
    indented(out, line)
    if cost.has_cycles:
        text = plural(round(total.cycles), "cycle")
        if round(total.cycles) != total.estimate:
            text += f" ({total.estimate:,} by the compiler's estimate alone)"
        text += f", {cost.duration(total.cycles)} at {cost.chip.clock / 1e9:g} GHz"
        apart = "; collectives apart, below" if cost.collectives else ""
        indented(out, Text.assemble((text, "bold"), f"; covers {total.coverage}{apart}"))
    floor = cost.floor
    text = (
        f"at least {plural(round(floor), 'cycle')}, {cost.duration(floor)}, for its HBM bytes or "
    )
    text += "FLOPs at the chip's best"
    if cost.has_cycles and floor > total.cycles:
        text += ": more than that sum, which leaves out what has no cycles"
    indented(out, Text(text))


def _tail(out: Console, cost: Cost) -> None:
    bounds = ", ".join(f"{name} {count}" for name, count in sorted(cost.bounds().items()))
    if bounds:
        indented(out, Text(f"operations by what bounds them: {bounds}"), 0)
    counts = [f"{name} {cost.counts[name]:,}" for name in _COUNTS if cost.counts.get(name)]
    indented(
        out,
        Text("compiled operations, fused ones too: " + (", ".join(counts) or "none of note")),
        0,
    )
    if cost.sorts:
        sorts = ", ".join(f"{count} of {n}" for n, count in cost.sorts.items())
        indented(out, Text(f"sorts by operands: {sorts}"), 0)
    for c in cost.collectives:
        text = f"{c.kind}: {c.count:,}, {c.bytes:,} bytes sent, at least {1000 * c.seconds:.3g} ms"
        indented(out, Text(f"{text} on the links"), 0)
    memory = cost.memory
    indented(
        out,
        Text(
            f"memory of one device: arguments {memory.arguments:,}, outputs {memory.outputs:,}, "
            f"temp {memory.temp:,}, code {memory.code:,}, peak {memory.peak:,} bytes"
        ),
        0,
    )
    versions = ", ".join(f"{name} {version}" for name, version in cost.versions.items())
    indented(out, Text(f"{cost.target}, one device; {versions}", style="dim"), 0)
    for note in cost.notes:
        indented(out, Text(f"note: {note}", style="dim"), 0)


def _memories(out: Console, found: Comparison) -> None:
    table = _table("A", "B", "change", "bytes of one device")
    for name in ("arguments", "outputs", "temp", "code", "peak"):
        before, after = getattr(found.a.memory, name), getattr(found.b.memory, name)
        table.add_row(f"{before:,}", f"{after:,}", _signed(after - before), Text(name))
    tabled(out, table)
    table = _table("A", "B", "change", "compiled operations")
    for label, a, b in _count_rows(found.a, found.b):
        if a != b:
            table.add_row(f"{a:,}", f"{b:,}", _signed(b - a), Text(label))
    if table.row_count:
        tabled(out, table)


def _count_rows(a: Cost, b: Cost) -> list[tuple[str, int, int]]:
    kinds = [(name, a.counts.get(name, 0), b.counts.get(name, 0)) for name in _COUNTS]
    operands = sorted({*a.sorts, *b.sorts})
    return kinds + [
        (f"sort of {plural(n, 'operand')}", a.sorts.get(n, 0), b.sorts.get(n, 0)) for n in operands
    ]


def _row(group: Group) -> tuple[str, str, Text, Text]:
    saving = group.saving
    kinds = [" + ".join(kinds) or "nothing" for kinds in (group.kinds_before, group.kinds_after)]
    what = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} → {kinds[1]}"
    if saving is None:
        saved = Text("no figure", style="yellow")
    else:
        saved = _saved(saving, group.before or 0.0)
    where = Text.assemble((source_text(group.place), "cyan"), f"  {what}")
    return _cycles(group.before), _cycles(group.after), saved, where


def _by_rewrite(out: Console, found: Attribution, shown: int) -> None:
    table = _table("saved", "of", "by rewrite")
    for saving in found.savings[:shown]:
        name = saving.label + (f" × {len(saving.sites)}" if len(saving.sites) > 1 else "")
        places = ", ".join(map(source_text, saving.places)) or "nothing is left there"
        rest = "  and a place without a figure" if saving.undecided else ""
        where = Text.assemble((name, "bold"), "  ", (places, "cyan"), (rest, "yellow"))
        table.add_row(_saved(saving.saving, saving.before), f"{saving.before:,.0f}", where)
    if len(found.savings) > shown:
        table.add_row("", "", Text(f"and {plural(len(found.savings) - shown, 'more')}", "dim"))
    table.add_row(_saved(found.elsewhere, 0.0), "", Text("elsewhere", "dim"))
    tabled(out, table)
    if found.share is not None:
        out.print(f"  {100 * found.share:.0f} % of the change is at the rewrites' places")


def _saved(saving: float, base: float) -> Text:
    """A saving in its colour; a loss of more than `NOISE` is a regression."""
    if saving < 0 and saving < -NOISE * base:
        return Text(f"{saving:,.0f} REGRESSION", style="bold red")
    return Text(f"{saving:,.0f}", style="red" if saving < 0 else "green")


def _verdict(found: Comparison) -> Text:
    before, after = found.before, found.after
    if found.worse is None:
        count = len(found.undecided)
        why = (
            f"{plural(count, 'place')} changed and {agreeing(count, 'has', 'have')} no figure"
            if count
            else "no place has a figure on both sides"
        )
        return Text(
            f"undecided: {why}; where both have one, {before:,.0f} → {after:,.0f} cycles, "
            f"rung {found.a.rung}",
            style="bold yellow",
        )
    ratio = f", {before / after:.2f}× as fast" if after and after <= before else ""
    if found.worse:
        ratio = f", {after / before:.2f}× the cycles" if before else ""
    head = "B costs more" if found.worse else "B costs no more"
    left = len(found.groups) - len(found.compared)
    rest = f"; {plural(left, 'place')} without a figure left out" if left else ""
    return Text(
        f"{head}: {before:,.0f} → {after:,.0f} cycles{ratio}, rung {found.a.rung}{rest}",
        style="bold red" if found.worse else "bold green",
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table


def _weight(op: OpCost) -> float:
    if op.total is not None:
        return op.total
    return (op.figure or op.roofline) * (1 if op.times is None else op.times)


def _cycles(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _floor(op: OpCost) -> str:
    return f"no figure; ≥ {op.roofline:,.0f}" if op.roofline >= 1 else "no figure"


def _operation(op: OpCost) -> Text:
    place = source_text(op.source) if op.source else ""
    text = Text.assemble((op.kind, "bold"), f" {op.shape}  ", (place, "cyan"))
    if op.scope:
        text.append(f"  {op.scope}", style="dim")
    return text


def _signed(value: int) -> str:
    return f"{value:+,}" if value else "0"
