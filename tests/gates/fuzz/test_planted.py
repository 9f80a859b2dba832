"""Faults put into passes and into the machinery: the fuzzer must find each."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax import lax

from relower.gates.fuzz import check as fuzz_check
from relower.gates.fuzz.check import check, passes_of
from relower.gates.fuzz.plan import Node, Plan
from relower.passes import registry
from relower.passes.engine import interpreter

ORIGINAL = registry.all_passes()
TRIES = 80
"""Programs of one pattern and what feeds it; each takes some 30 ms."""


def plans(*kinds, transform="none", eager=True):
    """Small programs of these pieces, one after another."""
    for seed in range(TRIES):
        nodes = tuple(Node(kind, 100 * seed + i) for i, kind in enumerate(kinds))
        yield Plan(t=6, d=4, dtype="float32", transform=transform, contract="named", eager=eager,
                   mesh=None, some=None, nodes=nodes, seed=seed)  # fmt: skip


def found(plans, names, *properties):
    """Whether one of the plans breaks a property of these, before the tries are used up."""
    for plan in plans:
        outcome = check(plan, names)
        if outcome.violation is not None:
            assert outcome.violation.property in properties, outcome.violation
            return True
    return False


def with_pass(monkeypatch, name, **changes):
    mutated = tuple(dataclasses.replace(p, **changes) if p.name == name else p for p in ORIGINAL)
    monkeypatch.setattr(registry, "all_passes", lambda: mutated)


def replaced(name, change):
    """The pass, with what its replacement computes changed by ``change(results, operands)``."""
    plain = registry.by_name(name).replace

    def replace(match):
        r = plain(match)
        if r.fn is None:
            return dataclasses.replace(r, fn=lambda *ops: change(list(ops), ops))
        return dataclasses.replace(r, fn=lambda *ops: change(list(r.fn(*ops)), ops))

    return replace


def integers_up(results, operands):
    """The last result of integers, by one too large."""
    at = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.integer)]
    if at:
        results[at[-1]] = results[at[-1]] + 1
    return results


def floats_turned(results, operands):
    return [x[::-1] if x.ndim and jnp.issubdtype(x.dtype, jnp.floating) else x for x in results]


def halves_swapped(results, operands):
    return [jnp.roll(x, x.shape[-1] // 2, -1) if x.ndim > 1 else x for x in results]


def shrunk_a_little(results, operands):
    return [x * 0.995 if jnp.issubdtype(x.dtype, jnp.floating) else x for x in results]


def signs_lost(results, operands):
    return [x + 0 if jnp.issubdtype(x.dtype, jnp.floating) else x for x in results]


FAULTS = {
    "an order shifted by one": ("argsort_packed_key", integers_up, ("argsort",), "none"),
    "an inverse shifted by one": ("inverse_permutation", integers_up, ("inverse",), "none"),
    "an index shifted by one": ("nonnegative_index", integers_up, ("layer",), "none"),
    "choices reversed": ("top_k_by_argmax", floats_turned, ("chosen",), "none"),
    "a choice's zero without its sign": ("top_k_by_argmax", signs_lost, ("chosen",), "none"),
    "counts by one too many": ("counting_scatter", integers_up, ("groups",), "none"),
    "arithmetic by one too far": ("affine_gather", integers_up, ("argsort", "counted"), "none"),
    "rows reversed": ("permutation_scatter", floats_turned, ("permuted",), "none"),
    "sums reversed": ("sorted_scatter", floats_turned, ("spread",), "none"),
    "cotangents reversed": ("top_k_scatter", floats_turned, ("unchosen",), "none"),
    "parts swapped": ("concat_cotangents", halves_swapped, ("pads",), "none"),
    "halves swapped": ("split_fused_wi", halves_swapped, ("fused",), "none"),
    "products swapped": ("shared_lhs_dot", lambda r, o: [x[::-1] for x in r], ("grouped",), "none"),
    "a gradient shrunk": ("router_grad_from_wo_input", shrunk_a_little, ("weighed",), "none"),
    "an inverse shrunk": ("triangular_inverse", shrunk_a_little, ("solved",), "none"),
    "a window reversed": ("late_cast", floats_turned, ("taps",), "none"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_in_what_a_pass_computes(monkeypatch, fault):
    name, change, kinds, transform = FAULTS[fault]
    with_pass(monkeypatch, name, replace=replaced(name, change))
    assert found(plans(*kinds, transform=transform), (name,), "contract", "promises")


def test_reversed_ties(monkeypatch):
    """An unstable sort without its tie break, which a CPU may sort stably all the same."""

    def one_key(results, operands):
        return list(lax.sort(operands, num_keys=1, is_stable=False))

    name = "argsort_unique_pairs"
    plain = registry.by_name(name).replace
    swapped = lambda m: dataclasses.replace(plain(m), fn=lambda *ops: one_key(None, ops))
    with_pass(monkeypatch, name, replace=swapped)
    assert found(plans("argsort"), (name,), "contract")


# The requirement, and what then is broken: a value, or the pass itself.
DROPPED = {
    "nonnegative_index": ("maybe-negative", "indexed", "promises"),
    "permutation_scatter": ("not-zeros", "permuted", "contract"),
    "split_fused_wi": ("different-ops", "fused", "rewrites"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_requirements(monkeypatch, name):
    code, kind, prop = DROPPED[name]
    left = tuple(q for q in registry.by_name(name).requirements if q.code != code)
    assert len(left) < len(registry.by_name(name).requirements)
    with_pass(monkeypatch, name, requirements=left)
    assert found(plans(kind), (name,), prop)


def test_a_pass_that_never_ends(monkeypatch):
    """Each application leaves what it looks for."""
    plain = registry.by_name("nonnegative_index")
    again = lambda m: dataclasses.replace(
        plain.replace(m), fn=lambda i: [lax.select_n(i < 0, i, i + 9)], key="again"
    )
    with_pass(monkeypatch, "nonnegative_index", replace=again)
    assert found(plans("layer"), ("nonnegative_index",), "ends")


def test_a_rewrite_whose_results_are_dropped(monkeypatch):
    """Something is said to be applied, and the same is found again."""
    plain = interpreter.Interpreter._substitute
    monkeypatch.setattr(
        interpreter.Interpreter,
        "_substitute",
        lambda self, site, renamed, retyper: (plain(self, site, {}, retyper), [site.match.eqn])[1],
    )
    for plan in plans("layer"):
        outcome = check(plan, ("nonnegative_index",))
        if outcome.violation is not None:
            assert outcome.violation.property in ("ends", "rewrites")
            return
    raise AssertionError("not found")


def test_a_replacement_that_raises(monkeypatch):
    """That is a violation as well, not a crash of the fuzzer."""

    def wrong(results, operands):
        raise ValueError("wrong")

    name = "top_k_by_argmax"
    with_pass(monkeypatch, name, replace=replaced(name, wrong))
    assert found(plans("chosen"), (name,), "rewrites")


def test_nothing_is_found_without_a_fault():
    """The same programs, so that it is the faults that are found."""
    for name, _, kinds, transform in FAULTS.values():
        for plan in list(plans(*kinds, transform=transform))[:6]:
            outcome = check(plan, (name,))
            assert outcome.violation is None, outcome.violation


def test_at_any_size_only_sizes_are_left_aside():
    plan = next(plans("solved"))
    p = next(p for p in passes_of(plan, ("triangular_inverse",)))
    assert p.profitable is not registry.by_name("triangular_inverse").profitable
    assert "no-input-gradient" not in fuzz_check.SIZES
