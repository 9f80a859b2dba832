"""Write docs/passes/*.md from the passes themselves, docs/json.md from its schema.

    python docs/generate.py            write the pages
    python docs/generate.py --check    exit 1 if a page is not what would be written

The before and after of each page are the pass's own functions, and the counts of equations are
taken from them as they are traced today, so a page can't go stale: a test runs the check.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import relower
from relower.compat import bodies, jaxprs
from relower.gates.pass_checks import mesh_of
from relower.passes.base import Contract, Pass
from relower.passes.registry import all_passes

DOCS = Path(__file__).parent
SENTENCES = {
    "bitwise": "the same bits, NaN payloads and the sign of zero included.",
    "value": "equal as numbers; the sign of a zero, NaN payloads and quieting, and flushed "
    "subnormals may differ.",
    "rounding": "one rounding stands elsewhere; the error is at most 1.10× as large.",
}
# Calls, and what jax wraps around an operation: not operations themselves.
_NOT_COUNTED = frozenset({"jit"})


def count_equations(body: Any, counts: Counter[str] | None = None) -> Counter[str]:
    """Equations by primitive in a jaxpr and all the bodies that relower enters."""
    counts = Counter() if counts is None else counts
    for eqn in jaxprs.opened(body).eqns:
        name = eqn.primitive.name
        if name == "sort":
            stable = "stable" if eqn.params["is_stable"] else "unstable"
            keys, operands = eqn.params["num_keys"], len(eqn.invars)
            name = f"{stable} sort, operands: {operands}, keys: {keys}"
        if name not in _NOT_COUNTED:
            counts[name] += 1
        for entered in bodies.carried(eqn).entered:
            count_equations(entered.body, counts)
    return counts


def page(rewrite: Pass) -> str:
    """The page of one pass."""
    module = inspect.getmodule(rewrite.before)
    assert module is not None
    title, _, story = inspect.cleandoc(module.__doc__ or "").partition("\n")
    parts = [
        f"# {rewrite.name}",
        "<!-- Written by docs/generate.py from the pass itself; edit the pass, not this page. -->",
        title.removeprefix(f"{rewrite.name}: ").capitalize(),
        _prose(story.strip()),
        "## Contract",
        f"`{rewrite.contract.value.upper()}`: {_sentence(rewrite)}",
        f"Each application lowers the number of {rewrite.measure}, so rewriting ends.",
        *_ways(rewrite),
        *(["It runs only where it is asked for by name."] if rewrite.by_name else []),
        "## What must hold",
        "\n".join(f"- `{r.code}`: {r.sentence}" for r in rewrite.requirements),
        "A site that fails a requirement is declined with that code, the value found, and the "
        "user's source line.",
        "## Before",
        _code(rewrite.before),
        "## After",
        _code(rewrite.after),
        "`relower` turns the first into the second: the tests prove that both lower to the same "
        "TPU program at level `inlined`.",
        "## Equations",
        *(_table(rewrite, example) for example in rewrite.examples()),
    ]
    return "\n\n".join(parts) + "\n"


def _sentence(rewrite: Pass) -> str:
    """The docstring that stands under a member of Contract."""
    return SENTENCES[rewrite.contract.value]


def _ways(rewrite: Pass) -> Iterator[str]:
    """What `choose` may ask for."""
    if rewrite.ways:
        yield "## Ways"
        yield f'`choose={{"{rewrite.name}": way}}` takes one of ' + (
            ", ".join(f"`{way}`" for way in rewrite.ways) + "."
        )


def _prose(story: str) -> str:
    """The header docstring; its before/after lines as a block."""
    head, _, rest = story.partition("\n\n")
    return f"```text\n{head.replace('``', '')}\n```\n\n{rest}"


def _code(function: Callable[..., Any]) -> str:
    return f"```python\n{inspect.getsource(function).strip()}\n```"


def _table(rewrite: Pass, example: Any) -> str:
    args = ", ".join(f"{a.dtype}{list(a.shape)}" for a in example.args)
    optimized = relower.optimize(rewrite.before, passes=[rewrite.name])
    with mesh_of(example):
        before = count_equations(jax.make_jaxpr(rewrite.before)(*example.args))
        after = count_equations(jax.make_jaxpr(optimized)(*example.args))
    names = [n for n in sorted(before | after) if before[n] != after[n]]
    rows = "\n".join(f"| {n} | {before[n]} | {after[n]} |" for n in names)
    return (
        f"On {example.label} (`{args}`), only what changes:\n\n"
        f"| equation | before | after |\n|---|---|---|\n{rows}"
    )


def index_page() -> str:
    """The page that lists the passes."""
    rows = [
        f"| [{p.name}]({p.name}.md) | {p.summary}{'; only by name' if p.by_name else ''} |"
        for p in all_passes()
    ]
    of_contract = {
        contract: [row for row, p in zip(rows, all_passes(), strict=True) if p.contract is contract]
        for contract in Contract
    }
    parts = [
        "# The passes",
        "<!-- Written by docs/generate.py from the passes; edit those, not this page. -->",
        "Each page has a pass's code before and after, what must hold for it, and what it changes, "
        "all taken from the pass itself. `relower passes NAME` prints the same.",
        "## Contracts",
        "A contract is a claim about the operations' semantics as StableHLO states them. "
        '`relower.optimize` takes `bitwise` passes by default, `contract="value"` and '
        '`contract="rounding"` admit the looser ones as well; those marked so run only by name.',
    ]
    for contract, listed in of_contract.items():
        head = f"### {contract.value}"
        table = "\n".join(["| pass | rewrites |", "|---|---|", *sorted(listed)])
        parts += [head, SENTENCES[contract.value][0].upper() + SENTENCES[contract.value][1:], table]
    return "\n\n".join(parts) + "\n"


def json_page() -> str:
    """The page of what ``--json`` prints."""
    schema = json.loads((DOCS / "json.schema.json").read_text(encoding="utf-8"))
    parts = [
        "# What `--json` prints",
        "<!-- Written by docs/generate.py from json.schema.json; edit that, not this page. -->",
        "Each command prints one JSON object, an [error](#error) where its input is bad. "
        "Its `schema` names its kind and version; "
        "[json.schema.json](json.schema.json) is the whole as a JSON Schema, and the tests hold "
        "every command's output against it. Read only what you know: a field may be added under "
        "the same version.",
    ]
    shapes = schema["$defs"].items()
    for name, shape in sorted(shapes, key=lambda item: "schema" not in item[1]["properties"]):
        parts += [f"## {name}", shape["description"], _fields(shape)]
    return "\n\n".join(parts) + "\n"


def _fields(shape: Mapping[str, Any]) -> str:
    rows = [
        f"| {path} | {_kind(value)} | {value.get('description', '')} |"
        for path, value in _flat(shape)
    ]
    return "\n".join(["| field | type | |", "|---|---|---|", *rows])


def _flat(shape: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field of an object, those of the objects inside it after it."""
    for name, value in shape.get("properties", {}).items():
        path = f"{prefix}`{name}`"
        yield path, value
        inner = value
        while inner.get("type") == "array" or isinstance(inner.get("additionalProperties"), dict):
            path += "[]" if inner.get("type") == "array" else "{}"
            inner = inner.get("items", inner.get("additionalProperties"))
        yield from _flat(inner, f"{path}.")


def _kind(value: Mapping[str, Any]) -> str:
    if "const" in value:
        return f'`"{value["const"]}"`'
    if "enum" in value:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in value["enum"])
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in value:
        return " or ".join(map(_kind, value["anyOf"]))
    if value["type"] == "array":
        return f"array of {_kind(value['items'])}"
    if isinstance(value.get("additionalProperties"), dict):
        return f"object of {_kind(value['additionalProperties'])}"
    return str(value["type"])


def pages() -> Iterator[tuple[Path, str]]:
    """Every generated page and what it should hold."""
    yield DOCS / "json.md", json_page()
    yield DOCS / "passes" / "index.md", index_page()
    for rewrite in all_passes():
        yield DOCS / "passes" / f"{rewrite.name}.md", page(rewrite)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args(argv).check
    stale = 0
    for path, text in pages():
        if check and (not path.exists() or path.read_text() != text):
            print(f"{path.name} is stale: run python docs/generate.py", file=sys.stderr)
            stale += 1
        elif not check:
            path.write_text(text)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
