"""`bisect` finds what breaks a check, and says so where nothing can be said."""

import dataclasses
import random
from itertools import combinations

import jax
import jax.numpy as jnp
import pytest

import relower
from relower.cli.main import main
from relower.gates.bisect import _Search
from relower.gates.bisect_work import _of_user, work
from relower.lowering.errors import InputError
from relower.passes import registry

SITES = [f"p@f#{i}" for i in range(1, 17)]


def search(fails, most=200, sites=SITES):
    """A bisection whose check fails where ``fails`` says so of the sites that are on."""
    made = _Search(lambda on: on, lambda on: not fails(on), most, None, len(sites))
    return made.run(sites)


@pytest.mark.parametrize("bad", [(SITES[0],), (SITES[15],), *combinations(SITES[3:16:4], 2)])
def test_the_one_site_or_pair_is_found(bad):
    found = search(lambda on: set(bad) <= on)
    assert (found.outcome, set(found.sites), found.rest_holds) == ("found", set(bad), True)
    assert found.checks <= 60


def test_what_is_found_is_minimal_where_several_break_it():
    found = search(lambda on: {"p@f#3"} <= on or {"p@f#9", "p@f#10"} <= on)
    assert found.sites in (("p@f#3",), ("p@f#9", "p@f#10"))
    assert found.rest_holds is False


def test_holds_and_fails_without_any():
    assert search(lambda on: False).outcome == "holds"
    assert search(lambda on: True).outcome == "fails-without"
    assert search(lambda on: True, sites=[]).outcome == "holds"


def test_a_flaky_check_is_called_so():
    rng = random.Random(0)
    outcomes = {search(lambda on: bool(on) and rng.random() < 0.5).outcome for _ in range(30)}
    assert outcomes <= {"flaky", "found", "holds"}
    assert "flaky" in outcomes
    state = iter([False, True, *[True] * 9, *[False] * 99])
    assert search(lambda on: bool(on) and next(state)).outcome in ("flaky", "holds")


def test_it_ends():
    found = search(lambda on: set(SITES[::2]) <= on, most=7)
    assert (found.outcome, found.checks) == ("unfinished", 7)
    assert set(SITES[::2]) <= set(found.sites)


def step(x, ids):
    ids = relower.assume_range(ids, 0, 7)
    order = jnp.argsort(ids)
    counts = jnp.bincount(ids, length=8)
    return x[order], jnp.take(counts, ids)


ARGS = jnp.ones((64, 2)), jnp.arange(64, dtype=jnp.int32) % 8


def test_of_a_function_and_a_check_that_raises():
    def check(made):
        text = str(jax.make_jaxpr(made)(*ARGS))
        assert "num_keys=1" in text or "dimension=0" not in text
        if "is_stable=False" in text:
            raise RuntimeError("an unstable sort")

    found = relower.bisect(step, check, *ARGS)
    assert found.outcome == "found"
    assert found.sites == ("argsort_packed_key@jit(argsort):step#1",)
    assert found.said == "RuntimeError: an unstable sort"
    assert found.among > 1


FILE = """
import jax, jax.numpy as jnp, relower

def step(x, ids):
    ids = relower.assume_range(ids, 0, 7)
    return x[jnp.argsort(ids)], jnp.bincount(ids, length=8)

def case():
    return relower.case(step, jnp.ones((64, 2)), jnp.arange(64, dtype=jnp.int32) % 8)

def check(made, args):
    return "is_stable=False" not in str(jax.make_jaxpr(made)(*args))
"""


def test_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(FILE)
    assert main(["bisect", "step.py:case", "--check", "step.py:check"]) == 1
    out = capfd.readouterr().out
    assert "the check fails with\n    argsort_" in out
    assert "and holds with all others on: disable these" in out
    assert main(["bisect", "step.py:case", "--check", "bits"]) == 0
    out = capfd.readouterr().out
    assert "the check holds with all sites on" in out
    assert "every site on" not in out
    assert main(["bisect", "step.py:case", "--check", "step.py:nothing"]) == 2
    assert "no function 'nothing'" in capfd.readouterr().err


def train(w, ids):
    def loss(w):
        return jnp.mean(jnp.square(step(w, ids)[0] - 3.0)) + w[jnp.argmax(w[:, 0])].sum()

    value, grads = jax.value_and_grad(loss)(w)
    return {"loss": value, "grads": grads}


METRICS = dict.fromkeys(("tokens_kept", "mean_log_prob", "last_log_prob", "entropy", "grad_norm"))
TRAINING = relower.case(
    train, jax.random.normal(jax.random.key(0), (64, 2)), ARGS[1],
    numerics=relower.Numerics(grads="grads", params=None, metrics={**METRICS, "loss": "loss"}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"disable": ["bad"]}, "no pass called 'bad'"),
        ({"disable": ["argsort_packed_key@f#7"]}, "disable: no site of"),
        ({"frozen": "(", "passes": ["frozen_gradient"]}, "frozen: the regex '('"),
    ],
)
def test_options_that_cant_be_followed_are_told_in_one_line(wrong, said):
    """As they are said everywhere: no class of an error, and no line of this package."""
    request = {"spec": "step.py:case", "passes": None, "contract": "bitwise", "frozen": None,
               "assume": None, "disable": [], "options": {"check": "bits", "most": 50}}  # fmt: skip
    with pytest.raises(InputError) as error:
        work(TRAINING, {**request, **wrong})
    assert str(error.value).startswith(said)


def numerics(case):
    request = {"spec": "step.py:case", "passes": None, "contract": "bitwise", "frozen": None,
               "assume": None, "disable": [],
               "options": {"check": "numerics", "most": 50}}  # fmt: skip
    return work(case, request)


def test_the_site_that_breaks_a_figure_of_the_numerics_gate(monkeypatch):
    every = registry.all_passes()
    own = registry.by_name("nonnegative_index")

    def shifted(match):
        way = own.replace(match)
        return dataclasses.replace(way, fn=lambda *xs: [xs[0] * 0 + 3], key="shifted")

    held = numerics(TRAINING)
    assert (held["outcome"], held["sites"]) == ("holds", [])
    assert held["among"] > 1
    wrong = tuple(dataclasses.replace(p, replace=shifted) if p is own else p for p in every)
    monkeypatch.setattr(registry, "all_passes", lambda: wrong)
    found = numerics(TRAINING)
    assert found["outcome"] == "found"
    assert all(site.startswith("nonnegative_index@") for site in found["sites"])
    assert len(found["sites"]) == 1
    assert "wanted at most" in found["said"]


def test_numerics_needs_a_case_that_says_what_its_outputs_are():
    with pytest.raises(InputError, match="--check numerics needs numerics="):
        numerics(relower.case(step, *ARGS))


@pytest.mark.parametrize(
    "function", [lambda: True, lambda made, args, more: True, lambda made, *, strict: True]
)
def test_a_check_of_other_arguments_is_refused(function):
    with pytest.raises(InputError, match="takes other arguments than it gets; wanted one, the opt"):
        _of_user(function, None)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda made: (made,), (step,)),
        (lambda made, args: (made, args), (step, (1,))),
        (lambda *every: every, (step,)),
        (lambda made, strict=True: (made,), (step,)),
    ],
)
def test_a_check_gets_what_it_takes(function, given):
    base = dataclasses.make_dataclass("Base", ["args"])((1,))
    assert _of_user(function, base)(step) == given


def test_a_check_that_returns_no_truth_is_told_so():
    """As `a == b` of two arrays; the case itself is not to blame."""
    fn = lambda x, ids: x[jnp.argsort(relower.assume_range(ids, 0, 7))]
    args = jnp.ones((8, 2)), jnp.arange(8, dtype=jnp.int32)
    said = r"the check returned a value of type .*Array.* of shape \(8, 2\), .*wanted True or False"
    with pytest.raises(InputError, match=said):
        relower.bisect(fn, lambda made: made(*args) == fn(*args), *args)
