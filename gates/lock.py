"""``relower.lock``: the sites that were applied in each program of a gate, and what is lost since.

A text file kept in git, one section for each program and version of jax, for jax's name scopes and
patterns differ between versions. A line a site, by its address; below, the equations around it.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..lowering.errors import InputError
from ..lowering.words import plural

FORMAT = 1
_HEAD = f"""# The sites that relower rewrites in each program of the gate.
# `relower lock` writes this file, `relower gate` fails where a site is lost.
format = {FORMAT}
"""


@dataclass(frozen=True)
class Locked:
    """One program, as it was accepted."""

    name: str
    """As in ``moe: step+packed``."""
    jax: str
    """The version of jax."""
    sites: Mapping[str, tuple[str, ...]]
    """The equations around each applied site, by its address."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """How many equations run it, by address, where these are several."""

    @property
    def key(self) -> tuple[str, str]:
        """What no two sections share."""
        return self.name, self.jax

    def counts(self) -> Counter[str]:
        """Sites by pass, each as often as it is run."""
        found: Counter[str] = Counter()
        for address in self.sites:
            found[address.partition("@")[0]] += self.calls.get(address, 1)
        return found


@dataclass(frozen=True)
class Change:
    """A site that was lost or is new."""

    address: str
    then: tuple[str, ...]
    """The equations around it when it was accepted."""
    now: tuple[str, ...]
    """Those at the nearest place at which its pass looks now."""
    reasons: tuple[str, ...]
    """Why the pass declines that place."""
    gone: int = 0
    """Of how many equations that run it, where others still do."""
    of: int = 0


def locked(name: str, jax: str, report: Mapping[str, Any]) -> Locked:
    """What a report, as plain data, gives to remember."""
    sites: dict[str, tuple[str, ...]] = {}
    calls: Counter[str] = Counter()
    for site in report["sites"]:
        for address in site["addresses"] if site["status"] == "applied" else ():
            sites[address] = tuple(site["around"])
            calls[address] += site["calls"]
    several = {address: n for address, n in calls.items() if n > 1}
    return Locked(name, jax, dict(sorted(sites.items())), several)


def written(entries: Sequence[Locked]) -> str:
    """The text of a lock file."""
    parts = [_HEAD]
    for entry in sorted(entries, key=lambda e: e.key):
        parts.append(f"\n[[program]]\nname = {_text(entry.name)}\njax = {_text(entry.jax)}\n"
                     f"sites = {len(entry.sites)}\n")  # fmt: skip
        for address, around in entry.sites.items():
            lines = "".join(f"\n  {_text(line)}," for line in around)
            calls = f"calls = {entry.calls[address]}\n" if address in entry.calls else ""
            parts.append(
                f"[[program.site]]\naddress = {_text(address)}\n{calls}around = [{lines}\n]\n"
            )
    return "".join(parts)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read(path: Path) -> tuple[Locked, ...]:
    """The sections of a lock file; none where there is no file.

    Raises:
        InputError: it can't be read, or isn't what `written` writes; one line.
    """
    if not path.exists():
        return ()
    try:
        data = tomllib.loads(path.read_bytes().decode())
        if data.get("format") != FORMAT:
            raise ValueError(f"its format is {data.get('format')!r}, wanted {FORMAT}")
        if not set(data) <= {"format", "program"}:
            raise ValueError("unknown keys")
        entries = tuple(_entry(value) for value in data.get("program", []))
        if len({e.key for e in entries}) != len(entries):
            raise ValueError("a program twice")
        return entries
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"{path}: not a whole lock file ({reason}); take it from git, or delete it and run "
            "`relower lock` again"
        ) from None


def _entry(value: Mapping[str, Any]) -> Locked:
    sites: dict[str, tuple[str, ...]] = {}
    calls: dict[str, int] = {}
    for site in value.get("site", []):
        address, around = site["address"], site["around"]
        if not all(isinstance(t, str) for t in (address, *around)) or isinstance(around, str):
            raise ValueError("a site's address or the lines around it")
        if address in sites:
            raise ValueError(f"{address} twice")
        sites[address] = tuple(around)
        if "calls" in site:
            if type(site["calls"]) is not int or site["calls"] < 2:
                raise ValueError(f"{address} with calls = {site['calls']!r}")
            calls[address] = site["calls"]
    count = value["sites"]
    if count != len(sites):
        raise ValueError(f"{value['name']} has {len(sites)} sites, {count} were written")
    if not isinstance(value["name"], str) or not isinstance(value["jax"], str):
        raise ValueError("a name or a version")
    return Locked(value["name"], value["jax"], sites, calls)


def lost(was: Locked, report: Mapping[str, Any]) -> list[Change]:
    """Sites that were applied and are not, or by fewer equations that run them.

    Each with the nearest place there is now. Several equations have one address where they are
    called from one line, as in a Python loop over layers.
    """
    now = locked(was.name, was.jax, report)
    found: list[Change] = []
    for address, around in was.sites.items():
        before = was.calls.get(address, 1)
        after = now.calls.get(address, 1) if address in now.sites else 0
        if after < before:
            change = _change(address, around, report)
            found.append(replace(change, gone=before - after, of=before) if after else change)
    return found


def gained(was: Locked, report: Mapping[str, Any]) -> list[str]:
    """Addresses of sites that are applied and were not."""
    return [a for a in locked(was.name, was.jax, report).sites if a not in was.sites]


def _change(address: str, then: tuple[str, ...], report: Mapping[str, Any]) -> Change:
    owner, _, path = address.partition("@")
    mine = [s for s in report["sites"] if s["pass"] == owner and s["status"] == "declined"]
    place, function = path.rpartition("#")[0], path.rpartition("#")[0].rpartition(":")[2]

    def near(site: Mapping[str, Any]) -> int:
        paths = [a.partition("@")[2] for a in site["addresses"]]
        if path in paths:
            return 3
        places = [p.rpartition("#")[0] for p in paths]
        return 2 if place in places else int(any(p.rpartition(":")[2] == function for p in places))

    best = max(mine, key=near, default=None)
    if best is None or near(best) == 0:
        return Change(address, then, (), ())
    reasons = tuple(f"{r['code']}: {r['sentence']}" for r in best["reasons"])
    return Change(address, then, tuple(best["around"]), reasons)


def described(change: Change) -> list[str]:
    """A change in lines for people."""
    how = f" in {change.gone} of {change.of} equations that run it" if change.of else ""
    found = [f"lost{how}: {change.address}", "then:", *(f"  {line}" for line in change.then)]
    if change.now:
        found += ["now, at the nearest place:", *(f"  {line}" for line in change.now)]
        found += [f"declined: {reason}" for reason in change.reasons]
    else:
        found.append("now: its pass finds nothing there that it could start from")
    return found


def report_of(node: Any, folder: Path, timeout: float) -> dict[str, Any]:
    """What the passes of a gate's program do to it now.

    Raises:
        ChildFailed: it can't be traced.
    """
    from dataclasses import asdict

    from .child import Job, run

    job = Job(
        "explain", spec=node.spec, args=node.args, target=node.target, route=node.route,
        mesh=None if node.mesh is None else dict(node.mesh), **asdict(node.choice),
    )  # fmt: skip
    return run(job, timeout=timeout, cwd=folder)  # type: ignore[no-any-return]


def jax_version() -> str:
    """The version of jax that is installed."""
    from importlib.metadata import version

    return version("jax")


def lock_path(matrix_path: Path) -> Path:
    """``relower.lock`` beside ``relower.toml``."""
    return matrix_path.with_suffix(".lock")


def compared(
    name: str, node: Any, path: Path, folder: Path, timeout: float
) -> tuple[list[str], list[str], list[str]]:
    """What is broken, what is undecided, and notes on one program, a line each.

    Raises:
        InputError: the lock file is damaged, or the program can't be traced.
    """
    entries = {entry.key: entry for entry in read(path)}
    version = jax_version()
    was = entries.get((name, version))
    if was is None:
        others = sorted(jax for known, jax in entries if known == name)
        if others:
            said = f"{path.name} knows it of jax {', '.join(others)}, and not of {version}"
            return [], [f"undecided: {said}; run `relower lock`"], []
        return [f"{path.name} doesn't have it; run `relower lock`, and commit the file"], [], []
    report = report_of(node, folder, timeout)
    broken: list[str] = []
    changes = lost(was, report)
    before, after = was.counts(), locked(name, version, report).counts()
    for owner in dict.fromkeys(c.address.partition("@")[0] for c in changes):
        broken.append(f"{owner}: {plural(before[owner], 'site')} → {after[owner]}")
    for change in changes[:_MOST_SHOWN]:
        broken += described(change)
    if len(changes) > _MOST_SHOWN:
        broken.append(f"and {plural(len(changes) - _MOST_SHOWN, 'more lost site')}")
    new = gained(was, report)
    notes = [f"new, run `relower lock` to keep it: {a}" for a in new[:_MOST_SHOWN]]
    if len(new) > _MOST_SHOWN:
        notes.append(f"and {plural(len(new) - _MOST_SHOWN, 'more new site')}")
    if not was.sites:
        return broken, ["undecided: it was locked with no site: nothing can be lost"], notes
    return broken, [], notes


_MOST_SHOWN = 4
