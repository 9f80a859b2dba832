"""What a program costs, or what a rewrite saves, as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable

from ..lowering.cost.attribute import Attribution
from ..lowering.cost.compare import Comparison, Group
from ..lowering.cost.measurement import SiteSum
from ..lowering.cost.model import RUNGS, Cost, OpCost
from ..lowering.words import plural
from .page import badge, folded, page, table, text
from .render import source_text

NOISE = 0.01
"""The share of a place's cycles below which a loss isn't called a regression."""
_VERDICTS = {
    None: ("undecided", "undecided"),
    True: ("broken", "more"),
    False: ("holds", "no more"),
}
"""The colour and the word for whether B costs more."""
_MEMORY = ("arguments", "outputs", "temp", "code", "peak")


def cost_page(cost: Cost, title: str) -> str:
    """The report of one program."""
    body = [f"<h1>{text(title)}</h1>", *_head(cost), *_operations(cost), *_rest(cost)]
    return page(f"cost: {title}", "\n".join(body))


def comparison_page(
    found: Comparison,
    titles: tuple[str, str],
    attribution: Attribution | None,
    sites: SiteSum | None = None,
) -> str:
    """The report of two programs.

    Args:
        found: B against A.
        titles: what the user calls them.
        attribution: the change by rewrite, where B is A rewritten.
        sites: the rewritten sites alone, where the two have no cycles to compare.
    """
    verdict, said = _VERDICTS[found.worse]
    body = [
        f"<h1>{text(titles[0])} → {text(titles[1])}</h1>",
        f"<p>{badge(verdict, said)} {text(closing(found))}</p>",
    ]
    if sites is not None:
        body.append(f"<p>{text(str(sites))}</p>")
    if attribution is not None:
        body += ["<h2>By rewrite</h2>", *_by_rewrite(attribution)]
    if found.unlike is None:
        body += ["<h2>By place</h2>", _places(found.groups)]
    body += ["<h2>Memory of one device, bytes</h2>", _memory(found)]
    for side, title, cost in zip("AB", titles, (found.a, found.b)):
        body += [f"<h2>{side}: {text(title)}</h2>", *_head(cost)]
        body.append(folded("Operations", "\n".join([*_operations(cost), *_rest(cost)])))
    return page(f"{said}: {titles[0]} → {titles[1]}", "\n".join(body))


def closing(found: Comparison) -> str:
    """The verdict in a sentence."""
    if found.unlike is not None:
        return f"cycles can't be compared: {found.unlike}"
    sums = f"{found.before:,.0f} → {found.after:,.0f} cycles, rung {found.a.rung}"
    if found.worse is None:
        count = len(found.undecided)
        return f"undecided: {plural(count, 'place')} changed without a figure; elsewhere {sums}"
    return f"B costs {'more' if found.worse else 'no more'}: {sums}"


def _head(cost: Cost) -> Iterable[str]:
    total = cost.total()
    yield f"<p>rung <b>{text(cost.rung)}</b>: {text(RUNGS[cost.rung])}</p>"
    if cost.has_cycles:
        yield (
            f"<p><b>{plural(round(total.cycles), 'cycle')}</b>, {cost.duration(total.cycles)} at "
            f"{cost.chip.clock / 1e9:g} GHz; covers {text(total.coverage)}</p>"
        )
    floor = plural(round(cost.floor), "cycle")
    yield f"<p>at least {floor} for its HBM bytes or FLOPs at the chip's best</p>"
    yield from (f'<p class="note">{text(note)}</p>' for note in cost.notes)


def _operations(cost: Cost) -> Iterable[str]:
    def weight(op: OpCost) -> float:
        return op.total or op.figure or op.roofline

    rows: list[tuple[str, ...]] = [
        ("operation", "cycles", "bound by", "×", "HBM bytes", "bundles", "place")
    ]
    for op in sorted(cost.ops, key=weight, reverse=True):
        cycles = op.figure if op.times is None else op.total
        rows.append(
            (
                f"<b>{text(op.kind)}</b> {text(op.shape)}",
                "–" if cycles is None else f"{cycles:,.0f}",
                text(op.bound),
                "?" if op.times is None else f"{op.times:,}",
                f"{op.hbm_bytes:,}",
                "" if op.bundles is None else f"{op.bundles:,}",
                _place(op.source),
            )
        )
    yield table(rows, head=True, numbers=True, words=(0, 2, 6))


def _rest(cost: Cost) -> Iterable[str]:
    rows = [(text(kind), f"{count:,}") for kind, count in sorted(cost.counts.items())]
    rows += [(f"sort of {n}", f"{count:,}") for n, count in cost.sorts.items()]
    yield folded("Compiled operations", table(rows, numbers=True))
    for c in cost.collectives:
        yield (
            f"<p>{text(c.kind)}: {c.count:,}, {c.bytes:,} bytes sent, at least "
            f"{1000 * c.seconds:.3g} ms on the links, estimated apart</p>"
        )
    versions = ", ".join(f"{name} {version}" for name, version in cost.versions.items())
    yield f'<p class="dim">{text(cost.target)}, one device; {text(versions)}</p>'


def _by_rewrite(found: Attribution) -> Iterable[str]:
    rows: list[tuple[str, ...]] = [("rewrite", "saved", "of", "places")]
    rows += [
        (
            f"<b>{text(s.label)}</b>" + (f" × {len(s.sites)}" if len(s.sites) > 1 else ""),
            _signed(s.saving, s.before) + (" and no figure" if s.undecided else ""),
            f"{s.before:,.0f}",
            "<br>".join(map(_place, s.places)) or "nothing is left there in either program",
        )
        for s in found.savings
    ]
    rows.append(("elsewhere", _signed(found.elsewhere, 0.0), "", ""))
    yield table(rows, head=True, numbers=True, words=(0, 3))
    if found.share is not None:
        yield f"<p>{100 * found.share:.0f} % of the change is at the rewrites' places</p>"


def _places(groups: Iterable[Group]) -> str:
    rows: list[tuple[str, ...]] = [("place", "A", "B", "saved", "operations")]
    for group in groups:
        kinds = [" + ".join(k) or "nothing" for k in (group.kinds_before, group.kinds_after)]
        if group.saving is None:
            saved = (
                '<span class="worse">no figure</span>' if not group.alike else "no figure, alike"
            )
        else:
            saved = _signed(group.saving, group.before or 0.0)
        what = kinds[0] if kinds[0] == kinds[1] else " → ".join(kinds)
        rows.append(
            (_place(group.place), _figure(group.before), _figure(group.after), saved, text(what))
        )
    return table(rows, head=True, numbers=True, words=(0, 4))


def _memory(found: Comparison) -> str:
    rows: list[tuple[str, ...]] = [("", "A", "B", "change")]
    for name in _MEMORY:
        a, b = getattr(found.a.memory, name), getattr(found.b.memory, name)
        rows.append((name, f"{a:,}", f"{b:,}", _signed(a - b, 0.0, b - a)))
    return table(rows, head=True, numbers=True)


def _signed(saving: float, base: float, shown: float | None = None) -> str:
    """A saving in its colour; a loss beyond `NOISE` is a regression."""
    value = saving if shown is None else shown
    figure = f"{value:+,.0f}" if shown else f"{value:,.0f}"
    if saving < -NOISE * base and saving < 0:
        word = "" if shown is not None else " REGRESSION"
        return f'<span class="worse">{figure}{word}</span>'
    return f'<span class="better">{figure}</span>' if saving > 0 else figure


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _place(place: str | None) -> str:
    return f'<span class="place mono">{text(source_text(place))}</span>' if place else ""
