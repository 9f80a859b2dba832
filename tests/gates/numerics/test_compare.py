"""What the gate catches, by which check, and when it says that it can't tell."""

import importlib.util
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from relower.gates.numerics import work
from relower.gates.numerics.judge import Rule, first_and_worst, judge, zeros
from relower.gates.numerics.outputs import Reading
from relower.gates.numerics.runs import program, replicates, run
from relower.gates.numerics.work import compare, contract_of
from relower.gates.numerics_cell import Steps, verdict
from relower.lowering.errors import InputError
from relower.lowering.numerics import Numerics

_spec = importlib.util.spec_from_file_location(
    "numerics_cases", Path(__file__).parents[1] / "numerics_cases.py"
)
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

OPTIONS = {"steps": 1, "replicates": 1, "factor": 3.0, "contract": "rounding"}
OPTIONS |= {"reference": "ref", "candidate": "cand"}
SCALARS = {"tokens_kept", "loss", "mean_log_prob", "last_log_prob", "entropy", "grad_norm"}


@pytest.fixture(scope="module")
def base():
    return program(cases.right(), "right")


@pytest.fixture(scope="module")
def reference(base):
    return run(base, 1)


@pytest.fixture(scope="module")
def near(base):
    return replicates(base, 1, 2)


def broken(checks):
    return {f"{c.of} {c.figure}" for c in checks if c.status == "broken"}


PAGE = Path(__file__).parents[3] / "docs" / "numerics.md"


def written(breakage):
    """The figures by which the documentation says that something is caught."""
    row = next(r for r in PAGE.read_text().splitlines() if r.startswith(f"| {breakage} |"))
    return set(re.findall("`([^`]+)`", row))


def said_by_the_gate(checks, figures):
    """What the gate prints of a control that must be caught by these figures, and is."""
    found = {
        "checks": [c.to_json() for c in first_and_worst(checks)], "unclear": [], "zero": [],
        "waived": [], "steps": 1, "contract": "rounding", "replicate": None, "replicates": 0,
        "worst": work._worst(checks),
    }  # fmt: skip
    wrong, unclear, lines = verdict(found, Steps(caught_by=tuple(figures)), control=True)
    assert (wrong, unclear) == ([], [])
    return "\n".join(lines)


CAUGHT = {
    "layout": "the two halves of a gated layer's gradient the wrong way round",
    "halves": "gate and up swapped",
    "sign": "the sign of one leaf, all scalars the same",
    "shrunk": "a gradient shrunk by 0.5 %",
    "nan": "a NaN in a gradient",
    "tokens": "one token fewer kept",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_each_broken_step_is_caught_and_by_which_check(name, base, reference, near):
    made = run(base, 1, cases.make_step(name))
    checks = judge(reference, near, made, Rule("rounding"))
    figures = written(CAUGHT[name])
    assert figures
    assert figures <= broken(checks)
    text = said_by_the_gate(checks, figures)
    assert any(f"caught: {figure} " in text for figure in figures)
    if name == "sign":  # every scalar holds
        assert {f"{c.of} {c.figure}" for c in checks
                if c.status == "broken" and not c.of.startswith("params")} == figures  # fmt: skip
    if name == "tokens":
        assert broken(checks) == figures


def test_what_breaks_later_may_follow_from_what_did_before():
    """A parameter that is never updated: at the next step everything is another."""
    leaf = np.arange(1.0, 5.0, dtype=np.float32)
    scalar = lambda x: {"loss": np.float32(x)}
    ref = [Reading(scalar(1), {"wo": leaf, "wi": leaf}, {"wo": leaf, "wi": leaf}),
           Reading(scalar(2), {"wo": leaf, "wi": leaf}, {"wo": leaf, "wi": leaf})]  # fmt: skip
    made = [Reading(scalar(1), {"wo": leaf, "wi": leaf}, {"wo": leaf * 1.01, "wi": leaf}),
            Reading(scalar(9), {"wo": -leaf, "wi": leaf[::-1]},
                    {"wo": leaf * 9, "wi": leaf[::-1]})]  # fmt: skip
    checks = judge(ref, [], made, Rule("rounding"))
    first = first_and_worst(c for c in checks if c.status == "broken")[0]
    assert (first.of, first.step) == ("params/wo", 1)
    assert (work._worst(checks)["of"], work._worst(checks)["step"]) == ("params/wo", 1)
    assert "caught: params/wo" in said_by_the_gate(checks, ["params/wo"]).splitlines()[0]
    with pytest.raises(AssertionError) as error:
        said_by_the_gate(checks, ["loss"])
    assert "must be caught by loss, which breaks at step 2 only, behind params/wo" in str(
        error.value
    )


def test_a_figure_that_holds_is_reported_where_it_is_worst():
    leaf = np.ones(4, np.float32)
    readings = lambda *scales: [Reading({}, {"w": leaf * np.float32(s)}, {}) for s in scales]
    near = [readings(1 + 3e-7, 1 + 3e-7, 1 + 3e-7)]
    checks = judge(readings(1, 1, 1), near, readings(1, 1 + 3e-7, 1), Rule("rounding"))
    assert {c.step for c in checks if c.figure == "l2"} == {2}
    assert broken(checks) == set()


def test_a_replicate_agrees_and_is_no_copy(base, reference, near):
    other = replicates(base, 1, 3)[2:]
    checks = judge(reference, near, other[0], Rule("rounding"))
    assert broken(checks) == set()
    assert any(c.found > 0 for c in checks if c.figure == "l2")
    assert broken(judge(reference, [], other[0], Rule("bitwise")))
    assert zeros(reference, other[0]) == ["unused"]


def half(reading, name, change):
    """The reading with one gradient leaf changed, in half precision's noise."""
    return replace(reading, grads={**reading.grads, name: change(reading.grads[name])})


def test_in_low_precision_a_shrunk_leaf_is_told_by_its_scale():
    """Noise of 1 % hides half a percent from the distance, not from the projection."""
    rng = np.random.default_rng(0)
    leaf = rng.normal(size=40_000).astype(np.float32)
    noisy = lambda: leaf * (1 + 0.01 * rng.normal(size=leaf.size)).astype(np.float32)
    ref = [Reading({}, {"w": leaf}, {})]
    near = [[Reading({}, {"w": noisy()}, {})] for _ in range(3)]
    rule = Rule("rounding")
    assert broken(judge(ref, near, [Reading({}, {"w": noisy()}, {})], rule)) == set()
    shrunk = [Reading({}, {"w": noisy() * np.float32(0.995)}, {})]
    assert broken(judge(ref, near, shrunk, rule)) == {"grads/w scale"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g[:, :-1], "float32[12, 15] in place of float32[12, 16]"),
        (lambda g: g.astype(np.float16), "float16[12, 16] in place of float32[12, 16]"),
        (lambda g: np.where(g == 0, g, -0.0 * g), ""),
    ],
)
def test_shape_dtype_and_zeros(reference, near, change, said):
    made = [half(reference[0], "wi", change)]
    checks = judge(reference, near, made, Rule("rounding"))
    wrong = [c for c in checks if c.status == "broken" and c.of == "grads/wi"]
    assert wrong
    assert said in wrong[0].said


def test_a_missing_leaf_is_broken(reference, near):
    less = {k: v for k, v in reference[0].grads.items() if k != "wo"}
    checks = judge(reference, near, [replace(reference[0], grads=less)], Rule("rounding"))
    assert broken(checks) == {"grads/wo shape"}


def test_bits_values_and_the_sign_of_zero(reference):
    flipped = [half(reference[0], "unused", lambda g: -g)]
    assert broken(judge(reference, [], flipped, Rule("value"))) == set()
    assert broken(judge(reference, [], flipped, Rule("bitwise"))) == {"grads/unused bits"}


def test_where_the_reference_is_not_finite_nothing_is_decided(reference):
    bad = [half(reference[0], "wi", lambda g: np.full_like(g, np.nan))]
    for rule in (Rule("bitwise"), Rule("value"), Rule("rounding")):
        same = judge(bad, [], bad, rule)
        assert [c.status for c in same if c.of == "grads/wi"] == ["undecided"]
        assert broken(judge(bad, [], reference, rule)) == {"grads/wi finite"}


def test_replicates_that_go_astray_show_nothing(reference):
    astray = [[half(reference[0], "wi", lambda g: g[::-1])]]
    checks = judge(reference, astray, reference, Rule("rounding"))
    assert "undecided" in {c.status for c in checks if c.of == "grads/wi"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("silent", "says nothing of what its step returns"),
        ("shapes", "the arguments are shapes, and a run needs arrays"),
        ("nowhere", "grads: the output has nothing at '1/gradients'; it has 1/grads"),
        ("stuck", "need relower.Numerics(advance=...)"),
    ],
)
def test_what_can_not_be_run_is_refused(name, said):
    case = cases.others()[name]
    with pytest.raises(InputError) as error:
        compare(case, case, {**OPTIONS, "steps": 2})
    assert said in str(error.value)


def test_a_replicate_that_is_the_reference_is_said():
    case = cases.others()["unmoved"]
    found = compare(case, case, OPTIONS)
    assert found["unclear"] == [
        "the replicate is bit for bit the reference: it says nothing of the spread"
    ]
    assert found["zero"] == ["unused"]


def test_every_standard_metric_is_mentioned():
    with pytest.raises(InputError, match="doesn't mention entropy"):
        Numerics(grads="", params=None, metrics={n: None for n in SCALARS - {"entropy"}})
    with pytest.raises(InputError, match="loss is 3; wanted a path"):
        Numerics(grads="", params=None, metrics={**dict.fromkeys(SCALARS), "loss": 3})


def test_a_set_is_as_strict_as_its_loosest_pass():
    assert contract_of("default", "bitwise") == "bitwise"
    assert contract_of(["argsort_packed_key"], "rounding") == "bitwise"
    assert contract_of(["default", "top_k_scatter"], "bitwise") == "value"
    assert contract_of(["sorted_scatter", "late_cast"], "bitwise") == "rounding"
    assert contract_of(None, "bitwise") == "rounding"


@pytest.fixture(scope="module")
def routed():
    """`routed_moe`'s step on one device, in which every choice of experts is a tie."""
    import numerics as examples
    import routed_moe

    config = replace(examples.ROUTED, hidden=16, head_dim=8, batch=2, vocab=17)

    def step(config=config, module=routed_moe):
        logits = partial(examples.routed_logits, config=config)
        return examples.with_tokens(examples.make_step(logits))

    def arguments():
        params, batch = examples.routed_args(config)
        params["layers"]["router"] = 0 * params["layers"]["router"]
        return params, batch

    import relower

    base = program(
        relower.case(step(), *arguments(), numerics=examples.numerics(arguments)), "routed"
    )
    return config, step, base, run(base, 1)


def test_an_inverse_shifted_by_one_is_caught(routed):
    config, step, base, reference = routed

    right = config.sort_by_expert
    wrong = replace(config, sort_by_expert=lambda ids, c: (
        right(ids, c)[0], (right(ids, c)[1] + 1) % ids.size))  # fmt: skip
    checks = judge(reference, [], run(base, 1, step(wrong)), Rule("rounding"))
    figures = written("an inverse permutation shifted by one")
    assert figures
    assert figures <= broken(checks)
    assert "caught: " in said_by_the_gate(checks, figures)


def test_reversed_ties_are_caught(routed, monkeypatch):
    _, step, base, reference = routed
    import jax
    from jax import lax

    right = lax.top_k

    def reversed_ties(x, k):
        values, ids = right(x[..., ::-1], k)
        return values, x.shape[-1] - 1 - ids

    monkeypatch.setattr(jax.lax, "top_k", reversed_ties)
    checks = judge(reference, [], run(base, 1, step()), Rule("rounding"))
    figures = written("ties broken the other way round")
    assert figures
    assert figures <= broken(checks)
    assert "caught: " in said_by_the_gate(checks, figures)
