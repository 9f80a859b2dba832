"""Budgets of compiled programs: what holds, what breaks, and what can't be decided."""

import importlib.util
import math
from pathlib import Path

import pytest

from relower.gates import cost_budget
from relower.gates.budget import parse_budget
from relower.gates.config import load_matrix
from relower.gates.cost_budget import nodes_to_compile
from relower.gates.matrix import Ready, judge, run_matrix, steps
from relower.gates.results import GateResult
from relower.lowering.artifact_index import form_digest
from relower.lowering.compile import Compiled, StagedModule
from relower.lowering.cost.estimate import Figures
from relower.lowering.cost.ladder import build_cost
from relower.lowering.errors import InputError
from relower.lowering.program import Form, Program, Section, Stamp

HLO = Path(__file__).parents[1] / "lowering" / "cost" / "data" / "scan_sort.hlo"
CASES = """
import jax, jax.numpy as jnp
import relower

X = jax.ShapeDtypeStruct((64,), jnp.int32)

def base():
    return relower.case(lambda x: jnp.argsort(x & 7), X)

def other():
    return relower.case(lambda x: jnp.argsort(x & 7) + 1, X)
"""
HEAD = """
[[program]]
name = "p"
variants.base = "m.py:base"
variants.other = "m.py:other"
passes.packed = ["argsort_packed_key"]
[[program.cell]]
variant = "other"
differs-from = "base"
"""


def made(cycles, temp=1000, rung="profile"):
    staged = StagedModule(b"", {}, "TPU7x:2x2x1", "p")
    memory = {"arguments": 8, "outputs": 4, "alias": 1, "temp": temp, "code": 3, "peak": 2000}
    figures = Figures("salvaged", cycles, {})
    return build_cost(staged, Compiled(HLO.read_text(), memory, {}, 1.0), figures, ["it died"])


FULL = {op.name: 100 for op in made({"sort.8": 1}).ops}
CYCLES = math.ceil(made(FULL).total().cycles)


def program(text):
    sections = (Section("main", "function", text, "main"),)
    form = Form("exact", sections, form_digest(sections))
    ops = {"stablehlo.add": 3}
    return Program({"exact": form}, {}, {}, ops, {}, Stamp({"jax": "1"}))


@pytest.fixture
def gate(tmp_path):
    """Judges one cell with a budget, on programs and costs made here."""

    def judged(budget, other, base=""):
        (tmp_path / "relower.toml").write_text(f"{HEAD}budget = {budget!r}\n")
        found = load_matrix(tmp_path / "relower.toml")
        lowered = {node: Ready(program(node.name)) for node in found.nodes()}
        by_name = {"other": other, "base": base}
        costs = {node: by_name[node.name] for node in found.nodes() if by_name[node.name] != ""}
        cell = judge(found.cells[0], lowered, found, "check", costs)
        return GateResult((cell,), ()).exit_code, cell.messages

    return judged


@pytest.mark.parametrize(
    "budget",
    [
        "cycles <= 1.00x base",
        "cycles <= 1x",
        f"cycles <= {CYCLES}",
        "temp <= 0.5x base",
        "peak <= 2 KiB",
        "code >= 1, <= 3",
        "sorts.operands <= 2",
        "hlo.sort == 1",
    ],
)
def test_what_holds(gate, budget):
    assert gate(budget, made(FULL), made(FULL, temp=2000)) == (0, ())


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("cycles < 1.00x base", "other: cycles is 6,848"),
        (f"cycles < {CYCLES - 1}", "other: cycles is 6,848"),
        ("temp <= 0.4x base", "other: temp is 1,000; wanted <= 0.4x base, which has 2,000"),
        ("sorts.operands <= 1", "other: sorts.operands is 2; wanted <= 1"),
        ("hlo.sort == 0", "other: hlo.sort is 1; wanted == 0"),
    ],
)
def test_what_breaks(gate, budget, said):
    code, (message,) = gate(budget, made(FULL), made(FULL, temp=2000))
    assert code == 1
    assert message.startswith(said)


MISSING = "libtpu isn't installed: install relower[tpu]"


@pytest.mark.parametrize(
    ("budget", "other", "base", "said"),
    [
        ("cycles <= 1x base", MISSING, made(FULL), f"other: cycles isn't known: {MISSING}"),
        ("temp <= 1x base", made(FULL), MISSING, f"base: temp isn't known: {MISSING}"),
        ("sorts.operands <= 1", MISSING, "", f"other: sorts.operands isn't known: {MISSING}"),
        (
            "cycles <= 100000",
            made({"copy.10": 5}),
            "",
            "other: cycles <= 100000 can't be decided: the sum covers 1 of 8 operations",
        ),
        (
            "cycles <= 100000",
            made({}),
            "",
            "other: cycles <= 100000 can't be decided: rung counts: it died",
        ),
        (
            "cycles <= 1x base",
            made({}),
            made(FULL),
            "other: cycles <= 1x base can't be decided: base's figures stand on the rung "
            "'salvaged', other's on 'counts'",
        ),
    ],
)
def test_what_cannot_be_decided_is_never_success(gate, budget, other, base, said):
    code, (message,) = gate(budget, other, base)
    assert code == 2
    assert message.startswith(said)
    assert "\n" not in message


def test_only_what_a_budget_is_about_is_compiled(tmp_path):
    def names(budget):
        (tmp_path / "relower.toml").write_text(f"{HEAD}budget = {budget!r}\n")
        return [n.name for n in nodes_to_compile(load_matrix(tmp_path / "relower.toml"))]

    assert names("temp <= 4000") == ["other"]
    assert names("ops.total <= 100") == []
    assert names("cycles <= 1x base+packed") == ["other", "base+packed"]
    assert names("cycles <= 1x") == ["other", "base"]


@pytest.mark.parametrize(
    "wrong", ["cycles.total <= 1", "temp.x <= 1", "sorts.keys <= 1", "hlo.Sort <= 1", "hlo <= 1"]
)
def test_a_metric_that_nothing_measures(wrong):
    with pytest.raises(InputError):
        parse_budget(wrong, "cell")


def test_from_the_file_to_the_exit_code(tmp_path, monkeypatch):
    """The cases are staged for the target; only the compiler's part is played."""
    (tmp_path / "m.py").write_text(CASES)
    budget = 'budget = ["temp <= 1x base", "sorts.operands <= 2"]'
    (tmp_path / "relower.toml").write_text(HEAD + budget)
    found = load_matrix(tmp_path / "relower.toml")
    seen, noted = [], []

    def measure(staged, *, limits, cache):
        seen.append((staged.target, limits.seconds, len(staged.module) > 0, cache))
        if len(seen) == 2:
            raise InputError(f"{staged.name}: it died")
        return made(FULL)

    monkeypatch.setattr(cost_budget, "measure", measure)
    result = run_matrix(found, noted.append)
    assert seen == [("TPU7x:2x2x1", found.timeout, True, None)] * 2
    assert (result.exit_code, result.cells[0].messages) == (2, ("base: temp isn't known: it died",))
    assert len(noted) == steps(found) == 5


@pytest.mark.libtpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu isn't installed, so nothing is compiled: install relower[tpu]",
)
def test_the_documented_budgets_on_the_compiler(tmp_path):
    """The packed form keeps them; the stable sort, held to them against the packed one, doesn't."""
    (tmp_path / "m.py").write_text(CASES.replace("(64,)", "(8192,)").replace("& 7)", "& 511)"))
    budget = ["cycles <= 1.00x {0}", "temp <= 0.9x {0}", "sorts.operands <= 1"]
    text = HEAD.partition("[[program.cell]]")[0]
    for passes, other in (("packed", "base"), ("none", "base+packed")):
        limits = [b.format(other) for b in budget]
        text += f'[[program.cell]]\nvariant = "base"\npasses = "{passes}"\n'
        text += f'differs-from = "{other}"\nbudget = {limits!r}\n'
    (tmp_path / "relower.toml").write_text(text)
    kept, broken = run_matrix(load_matrix(tmp_path / "relower.toml")).cells
    assert kept.messages == ()
    said = " ".join(broken.messages)
    assert "cycles is" in said
    assert "temp is" in said
    assert "sorts.operands is 2; wanted <= 1" in said
