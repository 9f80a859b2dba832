"""Verification says VERIFIED of what keeps its contract, and must be seen to fail otherwise."""

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower import assume_range, optimize, verify
from relower.gates.verify import check, themes
from relower.gates.verify.api import verify_examples
from relower.gates.verify.check import Limits
from relower.gates.verify.verdict import Checked, Evidence, Verdict
from relower.lowering.errors import InputError
from relower.passes import concat_cotangents, nonnegative_index, registry
from relower.passes.base import Contract, Reason, Requirement
from relower.passes.engine import rewrite as rewriting

TABLE, PLACES = np.arange(5, dtype=np.float32), np.array([1, 2, 3], np.int32)


def known(table, places):
    return table[assume_range(places, 0, 4)]


def plain(table, places):
    return table[places]


def only(found):
    (site,) = found.sites
    return site


def test_a_site_that_keeps_its_contract(quick):
    found = verify(known, TABLE, PLACES, passes=["nonnegative_index"], limits=quick)
    site = only(found)
    assert found.verdict is Verdict.VERIFIED
    assert found.exit_code == 0
    assert site.key == "nonnegative_index@known#1"
    every = 2  # runs in which three places have each of five values
    assert site.checked.runs == len(themes.EXACT) + every
    assert site.checked.shapes == ("i32[3]",)
    assert site.facts == ("i32[3] in [0, 4]",)


def test_a_requirement_that_is_missing_is_a_violation(swap, quick, tmp_path):
    swap("nonnegative_index", requirements=())
    found = verify(plain, TABLE, PLACES, passes=["nonnegative_index"], limits=quick,
                   repro=str(tmp_path))  # fmt: skip
    site = only(found)
    assert found.exit_code == 1
    assert site.checked.verdict is Verdict.VIOLATION
    # The simplest input: all zero but one negative index.
    (array,) = site.checked.counterexample.arrays
    assert sorted(array.tolist()) == [array.min(), 0, 0]
    assert array.min() < 0
    assert f"became {array.min()}" in site.checked.reason
    ran = subprocess.run([sys.executable, site.repro], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "1 of 3 words differ" in ran.stdout


def test_a_contract_that_claims_too_much_is_a_violation(swap, quick):
    """A sum with zeros turns -0.0 into 0.0; a concatenate doesn't."""
    p = concat_cotangents.PASS
    args = p.examples()[0].args
    assert verify(p.before, *args, passes=[p.name], limits=quick).exit_code == 0
    swap(p.name, contract=Contract.BITWISE)
    found = verify(p.before, *args, passes=[p.name], limits=quick)
    assert found.exit_code == 1
    assert "0.0 (0x00000000) became -0.0 (0x80000000)" in only(found).checked.reason


def changed_results(p, change):
    """The pass's ``replace``, with its results changed."""

    def replace(match):
        way = p.replace(match)
        fn = way.fn or (lambda *ops: ops)
        return dataclasses.replace(way, fn=lambda *ops: change(list(fn(*ops))), key=(way.key, "x"))

    return replace


def test_a_value_that_loses_its_gradient_is_a_violation(swap, quick):
    p = registry.by_name("late_cast")
    stopped = lambda outs: [lax.stop_gradient(o) for o in outs]
    swap(p.name, replace=changed_results(p, stopped))
    found = verify(p.before, *p.examples()[0].args, passes=[p.name], limits=quick)
    checked = only(found).checked
    assert checked.verdict is Verdict.VIOLATION
    assert checked.counterexample.of == "derivative"


@pytest.mark.parametrize("factor", [1 - 2.0**-14, 0.995])
def test_a_rewrite_that_rounds_worse_is_a_violation(swap, quick, factor):
    p = registry.by_name("sorted_scatter")
    swap(p.name, replace=changed_results(p, lambda outs: [o * np.float32(factor) for o in outs]))
    found = verify(p.before, *p.examples()[0].args, passes=[p.name], limits=quick)
    assert "greatest error" in only(found).checked.reason
    assert found.exit_code == 1


def test_a_rewrite_that_fails_is_a_violation(swap, quick):
    def fails(outs):
        raise ZeroDivisionError("no such thing")

    p = nonnegative_index.PASS
    # While it is traced, a rewrite that fails is the pass's own error, not a verdict.
    swap(p.name, replace=changed_results(p, fails))
    with pytest.raises(ZeroDivisionError):
        verify(known, TABLE, PLACES, passes=[p.name], limits=quick)


def test_nothing_run_is_not_verified(monkeypatch, quick):
    monkeypatch.setattr(check, "EXACT", ())
    monkeypatch.setattr(check, "each_value", lambda ranges: ())
    found = verify(known, TABLE, PLACES, passes=["nonnegative_index"], limits=quick)
    assert only(found).checked.reason == "no input was run"
    assert found.exit_code == 2


def test_passes_that_do_not_come_to_an_end_are_not_verified(monkeypatch, quick):
    monkeypatch.setattr(rewriting, "MAX_ROUNDS", 1)
    found = verify(known, TABLE, PLACES, passes=["nonnegative_index"], limits=quick)
    assert only(found).checked.verdict is Verdict.VERIFIED
    assert found.verdict is Verdict.UNKNOWN
    assert found.exit_code == 2
    assert any("stopped after 1 rounds" in note for note in found.notes)


def test_no_sites_are_not_verified(quick):
    found = verify(lambda x: x + 1, TABLE, limits=quick)
    assert found.verdict is Verdict.UNKNOWN
    assert found.exit_code == 2
    assert "nothing to verify" in str(found)


def test_what_is_too_large_is_unknown():
    tiny = Limits(bytes=8, seeds=1)
    found = verify(known, TABLE, PLACES, passes=["nonnegative_index"], limits=tiny)
    assert found.exit_code == 2
    assert "above the limit of 8" in only(found).checked.reason


def sort_rows(rows, keys):
    return rows[jnp.argsort(assume_range(keys, 0, 511))]


LARGE = jax.ShapeDtypeStruct((1 << 17, 64), jnp.float32), jax.ShapeDtypeStruct((1 << 17,), "int32")
SMALL = Limits(bytes=1 << 20, seeds=1)


def test_what_is_too_large_is_run_at_smaller_shapes():
    found = verify(sort_rows, *LARGE, passes=["argsort_packed_key"], limits=SMALL, mutants=True)
    site = only(found)
    assert found.verdict is Verdict.VERIFIED
    assert site.checked.shrunk
    assert site.checked.shapes == ("i32[16384]",)
    assert "at shrunk shapes: 131,072 → 16,384" in site.checked.notes
    assert "1 of these at shrunk shapes only" in found.line()
    assert "            at shrunk shapes: 131,072 → 16,384" in str(found).splitlines()
    killed, total = found.killed
    assert killed == total > 0


def test_a_violation_at_smaller_shapes(swap, tmp_path):
    own = registry.by_name("argsort_packed_key")
    reversed_ties = next(m for n, m in own.mutants.items() if "ties" in n)
    swap("argsort_packed_key", replace=lambda match: reversed_ties(match, own.replace(match)))
    found = verify(sort_rows, *LARGE, passes=["argsort_packed_key"], limits=SMALL,
                   repro=str(tmp_path))  # fmt: skip
    site = only(found)
    assert site.checked.verdict is Verdict.VIOLATION
    assert site.checked.shrunk
    assert site.repro is not None


def test_a_pass_that_makes_something_else_of_smaller_shapes_stays_unknown(swap):
    own = registry.by_name("argsort_packed_key")
    large = Requirement("large", "It is large.", lambda m: None if m.eqn.invars[0].aval.size > 1e5
                        else Reason("small", "it is small", "a few", "many"))  # fmt: skip
    swap("argsort_packed_key", requirements=(*own.requirements, large))
    found = verify(sort_rows, *LARGE, passes=["argsort_packed_key"], limits=SMALL)
    assert found.exit_code == 2
    assert "above the limit" in only(found).checked.reason
    assert "at smaller shapes the pass doesn't apply" in only(found).checked.reason


def test_an_inverse_at_hand_is_run_with_what_makes_it(quick):
    """That one array is the inverse of another is no fact about either."""

    p = registry.by_name("permutation_scatter")
    found = verify(p.before, *p.examples()[0].args, passes=[p.name], limits=quick)
    assert found.exit_code == 0
    assert only(found).checked.producers


def test_under_scan_and_remat(quick):
    def body(carry, x):
        return carry + jnp.take(x, jnp.argsort(lax.top_k(x, 2)[1]), axis=0).sum(), None

    fn = jax.grad(lambda xs: lax.scan(jax.checkpoint(body), 0.0, xs)[0])
    found = verify(fn, np.zeros((3, 8), np.float32), limits=quick)
    assert found.exit_code == 0, str(found)
    assert {"top_k_by_argmax", "argsort_packed_key"} <= {s.pass_name for s in found.sites}


def test_sites_alike_are_run_once(monkeypatch, quick):
    seen = []
    original = check.check_piece
    monkeypatch.setattr("relower.gates.verify.api.check_piece",
                        lambda *a: seen.append(1) or original(*a))  # fmt: skip
    fn = lambda t, i, j: known(t, i) + known(t, j)
    found = verify(fn, TABLE, PLACES, PLACES, passes=["nonnegative_index"], limits=quick)
    assert len(found.sites) == 2
    assert len(seen) == 1


def test_only_some_passes(quick):
    fn = lambda t, s: t[jnp.argmax(s, -1)] + jnp.argsort(s[:, 0])
    args = TABLE, np.zeros((5, 5), np.float32)
    found = verify(fn, *args, only=["nonnegative_index"], limits=quick)
    assert {s.pass_name for s in found.sites} == {"nonnegative_index"}
    with pytest.raises(InputError, match="did you mean 'nonnegative_index'"):
        verify(fn, *args, only=["nonnegative_indices"])


def test_a_pass_that_does_not_run_unasked_is_run_where_it_is_named(quick):
    from relower.passes.registry import by_name

    p = by_name("concat_cotangents")  # of a looser contract than what runs by default
    (example,) = p.examples()
    found = verify(p.before, *example.args, only=[p.name], limits=quick)
    assert [s.pass_name for s in found.sites] == [p.name]
    assert found.verdict is Verdict.VERIFIED


def test_devices_that_talk(quick):
    found = verify_examples(["packed_all_gather"], limits=quick, mutants=True)
    assert found.exit_code == 0, str(found)
    assert only(found).checked.derivatives
    assert found.killed[0] == found.killed[1] > 0


# --- the score ------------------------------------------------------------------------------------

SOME = ["argsort_packed_key", "argsort_unique_pairs", "top_k_by_argmax", "nonnegative_index",
        "router_grad_from_wo_input"]  # fmt: skip


@pytest.fixture(scope="module")
def scored():
    return verify_examples(SOME, mutants=True, limits=Limits(seeds=1))


def test_mutants_are_killed(scored):
    assert not scored.survivors
    assert scored.exit_code == 0, str(scored)
    assert scored.killed[1] > 50
    names = {m.name for s in scored.sites for m in s.mutants if m.killed}
    assert {"reversed ties", "output 0 one too great", "output 0: halves swapped",
            "output 0 shrunk by 0.5 %"} <= names  # fmt: skip
    (router,) = [s for s in scored.sites if s.pass_name == "router_grad_from_wo_input"]
    rounded = [m for m in router.mutants if "rounded to bfloat16" in m.name and "input" in m.name]
    assert rounded
    assert all(m.killed for m in rounded)


def test_a_mutant_that_is_the_same_program_says_why(scored):
    same = [m for s in scored.sites for m in s.mutants if m.equivalent]
    assert same
    assert all(len(m.how) > 20 and not m.killed for m in same)


def test_a_survivor_is_a_failure(monkeypatch, quick):
    monkeypatch.setattr("relower.gates.verify.mutants.run", lambda *a: (None, check.Tally(runs=1)))
    found = verify_examples(["argsort_unique_pairs"], mutants=True, limits=quick)
    assert found.survivors
    assert found.exit_code == 1


def test_no_mutants_are_no_score():
    site = dataclasses.replace(only(verify(known, TABLE, PLACES, passes=["nonnegative_index"])))
    assert Evidence("f", (site,), mutated=False).exit_code == 0
    assert Evidence("f", (site,), mutated=True).exit_code == 2


def test_the_worst_verdict_counts():
    site = only(verify(known, TABLE, PLACES, passes=["nonnegative_index"]))
    unknown = dataclasses.replace(site, checked=Checked(Verdict.UNKNOWN, "why"))
    broken = dataclasses.replace(site, checked=Checked(Verdict.VIOLATION, "how"))
    assert Evidence("f", (site, unknown)).exit_code == 2
    assert Evidence("f", (unknown, broken, site)).exit_code == 1
    assert Evidence("f", (unknown, broken, site)).line() == (
        "1 of 3 sites verified, 1 violated, 1 unknown"
    )


def test_what_is_run_is_what_optimize_does(quick):
    """The recorded trace is that of `optimize`: the same sites, in the same number."""
    fn = jax.grad(lambda s: (jnp.sort(s) * jnp.arange(8.0)).sum())
    args = (np.zeros(8, np.float32),)
    found = verify(fn, *args, limits=quick)
    assert found.exit_code == 0
    assert found.sites
    np.testing.assert_array_equal(optimize(fn)(*args), fn(*args))


# --- facts, and whole programs --------------------------------------------------------------------


def test_facts_that_hold(quick):
    found = verify(known, TABLE, PLACES, passes=["nonnegative_index"], facts=True, limits=quick)
    assert found.exit_code == 0
    assert found.facts == {"held": 1, "total": 1, "runs": 1, "made_up": False, "broken": [],
                           "why": None}  # fmt: skip
    assert found.line().endswith("1 of 1 fact held")


def test_a_fact_that_does_not_hold(quick):
    """The user's own statement is wrong of the arguments at hand."""
    wrong = np.array([1, 7, 3], np.int32)
    found = verify(known, TABLE, wrong, passes=["nonnegative_index"], facts=True, limits=quick)
    assert found.exit_code == 1
    (broken,) = found.facts["broken"]
    assert broken.startswith("i32[3] in [0, 4]: 7 is above 4; taken as known by nonnegative_index ")
    assert re.search(r" at .*test_verify\.py:\d+$", broken)
    assert found.line() == (
        "1 of 1 site verified on inputs that obey all facts, 1 of 1 fact broken in the program"
    )
    assert broken in str(found)


def test_a_place_without_a_line_is_named_by_what_stands_there(quick, monkeypatch):
    monkeypatch.setattr("relower.compat.source.source_line", lambda eqn: None)
    fn = lambda t, i: jax.vmap(known, (None, 0))(t, i)
    found = verify(fn, TABLE, np.array([[1, 7]], np.int32), passes=["nonnegative_index"],
                   facts=True, limits=quick)  # fmt: skip
    (broken,) = found.facts["broken"]
    assert broken.endswith("taken as known by nonnegative_index at a select_n of unknown line "
                           "(vmap())")  # fmt: skip


def test_facts_in_the_body_of_a_scan(quick):
    def fn(xs):
        step = lambda carry, x: (carry, jnp.argsort(jnp.argsort(x)))
        return lax.scan(step, 0, xs)[1]

    xs = np.random.default_rng(0).random((3, 8)).astype(np.float32)
    found = verify(fn, xs, facts=True, limits=quick)
    assert found.exit_code == 0, str(found)
    assert found.facts["held"] == found.facts["total"] > 0


def test_facts_of_a_program_that_is_too_large():
    tiny = Limits(bytes=60, seeds=1)
    found = verify(lambda t, i: known(t, i) * jnp.ones((9, 1)), TABLE, PLACES, facts=True,
                   passes=["nonnegative_index"], limits=tiny)  # fmt: skip
    assert "above the limit of 60" in found.facts["why"]
    assert found.line().endswith("facts not checked")
    assert found.exit_code == 2


def test_a_gradient_taken_out_of_the_whole_program(monkeypatch, quick):
    found = verify_examples(["frozen_gradient"], mutants=True, limits=quick)
    assert found.exit_code == 0, str(found)
    assert found.killed == (4, 4)
    # One that takes out what it must not.
    monkeypatch.setattr("relower.gates.verify.whole.WholeProgram.after", property(
        lambda self: jax.make_jaxpr(lambda *a: (0.0 * a[0].sum(), a[0], a[1]))(
            *(jax.ShapeDtypeStruct(s, np.float32) for s in ((64, 64), (64, 32), (4, 16, 64)))
        )
    ))  # fmt: skip
    found = verify_examples(["frozen_gradient"], limits=quick)
    assert found.exit_code == 1
    assert "an output of the program differs" in only(found).checked.reason
