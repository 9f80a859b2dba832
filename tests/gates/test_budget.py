"""The grammar of budgets, and what comes of each."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relower.gates.budget import (
    COMPARISONS,
    FAMILIES,
    OTHER,
    Bound,
    check,
    measured,
    parse_bounds,
    parse_budget,
    references,
)
from relower.lowering.errors import InputError
from relower.lowering.program import Program, Section, Stamp


def said(sentence, ours, **others):
    """What is found missing where ``ours`` and the references measure as given."""
    values = {None: ours, OTHER: others.pop("other", None), **others}
    missed = check([parse_budget(sentence, "cell")], "packed", "base", lambda _, r: values[r])
    return [(miss.kind, miss.text) for miss in missed]


@pytest.mark.parametrize(
    ("bounds", "holds", "fails"),
    [
        ("<= 2", [0, 2], [3]),
        ("< 2", [0, 1], [2]),
        (">= 2", [2, 9], [1]),
        ("> 2", [3], [2]),
        ("== 2", [2], [1, 3]),
        ("!= 2", [1, 3], [2]),
        (">= 1, <= 4", [1, 4], [0, 5]),
        ("<= 1.5e3", [1500], [1501]),
        ("<=2KiB", [2048], [2049]),
        ("<= 0.5 MiB", [1 << 19], [(1 << 19) + 1]),
        ("<= 1 GiB", [1 << 30], [(1 << 30) + 1]),
    ],
)
def test_numbers(bounds, holds, fails):
    assert [said(f"ops.total {bounds}", n) for n in holds] == [[]] * len(holds)
    for n in fails:
        ((kind, text),) = said(f"ops.total {bounds}", n)
        assert kind == "broken"
        assert text.startswith(f"packed: ops.total is {n:,}; wanted ")


def test_multiples_are_exact():
    third = 3 * 10**17 + 1
    assert said("ops.total <= 1.00x base", third, base=third) == []
    assert len(said("ops.total <= 1.00x base", third + 1, base=third)) == 1
    assert said("ops.total <= 0.1x other+set", 3, **{"other+set": 30}) == []  # 0.1 * 30 > 3.0
    assert len(said("ops.total < 0.1x v-1.b", 3, **{"v-1.b": 30})) == 1
    assert said("ops.total <= 0.9x", 10, other=11) == [
        ("broken", "packed: ops.total is 10; wanted <= 0.9x of base, 11")
    ]
    assert said("ops.total <= 0.9x plain", 10, plain=11) == [
        ("broken", "packed: ops.total is 10; wanted <= 0.9x plain, which has 11")
    ]


@given(
    st.sampled_from(sorted(COMPARISONS)),
    st.integers(0, 10**20),
    st.fractions(0, 100).map(lambda f: f.limit_denominator(1)),
    st.integers(1, 10**20),
)
def test_what_is_said_is_what_the_comparison_says(sign, value, factor, base):
    factor = factor or Fraction(1)
    wanted = COMPARISONS[sign](Fraction(value), factor * base)
    assert (said(f"ops.total {sign} {factor}x base", value, base=base) == []) is wanted


def test_what_can_not_be_decided():
    assert said("ops.total <= 1", None) == [("undecided", "packed: ops.total isn't known")]
    assert said("ops.total <= 1x", 3) == [("undecided", "base: ops.total isn't known")]
    assert said("ops.total <= 1x plain", 3, plain=None) == [
        ("undecided", "plain: ops.total isn't known")
    ]


def test_bounds_that_show_nothing():
    for bounds, says in ((">= 0", "always"), ("< 0", "never"), ("<= 1, >= 0", "always")):
        with pytest.raises(InputError, match=f"{says} holds"):
            parse_bounds(bounds, "cell")
    with pytest.raises(InputError, match="a factor of 0"):
        parse_bounds("<= 0x base", "cell")
    ((kind, text),) = said("ops.total >= 1x base", 5, base=0)
    assert (kind, "base has none, so it can't fail" in text) == ("broken", True)
    ((kind, text),) = said("kernels.gmmm <= 2", 0)
    assert (kind, "no kernel is called so" in text) == ("broken", True)
    assert said("kernels.gmm <= 0", 0) == []
    assert said("kernels.gmm <= 1x base", 0, base=3) == []
    assert len(said("kernels.gmm <= 1x base", 0, base=0)) == 1
    assert said("ops.stablehlo.sort <= 1x base", 0, base=0) == []


@pytest.mark.parametrize(
    "text", ["", "2", "<= ", "<= -1", "=< 2", "<= x", "<= 2 x base", "<= 2y", "<= 1x a b", "<= 2,"]
)
def test_other_forms(text):
    with pytest.raises(InputError, match="wanted") as caught:
        parse_bounds(text, "cell 1 ops.total")
    assert str(caught.value).startswith("cell 1 ops.total: ")


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("ops <= 1", "no metric 'ops'"),
        ("ops. <= 1", "names nothing after its dot"),
        ("weight <= 1", "no metric 'weight'; known: ops, kernels, cycles, temp"),
        ("cycle <= 1", "no metric 'cycle'; did you mean 'cycles'"),
        ("kernel.gmm <= 1", "did you mean 'kernels'"),
        ("ops.stablehlo.sortt <= 1", "did you mean 'stablehlo.sort'"),
        ("<= 1", "wanted METRIC and bounds"),
    ],
)
def test_metrics(sentence, message):
    with pytest.raises(InputError, match=message):
        parse_budget(sentence, "cell")


def test_another_family_of_metrics(monkeypatch):
    """As the compiled costs will be: a name by itself, and one with checked parts."""

    def part(rest, where):
        if rest != "operands":
            raise InputError(f"{where}: sorts have no {rest}")

    monkeypatch.setitem(FAMILIES, "cycles", None)
    monkeypatch.setitem(FAMILIES, "sorts", part)
    assert said("cycles <= 1.00x base", 100.5, base=100.5) == []
    assert said("cycles < 1.00x base", 100.5, base=100.5) == [
        ("broken", "packed: cycles is 100.5; wanted < 1.00x base, which has 100.5")
    ]
    assert parse_budget("sorts.operands <= 1", "cell").bounds == (
        Bound("<=", Fraction(1), None, "<= 1"),
    )
    for wrong in ("cycles.total <= 1", "sorts <= 1", "sorts.keys <= 1"):
        with pytest.raises(InputError):
            parse_budget(wrong, "cell")
    budgets = [parse_budget("cycles <= 1x a, <= 2x b, <= 3x", "cell")]
    assert references(budgets) == ("a", "b")


def test_what_a_program_shows_by_itself():
    kernels = {"k1": Section("k1", "kernel", "", "gmm"), "k2": Section("k2", "kernel", "", "tgmm")}
    ops = {"stablehlo.add": 3, "func.return": 1}
    program = Program({}, kernels, {"k1": 2, "k2": 5}, ops, {}, Stamp({}))
    found = {m: measured(program, m) for m in (
        "ops.total", "ops.stablehlo.add", "ops.stablehlo.sort", "kernels", "kernels.gmm",
        "kernels.*gmm", "cycles")}  # fmt: skip
    assert list(found.values()) == [4, 3, 0, 7, 2, 7, None]
