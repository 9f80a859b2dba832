"""Write docs/passes/*.md from the passes themselves.

    python docs/generate.py            write the pages
    python docs/generate.py --check    exit 1 if a page is not what would be written

The before and after of each page are the pass's own functions, and the counts of equations are
taken from them as they are traced today, so a page can't go stale: a test runs the check.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import relower
from relower.compat import bodies, jaxprs
from relower.passes.base import Pass
from relower.passes.registry import all_passes

PAGES = Path(__file__).parent / "passes"
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
    return {
        "bitwise": "the same bits, NaN payloads and the sign of zero included.",
        "value": "equal as numbers; the sign of a zero and NaN payloads may differ.",
        "rounding": "one rounding stands elsewhere; the error is at most 1.10× as large.",
    }[rewrite.contract.value]


def _prose(story: str) -> str:
    """The header docstring; its before/after lines as a block."""
    head, _, rest = story.partition("\n\n")
    return f"```text\n{head.replace('``', '')}\n```\n\n{rest}"


def _code(function: Callable[..., Any]) -> str:
    return f"```python\n{inspect.getsource(function).strip()}\n```"


def _table(rewrite: Pass, example: Any) -> str:
    args = ", ".join(f"{a.dtype}{list(a.shape)}" for a in example.args)
    optimized = relower.optimize(rewrite.before, passes=[rewrite.name])
    with _mesh(example):
        before = count_equations(jax.make_jaxpr(rewrite.before)(*example.args))
        after = count_equations(jax.make_jaxpr(optimized)(*example.args))
    names = [n for n in sorted(before | after) if before[n] != after[n]]
    rows = "\n".join(f"| {n} | {before[n]} | {after[n]} |" for n in names)
    return (
        f"On {example.label} (`{args}`), only what changes:\n\n"
        f"| equation | before | after |\n|---|---|---|\n{rows}"
    )


def _mesh(example: Any) -> contextlib.AbstractContextManager[Any]:
    """The mesh that an example is traced under; no device is needed."""
    if not example.mesh:
        return contextlib.nullcontext()
    names, sizes = tuple(example.mesh), tuple(example.mesh.values())
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, names, axis_types=kinds))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args(argv).check
    stale = 0
    for rewrite in all_passes():
        path = PAGES / f"{rewrite.name}.md"
        text = page(rewrite)
        if check and (not path.exists() or path.read_text() != text):
            print(f"{path.name} is stale: run python docs/generate.py", file=sys.stderr)
            stale += 1
        elif not check:
            path.write_text(text)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
