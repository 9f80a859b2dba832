"""Rows added into zeros by a permutation against a gather by its inverse."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import PassNotApplicable, assume_range, explain, optimize
from relower.passes import permutation_scatter, registry
from relower.passes.parts import brought

NAME = "permutation_scatter"
ONE = {NAME: 1}
N = 12
KEYS = np.random.RandomState(0).randint(0, 5, N).astype(np.int32)
ROWS = np.random.RandomState(1).randint(-8, 9, (N, 3)).astype(np.float32)


def assert_numbers(got, want, what=""):
    """Equal types, and equal as numbers: NaN is NaN, and zeros of either sign are equal."""
    left, right = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(left) == len(right), what
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype, what
        assert jax.typeof(a).weak_type == jax.typeof(b).weak_type, what
        same = np.array_equal(np.asarray(a), np.asarray(b), equal_nan=a.dtype != np.int32)
        assert same, f"{what}: differs as numbers"


def equal(fn, *args, passes=(NAME,), applied=None, eager=False, way=None):
    """``optimize(fn)`` gives the numbers of ``fn``; the report."""
    passes = passes and list(passes)
    contract = None if passes else "value"
    choose = way and {NAME: way}
    report = explain(fn, *args, passes=passes, contract=contract, choose=choose)
    if applied is not None:
        assert report.counts() == applied, str(report)
    optimized = optimize(fn, passes=passes, contract=contract, choose=choose)
    try:
        got = jax.jit(optimized)(*args)
    except PassNotApplicable:
        assert not applied, str(report)
        return report
    assert_numbers(got, jax.jit(fn)(*args), "jitted")
    if eager:
        assert_numbers(optimized(*args), fn(*args), "eager")
    return report


def orders(keys):
    order = jnp.argsort(keys)
    return order, jnp.argsort(order)


def dispatched(keys, x, g):
    """The order's inverse in use, and the transpose of a gather by the order."""
    order, inverse = orders(keys)
    return x[inverse], jnp.zeros_like(g).at[order].add(g)


def taken_back(keys, x, g):
    """The order in use, and the transpose of a gather by its inverse."""
    order, inverse = orders(keys)
    return x[order], jnp.zeros_like(g).at[inverse].add(g)


BOTH = pytest.mark.parametrize("fn", [dispatched, taken_back])


@BOTH
@pytest.mark.parametrize("shape", [(N,), (N, 3), (N, 2, 3), (N, 1)])
def test_windows(fn, shape, eqns_of):
    g = np.random.RandomState(2).rand(*shape).astype(np.float32)
    equal(fn, KEYS, ROWS, g, applied=ONE, eager=True)
    assert not eqns_of(optimize(fn, passes=[NAME]), KEYS, ROWS, g, name="scatter-add")
    equal(fn, KEYS, ROWS, g, passes=None)


def test_the_other_axis_and_other_places_of_the_rows():
    def along_the_last(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((3, N), g.dtype).at[:, order].add(g.T)

    def in_the_middle(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((2, N, 3), g.dtype).at[:, order].add(jnp.stack([g, 2 * g]))

    def rows_behind(keys, g):
        order, inverse = orders(keys)
        dims = lax.ScatterDimensionNumbers((0,), (0,), (0,))
        return inverse, lax.scatter_add(jnp.zeros((N, 3)), order[:, None], g.T, dims)

    for fn in (along_the_last, in_the_middle, rows_behind):
        equal(fn, KEYS, ROWS, applied=ONE)


@BOTH
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, jnp.bfloat16, np.float16])
def test_dtypes(fn, dtype):
    equal(fn, KEYS, ROWS, jnp.asarray(ROWS).astype(dtype), applied=ONE)


def test_wide_indices(x64):
    equal(dispatched, KEYS.astype(np.int64), ROWS, ROWS.astype(np.float64), applied=ONE)


SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 3e38, -3e38, 2**-126, 0.5, 7],
                   np.float32)  # fmt: skip


@BOTH
def test_special_values(fn):
    equal(fn, KEYS, ROWS, SPECIAL, applied=ONE, eager=True)
    equal(fn, KEYS[::-1].copy(), ROWS, np.stack([SPECIAL, SPECIAL[::-1]], 1), applied=ONE)


def test_only_the_sign_of_a_zero_may_differ():
    g = np.full((N,), -0.0, np.float32)
    plain, done = jax.jit(dispatched), jax.jit(optimize(dispatched, passes=[NAME]))
    assert not np.signbit(plain(KEYS, ROWS, g)[1]).any()
    assert np.signbit(done(KEYS, ROWS, g)[1]).all()


def test_it_runs_only_where_the_contract_allows_it():
    assert NAME not in explain(dispatched, KEYS, ROWS, ROWS).counts()
    assert explain(dispatched, KEYS, ROWS, ROWS, contract="value").counts()[NAME] == 1


@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("wrap", [True, False])
def test_modes(mode, wrap):
    def fn(keys, g):
        order, inverse = orders(keys)
        into = jnp.zeros_like(g).at[order]
        return inverse, into.add(g, mode=mode, wrap_negative_indices=wrap)

    equal(fn, KEYS, ROWS, applied=ONE)


def test_layers_that_share_their_argsorts(eqns_of):
    """Equal calls share one body: each layer's inverse is its own, not another layer's."""

    def fn(k1, k2, g):
        (o1, i1), (o2, i2) = orders(k1), orders(k2)
        zeros = jnp.zeros_like(g)
        return g[i1], g[i2], zeros.at[o1].add(g), zeros.at[o2].add(g), zeros.at[i2].add(g)

    equal(fn, KEYS, KEYS[::-1].copy(), ROWS, applied={NAME: 3})
    equal(fn, KEYS, KEYS[::-1].copy(), ROWS, passes=None)

    def crossed(k1, k2, g):
        o1, (o2, i2) = jnp.argsort(k1), orders(k2)
        return g[i2], o2, jnp.zeros_like(g).at[o1].add(g)

    equal(crossed, KEYS, KEYS[::-1].copy(), ROWS, applied={}, way="at_hand")
    equal(crossed, KEYS, KEYS[::-1].copy(), ROWS, applied=ONE)  # by one that is made


def test_ways_to_the_inverse():
    """Packed sorts, unique pairs, other key dtypes, and an order that is itself the argsort."""
    ids = lambda s: lax.top_k(s, 1)[1].reshape(-1)
    scores = np.random.RandomState(0).randint(-3, 4, (N, 5)).astype(np.float32)
    equal(lambda s, g: dispatched(ids(s), g, g), scores, ROWS, passes=None)
    floats = np.random.RandomState(0).choice([0.0, -0.0, np.nan, 1.0], N).astype(np.float32)
    equal(dispatched, floats, ROWS, ROWS, applied=ONE)

    def unstable(keys, g):
        order = jnp.argsort(keys)
        inverse = jnp.argsort(order.astype(np.int16), stable=False)
        return g[inverse], jnp.zeros_like(g).at[order].add(g)

    equal(unstable, KEYS, ROWS, applied=ONE)

    def by_pairs(keys, g):
        i = lax.iota(np.int32, N)
        _, order = lax.sort((keys, i), num_keys=2, is_stable=False)
        _, inverse = lax.sort((order, i), num_keys=1, is_stable=False)
        return g[inverse], jnp.zeros_like(g).at[order].add(g)

    equal(by_pairs, KEYS, ROWS, applied=ONE)


# --- gradients ------------------------------------------------------------------------------------


def layer(keys, x, w):
    """Rows sorted, worked on and taken back."""
    order, inverse = orders(keys)
    return jnp.sin(x[order] * w)[inverse] * jnp.arange(1.0, 4.0)


def loss(keys, x, w):
    return (layer(keys, x, w) ** 2).sum()


W = np.random.RandomState(3).rand(N, 3).astype(np.float32)
GRAD = jax.grad(loss, argnums=(1, 2))


def test_the_backward_of_a_layer_holds_no_scatter(eqns_of):
    equal(GRAD, KEYS, ROWS, W, applied={NAME: 2}, eager=True)
    assert len(eqns_of(GRAD, KEYS, ROWS, W, name="scatter-add")) == 2
    assert not eqns_of(optimize(GRAD, passes=[NAME]), KEYS, ROWS, W, name="scatter-add")
    equal(GRAD, KEYS, ROWS, W, passes=None)


def test_grad_of_grad():
    def second(fn):
        inner = lambda *a: sum((g * jnp.cos(g)).sum() for g in fn(*a))
        return jax.grad(inner, argnums=(1, 2))

    want = jax.jit(second(GRAD))(KEYS, ROWS, W)
    assert all(np.any(w) for w in want)
    assert_numbers(jax.jit(second(optimize(GRAD, passes=[NAME])))(KEYS, ROWS, W), want)
    report = equal(second(GRAD), KEYS, ROWS, W)
    assert report.counts()[NAME] >= 2
    equal(second(optimize(GRAD, passes=[NAME])), KEYS, ROWS, W)


def test_gradients_of_the_scatter_itself():
    """Gather by the inverse has the same transpose and the same tangent."""

    def value(keys, g):
        taken, back = dispatched(keys, g, g)
        return (back * W).sum() + (taken * taken).sum()

    want = jax.jit(jax.grad(value, argnums=1))(KEYS, ROWS)
    assert np.any(want)
    optimized = optimize(value, passes=[NAME])
    assert_numbers(jax.jit(jax.grad(optimized, argnums=1))(KEYS, ROWS), want)
    tangent = lambda fn: jax.jit(lambda g: jax.jvp(lambda g: fn(KEYS, g), (g,), (W,)))
    assert_numbers(tangent(optimized)(ROWS), tangent(value)(ROWS))


def test_under_remat_and_scan():
    def stacked(keys, x, ws):
        step = lambda h, kw: (layer(kw[0], h, kw[1]), None)
        return lax.scan(jax.checkpoint(step), x, (keys, ws))[0].sum()

    fn = jax.grad(stacked, argnums=(1, 2))
    args = np.stack([KEYS, KEYS[::-1]]), ROWS, np.stack([W, W * 2])
    equal(fn, *args, applied={NAME: 2})


def test_under_vmap_in_either_order():
    batch = np.stack([KEYS, KEYS[::-1]]), np.stack([ROWS, -ROWS]), np.stack([W, W * 2])
    want = jax.jit(jax.vmap(GRAD))(*batch)
    assert_numbers(jax.jit(jax.vmap(optimize(GRAD, passes=[NAME])))(*batch), want)
    shared = jax.vmap(GRAD, in_axes=(None, 0, 0))  # one order for all
    want = jax.jit(shared)(KEYS, *batch[1:])
    report = explain(shared, KEYS, *batch[1:], passes=[NAME])
    assert report.counts() == {NAME: 2}, str(report)
    assert_numbers(jax.jit(optimize(shared, passes=[NAME]))(KEYS, *batch[1:]), want)


def sharded(fn, mesh, specs, check_vma=True):
    return jax.shard_map(
        fn, mesh=mesh, in_specs=specs, out_specs=(P("d"), P("d")), check_vma=check_vma
    )


def data(n):
    r = np.random.RandomState(0)
    keys = r.randint(0, 5, n * N).astype(np.int32)
    return keys, *(r.randint(-8, 9, (n * N, 3)).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind, check_vma):
    """A backward inside, and one more around it."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    part = sharded(GRAD, mesh, (P("d"),) * 3, check_vma)
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, P("d"))) for a in data(4)]
        want = jax.jit(part)(*args)
        assert all(np.any(v) for v in want)
        assert explain(part, *args, passes=[NAME]).counts() == {NAME: 2}
        done = optimize(part, passes=[NAME])
        assert_numbers(jax.jit(done)(*args), want)
        outer = lambda fn: jax.grad(lambda *a: sum(v.sum() for v in fn(*a)), argnums=(1, 2))
        want = jax.jit(outer(part))(*args)
        assert all(np.any(v) for v in want)
        assert_numbers(jax.jit(outer(done))(*args), want)


def test_updates_that_vary_over_devices_by_an_order_that_does_not():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    part = sharded(GRAD, mesh, (P(), P("d"), P("d")))
    equal(part, KEYS, *data(4)[1:], applied={NAME: 2})


def test_declines_where_the_order_crosses_into_a_shard_map_of_its_own(why):
    """A backward around shard_map reads the order as an array of all devices' orders."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    part = jax.shard_map(layer, mesh=mesh, in_specs=(P("d"),) * 3, out_specs=P("d"))
    fn = jax.grad(lambda *a: (part(*a) ** 2).sum(), argnums=(1, 2))
    found = why(equal(fn, *data(4), applied={}), NAME)
    assert {r.split(":")[0] for reasons in found for r in reasons} == {"not-permutation"}


# --- rows left out --------------------------------------------------------------------------------


def masked(outside, turned=False, mode="drop", rows=N):
    def fn(keys, g):
        order, inverse = orders(keys)
        keep = keys != 1
        at = jnp.where(~keep, outside, order) if turned else jnp.where(keep, order, outside)
        return inverse, jnp.zeros((rows, 3), g.dtype).at[at].add(g, mode=mode)

    return fn


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("outside", [N, N + 5, 2**31 - 1])
def test_rows_masked_to_an_index_outside(outside, turned, eqns_of):
    fn = masked(outside, turned)
    equal(fn, KEYS, ROWS, applied=ONE, eager=True)
    assert not eqns_of(optimize(fn, passes=[NAME]), KEYS, ROWS, name="scatter-add")
    g = np.stack([SPECIAL] * 3, 1)
    equal(fn, KEYS, g, applied=ONE)
    equal(fn, np.ones_like(KEYS), g, applied=ONE)  # nothing is kept
    equal(fn, np.zeros_like(KEYS), g, applied=ONE)


@pytest.mark.parametrize("rows", [1, 5, N - 1])
def test_a_buffer_that_drops_rows(rows):
    """Places past the end of the buffer belong to no slice, masked or not."""

    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((rows, 3), g.dtype).at[inverse].add(g, mode="drop"), order

    equal(fn, KEYS, ROWS, applied=ONE)
    equal(masked(N, rows=rows), KEYS, ROWS, applied=ONE)


def test_rows_masked_by_lax_itself():
    """Without jax's wrapping of negative indices, -1 is outside as well."""

    def fn(keys, g):
        order, inverse = orders(keys)
        at = lax.select(keys != 1, order, jnp.full_like(order, -1))
        dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        mode = lax.GatherScatterMode.FILL_OR_DROP
        return inverse, lax.scatter_add(jnp.zeros((N, 3)), at[:, None], g, dims, mode=mode)

    equal(fn, KEYS, ROWS, applied=ONE)


def test_the_backward_of_a_masked_gather():
    """A row of padding is filled with zeros; its cotangent goes nowhere."""

    def loss(keys, x, w):
        order, inverse = orders(keys)
        at = jnp.where(keys != 1, inverse, N)
        rows = x[order].at[at].get(mode="fill", fill_value=0)
        return (jnp.sin(rows * w) * jnp.arange(1.0, 4.0)).sum()

    fn = jax.grad(loss, argnums=(1, 2))
    assert all(np.any(v) for v in fn(KEYS, ROWS, W))
    equal(fn, KEYS, ROWS, W, applied={NAME: 2})
    equal(fn, KEYS, ROWS, W, passes=None)
    inside = jax.grad(optimize(loss, passes=None, contract="value"), argnums=(1, 2))
    assert_numbers(jax.jit(inside)(KEYS, ROWS, W), jax.jit(fn)(KEYS, ROWS, W))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_masked_rows_under_shard_map(kind, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    with jax.set_mesh(mesh):
        fn = jax.shard_map(masked(N), mesh=mesh, in_specs=P("d"), out_specs=P("d"),
                           check_vma=check_vma)  # fmt: skip
        args = [jax.device_put(a, NamedSharding(mesh, P("d"))) for a in data(4)[:2]]
        equal(fn, *args, applied=ONE)


def reasons(fn, *args):
    report = equal(fn, *args, applied={})
    return {r.code for s in report.declined for r in s.reasons}


def test_declines_masks_that_point_inside(why):
    assert reasons(masked(0), KEYS, ROWS) == {"not-permutation"}
    assert reasons(masked(N - 1), KEYS, ROWS) == {"not-permutation"}
    # jax wraps -1 to the last row.
    assert reasons(masked(-1), KEYS, ROWS) == {"not-permutation"}

    def by_element(keys, g):
        order, inverse = orders(keys)
        at = jnp.where(keys != 1, order, N + jnp.arange(N))
        return inverse, jnp.zeros_like(g).at[at].add(g, mode="drop")

    assert reasons(by_element, KEYS, ROWS) == {"not-permutation"}


def shortened(mode):
    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((5, 3)).at[order].add(g, mode=mode)

    return fn


def test_declines_a_mode_that_moves_rows():
    assert reasons(masked(N, mode="clip"), KEYS, ROWS) == {"mode"}
    assert reasons(shortened("clip"), KEYS, ROWS) == {"mode"}


def test_a_broken_promise_drops_rows():
    """Lowered as the mode that drops, on every platform: the transpose of ``x[i]`` beyond ``x``."""
    equal(masked(N, mode="promise_in_bounds"), KEYS, ROWS, applied=ONE)
    equal(shortened("promise_in_bounds"), KEYS, ROWS, applied=ONE)
    text = {mode: jax.jit(shortened(mode)).lower(KEYS, ROWS).as_text() for mode in
            ("drop", "promise_in_bounds", "clip")}  # fmt: skip
    assert text["drop"] == text["promise_in_bounds"] != text["clip"]


def test_a_buffer_whose_rows_are_masked_when_taken_back():
    """As a routed layer with a buffer reads it: the index goes beyond, the select hides it."""

    def loss(keys, x, w):
        order, inverse = orders(keys)
        rows = jnp.sin(x[order[:5]] * w[:5])
        return (jnp.where(inverse[:, None] < 4, rows[inverse], 0) * jnp.arange(1.0, 4.0)).sum()

    fn = jax.grad(loss, argnums=(1, 2))
    report = equal(fn, KEYS, ROWS, W)
    assert report.counts() == ONE, str(report)
    equal(fn, KEYS, ROWS, W, passes=None)


def test_declines_a_truncated_order_even_where_rows_are_dropped():
    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((5, 3)).at[order[:8]].add(g[:8], mode="drop")

    assert reasons(fn, KEYS, ROWS) == {"not-permutation"}


# --- the inverse from another scan, or made -------------------------------------------------------


def by_token(keys, x, w):
    """The rows come from half as many tokens, so that the backward doesn't see the order."""
    order, inverse = orders(keys)
    return jnp.sin(x[order // 2] * w)[inverse].reshape(-1, 2, 3).sum(1)


def scanned(keys, x, ws):
    step = lambda h, kw: (by_token(kw[0], h, kw[1]), None)
    return (lax.scan(step, x, (keys, ws))[0] ** 2).sum()


LAYERS = np.stack([KEYS, KEYS[::-1], KEYS + 1]), ROWS[: N // 2], np.stack([W, W * 2, W + 1])
SCANNED = jax.grad(scanned, argnums=(1, 2))


def test_the_forward_scans_order_serves_its_backward(eqns_of):
    report = equal(SCANNED, *LAYERS, applied=ONE)
    assert {r.code for s in report.declined for r in s.reasons} == {"not-permutation"}
    # The rows' own scatter stays; no sort is added.
    done = optimize(SCANNED, passes=[NAME])
    assert len(eqns_of(done, *LAYERS, name="scatter-add")) == 1
    assert len(eqns_of(done, *LAYERS, name="sort")) == 2
    equal(SCANNED, *LAYERS, passes=None)
    equal(SCANNED, *LAYERS, way="threaded", applied=ONE)
    equal(SCANNED, *LAYERS, way="made", applied=ONE)
    equal(SCANNED, *LAYERS, way="at_hand", applied={})


def test_declines_to_keep_too_much_for_the_backward(monkeypatch):
    """Three iterations keep an inverse of N each; then one is made."""
    monkeypatch.setattr(brought, "MOST_BYTES", 3 * N * 4)
    equal(SCANNED, *LAYERS, way="threaded", applied=ONE)
    monkeypatch.setattr(brought, "MOST_BYTES", 3 * N * 4 - 1)
    report = equal(SCANNED, *LAYERS, way="threaded", applied={})
    found = [r for s in report.declined for r in s.reasons if r.code == "residuals"]
    assert [(r.found, r.wanted) for r in found] == [
        (f"{3 * N * 4:,} bytes", f"at most {3 * N * 4 - 1:,}")
    ]
    equal(SCANNED, *LAYERS, applied=ONE)


def test_the_gradient_of_what_was_optimized(eqns_of):
    inside = jax.grad(optimize(scanned, contract="value"), argnums=(1, 2))
    assert_numbers(jax.jit(inside)(*LAYERS), jax.jit(SCANNED)(*LAYERS))


def test_an_order_turned_round_between_two_scans_is_not_brought():
    def fn(keys, g):
        inverses = lax.scan(lambda c, k: (c, orders(k)), 0, keys)[1][1]
        back = lambda c, i: (c, jnp.zeros_like(g).at[i].add(g * c))
        turned = lax.scan(back, jnp.float32(2), inverses[::-1])[1]
        return turned, lax.scan(back, jnp.float32(3), inverses)[1]

    keys = np.stack([KEYS, KEYS[::-1], KEYS + 1])
    report = equal(fn, keys, ROWS, way="threaded")
    assert report.counts() in ({}, ONE)
    equal(fn, keys, ROWS, applied={NAME: 1})


@BOTH
def test_an_inverse_that_is_made(fn, eqns_of):
    equal(fn, KEYS, ROWS, ROWS, way="made", applied=ONE)
    alone = lambda keys, g: jnp.zeros_like(g).at[jnp.argsort(keys)].add(g)
    equal(alone, KEYS, ROWS, applied=ONE, eager=True)
    (_, made) = eqns_of(optimize(alone, passes=[NAME]), KEYS, ROWS, name="sort")
    assert not made.params["is_stable"]
    both = optimize(alone, contract="value")
    found = eqns_of(both, KEYS, ROWS, name="sort")
    assert sorted(len(e.invars) for e in found) == [1, 2]  # inverse_permutation packs it


# --- near misses ----------------------------------------------------------------------------------

LIST = "its argsort, or what it is the argsort of, before it in its body"


def test_declines_a_permutation_without_its_inverse(why):
    fn = lambda keys, g: jnp.zeros_like(g).at[jnp.argsort(keys)].add(g)
    assert why(equal(fn, KEYS, ROWS, applied={}, way="at_hand"), NAME) == [
        ["no-inverse: the inverse of the permutation is not at hand "
         f"(found a result of sort of type int32[12] without it; wanted {LIST})"]
    ]  # fmt: skip


def test_declines_an_inverse_that_comes_later_or_that_nobody_reads(why):
    def later(keys, g):
        order = jnp.argsort(keys)
        out = jnp.zeros_like(g).at[order].add(g)
        return out, jnp.argsort(order)

    def unread(keys, g):
        order, _ = orders(keys)
        return jnp.zeros_like(g).at[order].add(g)

    for fn in (later, unread):
        (found,) = why(equal(fn, KEYS, ROWS, applied={}, way="at_hand"), NAME)
        assert [r.split(":")[0] for r in found] == ["no-inverse"]


def test_declines_the_inverse_of_another_permutation():
    def fn(keys, g):
        order, _ = orders(keys)
        _, other = orders(-keys)
        down = jnp.argsort(order, descending=True)
        return g[other], g[down], jnp.zeros_like(g).at[order].add(g)

    report = equal(fn, KEYS, ROWS, applied={}, way="at_hand")
    assert {r.code for s in report.declined for r in s.reasons} == {"no-inverse"}


def test_declines_a_key_that_is_no_permutation():
    """An order is the argsort of its keys, but keys with ties invert nothing."""

    def fn(keys, g):
        keys = assume_range(keys, 0, N - 1)
        order = jnp.argsort(keys)
        return g[keys], jnp.zeros_like(g).at[order].add(g)

    report = equal(fn, KEYS, ROWS, applied={}, way="at_hand")
    assert {r.code for s in report.declined for r in s.reasons} == {"no-inverse"}


def test_declines_what_is_not_known_to_be_a_permutation(why):
    def given(order, g):
        return jnp.argsort(order), jnp.zeros_like(g).at[order].add(g)

    order = np.random.RandomState(0).permutation(N).astype(np.int32)
    found = why(equal(given, order, ROWS, applied={}), NAME)
    assert found[0][0] == (
        "not-permutation: the indices are not known to be a permutation of all slices "
        "(found a result of select_n of type int32[12]; wanted a permutation of 12)"
    )

    def halved(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros_like(g).at[order // 2].add(g)

    def truncated(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros_like(g).at[order[:8]].add(g[:8])

    for fn in (halved, truncated):
        found = why(equal(fn, KEYS, ROWS, applied={}), NAME)
        assert [r.split(":")[0] for r in found[0]] == ["not-permutation"]


def test_declines_a_permutation_of_some_slices_only(why):
    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((N + 1, 3)).at[order].add(g)

    assert why(equal(fn, KEYS, ROWS, applied={}), NAME) == [
        ["not-permutation: the indices are not known to be a permutation of all slices "
         "(found a permutation of 12; wanted a permutation of 13)"]
    ]  # fmt: skip


def test_declines_what_is_added_to_something(why):
    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, g.at[order].add(g)

    assert why(equal(fn, KEYS, ROWS, applied={}), NAME) == [
        ["not-zeros: the updates are added to something "
         "(found an input of type float32[12,3]; wanted zeros)"]
    ]  # fmt: skip


def test_declines_other_layouts(why):
    def windowed(keys, g):
        order, inverse = orders(keys)
        dims = lax.ScatterDimensionNumbers((1, 2), (), (0,))
        return inverse, lax.scatter_add(jnp.zeros((N, 3)), order[:, None], g[:, None], dims)

    def narrow(keys, g):
        order, inverse = orders(keys)
        dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        return inverse, lax.scatter_add(jnp.zeros((N, 3)), order[:, None], g[:, :2], dims)

    for fn in (windowed, narrow):
        (found,) = why(equal(fn, KEYS, ROWS, applied={}), NAME)
        assert found[0].startswith(
            "layout: the updates are not whole slices along one axis "
            "(found ScatterDimensionNumbers(update_window_dims="
        )
    batched = jax.vmap(dispatched)
    args = np.stack([KEYS, KEYS]), np.stack([ROWS, ROWS]), np.stack([ROWS, ROWS])
    (found,) = why(equal(batched, *args, applied={}), NAME)
    assert found[0].startswith("layout: ")


def test_other_scatters_are_no_candidates():
    def fn(keys, g):
        order, inverse = orders(keys)
        zeros = jnp.zeros_like(g)
        return inverse, zeros.at[order].set(g), zeros.at[order].max(g), zeros.at[order].mul(g)

    assert not explain(fn, KEYS, ROWS, passes=[NAME]).sites


# --- mutants --------------------------------------------------------------------------------------


def onto_something(keys, g):
    order, inverse = orders(keys)
    return inverse, g.at[order].add(g)


def by_halves(keys, g):
    order, inverse = orders(keys)
    return inverse, jnp.zeros_like(g).at[order // 2].add(g)


def by_tied_keys(keys, g):
    keys = assume_range(keys, 0, N - 1)
    return g[keys], jnp.zeros_like(g).at[jnp.argsort(keys)].add(g)


def battery():
    equal(dispatched, KEYS, ROWS, ROWS)
    equal(taken_back, KEYS, ROWS, SPECIAL)
    for fn in (onto_something, by_halves, by_tied_keys):
        equal(fn, KEYS, ROWS)
    equal(GRAD, KEYS, ROWS, W)


def of_result(change):
    original = permutation_scatter.PASS.replace

    def replace(match):
        r = original(match)
        return dataclasses.replace(r, fn=lambda u, inverse: change(r.fn, u, inverse))

    return lambda m: swap(m, replace=replace)


def swap(monkeypatch, **changes):
    mutated = tuple(
        dataclasses.replace(p, **changes) if p.name == NAME else p for p in registry.all_passes()
    )
    monkeypatch.setattr(registry, "all_passes", lambda: mutated)


def without(*codes):
    kept = tuple(r for r in permutation_scatter.PASS.requirements if r.code not in codes)
    return lambda m: swap(m, requirements=kept)


def forward_instead(monkeypatch):
    monkeypatch.setattr(permutation_scatter, "find_inverse", lambda scope, atom, before: atom)


MUTANTS = {
    "by the permutation itself": forward_instead,
    "an inverse shifted by one": of_result(lambda fn, u, i: fn(u, (i + 1) % N)),
    "the inverse reversed": of_result(lambda fn, u, i: fn(u, i[::-1])),
    "updates shrunk by half a percent": of_result(lambda fn, u, i: [fn(u, i)[0] * 0.995]),
    "NaN lost": of_result(lambda fn, u, i: [jnp.nan_to_num(fn(u, i)[0], posinf=jnp.inf)]),
    "what it is added to lost": without("not-zeros"),
    "keys with ties taken for an inverse": lambda m: m.setattr(
        "relower.matchers.inverse._is_permutation", lambda value: True
    ),
}


def test_the_battery_passes_unmutated():
    battery()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs as numbers"):
        battery()


# --- anything -------------------------------------------------------------------------------------


# Few sizes, as each is compiled, and many keys and values for each: rows, a row, where rows lie.
SIZES = [
    (2, (), 0),
    (9, (), 0),
    (5, (1,), 0),
    (4, (3,), 1),
    (7, (2,), 1),
    (3, (1, 2), 0),
    (6, (2, 3), 1),
    (8, (3, 1), 2),
]


@st.composite
def cases(draw):
    n, window, axis = draw(st.sampled_from(SIZES))
    keys = draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n))
    pool = st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.5, -2.0])
    size = n * int(np.prod(window))
    values = draw(st.lists(pool, min_size=size, max_size=size))
    shape = (*window[:axis], n, *window[axis:])
    return (
        np.array(keys, np.int32),
        np.array(values, np.float32).reshape(shape),
        axis,
        draw(st.booleans()),
    )


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_any_permutation(drawn):
    keys, g, axis, back = drawn

    def fn(keys, g):
        order, inverse = orders(keys)
        by, kept = (inverse, order) if back else (order, inverse)
        at = (*(slice(None),) * axis, by)
        return kept, jnp.zeros_like(g).at[at].add(g)

    # Op by op: compiling whole programs would take most of the test's time.
    assert_numbers(optimize(fn, passes=[NAME])(keys, g), fn(keys, g))
