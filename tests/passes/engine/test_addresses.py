"""Addresses of sites: the same in every run, whatever else is on; and what turning one off does."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import relower
from relower.cli.explain import show
from relower.compat import jaxprs
from relower.lowering.words import UNADDRESSED
from relower.passes.disable import Disabled
from relower.passes.engine.addresses import Addresses
from relower.passes.engine.rewrite import rewrite
from relower.passes.optimize import explain, optimize

IDS = jax.ShapeDtypeStruct((512,), jnp.int32)
X = jax.ShapeDtypeStruct((512, 4), jnp.float32)


@jax.jit
def ordered(ids):
    return jnp.argsort(ids)


def loss(x, ids):
    """Sorts in two functions, a scan and a backward; an index; a shared function at two lines."""
    ids = relower.assume_range(ids, 0, 7)

    def body(carry, xs):
        part, mine = xs
        order = jnp.argsort(mine)
        return carry + jnp.sum(part[order] ** 2), order[0]

    total, firsts = jax.lax.scan(body, 0.0, (x[None], ids[None]))
    one = ordered(ids)
    two = ordered(ids)
    return total + jnp.sum(x[one] * x[two]) + jnp.sum(jnp.bincount(ids, length=8)) + firsts[0]


STEP = jax.grad(loss, allow_int=True)


def addresses(report, status=None):
    sites = report.sites if status is None else getattr(report, status)
    return {a for s in sites for a in s.addresses}


@pytest.fixture(scope="module")
def whole():
    return explain(STEP, X, IDS)


def test_every_site_has_addresses_of_its_own(whole):
    assert all(s.addresses for s in whole.sites)
    found = [a for s in whole.applied for a in s.addresses]
    assert len(found) == len(set(found))
    assert not any(a.endswith("?") for a in found)
    assert all(a.startswith(f"{s.pass_name}@") for s in whole.sites for a in s.addresses)
    assert "argsort_packed_key@jvp()/scan/jit(argsort):body#1" in found


def test_calls_from_two_lines_have_two_addresses(whole):
    shared = {a for a in addresses(whole, "applied") if "jit(ordered)" in a}
    assert len(shared) >= 1
    # The function's own line is known inside of it, so both calls are one place.
    assert {a.partition(":")[2].partition("#")[0] for a in shared} == {"ordered"}

    def sorts(ids):
        ids = relower.assume_range(ids, 0, 7)
        first = jnp.argsort(ids)
        second = jnp.argsort(ids)
        return first, second

    report = explain(sorts, IDS)
    assert addresses(report, "applied") == {
        "argsort_packed_key@jit(argsort):sorts#1",
        "argsort_packed_key@jit(argsort):sorts#2",
    }
    off = explain(sorts, IDS, disable=["argsort_packed_key@jit(argsort):sorts#2"])
    packed = [s for s in off.applied if s.pass_name == "argsort_packed_key"]
    assert [s.addresses for s in packed] == [("argsort_packed_key@jit(argsort):sorts#1",)]


def test_turning_one_off_renumbers_no_other(whole):
    everything = addresses(whole)
    applied = addresses(whole, "applied")
    for address in sorted(applied):
        report = explain(STEP, X, IDS, disable=[address])
        assert address not in addresses(report, "applied")
        assert [s.addresses for s in report.declined if s.reasons[0].code == "disabled"]
        still = {a for a in applied if a != address}
        # What it put in place, and what only comes up behind it, goes with it; nothing else does.
        gone = still - addresses(report, "applied")
        assert gone <= {a for a in still if f"{address.partition('@')[2]}/" in a}
        assert addresses(report) <= everything | {a for a in addresses(report) if "/" in a} | {
            f"{p}@{address.partition('@')[2]}" for p in whole.passes
        }


def test_what_is_off_stays_as_it_was(equal_bits):
    def sorts(ids):
        ids = relower.assume_range(ids, 0, 7)
        first = jnp.argsort(ids)
        second = jnp.argsort(ids[::-1])
        return first, second

    ids = jnp.asarray(np.random.default_rng(0).integers(0, 8, 512), jnp.int32)
    off = "argsort_packed_key@jit(argsort):sorts#1"
    plain = [e.params["num_keys"] for e in _sorts(sorts, ids)]
    done = optimize(sorts, passes=["argsort_packed_key"], disable={off})
    assert [len(e.invars) for e in _sorts(done, ids)] == [2, 1]
    assert plain == [1, 1]
    equal_bits(jax.jit(done)(ids), jax.jit(sorts)(ids))


def _sorts(fn, *args):
    def walk(jaxpr):
        for eqn in jaxprs.opened(jaxpr).eqns:
            if eqn.primitive.name == "sort":
                yield eqn
            for value in eqn.params.values():
                if jaxprs.is_body(value):
                    yield from walk(value)

    return list(walk(jax.make_jaxpr(fn)(*args)))


def test_named_pass_with_its_only_site_off_is_no_error():
    def sorts(ids):
        return jnp.argsort(relower.assume_range(ids, 0, 7))

    ids = jnp.zeros(512, jnp.int32)
    off = {"argsort_packed_key@jit(argsort):sorts#1"}
    optimize(sorts, passes=["argsort_packed_key"], disable=off)(ids)


def test_only_turns_all_others_off(whole):
    one = "argsort_packed_key@jvp()/scan/jit(argsort):body#1"
    report = explain(STEP, X, IDS, disable=Disabled(only=frozenset({one})))
    assert addresses(report, "applied") == {one}
    assert not explain(STEP, X, IDS, disable=Disabled(only=frozenset())).applied


def test_same_in_another_process_and_with_other_caches(whole):
    jax.clear_caches()
    assert addresses(explain(STEP, X, IDS)) == addresses(whole)
    explain(jax.value_and_grad(loss, allow_int=True), X, IDS)  # leaves traces of the same functions
    assert addresses(explain(STEP, X, IDS)) == addresses(whole)
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_addresses as t;"
        "print(json.dumps(sorted(t.addresses(t.explain(t.STEP, t.X, t.IDS)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == sorted(addresses(whole))


def test_same_when_other_passes_or_facts_are_known(whole):
    mine = {a for a in addresses(whole) if a.startswith("argsort_packed_key@")}
    assert len(mine) > 1
    assert addresses(explain(STEP, X, IDS, passes=["argsort_packed_key"])) == mine
    assert mine <= addresses(explain(STEP, X, IDS, contract="rounding"))


def test_what_a_site_put_in_place_is_addressed_through_it(engine):
    cos = engine.make_pass(
        "cos_to_sin_twice", "cos_p", engine.every, engine.whole(lambda x, **_: [x + x])
    )

    def f(x):
        return jnp.sin(x) + jnp.cos(x)

    closed = engine.trace(f, jnp.ones(3))
    known = Addresses()
    report = rewrite(closed, [engine.SIN, cos], addresses=known).report
    assert addresses(report, "applied") == {
        "sin_to_cos@f#1",
        "cos_to_sin_twice@f#1",
        "cos_to_sin_twice@f#1/sin_to_cos#1",
    }
    off = Addresses(Disabled(frozenset({"cos_to_sin_twice@f#1/sin_to_cos#1"})))
    report = rewrite(closed, [engine.SIN, cos], addresses=off).report
    assert addresses(report, "applied") == {"sin_to_cos@f#1", "cos_to_sin_twice@f#1"}


def test_address_behind_another_that_is_off_is_no_error():
    """Turned off together, the second never comes up; it is known all the same."""
    report = explain(STEP, X, IDS, contract="rounding")
    inner = sorted(a for a in addresses(report) if "/" in a.partition("#")[2])
    if not inner:
        pytest.skip("no pass works on what another put in place here")
    outer = inner[0].partition("@")[2].rpartition("/")[0]
    off = [inner[0], *(a for a in addresses(report, "applied") if a.endswith(f"@{outer}"))]
    explain(STEP, X, IDS, contract="rounding", disable=off)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("argsort_packed_key@jvp()/scan/jit(argsort):bod#1", "near ones: argsort_packed_key@jvp()"),
        (
            "argsort_packed_key@jvp()/scan/jit(argsort):body#9",
            "near ones: argsort_packed_key@jvp()",
        ),
        ("stable_stack@f#1", "the pass stable_stack doesn't run here"),
    ],
)
def test_address_of_no_site_is_an_error_with_near_ones(address, said):
    with pytest.raises(ValueError, match="no site of") as error:
        explain(STEP, X, IDS, disable=[address])
    assert said in str(error.value)
    with pytest.raises(ValueError, match="no site of"):
        optimize(STEP, disable=[address])(jnp.ones((512, 4)), jnp.zeros(512, jnp.int32))


@pytest.mark.parametrize("address", ["argsort_packed_key@f", "argsort_packed_key@f#0"])
def test_address_of_another_form_is_refused(address):
    with pytest.raises(ValueError, match="is no address of a site"):
        optimize(STEP, disable=[address])


def test_address_without_a_number_is_shown_as_such_and_refused_with_what_to_do(whole, capsys):
    unknown = "argsort_packed_key@scan#?"
    site = replace(whole.applied[0], addresses=(unknown,))
    report = replace(whole, sites=(site,))
    assert f"{unknown}\n           {UNADDRESSED}" in str(report)
    assert UNADDRESSED not in str(whole)
    show(Console(width=400), report.to_json(), "case")
    assert UNADDRESSED in capsys.readouterr().out
    wanted = "not of one site.* the pass as a whole, 'argsort_packed_key', or relower.keep"
    with pytest.raises(ValueError, match=wanted):
        optimize(STEP, disable=[unknown])


def test_a_frozen_leaf_is_a_site_too(equal_bits):
    def grads(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w[0]) @ w[1]))(w)

    args = (jnp.ones((4, 5)), jnp.ones((5, 6))), jnp.ones((3, 4))
    options = {"passes": ["frozen_gradient"], "frozen": "0|1"}
    report = explain(grads, *args, **options)
    first, second = (a for s in report.applied for a in s.addresses)
    done = optimize(grads, disable=[first], **options)(*args)
    want = grads(*args)
    kept = [i for i in (0, 1) if np.any(done[i])]
    assert len(kept) == 1
    equal_bits(done[kept[0]], want[kept[0]])
    off = explain(grads, *args, disable=[first], **options)
    assert addresses(off, "applied") == {second}
    assert [r.code for s in off.declined for r in s.reasons] == ["disabled"]
    assert [leaf.status.value for leaf in off.frozen].count("declined") == 1


def test_what_nothing_reads_has_an_address_behind_what_is_live(equal_bits):
    """A gradient that is never returned is taken out by itself; it can be left in, too."""

    def update(w, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w[0]) @ w[1]))(w)
        return w[0] - grads[0], w[1]

    args = (jnp.ones((4, 5)), jnp.ones((5, 6))), jnp.ones((3, 4))
    report = explain(update, *args, passes=["frozen_gradient"])
    (address,) = addresses(report, "applied")
    assert not address.endswith("#?")
    off = explain(update, *args, passes=["frozen_gradient"], disable=[address])
    assert not off.applied
    equal_bits(optimize(update, disable=[address])(*args), update(*args))


def test_where_types_are_carried_on_addresses_are_known():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def body(ids):
        ids = relower.assume_range(ids, 0, 7)
        order = jnp.argsort(ids)
        return jnp.argsort(order), jnp.take(jnp.arange(order.size) // 2, order)

    report = explain(body, IDS)
    assert report.applied
    assert not any("?" in a for a in addresses(report))
