"""With which producers a site is run, and what is said where time or memory end the search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relower.gates.verify import check
from relower.gates.verify.check import Broken, Limits, Tally
from relower.gates.verify.compare import HOPELESS, MOST, Errors
from relower.gates.verify.record import Recorder
from relower.gates.verify.verdict import Verdict
from relower.passes import registry
from relower.passes.engine.rewrite import rewrite

ROWS = jax.ShapeDtypeStruct((8, 4), jnp.float32)
KEYS = jax.ShapeDtypeStruct((16,), jnp.int32)


def scattered(rows, keys):
    """An inverse at hand, ``back``, is no fact: it needs the sort before it."""
    order = jnp.argsort(keys * 2)
    back = jnp.argsort(order)
    return (rows * 2)[order // 2][back]


@pytest.fixture(scope="module")
def inverse():
    recorder = Recorder()
    p = registry.by_name("inverse_permutation")
    rewrite(jax.make_jaxpr(scattered)(ROWS, KEYS), recorder.recording([p]))
    ((kept,),) = recorder.kept.values()
    return kept.piece


def test_what_is_made_of_whole_numbers_only_counts_as_one():
    """An identity matrix is made of counters, so that it is run with the site early."""
    from jax.scipy.linalg import solve_triangular

    def inverted(x):
        scaled = x * 3
        return solve_triangular(scaled, jnp.eye(64), lower=True, unit_diagonal=True)

    recorder = Recorder()
    p = registry.by_name("triangular_inverse")
    body = jax.make_jaxpr(inverted)(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    rewrite(body, recorder.recording([p]))
    ((kept,),) = recorder.kept.values()
    ancestry = kept.piece.ancestry
    names = lambda floats: [e.primitive.name for e in ancestry.prefix(ancestry.depth, floats)]
    assert "mul" not in names(floats=False)
    assert "mul" in names(floats=True)
    made = [e.primitive.name for e in kept.piece.before.eqns] + names(floats=False)
    assert "convert_element_type" in made


@pytest.fixture
def broken_everywhere(monkeypatch):
    """Both sides always differ; the producers of each run are noted."""
    tried = []

    def run(problem, contract, limits, end):
        tried.append(problem.producers)
        return Broken("differ", "any", ()), Tally(1)

    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(check, "violation", lambda p, b: check.Checked(Verdict.VIOLATION))
    from relower.gates.verify import smallest

    monkeypatch.setattr(smallest, "smallest", lambda p, c, b: b)
    return tried


def test_when_time_runs_out_the_whole_of_the_producers_says(inverse, broken_everywhere):
    contract = registry.by_name("inverse_permutation").contract
    found, level = check.check_piece(inverse, contract, Limits(seconds=0))
    assert found.verdict is Verdict.VIOLATION
    assert level == (inverse.ancestry.depth, True)
    assert broken_everywhere == [min(broken_everywhere), max(broken_everywhere)]


def test_when_these_are_too_large_nothing_is_said(inverse, broken_everywhere, monkeypatch):
    contract = registry.by_name("inverse_permutation").contract

    def within(problem, limits):
        if problem.producers > 2:
            raise check.OverLimit("it takes 9 bytes, above the limit of 8")

    monkeypatch.setattr(check, "_within", within)
    found, _ = check.check_piece(inverse, contract, Limits())
    assert found.verdict is Verdict.UNKNOWN
    assert "its producers may never make: it takes 9 bytes, above the limit of 8" in found.reason
    assert len(broken_everywhere) > 1


def test_errors_far_above_the_bound_are_averaged_no_further():
    far = Errors().plus(*map(np.asarray, (np.float32(1), np.float32(1.001), 1 + 1e-8)))
    assert far.is_hopeless
    near = Errors(0.3, 0.3, 1)
    assert not near.holds
    assert not near.is_hopeless
    assert HOPELESS * MOST > 4
