"""Asking a pass for one of its ways."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relower import PassNotApplicable, assert_applied, explain, optimize
from relower.passes import registry
from relower.passes.base import Reason, Replacement

NAME = "inverse_permutation"
SCORES = np.random.RandomState(0).randint(-4, 5, 33).astype(np.float32)


def ranks(x):
    return jnp.argsort(jnp.argsort(x))


@pytest.mark.parametrize("way", ["packed", "pairs", "scatter"])
def test_each_way_gives_the_same_bits(equal_bits, way):
    choose = {NAME: way}
    report = explain(ranks, SCORES, choose=choose)
    assert report.counts()[NAME] == 1
    equal_bits(jax.jit(optimize(ranks, choose=choose))(SCORES), jax.jit(ranks)(SCORES))
    equal_bits(optimize(choose=choose)(ranks)(SCORES), ranks(SCORES))
    assert_applied(ranks, (SCORES,), {NAME: 1}, choose=choose)


def test_a_way_that_is_not_open_is_declined_not_replaced_by_another(why):
    report = explain(ranks, SCORES, passes=[NAME], choose={NAME: "at_hand"})
    assert not report.applied
    codes = {r.split(":")[0] for reasons in why(report, NAME) for r in reasons}
    assert codes == {"no-inverse", "not-a-permutation"}
    with pytest.raises(PassNotApplicable, match="no-inverse"):
        optimize(ranks, passes=[NAME], choose={NAME: "at_hand"})(SCORES)


def test_a_way_that_no_site_here_has(why):
    report = explain(ranks, SCORES, passes=[NAME], choose={NAME: "window"})
    assert not report.applied
    found = [r for reasons in why(report, NAME) for r in reasons]
    assert any(r.startswith("no-such-way: there is no way called 'window' here") for r in found)


@pytest.mark.parametrize("run", [optimize, explain])
def test_a_way_that_does_not_exist(run):
    ways = "'at_hand', 'threaded', 'packed', 'pairs', 'scatter', 'counting', 'window'"
    with pytest.raises(ValueError, match=f"inverse_permutation has no way 'sideways'.*{ways}"):
        run(ranks, *[SCORES] * (run is explain), choose={NAME: "sideways"})


@pytest.mark.parametrize("p", [p for p in registry.all_passes() if p.alternatives or p.ways])
def test_every_way_is_stated(monkeypatch, p):
    """What a pass gives at its own example is among the names that `choose` admits."""
    seen = set()

    def profitable(match):
        seen.update(p.alternatives(match))
        return p.profitable(match)

    spy = dataclasses.replace(p, profitable=profitable)
    monkeypatch.setattr(registry, "all_passes", lambda: (spy,))
    for example in p.examples():
        explain(p.before, *example.args, contract="rounding")
    assert seen
    assert seen <= set(p.ways)


def test_bad_choices():
    with pytest.raises(ValueError, match="argsort_packed_key has no alternatives"):
        optimize(ranks, choose={"argsort_packed_key": "pairs"})
    with pytest.raises(ValueError, match="no pass called 'inverse'"):
        optimize(ranks, choose={"inverse": "pairs"})
    with pytest.raises(TypeError, match="choose is 'counting'"):
        optimize(ranks, choose="counting")


def test_alternatives_are_named_and_give_replacements_or_reasons():
    """What a choice by measured costs goes through."""
    seen = {}
    p = registry.by_name(NAME)

    def profitable(match):
        seen.update(p.alternatives(match))
        return p.profitable(match)

    from relower.passes.engine.rewrite import rewrite
    from relower.passes.optimize import _trace

    spy = dataclasses.replace(p, profitable=profitable)
    rewrite(_trace(ranks, (SCORES,), {}).closed, [spy])
    assert set(seen) == {"at_hand", "threaded", "packed", "pairs", "scatter", "counting"}
    assert all(isinstance(way, Replacement | Reason) for way in seen.values())
    assert {n for n, way in seen.items() if isinstance(way, Replacement)} == {
        "packed", "pairs", "scatter",
    }  # fmt: skip
