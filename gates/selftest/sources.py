"""The programs' source, changed: what a person edits, and what must come of it.

Mutants of a module test the normal form; these test the way there as well: what jax does with the
source, what jit keeps beside the module, what the stamp says.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...lowering.load import load_case
from ...lowering.lower import lower
from ...lowering.program import LEVELS, Program
from .places import SOURCE
from .programs import CHOSEN_NAMES
from .score import Row
from .verdicts import compared, fault_of


@dataclass(frozen=True)
class SourceMutant:
    """A text of the programs' file, and what takes its place."""

    name: str
    old: str
    new: str
    seen_in: str = "program"


MUTANTS: tuple[SourceMutant, ...] = (
    SourceMutant("donation dropped", "donate_argnums=0", "donate_argnums=()"),
    SourceMutant("donation added", "donate_argnums=0", "donate_argnums=(0, 1)"),
    SourceMutant("mesh axis name", '"data"', '"rows"'),
    SourceMutant("sharding of the arguments", "NamedSharding(mesh, spec)",
                 "NamedSharding(mesh, P())"),
    SourceMutant("sum instead of difference", '- batch["targets"]', '+ batch["targets"]'),
    SourceMutant("compare direction", "norm < 1.0", "norm > 1.0", "stablehlo.compare"),
    SourceMutant("float constant, scalar", "RATE = 3e-3", "RATE = 3.0000003e-3"),
    SourceMutant("float constant, splat", "0.125, np.float32", "0.12500001, np.float32"),
    SourceMutant("float constant, dense", "1e4", "1.0001e4"),
    SourceMutant("rng algorithm", 'impl="rbg"', 'impl="threefry2x32"'),
    SourceMutant("rematerialisation dropped", "@jax.checkpoint", ""),
    SourceMutant("metadata for the compiler", 'step_name="update"', 'step_name="advance"'),
    SourceMutant("a kernel's op, add to mul", "v * 0.5 + staged", "v * 0.5 * staged", "kernel"),
    SourceMutant("a kernel's loop bound", "fori_loop(0, 3,", "fori_loop(0, 4,", "kernel"),
    SourceMutant("memory space", "memory_space=pltpu.VMEM", "memory_space=pl.ANY", "kernel"),
    SourceMutant("vmem limit", "32 << 20", "33 << 20", "stablehlo.custom_call"),
    SourceMutant("input fusion", "input_fusion=[False]", "input_fusion=[True]",
                 "stablehlo.custom_call"),
    SourceMutant("has_side_effect", "side_effects=True", "side_effects=False",
                 "stablehlo.custom_call"),
    SourceMutant("two kernels sharing one collective id", "- 0.5, 2)", "- 0.5, 1)",
                 "stablehlo.custom_call"),
)  # fmt: skip
HOISTED = SourceMutant("float constant, hoisted", "1e4", "1.0001e4")
"""Made where jax passes large constants as arguments, a setting that it reads when imported."""


def renamed(text: str) -> str:
    """The source with every name of `CHOSEN_NAMES` replaced, in code and in strings alike."""
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, string = token.type, token.string
        bare = string.strip("\"'")
        if kind in (tokenize.NAME, tokenize.STRING) and bare in CHOSEN_NAMES:
            string = string.replace(bare, CHOSEN_NAMES[bare])
        tokens.append((kind, string))
    return tokenize.untokenize(tokens)


def judged(program: str, folder: Path, mutants: tuple[SourceMutant, ...]) -> Iterator[Row]:
    """A row for each mutant of one program's source, and for what must not matter in it.

    Everything is lowered in this process, so each program comes after unrelated traces.
    """
    text = SOURCE.read_text()
    base = _lowered(text, program, folder / "base.py")
    for number, mutant in enumerate(mutants):
        row = Row(program, f"source: {mutant.name}", "mutant", "caught", levels=LEVELS)
        changed = text.replace(mutant.old, mutant.new)
        assert changed != text, mutant.old
        other = _lowered(changed, program, folder / f"mutant_{number}.py")
        fault = fault_of(base, other, mutant.seen_in)
        yield replace(row, state="survived", reason=fault, levels=()) if fault else row
    for name, change in VARIATIONS.items():
        row = Row(program, f"source: {name}", "noise", "matched", levels=LEVELS)
        other = _lowered(change(text), program, folder / f"{len(name)}_{program}.py")
        yield compared(row, base, other)


def _lowered(text: str, program: str, path: Path) -> Program:
    path.write_text(text)
    return lower(load_case(f"{path}:{program}"))


VARIATIONS: dict[str, Callable[[str], str]] = {
    "lowered again in one process": lambda text: text,
    "lines shifted": lambda text: "\n" * 40 + text,
    "functions, kernels, arguments and scopes renamed": renamed,
}
