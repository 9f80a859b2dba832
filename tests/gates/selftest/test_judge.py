"""Every mutant on one real program; and that a comparison which doesn't compare is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relower.compat.mlir import ir
from relower.gates.selftest import judge
from relower.gates.selftest.draft import Draft
from relower.gates.selftest.liveness import Liveness
from relower.gates.selftest.places import SOURCE
from relower.gates.selftest.run import PROGRAMS
from relower.lowering import LEVELS, dataflow, load_case, mosaic, printer, purity


@pytest.fixture(scope="session")
def staged():
    return judge.staged(load_case(f"{SOURCE}:flash_step"))


@pytest.fixture(scope="session")
def base(staged):
    return judge._program(staged.draft().normal())


def row(staged, name):
    """The row of one mutant or variation, against a base made by the same comparison."""
    base = judge._program(staged.draft().normal())
    for mutant in judge.MUTANTS:
        if mutant.name == name:
            return judge._mutant_row(staged, base, mutant, 1, "flash_step")
    for variation in judge.VARIATIONS:
        if variation.name == name:
            return judge._variation_row(staged, base, variation, "flash_step")
    raise AssertionError(name)


def test_every_mutant_is_caught_and_every_variation_matched(staged):
    rows = list(judge.judged(staged, 1, "flash_step"))
    assert {r.state for r in rows} == {"caught", "matched"}, [r for r in rows if r.reason]
    assert len(rows) == len(judge.MUTANTS) + len(judge.VARIATIONS)


def test_names_are_distinct():
    names = [m.name for m in (*judge.MUTANTS, *judge.VARIATIONS)]
    assert len(set(names)) == len(names)


def test_the_programs_are_there():
    text = SOURCE.read_text()
    assert all(f"def {name}(" in text for name in PROGRAMS)


# A comparison that lost something


def test_lost_frontend_attributes_are_noticed(staged, monkeypatch):
    normal = Draft.normal

    def forgetful(self):
        for op in self.ops():
            if "mhlo.frontend_attributes" in op.attributes:
                del op.attributes["mhlo.frontend_attributes"]
        return normal(self)

    monkeypatch.setattr(Draft, "normal", forgetful)
    found = row(staged, "frontend attribute changed")
    assert found.state == "survived"
    assert found.reason.endswith("IDENTICAL at exact, wanted DIFFERENT")
    assert row(staged, "num_partitions").state == "caught"


def test_kernels_that_are_all_alike_are_noticed(staged, monkeypatch):
    monkeypatch.setattr(mosaic, "digest_of", lambda text: "0" * 64)
    assert row(staged, "a kernel's loop bound").state == "survived"


def test_effects_taken_for_pure_are_noticed(staged, monkeypatch):
    is_pure = purity.is_pure_leaf
    monkeypatch.setattr(
        dataflow.purity,
        "is_pure_leaf",
        lambda op: is_pure(op) or op.name == "stablehlo.optimization_barrier",
    )
    monkeypatch.setattr(purity, "is_branch", lambda op: op.name.endswith(".all_reduce"))
    found = row(staged, "two effects swapped")
    assert found.state == "survived"
    assert "IDENTICAL at dataflow" in found.reason


def test_channels_that_are_all_one_are_noticed(staged, monkeypatch):
    name = printer.Names.name

    def careless(self, kind, key):
        return "1" if kind == "channel" else name(self, kind, key)

    monkeypatch.setattr(printer.Names, "name", careless)
    assert row(staged, "channels parted").state == "survived"


def test_names_taken_literally_are_noticed(staged, monkeypatch):
    name = printer.Names.name

    def literal(self, kind, key):
        found = name(self, kind, key)
        return key if kind == "func" else found

    monkeypatch.setattr(printer.Names, "name", literal)
    assert row(staged, "private functions renamed").state == "not matched"


def test_an_unknown_construct_is_no_catch(staged, monkeypatch):
    def blind(self, op):
        self._session.unknown("everything", "for a test")

    monkeypatch.setattr(mosaic.KernelTable, "_registered", blind)
    rows = list(judge.judged(staged, 1, "flash_step"))
    assert [r.state for r in rows] == ["survived"]
    assert "it holds everything" in rows[0].reason


def test_a_report_that_names_another_place_is_no_catch(staged):
    [mutant] = [m for m in judge.MUTANTS if m.name == "vmem limit"]
    base = judge._program(staged.draft().normal())
    found = judge._mutant_row(
        staged, base, replace(mutant, seen_in="stablehlo.sine"), 1, "flash_step"
    )
    assert found.state == "survived"
    assert "doesn't name stablehlo.sine" in found.reason


# Where mutants are made


def test_sites_are_spread_and_distinct(staged):
    [mutant] = [m for m in judge.MUTANTS if m.name == "float constant, scalar"]
    indices = judge._indices(staged, mutant, 4)
    assert len(indices) == 4
    assert indices == sorted(set(indices))


DEAD = """
module {
  func.func public @main(%a: tensor<f32>) -> tensor<f32> {
    %dead = stablehlo.sine %a : tensor<f32>
    %x = stablehlo.cosine %a : tensor<f32>
    %0:2 = func.call @pick(%dead, %x) : (tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<f32>)
    return %0#1 : tensor<f32>
  }
  func.func private @pick(%a: tensor<f32>, %b: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
    %1 = stablehlo.tanh %a : tensor<f32>
    %2 = stablehlo.exponential %b : tensor<f32>
    return %1, %2 : tensor<f32>, tensor<f32>
  }
}
"""


def test_what_reaches_no_result_does_not_live():
    from jax._src.interpreters import mlir

    context = mlir.make_ir_context()
    with context:
        draft = Draft(ir.Module.parse(DEAD).operation.clone(), "0", (), {})
        liveness = Liveness(draft.functions)
        lives = {op.name: liveness.lives(op) for op in draft.ops() if op.results}
    assert lives["stablehlo.cosine"]
    assert lives["stablehlo.exponential"]
    assert not lives["stablehlo.sine"]
    assert not lives["stablehlo.tanh"]


def test_the_base_has_every_level(base):
    assert set(base.forms) == set(LEVELS)
