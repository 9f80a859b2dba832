"""Rows added to the tokens they were sorted from, against a gather and a sum."""

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
from relower.passes import registry, sorted_scatter

NAME = "sorted_scatter"
ONE = {NAME: 1}
T, K, D = 6, 2, 3
N = T * K
KEYS = np.random.RandomState(0).randint(0, 5, N).astype(np.int32)
H = np.random.RandomState(1).randint(-8, 9, (T, D)).astype(np.float32)
ROWS = np.random.RandomState(2).randint(-8, 9, (N, D)).astype(np.float32)


def assert_numbers(got, want, what=""):
    """Equal types, and equal as numbers: the sums of these tests' values are exact."""
    left, right = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(left) == len(right), what
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype, what
        assert jax.typeof(a).weak_type == jax.typeof(b).weak_type, what
        floats = jnp.issubdtype(a.dtype, jnp.floating)
        same = np.array_equal(np.asarray(a), np.asarray(b), equal_nan=bool(floats))
        assert same, f"{what}: differs as numbers"


def equal(fn, *args, passes=(NAME,), applied=None, eager=False):
    """``optimize(fn)`` gives the numbers of ``fn``; the report."""
    passes = passes and list(passes)
    contract = None if passes else "rounding"
    report = explain(fn, *args, passes=passes, contract=contract)
    if applied is not None:
        assert report.counts() == applied, str(report)
    optimized = optimize(fn, passes=passes, contract=contract)
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


def dispatched(keys, g):
    """The transpose of ``h[order // k]``, and the inverse in use."""
    order, inverse = orders(keys)
    return inverse, jnp.zeros((T, *g.shape[1:]), g.dtype).at[order // K].add(g)


def alone(keys, g):
    """The same where nobody has the inverse."""
    return jnp.zeros((T, *g.shape[1:]), g.dtype).at[jnp.argsort(keys) // K].add(g)


BOTH = pytest.mark.parametrize("fn", [dispatched, alone])


@BOTH
@pytest.mark.parametrize("shape", [(N,), (N, 3), (N, 2, 3), (N, 1)])
def test_windows(fn, shape, eqns_of):
    g = np.random.RandomState(2).randint(-8, 9, shape).astype(np.float32)
    equal(fn, KEYS, g, applied=ONE, eager=True)
    assert not eqns_of(optimize(fn, passes=[NAME]), KEYS, g, name="scatter-add")
    equal(fn, KEYS, g, passes=None)


def test_no_sort_is_added_where_the_inverse_is_at_hand(eqns_of):
    for fn, added in ((dispatched, 0), (alone, 1)):
        before = len(eqns_of(fn, KEYS, ROWS, name="sort"))
        done = optimize(fn, passes=[NAME])
        assert len(eqns_of(done, KEYS, ROWS, name="sort")) == before + added


def test_a_sort_that_is_added_can_be_packed(eqns_of):
    done = optimize(alone, contract="rounding")
    sorts = eqns_of(done, KEYS, ROWS, name="sort")
    assert sorted(len(e.invars) for e in sorts) == [1, 2]


WAYS = {
    "quotient": lambda order: order // K,
    "div": lambda order: lax.div(order, np.int32(K)),
    "shift": lambda order: order >> 1,
    "taken from a repeat": lambda order: jnp.repeat(jnp.arange(T), K)[order],
    "remainder": lambda order: order % T,
    "rem": lambda order: lax.rem(order, np.int32(T)),
    "taken from a tile": lambda order: jnp.take(jnp.tile(jnp.arange(T), K), order),
    "expanded": lambda order: (order // K)[:, None].reshape(-1),
    "of a remainder": lambda order: (order % (2 * T)) // 2,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_inverse", [True, False])
def test_ways_to_the_token(way, with_inverse):
    def fn(keys, g):
        order, inverse = orders(keys)
        out = jnp.zeros((T, D)).at[WAYS[way](order)].add(g)
        return (inverse, out) if with_inverse else out

    equal(fn, KEYS, ROWS, applied=ONE)


def test_masks_and_blocks_of_an_order():
    """Tiles of four tokens, and two choices of each in each of two blocks."""
    for form, tokens in ((lambda o: o & 3, 4), (lambda o: (o // 2) % 3, 3), (lambda o: o // 6, 2)):

        def fn(keys, g, form=form, tokens=tokens):
            order, inverse = orders(keys)
            return inverse, jnp.zeros((tokens, D)).at[form(order)].add(g)

        equal(fn, KEYS, ROWS, applied=ONE)


def test_tokens_that_a_sort_carries_along():
    def fn(keys, g):
        _, token = lax.sort_key_val(keys, jnp.repeat(jnp.arange(T), K))
        return jnp.zeros((T, D)).at[token].add(g)

    equal(fn, KEYS, ROWS, applied=ONE)


def test_other_axes():
    def along_the_last(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((D, T)).at[:, order // K].add(g.T)

    def in_the_middle(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((2, T, D)).at[:, order // K].add(jnp.stack([g, 2 * g]))

    def rows_behind(keys, g):
        order, inverse = orders(keys)
        dims = lax.ScatterDimensionNumbers((0,), (0,), (0,))
        return inverse, lax.scatter_add(jnp.zeros((T, D)), (order // K)[:, None], g.T, dims)

    for fn in (along_the_last, in_the_middle, rows_behind):
        equal(fn, KEYS, ROWS, applied=ONE)


@BOTH
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, jnp.bfloat16, np.float16])
def test_dtypes(fn, dtype, equal_bits):
    """Of integers the bits are the same, also where the sums wrap around."""
    g = jnp.asarray(ROWS).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        g = g * dtype(31)
    equal(fn, KEYS, g, applied=ONE)
    if jnp.issubdtype(dtype, jnp.integer):
        equal_bits(optimize(fn, passes=[NAME])(KEYS, g), fn(KEYS, g))


def test_wide_indices(x64):
    equal(dispatched, KEYS.astype(np.int64), ROWS.astype(np.float64), applied=ONE)


@pytest.mark.parametrize(("mode", "wrap"), [
    ("drop", True), ("clip", False), ("promise_in_bounds", False),
])  # fmt: skip
def test_modes(mode, wrap):
    def fn(keys, g):
        order, inverse = orders(keys)
        into = jnp.zeros((T, D)).at[order // K]
        return inverse, into.add(g, mode=mode, wrap_negative_indices=wrap)

    equal(fn, KEYS, ROWS, applied=ONE)


# One special value a token, so that no sum depends on its order.
SPECIAL = np.zeros(N, np.float32)
SPECIAL[::2] = [-0.0, np.nan, np.inf, -np.inf, 1e-40, 3e38]
SPECIAL[1] = -0.0


@BOTH
def test_special_values(fn):
    def unsorted(keys, g):  # each token keeps its rows wherever they are sorted to
        order = jnp.argsort(keys)
        return fn(keys, g[order])

    equal(unsorted, KEYS, SPECIAL, applied=ONE, eager=True)


@pytest.mark.parametrize("keys", [
    np.zeros(N), np.arange(N), np.arange(N)[::-1], np.repeat([0, 4], N // 2), np.full(N, -1),
])  # fmt: skip
def test_empty_experts_one_expert_and_padding(keys):
    equal(dispatched, keys.astype(np.int32), ROWS, applied=ONE)
    equal(alone, keys.astype(np.int32), ROWS, applied=ONE)


@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("tokens", [1, 7])
def test_choices(k, tokens):
    r = np.random.RandomState(k)
    keys = r.randint(-1, 5, tokens * k).astype(np.int32)
    g = r.randint(-8, 9, (tokens * k, 2)).astype(np.float32)

    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((tokens, 2)).at[order // k].add(g)

    # With one row a token, it is a permutation's; of one row in all, it's no scatter of many.
    equal(fn, keys, g, applied=ONE if k > 1 else {})


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("with_inverse", [True, False])
def test_the_error_is_no_larger(dtype, with_inverse):
    """Root mean square over 32,768 sums of ten; 10 % covers what chance does to float32."""
    tokens, k, d = 512, 10, 64
    r = np.random.RandomState(0)
    keys = r.randint(0, 64, tokens * k).astype(np.int32)
    g = jnp.asarray(r.randn(tokens * k, d), dtype)

    def fn(keys, g):
        order, inverse = orders(keys)
        out = jnp.zeros((tokens, d), g.dtype).at[order // k].add(g)
        return (out, inverse) if with_inverse else (out,)

    order = np.argsort(keys, kind="stable")
    exact = np.zeros((tokens, d))
    np.add.at(exact, order // k, np.asarray(g, np.float64))
    error = lambda out: np.sqrt(np.mean((np.asarray(out, np.float64) - exact) ** 2))
    plain, done = (error(jax.jit(f)(keys, g)[0]) for f in (fn, optimize(fn, passes=[NAME])))
    assert 0 < done <= 1.10 * plain


def test_narrow_sums_are_rounded_once():
    """Of 1 and many halves of its last place, a bfloat16 that adds one by one keeps only the 1."""
    k = 8
    g = jnp.asarray([1.0] + [2.0**-8] * (k - 1), jnp.bfloat16)
    fn = lambda keys, g: jnp.zeros(2, g.dtype).at[jnp.argsort(keys) // k].add(g)
    keys, g = np.arange(2 * k, dtype=np.int32), jnp.tile(g, 2)
    assert (jax.jit(fn)(keys, g) == 1).all()
    want = jnp.asarray(1 + (k - 1) * 2.0**-8, jnp.bfloat16)
    assert (jax.jit(optimize(fn, passes=[NAME]))(keys, g) == want).all()


def test_it_runs_only_where_the_contract_allows_it():
    assert NAME not in explain(dispatched, KEYS, ROWS, contract="value").counts()
    assert explain(dispatched, KEYS, ROWS, contract="rounding").counts()[NAME] == 1


# --- rows that are missing ------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1, 5, N - 1])
def test_a_buffer_that_drops_rows(buffer):
    def front(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T, D)).at[order[:buffer] // K].add(g[:buffer])

    def behind(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T, D)).at[order[N - buffer :] // K].add(g[:buffer])

    def after(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T, D)).at[(order // K)[:buffer]].add(g[:buffer])

    for fn in (front, behind, after):
        equal(fn, KEYS, ROWS, applied=ONE, eager=True)


def test_a_buffer_that_rows_are_taken_back_from():
    """The transpose of ``rows[inverse]`` where there are fewer rows than places."""

    def fn(keys, g):
        order, inverse = orders(keys)
        return order, jnp.zeros((5, D)).at[inverse].add(g, mode="drop")

    def promised(keys, g):
        order, inverse = orders(keys)
        g = jnp.where(inverse[:, None] < 5, g, 0)
        return order, jnp.zeros((5, D)).at[inverse].add(g, mode="promise_in_bounds")

    equal(fn, KEYS, ROWS, applied=ONE)
    equal(promised, KEYS, ROWS, applied=ONE)
    equal(lambda *a: fn(*a)[1], KEYS, ROWS, applied=ONE)


@pytest.mark.parametrize("outside", [T, T + 3, -1])
def test_rows_with_an_index_outside_are_dropped(outside):
    """What they hold must not be seen, NaN included."""

    def fn(keys, g):
        order, inverse = orders(keys)
        token = jnp.where(keys[order] > 1, order // K, outside)
        into = jnp.zeros((T, D)).at[token]
        return inverse, into.add(g, mode="drop", wrap_negative_indices=False)

    keys_in_order = KEYS[np.argsort(KEYS, kind="stable")]
    g = np.where(keys_in_order[:, None] > 1, ROWS, np.nan).astype(np.float32)
    equal(fn, KEYS, g, applied=ONE)
    assert np.isfinite(fn(KEYS, g)[1]).all()


# --- gradients ------------------------------------------------------------------------------------


def layer(keys, h, w):
    """Rows sorted, worked on, taken back and added up."""
    order, inverse = orders(keys)
    return (h[order // K] * w)[inverse].reshape(T, K, D).sum(1)


W = np.random.RandomState(3).randint(-3, 4, (D,)).astype(np.float32)
loss = lambda *a: (layer(*a) ** 2).sum()
GRAD = jax.grad(loss, argnums=(1, 2))
PASSES = (NAME, "permutation_scatter")


def test_the_backward_of_a_layer_holds_no_scatter(eqns_of):
    equal(GRAD, KEYS, H, W, passes=PASSES, applied={p: 1 for p in PASSES}, eager=True)
    assert len(eqns_of(GRAD, KEYS, H, W, name="scatter-add")) == 2
    done = optimize(GRAD, passes=PASSES)
    assert not eqns_of(done, KEYS, H, W, name="scatter-add")
    assert len(eqns_of(done, KEYS, H, W, name="sort")) == 2
    equal(GRAD, KEYS, H, W, passes=None)


def added_up(keys, h, w):
    """A combine that adds its rows to their tokens: a scatter in the forward."""
    token = jnp.argsort(keys) // K
    return jnp.zeros_like(h).at[token].add(h[token] * w)


@pytest.mark.parametrize("fn", [layer, added_up])
def test_gradients_in_either_order(fn):
    scalar = lambda f: lambda *a: (f(*a) ** 2).sum()
    grad = lambda f: jax.grad(scalar(f), argnums=(1, 2))
    want = jax.jit(grad(fn))(KEYS, H, W)
    assert all(np.any(v) for v in want)
    assert_numbers(jax.jit(optimize(grad(fn), contract="rounding"))(KEYS, H, W), want)
    assert_numbers(jax.jit(grad(optimize(fn, contract="rounding")))(KEYS, H, W), want)
    inner = lambda *a: sum((g * g).sum() for g in grad(fn)(*a))
    want = jax.jit(jax.grad(inner, argnums=(1, 2)))(KEYS, H, W)
    second = optimize(jax.grad(inner, argnums=(1, 2)), contract="rounding")
    assert_numbers(jax.jit(second)(KEYS, H, W), want)


def test_the_tangent_of_the_scatter():
    done = optimize(alone, passes=[NAME])
    tangent = lambda fn: jax.jit(lambda g: jax.jvp(lambda g: fn(KEYS, g), (g,), (2 * g,)))
    assert_numbers(tangent(done)(ROWS), tangent(alone)(ROWS))


def stacked(remat):
    def fn(keys, h, ws):
        step = lambda h, kw: (jnp.clip(layer(kw[0], h, kw[1]), -64, 64), None)
        return lax.scan(jax.checkpoint(step) if remat else step, h, (keys, ws))[0].sum()

    return jax.grad(fn, argnums=(1, 2))


STACKED = np.stack([KEYS, KEYS[::-1]]), H, np.stack([W, W * 2])


@pytest.mark.parametrize("remat", [True, False])
def test_under_scan(remat, eqns_of):
    """Without remat the backward scan has only what the forward one hands it, maybe no order."""
    fn = stacked(remat)
    report = equal(fn, *STACKED)
    assert report.counts() == ONE
    done = optimize(fn, passes=[NAME])
    sorts = lambda f: len(eqns_of(f, *STACKED, name="sort"))
    assert sorts(done) == sorts(fn)


def test_an_order_that_a_policy_saves():
    from jax.ad_checkpoint import checkpoint_name

    def named(keys, h, w):
        order = checkpoint_name(jnp.argsort(keys), "order")
        return (h[order // K] * w)[jnp.argsort(order)].reshape(T, K, D).sum(1)

    policy = jax.checkpoint_policies.save_only_these_names("order")

    def fn(keys, h, ws):
        step = jax.checkpoint(lambda h, kw: (named(kw[0], h, kw[1]), None), policy=policy)
        return lax.scan(step, h, (keys, ws))[0].sum()

    equal(jax.grad(fn, argnums=(1, 2)), *STACKED, applied=ONE)


def test_under_vmap_in_either_order():
    batch = np.stack([KEYS, KEYS[::-1]]), np.stack([H, -H]), np.stack([W, W * 2])
    want = jax.jit(jax.vmap(GRAD))(*batch)
    assert_numbers(jax.jit(jax.vmap(optimize(GRAD, passes=[NAME])))(*batch), want)
    shared = jax.vmap(GRAD, in_axes=(None, 0, 0))  # one order for all
    equal(shared, KEYS, *batch[1:], applied=ONE)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind, check_vma):
    """A backward inside, one more around it, and one around a forward."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    wrap = lambda fn, specs, out: jax.shard_map(
        fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma
    )
    inside = wrap(lambda *a: GRAD(*a)[0], (P("d"), P("d"), P()), P("d"))
    forward = wrap(layer, (P("d"), P("d"), P()), P("d"))
    around = jax.grad(lambda *a: (forward(*a) ** 2).sum(), argnums=1)
    r = np.random.RandomState(0)
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in (
            (r.randint(0, 5, 4 * N).astype(np.int32), P("d")),
            (r.randint(-8, 9, (4 * T, D)).astype(np.float32), P("d")), (W, P()),
        )]  # fmt: skip
        for fn in (inside, around):
            want = jax.jit(fn)(*args)
            assert np.any(want)
            assert explain(fn, *args, passes=[NAME]).counts() == ONE
            assert_numbers(jax.jit(optimize(fn, passes=[NAME]))(*args), want)
        outer = lambda fn: jax.grad(lambda *a: fn(*a).sum(), argnums=1)
        want = jax.jit(outer(inside))(*args)
        assert_numbers(jax.jit(outer(optimize(inside, passes=[NAME])))(*args), want)


# --- near misses ----------------------------------------------------------------------------------


def codes(report):
    return [[r.code for r in s.reasons] for s in report.declined if s.pass_name == NAME]


def test_declines_an_embedding(why):
    fn = jax.grad(lambda table, ids: (table[ids] ** 2).sum())
    ids = np.array([1, 0, 4, 1], np.int32)
    found = why(equal(fn, H, ids, applied={}), NAME)
    assert found == [[
        "not-routing: the indices are not known to name every slice equally often "
        "(found a result of select_n of type int32[4]; "
        "wanted quotients or remainders of a permutation, of 6 slices)"
    ]]  # fmt: skip
    batched = equal(fn, H, ids.reshape(2, 2), applied={})
    assert codes(batched) == [["layout", "not-routing"]]


def test_declines_slices_that_get_unlike_many_rows():
    def uneven(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((3, D)).at[order // 5].add(g)

    def by_key(keys, g):  # the experts' own sums
        return jnp.zeros((5, D)).at[assume_range(keys, 0, 4)].add(g)

    def shifted(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T + 1, D)).at[order // K + 1].add(g)

    def more_slices(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T + 1, D)).at[order // K].add(g)

    def of_no_permutation(keys, g):
        return jnp.zeros((T, D)).at[assume_range(keys, 0, N - 1) // K].add(g)

    for fn in (uneven, by_key, shifted, more_slices, of_no_permutation):
        assert codes(equal(fn, KEYS, ROWS, applied={})) == [["not-routing"]]


def test_declines_one_row_a_slice():
    def fn(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros_like(g).at[order].add(g)

    assert codes(equal(fn, KEYS, ROWS, applied={})) == [["is-permutation"]]
    equal(fn, KEYS, ROWS, passes=PASSES[::-1])


def test_declines_what_is_added_to_something():
    def fn(keys, h, g):
        order, inverse = orders(keys)
        return inverse, h.at[order // K].add(g)

    assert codes(equal(fn, KEYS, H, ROWS, applied={})) == [["not-zeros"]]


def test_declines_missing_rows_without_an_inverse():
    fn = lambda keys, g: jnp.zeros((T, D)).at[jnp.argsort(keys)[:5] // K].add(g[:5])
    assert codes(equal(fn, KEYS, ROWS, applied={})) == [["no-inverse"]]

    def carried(keys, g):
        token = lax.sort_key_val(keys, jnp.repeat(jnp.arange(T), K))[1]
        return jnp.zeros((T, D)).at[token[:5]].add(g[:5])

    assert codes(equal(carried, KEYS, ROWS, applied={})) == [["not-routing"]]


def test_declines_indices_outside_that_are_clipped_or_wrapped():
    def clipped(keys, g):
        order, inverse = orders(keys)
        token = jnp.where(keys[order] > 1, order // K, T)
        return inverse, jnp.zeros((T, D)).at[token].add(g, mode="clip")

    def wrapped(keys, g):  # -1 is the last token
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T, D)).at[jnp.where(keys[order] > 1, order // K, -1)].add(g)

    def at_zero(keys, g):
        order, inverse = orders(keys)
        return inverse, jnp.zeros((T, D)).at[jnp.where(keys[order] > 1, order // K, 0)].add(g)

    assert codes(equal(clipped, KEYS, ROWS, applied={})) == [["mode"]]
    assert codes(equal(wrapped, KEYS, ROWS, applied={})) == [["not-routing"]]
    assert codes(equal(at_zero, KEYS, ROWS, applied={})) == [["not-routing"]]


def test_another_layers_inverse_is_not_taken(eqns_of):
    def fn(k1, k2, g):
        (o1, _), (_, i2) = orders(k1), orders(k2)
        return g[i2], jnp.zeros((T, D)).at[o1 // K].add(g)

    equal(fn, KEYS, KEYS[::-1].copy(), ROWS, applied=ONE)
    done = optimize(fn, passes=[NAME])
    sorts = lambda f: len(eqns_of(f, KEYS, KEYS, ROWS, name="sort"))
    assert sorts(done) == sorts(fn) + 1


# --- mutants --------------------------------------------------------------------------------------


def battery():
    equal(dispatched, KEYS, ROWS)
    equal(alone, KEYS, ROWS)
    equal(lambda k, h, g: h.at[orders(k)[0] // K].add(g), KEYS, H, ROWS)
    test_a_buffer_that_drops_rows(5)
    test_rows_with_an_index_outside_are_dropped(T)
    test_ways_to_the_token("remainder", True)
    equal(lambda k, g: jnp.zeros((3, D)).at[orders(k)[0] // 5].add(g), KEYS, ROWS)
    equal(GRAD, KEYS, H, W, passes=PASSES)


def swap(monkeypatch, **changes):
    mutated = tuple(
        dataclasses.replace(p, **changes) if p.name == NAME else p for p in registry.all_passes()
    )
    monkeypatch.setattr(registry, "all_passes", lambda: mutated)


def without(code):
    kept = tuple(r for r in sorted_scatter.PASS.requirements if r.code != code)
    return lambda m: swap(m, requirements=kept)


def instead(name, change):
    original = getattr(sorted_scatter, name)
    return lambda m: m.setattr(sorted_scatter, name, lambda *a: change(original, *a))


MUTANTS = {
    "an inverse shifted by one": instead("by_choice", lambda f, i, g: f((i + 1) % i.size, g)),
    "the order for its inverse": instead("by_choice", lambda f, i, g: f(jnp.argsort(i), g)),
    "choices and tokens confused": instead(
        "by_choice", lambda f, i, g: i.reshape(g.each, g.groups)
    ),
    "an order shifted by one": instead("sorting_order", lambda f, i, g: jnp.roll(f(i, g), 1, 1)),
    "a choice dropped": instead("summed", lambda f, p: f(p[1:])),
    "sums shrunk by half a percent": instead("summed", lambda f, p: f(p * 0.995)),
    "the mask lost": instead("masked", lambda f, u, *_: u),
    "what it is added to lost": without("not-zeros"),
}


def test_the_battery_passes_unmutated():
    battery()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs as numbers"):
        battery()


# --- anything -------------------------------------------------------------------------------------


# Few sizes, as each is compiled, and many keys for each: blocks, tokens, rows of each, a window.
SIZES = [
    (1, 1, 2, 0, 2),
    (1, 2, 1, 0, 2),
    (3, 1, 1, 1, 2),
    (1, 3, 2, 0, 6),
    (2, 1, 3, 2, 6),
    (2, 2, 3, 0, 11),
    (3, 3, 1, 3, 6),
    (3, 3, 3, 4, 27),
]


@st.composite
def cases(draw):
    blocks, tokens, each, start, stop = draw(st.sampled_from(SIZES))
    n = blocks * tokens * each
    keys = draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))
    return np.array(keys, np.int32), each, tokens, start, stop, draw(st.booleans())


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_any_order(drawn):
    keys, each, tokens, start, stop, drop = drawn
    n = keys.size
    g = np.random.RandomState(n).randint(-8, 9, (n, 2)).astype(np.float32)

    def fn(keys, g):
        order, inverse = orders(keys)
        token = ((order // each) % tokens)[start:stop]
        token = jnp.where(g[start:stop, 0] > 0, token, tokens) if drop else token
        return inverse, jnp.zeros((tokens, 2)).at[token].add(g[start:stop], mode="drop")

    # Op by op: compiling whole programs would take most of the test's time.
    done = optimize(fn, contract="rounding", disable=["permutation_scatter"])
    assert_numbers(done(keys, g), fn(keys, g))
