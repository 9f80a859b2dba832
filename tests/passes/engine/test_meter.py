"""Deciding by figures: the compiler's part is played by a count of each fragment's operations."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import relower
from relower import Measured, MeasureWarning, explain, optimize
from relower.compat.mlir import parse_stablehlo
from relower.lowering.compile import Compiled, CompileFailed
from relower.lowering.cost import ladder
from relower.lowering.cost.measurement import sum_of_sites
from relower.passes.engine.meter import Meter

IDS = np.random.RandomState(0).randint(0, 8, 64).astype(np.int32)
MEMORY = {"arguments": 8, "outputs": 4, "alias": 0, "temp": 2, "code": 3, "peak": 20}


def hlo(name, cycles, sparse=0):
    """A module of one operation with a figure, and some that have none."""
    notes = f'{{"bundle_analysis_data":{{"estimated_cycles":"{cycles}"}}}}'
    extra = "".join(f"  %g.{i} = f32[8]{{0}} gather(%x, %x)\n" for i in range(sparse))
    return (
        "HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        f"{extra}  ROOT %y = f32[8]{{0}} {name}(%x), backend_config={notes}\n}}\n"
    )


@pytest.fixture
def compiler(monkeypatch):
    """Prices: cycles by a pattern in a fragment's StableHLO; returns the texts compiled."""
    texts = []

    def install(prices, sparse=(), fails=(), error=None):
        def compile_staged(staged, *, flags=(), limits=None):
            text = str(parse_stablehlo(staged.module))
            texts.append(text)
            if error is not None:
                raise error
            for pattern in fails:
                if any("static_llo_profile" in f for f in flags) and re.search(pattern, text):
                    raise CompileFailed("it died", "crash", staged.name)
            cycles = 1 + sum(p * len(re.findall(pattern, text)) for pattern, p in prices.items())
            missing = sum(bool(re.search(pattern, text)) for pattern in sparse)
            return Compiled(hlo("negate", cycles, missing), MEMORY, {}, 1.0)

        monkeypatch.setattr(ladder, "compile_staged", compile_staged)
        monkeypatch.setenv("RELOWER_COST_CACHE", "off")
        return texts

    return install


STABLE, UNSTABLE, PACKED = r"is_stable = true", r"is_stable = false", r"stablehlo\.shift_left"


def order(ids):
    return jnp.argsort(relower.assume_range(ids, 0, 7))


def ranks(scores):
    return jnp.argsort(jnp.argsort(scores))


def only(report, status="applied"):
    (site,) = getattr(report, status)
    return site


def test_the_cheaper_is_taken_and_the_figures_are_said(compiler):
    compiler({STABLE: 1000, UNSTABLE: 500})
    report = explain(order, IDS, passes=["argsort_packed_key"], choose="measured")
    found = only(report).measured
    assert (found.before, found.chosen, found.rung) == (1001, "rewrite", "fragment")
    assert found.after == {"rewrite": 501}
    assert found.runs == 1
    assert "measured: 1,001 estimated cycles as it is; rewrite 501; rung fragment" in str(report)
    assert "1 site was decided by estimated cycles on TPU7x:2x2x1" in report.notes[-1]


def test_where_nothing_wins_it_stays_and_both_figures_are_said(compiler):
    compiler({STABLE: 1000, UNSTABLE: 1000})
    report = explain(order, IDS, choose="measured")
    assert not report.applied
    for site in report.declined:
        if site.pass_name.startswith("argsort"):
            (reason,) = site.reasons
            assert reason.code == "measured-no-gain"
            assert reason.found == "1,001 estimated cycles (rewrite), rung fragment"
            assert reason.wanted == "fewer than 1,001"
    assert any(site.reasons[0].code == "measured-no-gain" for site in report.declined)
    np.testing.assert_array_equal(optimize(order, choose="measured")(IDS), order(IDS))


@pytest.mark.parametrize(
    ("prices", "way"),
    [
        ({STABLE: 1000, UNSTABLE: 400, PACKED: 100, r"scatter": 900}, "pairs"),
        ({STABLE: 1000, UNSTABLE: 700, PACKED: -500, r"scatter": 900}, "packed"),
        ({STABLE: 1000, UNSTABLE: 700, r"\"stablehlo\.scatter": 100}, "scatter"),
    ],
)
def test_of_several_ways_the_cheapest(compiler, prices, way):
    compiler(prices)
    scores = np.random.RandomState(1).randn(64).astype(np.float32)
    report = explain(ranks, scores, passes=["inverse_permutation"], choose="measured")
    found = only(report).measured
    assert found.chosen == way
    assert {"pairs", "packed", "scatter"} <= found.after.keys()
    wanted = explain(ranks, scores, passes=["inverse_permutation"],
                     choose={"inverse_permutation": way})  # fmt: skip
    assert len(wanted.applied) == 1
    measured = jax.jit(optimize(ranks, passes=["inverse_permutation"], choose="measured"))
    by_name = jax.jit(
        optimize(ranks, passes=["inverse_permutation"], choose={"inverse_permutation": way})
    )
    assert measured.lower(scores).as_text() == by_name.lower(scores).as_text()
    np.testing.assert_array_equal(measured(scores), ranks(scores))


def test_a_rival_that_saves_more_takes_the_site(compiler, engine):
    """Packed keys are preferred by rule of thumb; here the pairs cost less."""
    compiler({STABLE: 1000, UNSTABLE: 500, PACKED: 200})
    report = explain(order, IDS, choose="measured")
    assert report.counts() == {"argsort_unique_pairs": 1}

    compiler({r"stablehlo\.cosine": 1000, r"stablehlo\.sine": 300, r"stablehlo\.tanh": 100})
    sine = engine.make_pass("sine", "cos_p", engine.every, engine.whole(lambda x: [jnp.sin(x)]))
    tanh = engine.make_pass("tanh", "cos_p", engine.every, engine.whole(lambda x: [jnp.tanh(x)]))
    meter = Meter()
    done = engine.rewrite(
        engine.trace(jnp.cos, np.ones(3, np.float32)), meter.measuring((sine, tanh))
    )
    assert done.report.counts() == {"tanh": 1}
    (reason,) = only(done.report, "declined").reasons
    assert reason.code == "measured-less"
    assert str(reason) == (
        "tanh (rewrite) saves more here (found 700 estimated cycles saved by sine (rewrite); "
        "wanted 900, as by tanh)"
    )


def test_a_rewrite_inside_a_call_is_weighed_against_one_of_the_call(compiler, engine):
    compiler({r"stablehlo\.cosine": 1000, r"stablehlo\.sine": 300, r"stablehlo\.tanh": 100})
    inner = engine.make_pass("inner", "cos_p", engine.every, engine.whole(lambda x: [jnp.tanh(x)]))
    outer = engine.make_pass("outer", "jit_p", engine.every, engine.whole(lambda x: [jnp.sin(x)]))
    closed = engine.trace(lambda x: jax.jit(jnp.cos)(x), np.ones(3, np.float32))
    done = engine.rewrite(closed, Meter().measuring((outer, inner)))
    assert done.report.counts() == {"inner": 1}


def test_equal_sites_are_compiled_once(compiler):
    texts = compiler({STABLE: 1000, UNSTABLE: 500})

    def both(a, b):
        first = order(a)
        return first, jnp.argsort(relower.assume_range(b * first, 0, 7))

    report = explain(both, IDS, IDS, passes=["argsort_packed_key"], choose="measured")
    assert only(report).calls == only(report).measured.runs == 2
    assert len(texts) == len(set(texts)) == 2


def test_measuring_without_deciding(compiler):
    """What the rules of thumb do, with figures that would have decided otherwise."""
    compiler({STABLE: 1000, UNSTABLE: 2000})
    report = explain(order, IDS, choose=Measured(decide=False))
    assert report.counts() == explain(order, IDS).counts() == {"argsort_packed_key": 1}
    assert only(report).measured.after == {"rewrite": 2001}
    assert str(sum_of_sites(report.to_json())) == (
        "the rewritten sites alone: 1,001 → 2,001 cycles in one run, rung fragment; "
        "1 of 1 site has a figure"
    )
    assert report.notes[-1].startswith("1 site was measured in estimated cycles on TPU7x:2x2x1")


def test_a_site_without_a_fragment_is_counted_with_that_reason():
    site = {"pass": "frozen_gradient", "status": "applied", "measured": None}
    found = sum_of_sites({"sites": [site, {**site, "status": "declined"}]})
    assert (found.sites, found.summed) == (1, 0)
    (why,) = found.missing
    assert "whole program" in why


def test_a_sum_says_what_it_leaves_out(compiler):
    compiler({STABLE: 1000, UNSTABLE: 500}, fails=[PACKED])
    found = sum_of_sites(explain(order, IDS, choose=Measured(decide=False)).to_json())
    assert (found.sites, found.summed, found.before) == (1, 0, 0)
    assert sum(found.missing.values()) == 1

    def until(ids):
        return jax.lax.while_loop(lambda c: c[0] < 3, order, ids)

    compiler({STABLE: 1000, UNSTABLE: 500})
    found = sum_of_sites(explain(until, IDS, choose=Measured(decide=False)).to_json())
    assert found.missing == {"it runs an unknown number of times": 1}


def test_what_is_kept_is_not_measured(compiler):
    texts = compiler({STABLE: 1000, UNSTABLE: 500})
    report = explain(relower.keep(order), IDS, choose="measured")
    assert not report.applied
    assert not texts


def test_a_warm_cache_compiles_nothing(compiler, monkeypatch, tmp_path):
    texts = compiler({STABLE: 1000, UNSTABLE: 500})
    monkeypatch.setenv("RELOWER_COST_CACHE", "on")
    monkeypatch.setenv("RELOWER_CACHE", str(tmp_path))
    reports = [explain(order, IDS, choose="measured") for _ in range(2)]
    assert len(texts) > 0
    count = len(texts)
    reports.append(explain(order, IDS, choose="measured"))
    assert len(texts) == count
    assert reports[0].to_json() == reports[1].to_json() == reports[2].to_json()


def test_figures_that_cannot_be_compared_leave_the_rule_of_thumb(compiler):
    compiler({STABLE: 1000, UNSTABLE: 2000}, sparse=[PACKED])
    with pytest.warns(MeasureWarning, match="no figure on any rung for: gather"):
        optimize(order, passes=["argsort_packed_key"], choose="measured")(IDS)
    site = only(explain(order, IDS, passes=["argsort_packed_key"], choose="measured"))
    assert site.measured.why == "no figure on any rung for: gather"
    assert str(site.measured).startswith("not measured, the rule of thumb decided: ")


def test_operations_without_a_figure_on_both_sides_do_not_matter(compiler):
    compiler({STABLE: 1000, UNSTABLE: 500}, sparse=["sort"])
    assert only(explain(order, IDS, passes=["argsort_packed_key"], choose="measured")).measured


def test_two_rungs_are_never_compared(compiler):
    """The packed form's analysis dies, so that it has counts at best, and those are no cycles."""
    compiler({STABLE: 1000, UNSTABLE: 2000}, fails=[PACKED])
    site = only(explain(order, IDS, passes=["argsort_packed_key"], choose="measured"))
    assert site.measured.why == "they stand on different rungs: counts, fragment"
    assert site.measured.chosen is None


def test_without_a_compiler_it_is_said_once_and_asked_once(compiler):
    texts = compiler({}, error=CompileFailed("libtpu isn't installed: install it", "missing"))
    report = explain(order, IDS, choose="measured")
    assert report.counts() == explain(order, IDS).counts()
    assert len(texts) == 1
    assert report.notes[-1] == (
        "nothing was measured, rules of thumb decided: libtpu isn't installed: install it"
    )
    with pytest.warns(MeasureWarning, match="libtpu isn't installed"):
        optimize(order, choose="measured")(IDS)


def test_in_a_jit_a_grad_a_scan_and_a_shard_map(compiler):
    from jax.sharding import PartitionSpec as P

    compiler({STABLE: 1000, UNSTABLE: 500})
    measured = optimize(order, choose="measured")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MeasureWarning)
        np.testing.assert_array_equal(jax.jit(measured)(IDS), order(IDS))
        loss = lambda x: (x[order(jnp.asarray(IDS))] * jnp.arange(64.0)).sum()
        grad = jax.grad(lambda x: (x[measured(jnp.asarray(IDS))] * jnp.arange(64.0)).sum())
        x = np.linspace(0, 1, 64, dtype=np.float32)
        np.testing.assert_array_equal(grad(x), jax.grad(loss)(x))
        rows = np.stack([IDS, IDS[::-1]])
        scanned = jax.lax.scan(lambda c, r: (c, measured(r)), None, rows)[1]
        np.testing.assert_array_equal(scanned[1], order(rows[1]))
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = {"mesh": mesh, "in_specs": P("d"), "out_specs": P("d")}
        got = jax.jit(jax.shard_map(measured, **spec))(IDS)
        np.testing.assert_array_equal(got, jax.jit(jax.shard_map(order, **spec))(IDS))
        whole = jax.jit(optimize(jax.shard_map(order, **spec), choose="measured"))
        np.testing.assert_array_equal(whole(IDS), got)


@pytest.mark.parametrize("run", [explain, optimize])
def test_another_word_is_refused(run):
    with pytest.raises(TypeError, match=r"choose is .cheapest.; wanted .* or .measured."):
        run(order, *[IDS] * (run is explain), choose="cheapest")


def test_the_rule_of_thumb_by_its_name():
    report = explain(order, IDS, choose="heuristic")
    assert report.to_json() == explain(order, IDS).to_json()
    assert only(report).measured is None
