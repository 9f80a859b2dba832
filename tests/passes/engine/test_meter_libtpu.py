"""Measured choice with the real compiler, where it is installed: some seconds for each fragment."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import relower
from relower.lowering.cost import ladder
from relower.lowering.cost.compare import compare

pytestmark = [
    pytest.mark.libtpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu isn't installed, so nothing is compiled: install relower[tpu]",
    ),
]
INVERSE = "inverse_permutation"


def ids(n):
    return jax.ShapeDtypeStruct((n,), jnp.int32)


def inverse_of(experts):
    def inverse(ids):
        order = jnp.argsort(relower.assume_range(ids, 0, experts - 1))
        return order, jnp.argsort(order)

    return inverse


def chosen(report):
    (site,) = report.applied
    return site.measured


@pytest.fixture
def compilations(monkeypatch):
    """Counts what the compiler is started for."""
    started = []
    real = ladder.compile_staged

    def counting(staged, **kwargs):
        started.append(staged.name)
        return real(staged, **kwargs)

    monkeypatch.setattr(ladder, "compile_staged", counting)
    return started


def test_pairs_at_81920_of_512_experts_as_when_compiled_by_hand(compilations):
    n = 81_920
    report = relower.explain(inverse_of(512), ids(n), passes=[INVERSE], choose="measured")
    found = chosen(report)
    assert found.chosen == "pairs"
    assert "packed" in found.missing  # 17 + 17 bits are more than 32
    assert min(found.after, key=found.after.get) == "pairs"
    assert found.after["pairs"] < found.before < found.after["scatter"]

    by_hand = {
        "before": lambda order: jnp.argsort(order),
        "pairs": lambda order: lax.sort(
            (order, lax.iota(jnp.int32, n)), is_stable=False, num_keys=1
        )[1],
    }
    figures = {"before": found.before, **found.after}
    for name, fn in by_hand.items():
        cost = relower.cost(fn, ids(n))
        assert figures[name] == pytest.approx(cost.total().cycles, rel=0.001)

    count = len(compilations)
    assert count > 0
    again = relower.explain(inverse_of(512), ids(n), passes=[INVERSE], choose="measured")
    assert len(compilations) == count
    assert again.to_json() == report.to_json()


def test_the_packed_form_where_both_fit_one_word():
    """At 8,192, where they fit too, the pairs cost less; no rule of thumb knows."""
    report = relower.explain(inverse_of(512), ids(65_536), passes=[INVERSE], choose="measured")
    found = chosen(report)
    assert found.chosen == "packed"
    assert found.after["packed"] < found.after["pairs"] < found.before


def test_counting_where_there_are_few_values():
    report = relower.explain(inverse_of(8), ids(81_920), passes=[INVERSE], choose="measured")
    found = chosen(report)
    assert found.chosen == "counting"
    assert found.after["counting"] < found.before


def test_the_sites_sum_explains_the_whole_programs_change():
    """Fragments and whole programs are two rungs: this is what their agreement rests on.

    At a size where a sort's cycles aren't small beside those of what the compiler fuses with it.
    """
    fn = inverse_of(512)
    report = relower.explain(fn, ids(81_920), choose="measured")
    saved = sum(s.measured.saving * s.measured.runs for s in report.applied)
    after = relower.optimize(fn, choose="measured")
    found = compare(relower.cost(fn, ids(81_920)), relower.cost(after, ids(81_920)))
    assert found.a.rung == "profile"
    assert found.worse is False
    change = found.before - found.after
    assert 0.9 * change <= saved <= 1.1 * change


def test_collectives_are_cut_with_their_mesh():
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))

    def routing(weights, ids):
        every = lax.all_gather(weights, "expert", tiled=True)
        return every, lax.all_gather(ids, "expert", tiled=True)

    fn = jax.shard_map(routing, mesh=mesh, in_specs=P("expert"), out_specs=P(None, "expert"))
    args = [jax.ShapeDtypeStruct((4096, 128), d) for d in (jnp.float32, jnp.int32)]
    report = relower.explain(fn, *args, passes=["packed_all_gather"], choose="measured")
    (site,) = report.sites
    # What runs beside other instructions has no cycles on any rung: the rule of thumb decides.
    assert site.measured is not None
    assert site.measured.why is None or "lowered" not in site.measured.why
