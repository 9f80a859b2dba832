"""A key that leaves something out is a violation, though each replacement alone is right."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import jit, lax

from relower import assume_range, optimize, verify
from relower.gates.verify.verdict import Verdict
from relower.passes import registry

NAME = "affine_gather"
PLACES = np.array([1, 0, 3], np.int32)


def counted(places, *, step):
    return (jnp.arange(12) * step).at[places].get(mode="clip")


def two_steps(places):
    """Two gathers of one type, from tables that count by different steps."""
    return counted(places, step=2), counted(places, step=3)


def forgetful(p):
    """The pass's ``replace``, with a key that says nothing."""
    return lambda match: dataclasses.replace(p.replace(match), key=("same",))


def test_two_sites_of_one_wrong_key(swap, quick):
    p = registry.by_name(NAME)
    found = verify(two_steps, PLACES, passes=[NAME], limits=quick)
    assert len(found.sites) == 2
    assert found.verdict is Verdict.VERIFIED
    swap(NAME, replace=forgetful(p))
    out = optimize(two_steps, passes=[NAME])(PLACES)
    assert out[1].tolist() == [2, 0, 6]  # by the other's step
    found = verify(two_steps, PLACES, passes=[NAME], limits=quick)
    assert found.exit_code == 1
    (broken,) = [s for s in found.sites if s.checked.verdict is Verdict.VIOLATION]
    assert broken.checked.reason.count("test_shared.py:") == 2
    assert "both have the key ('same',)" in broken.checked.reason


def test_sites_that_are_alike_may_share(swap, quick):
    """The same key at sites that need the same is no fault."""
    p = registry.by_name(NAME)
    swap(NAME, replace=forgetful(p))
    fn = lambda x, y: (counted(x, step=2), counted(y, step=2))
    found = verify(fn, PLACES, PLACES[::-1], passes=[NAME], limits=quick)
    assert len(found.sites) == 2
    assert found.verdict is Verdict.VERIFIED


def test_what_a_shared_body_is_given(swap, quick):
    """One body whose calls know different things of its inputs is rewritten once for both."""
    p = registry.by_name("nonnegative_index")

    def by_facts(match):
        way = p.replace(match)
        hi = match.scope.fact(way.operands[0]).range(jnp.int32)[1]
        return dataclasses.replace(way, key=(), fn=lambda x, *rest: [lax.min(x, jnp.int32(hi))])

    swap(p.name, replace=by_facts)
    inner = jit(lambda t, i: t[i])

    def fn(t, i, j):
        return inner(t, assume_range(i, 0, 3)), inner(t, assume_range(j, 0, 5))

    places = np.array([1, 2, 3], np.int32)
    found = verify(fn, np.arange(8.0), places, places, passes=[p.name], limits=quick)
    assert found.exit_code == 1
    assert any("needs another" in s.checked.reason for s in found.sites)
