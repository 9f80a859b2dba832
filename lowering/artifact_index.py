"""The index of an artifact: a `Program` as plain JSON values, and back, checked strictly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .program import LEVELS, Form, Level, Location, Program, Section, Stamp, Unknown
from .program import form_digest as form_digest

FORMAT = "relower-program"
VERSION = 2

_DIGEST_CHARS = frozenset("0123456789abcdef")
_HASHED = ("forms", "kernels", "counts", "stamp", "unknowns")


class Malformed(Exception):
    """The bytes or the schema of an artifact are wrong; the message says where."""


def canonical_json(value: Any) -> bytes:
    """``value`` as JSON in one way only: sorted keys, no spaces, ASCII."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def index_of(program: Program) -> tuple[dict[str, Any], dict[str, str]]:
    """The index without its locations digest, and every distinct text by its digest."""
    texts: dict[str, str] = {}

    def leaf(section: Section) -> list[str]:
        digest = section.digest
        texts[digest] = section.text
        return [section.name, section.kind, digest]

    index: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "forms": {
            level: {"digest": form.digest, "sections": [leaf(s) for s in form.sections]}
            for level, form in program.forms.items()
        },
        "kernels": {name: leaf(section) for name, section in program.kernels.items()},
        "counts": {
            "kernel_calls": dict(program.kernel_calls),
            "ops": dict(program.ops),
            "ledger": dict(program.ledger),
        },
        "stamp": dict(program.stamp.fields),
        "unknowns": [[u.construct, u.reason] for u in program.unknowns],
    }
    index["nodes"] = {key: _node(index[key]) for key in _HASHED}
    index["root"] = _node(index["nodes"])
    return index, texts


def locations_of(program: Program) -> dict[str, Any]:
    """Everything that no digest of the program may depend on."""

    def section(s: Section) -> dict[str, Any]:
        return {"label": s.label, "lines": list(s.locations)}

    def place(where: Location | None) -> list[Any] | None:
        return None if where is None else [where.file, where.line, where.scope]

    return {
        "table": [place(where) for where in program.locations],
        "forms": {
            level: [section(s) for s in form.sections] for level, form in program.forms.items()
        },
        "kernels": {name: section(s) for name, s in program.kernels.items()},
        "unknowns": [place(u.where) for u in program.unknowns],
        "queries": list(program.stamp.queries),
    }


def program_from(
    index: dict[str, Any], locations: dict[str, Any], texts: Mapping[str, str]
) -> Program:
    """The program that `index_of` and `locations_of` described.

    Raises:
        Malformed: a key, type, digest or count isn't what `index_of` writes.
    """
    _keys(index, {"format", "version", "locations", "nodes", "root", *_HASHED}, "index")
    _keys(locations, {"table", "forms", "kernels", "unknowns", "queries"}, "locations")
    nodes = _dict(index["nodes"], "nodes")
    _keys(nodes, set(_HASHED), "nodes")
    for key in _HASHED:
        if _node(index[key]) != nodes[key]:
            raise Malformed(f"{key} doesn't have the digest the index states")
    if _node(nodes) != index["root"]:
        raise Malformed("the root digest doesn't match the index")

    used: set[str] = set()
    table = tuple(_location(v) for v in _list(locations["table"], "table"))

    def section(leaf: Any, lines: Any, wanted: str) -> Section:
        name, kind, digest = _strings(leaf, 3, wanted)
        if kind not in (("kernel",) if wanted == "kernel" else ("function", "module")):
            raise Malformed(f"{wanted} {name!r:.40} is of kind {kind!r:.40}")
        if digest not in texts:
            raise Malformed(f"no text for {wanted} {name!r:.40}")
        used.add(digest)
        entry = _dict(lines, "locations of a section")
        _keys(entry, {"label", "lines"}, "locations of a section")
        places = tuple(_integer(i, -1, len(table) - 1) for i in _list(entry["lines"], "lines"))
        text = texts[digest]
        if len(places) not in (0, text.count("\n") + 1, text.count("\n")):
            raise Malformed(f"{wanted} {name!r:.40} has {len(places)} locations for its lines")
        label = _string(entry["label"], "label")
        found = Section(name, kind, text, label, places)  # type: ignore[arg-type]
        _ = found.kernels  # looked up now, so that comparisons are quick
        return found

    forms: dict[Level, Form] = {}
    form_lines = _dict(locations["forms"], "locations of forms")
    written = _dict(index["forms"], "forms")
    _keys(form_lines, set(written), "locations of forms")
    if not written or not set(written) <= set(LEVELS):
        raise Malformed(f"levels {sorted(written)!r:.80}; wanted some of {list(LEVELS)}")
    for level in (known for known in LEVELS if known in written):
        entry = _dict(written[level], f"form {level}")
        _keys(entry, {"digest", "sections"}, f"form {level}")
        leaves = _list(entry["sections"], "sections")
        lines = _list(form_lines[level], "locations of sections")
        if len(leaves) != len(lines):
            raise Malformed(f"{len(lines)} section locations for {len(leaves)} sections")
        sections = tuple(
            section(leaf, place, "function") for leaf, place in zip(leaves, lines, strict=True)
        )
        if len({s.name for s in sections}) != len(sections):
            raise Malformed(f"two sections of form {level} have one name")
        forms[level] = Form(level, sections, _digest(entry["digest"]))
        if form_digest(sections) != forms[level].digest:
            raise Malformed(f"form {level} doesn't have the digest the index states")

    kernel_lines = _dict(locations["kernels"], "locations of kernels")
    leaves_by_name = _dict(index["kernels"], "kernels")
    _keys(kernel_lines, set(leaves_by_name), "locations of kernels")
    kernels = {
        name: section(leaf, kernel_lines[name], "kernel") for name, leaf in leaves_by_name.items()
    }
    for name, kernel in kernels.items():
        if kernel.name != name or name != f"kernel:{kernel.digest[:12]}":
            raise Malformed(f"kernel {name!r:.40} isn't named by its digest")
    if used != set(texts):
        raise Malformed(f"{len(set(texts) - used)} texts belong to no section")

    counts = _dict(index["counts"], "counts")
    _keys(counts, {"kernel_calls", "ops", "ledger"}, "counts")
    pairs = [_strings(u, 2, "unknown") for u in _list(index["unknowns"], "unknowns")]
    places = _list(locations["unknowns"], "locations of unknowns")
    if len(pairs) != len(places):
        raise Malformed(f"{len(places)} locations for {len(pairs)} unknowns")
    return Program(
        forms=forms,
        kernels=kernels,
        kernel_calls=_counts(counts["kernel_calls"], "kernel_calls"),
        ops=_counts(counts["ops"], "ops"),
        ledger=_counts(counts["ledger"], "ledger"),
        stamp=Stamp(
            {k: _string(v, "stamp") for k, v in _dict(index["stamp"], "stamp").items()},
            tuple(_string(q, "query") for q in _list(locations["queries"], "queries")),
        ),
        unknowns=tuple(
            Unknown(construct, reason, None if place is None else _location(place))
            for (construct, reason), place in zip(pairs, places, strict=True)
        ),
        locations=table,
    )


def _node(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _keys(value: dict[str, Any], wanted: set[str], what: str) -> None:
    if set(value) != wanted:
        odd = sorted(set(value) ^ wanted)[0]
        raise Malformed(f"{what}: {'unexpected' if odd in value else 'no'} key {odd!r:.60}")


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{what}: {type(value).__name__} where an object was wanted")
    for key in value:
        _string(key, what)
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"{what}: {type(value).__name__} where a list was wanted")
    return value


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what}: {type(value).__name__} where a string was wanted")
    value.encode()  # half of a surrogate pair is valid JSON, and can't be printed
    return value


def _strings(value: Any, count: int, what: str) -> list[str]:
    values = [_string(v, what) for v in _list(value, what)]
    if len(values) != count:
        raise Malformed(f"{what}: {len(values)} strings where {count} were wanted")
    return values


def _integer(value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Malformed(f"{value!r:.40} where an integer in [{low}, {high}] was wanted")
    return value


def _counts(value: Any, what: str) -> dict[str, int]:
    return {key: _integer(n, 0, 1 << 62) for key, n in _dict(value, what).items()}


def _digest(value: Any) -> str:
    text = _string(value, "digest")
    if len(text) != 64 or not set(text) <= _DIGEST_CHARS:
        raise Malformed(f"{text!r:.80} is not a sha256 digest")
    return text


def _location(value: Any) -> Location:
    fields = _list(value, "location")
    if len(fields) != 3:
        raise Malformed(f"a location of {len(fields)} fields; wanted 3")
    file, line, scope = fields
    return Location(
        None if file is None else _string(file, "file"),
        None if line is None else _integer(line, -(1 << 31), 1 << 32),
        None if scope is None else _string(scope, "scope"),
    )
