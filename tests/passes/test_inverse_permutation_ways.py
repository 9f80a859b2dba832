"""Inverses found at hand, brought from another scan, counted, and counted in a window of keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import relower
from relower import assume_range, explain, optimize
from relower.kernels import counting_rank
from relower.passes import inverse_permutation, registry
from relower.passes.parts import inverse_permutation_ways

NAME = "inverse_permutation"
ONE = {NAME: 1}
N, E = 24, 3
KEYS = np.random.RandomState(0).randint(0, E, N).astype(np.int32)
ROWS = np.random.RandomState(1).randint(-8, 9, (N, 3)).astype(np.float32)


def known(keys):
    return assume_range(keys, 0, E - 1)


def ranks(keys):
    return jnp.argsort(jnp.argsort(known(keys)))


def chosen(equal_bits, fn, *args, way, applied=ONE):
    """``fn`` with one way asked for gives the same bits; the report."""
    choose = {NAME: way}
    report = explain(fn, *args, passes=[NAME], choose=choose)
    assert report.counts() == applied, str(report)
    if applied:
        done = optimize(fn, passes=[NAME], choose=choose)
        equal_bits(jax.jit(done)(*args), jax.jit(fn)(*args), way)
    return report


def codes(report):
    return {r.code for s in report.declined for r in s.reasons}


# --- at hand --------------------------------------------------------------------------------------


def there_and_back(keys):
    order = jnp.argsort(keys)
    inverse = jnp.argsort(order)
    return order, inverse, jnp.argsort(inverse)


def sorts_of(eqns_of, fn, *args, **options):
    return len(eqns_of(optimize(fn, **options), *args, name="sort"))


def test_an_inverse_is_not_argsorted_back(same, eqns_of):
    same(there_and_back, KEYS, passes=[NAME], applied={NAME: 2}, eager=True)
    same(there_and_back, KEYS)
    assert sorts_of(eqns_of, there_and_back, KEYS) == 2
    floats = np.random.RandomState(0).choice([0.0, -0.0, np.nan, 1.0], N).astype(np.float32)
    same(there_and_back, floats, passes=[NAME], applied={NAME: 2})


def test_a_second_inverse_of_one_order_is_the_first(same, eqns_of):
    def fn(keys):
        order = jnp.argsort(keys)
        return jnp.argsort(order), jnp.argsort(order)

    same(fn, KEYS, passes=[NAME])
    assert sorts_of(eqns_of, fn, KEYS, passes=[NAME]) == 2


def test_an_order_of_another_dtype(same, eqns_of):
    def fn(keys):
        order = lax.sort((keys, lax.iota(np.uint32, N)), num_keys=1)[1]
        inverse = lax.sort((order, lax.iota(np.int32, N), lax.iota(np.uint32, N)), num_keys=1)
        return order, inverse, lax.sort((inverse[1], lax.iota(np.int8, N)), num_keys=1)

    same(fn, KEYS, passes=[NAME])
    assert sorts_of(eqns_of, fn, KEYS, passes=[NAME]) == 2


def test_layers_that_share_one_argsort_keep_their_own_inverse(same):
    def fn(a, b):
        return there_and_back(a), there_and_back(b)

    same(fn, KEYS, KEYS[::-1].copy(), passes=[NAME])


@pytest.mark.parametrize("change", [lambda i: i[::-1], lambda i: i[:8], lambda i: (i + 1) % N,
                                    lambda i: N - 1 - i])  # fmt: skip
def test_what_an_inverse_was_turned_into_is_not_at_hand(equal_bits, change):
    def fn(keys):
        order = jnp.argsort(keys)
        return order, jnp.argsort(change(jnp.argsort(order)))

    chosen(equal_bits, fn, KEYS, way="at_hand", applied={})


def test_a_descending_argsort_is_not_the_order(equal_bits):
    def fn(keys):
        order = jnp.argsort(keys)
        return order, jnp.argsort(jnp.argsort(order), descending=True)

    report = chosen(equal_bits, fn, KEYS, way="at_hand", applied={})
    assert "no-inverse" in codes(report)


def test_keys_with_ties_are_no_inverse_of_their_order(equal_bits):
    def fn(keys):
        keys = assume_range(keys, 0, N - 1)
        return keys, jnp.argsort(jnp.argsort(keys))

    chosen(equal_bits, fn, KEYS, way="at_hand", applied={})


def test_a_call_that_does_more_than_sort_stays(eqns_of):
    """Another call's argument is what it returns, but the callback in it would be lost."""
    seen = []

    @jax.jit
    def back(x, order):
        jax.debug.callback(seen.append, x[0])
        return jnp.argsort(order)

    def fn(x, keys):
        inverse = jnp.argsort(jnp.argsort(keys))
        return back(x, inverse), back(x[::-1], inverse[::-1])

    args = jnp.arange(2), jnp.array([3, 1, 2, 0])
    done = optimize(fn)
    assert len(eqns_of(done, *args, name="debug_callback")) == 2
    for got, want in zip(jax.jit(done)(*args), fn(*args), strict=True):
        assert got.tolist() == want.tolist()
    jax.effects_barrier()
    assert sorted(map(int, seen)) == [0, 0, 1, 1]


@pytest.mark.parametrize("reported", [False, True])
def test_a_call_that_masks_and_does_more_stays(eqns_of, reported):
    @jax.jit
    def masked(mask, inverse):
        if reported:
            jax.debug.callback(lambda m: None, mask[0])
        return jnp.where(mask, inverse, -1)

    def fn(keys):
        keys = relower.assume_range(keys, 0, 511)
        return masked((keys >= 64) & (keys < 128), jnp.argsort(jnp.argsort(keys)))

    keys = jax.ShapeDtypeStruct((81920,), jnp.int32)
    applied = {s.primitive for s in explain(fn, keys, passes=[NAME]).applied}
    assert ("jit" in applied) is not reported
    done = optimize(fn, passes=[NAME])
    assert len(eqns_of(done, keys, name="debug_callback")) == reported


# --- brought from another scan --------------------------------------------------------------------


@jax.custom_vjp
def unsorted(rows, inverse):
    """Rows taken back; the backward argsorts the inverse, as a library that has nothing else."""
    return rows[inverse]


unsorted.defvjp(
    lambda rows, inverse: (rows[inverse], inverse),
    lambda inverse, g: (g[jnp.argsort(inverse)], None),
)


def layer(x, keys, w):
    order = jnp.argsort(keys)
    rows = jnp.sin(x[order // 2] * w)
    return x + unsorted(rows, jnp.argsort(order)).reshape(-1, 2, 3).sum(1)


def stacked(x, keys, ws):
    return (lax.scan(lambda h, kw: (layer(h, *kw), None), x, (keys, ws))[0] ** 2).sum()


LAYERS = (
    ROWS[: N // 2],
    np.stack([KEYS, KEYS[::-1], (KEYS + 1) % E]),
    np.random.RandomState(3).rand(3, N, 3).astype(np.float32),
)
GRAD = jax.value_and_grad(stacked, argnums=(0, 2))


def test_after_value_and_grad_nothing_argsorts_an_inverse_back(same, eqns_of):
    """The forward scan's order goes to the backward scan, which runs the other way."""
    same(GRAD, *LAYERS, passes=[NAME], applied={NAME: 2})
    same(GRAD, *LAYERS)
    assert sorts_of(eqns_of, GRAD, *LAYERS, passes=[NAME]) == 2
    assert len(eqns_of(GRAD, *LAYERS, name="sort")) == 3
    backward = eqns_of(optimize(GRAD), *LAYERS, name="scan")[-1]
    assert backward.params["reverse"]
    assert "sort[" not in str(backward.params["jaxpr"])


def test_in_either_order_with_grad_remat_and_without_a_scan(equal_bits, eqns_of):
    def looped(x, keys, ws):
        for i in range(3):
            x = layer(x, keys[i], ws[i])
        return (x**2).sum()

    def saved(x, keys, ws):
        step = jax.checkpoint(lambda h, kw: (layer(h, *kw), None))
        return (lax.scan(step, x, (keys, ws))[0] ** 2).sum()

    for fn in (stacked, looped, saved):
        grad = jax.value_and_grad(fn, argnums=(0, 2))
        want = jax.jit(grad)(*LAYERS)
        equal_bits(jax.jit(optimize(grad))(*LAYERS), want, fn.__name__)
        inside = jax.value_and_grad(optimize(fn), argnums=(0, 2))
        equal_bits(jax.jit(inside)(*LAYERS), want, fn.__name__)
        left = eqns_of(optimize(grad), *LAYERS, name="sort")
        wanted = {"stacked": 2, "looped": 6, "saved": 3}[fn.__name__]
        assert len(left) == wanted


def test_the_way_by_name(equal_bits):
    chosen(equal_bits, GRAD, *LAYERS, way="threaded")
    report = chosen(equal_bits, GRAD, *LAYERS, way="at_hand", applied={})
    assert "no-inverse" in codes(report)


def test_another_length_or_another_layers_order_is_not_brought(equal_bits):
    """Sliced again, but not by the scan that stacked it, or turned round on the way."""

    def inverses(keys):
        step = lambda c, k: (c, jnp.argsort(jnp.argsort(k)))
        return lax.scan(step, 0, keys)[1]

    def back(inverses):
        return lax.scan(lambda c, i: (c, jnp.argsort(assume_permuted(i))), 0, inverses)[1]

    def assume_permuted(i):
        return i

    for between in (lambda i: i[::-1], lambda i: i[:2], lambda i: jnp.roll(i, 1, 0)):
        fn = lambda keys, between=between: back(between(inverses(keys)))
        for way in ("threaded", "at_hand"):
            chosen(equal_bits, fn, LAYERS[1], way=way, applied={})
    chosen(equal_bits, lambda keys: back(inverses(keys)), LAYERS[1], way="threaded")


def test_under_shard_map(equal_bits):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    part = jax.shard_map(GRAD, mesh=mesh, in_specs=(P(), P(None), P()), out_specs=(P(), P()),
                         check_vma=False)  # fmt: skip
    want = jax.jit(part)(*LAYERS)
    assert explain(part, *LAYERS, passes=[NAME]).counts() == {NAME: 2}
    equal_bits(jax.jit(optimize(part))(*LAYERS), want)


# --- counted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
@pytest.mark.parametrize("n", [1, 2, 255, 256, 700])
def test_counting(equal_bits, eqns_of, dtype, n):
    keys = np.random.RandomState(0).randint(0, E, n).astype(dtype)
    applied = ONE if n > 1 else {}
    chosen(equal_bits, ranks, keys, way="counting", applied=applied)
    if n > 1:
        done = optimize(ranks, passes=[NAME], choose={NAME: "counting"})
        assert not eqns_of(done, keys, name="sort")  # nobody reads the order itself


def test_counting_with_padding_and_a_carried_sort(equal_bits):
    padded = lambda keys: jnp.argsort(jnp.argsort(assume_range(keys - 1, -1, E)))
    chosen(equal_bits, padded, KEYS, way="counting")

    def direct(keys):
        i = lax.iota(np.int32, N)
        order = lax.sort((known(keys), i), num_keys=2, is_stable=False)[1]
        return lax.sort((order, i, lax.iota(np.uint32, N)), num_keys=1)

    chosen(equal_bits, direct, KEYS, way="counting")


def test_counting_declines(equal_bits):
    unstable = lambda keys: jnp.argsort(
        lax.sort((known(keys), lax.iota(np.int32, N)), num_keys=1, is_stable=False)[1]
    )
    falling = lambda keys: jnp.argsort(jnp.argsort(known(keys), descending=True))
    floats = lambda keys: jnp.argsort(jnp.argsort(keys.astype(np.float32)))
    for fn in (unstable, falling, floats):
        assert "no-keys" in codes(chosen(equal_bits, fn, KEYS, way="counting", applied={}))


def test_keys_of_too_many_values_are_not_counted(equal_bits):
    def unknown(keys):
        i = lax.iota(np.int32, N)
        return lax.sort((lax.sort((keys, i), num_keys=1)[1], i), num_keys=1)[1]

    assert "too-many-values" in codes(chosen(equal_bits, unknown, KEYS, way="counting", applied={}))


def test_counting_is_chosen_where_it_costs_less():
    """Estimated cycles: against pairs from 65,537 positions on, against packed words before."""

    def taken(n, experts):
        fn = lambda keys: jnp.argsort(jnp.argsort(assume_range(keys, 0, experts - 1)))
        report = explain(fn, jax.ShapeDtypeStruct((n,), np.int32), passes=[NAME])
        (site,) = [s for s in report.sites if s.primitive == "jit"]
        return site.status.value, [r.code for r in site.reasons]

    assert taken(81_920, 64) == ("applied", [])
    assert taken(81_920, 512) == ("declined", ["costs-more"])
    assert taken(8_192, 8) == ("declined", ["costs-more"])
    assert taken(8_192, 2) == ("applied", [])


# --- counted in a window --------------------------------------------------------------------------


def masked(mask, other=-1, turned=False):
    def fn(keys):
        keys = known(keys)
        inverse = jnp.argsort(jnp.argsort(keys))
        if turned:
            return jnp.where(~mask(keys), other, inverse)
        return jnp.where(mask(keys), inverse, other)

    return fn


MASKS = {
    "constants": lambda k: (k >= 1) & (k < 2),
    "the other way round": lambda k: (2 > k) & (1 <= k),
    "from one below": lambda k: (k > 0) & (k <= 1),
    "equal": lambda k: k == 1,
    "one-sided, the range known": lambda k: k >= 2,
    "a window that moves": lambda k: (k >= k[0]) & (k < k[0] + 1),
    "offsets from its start": lambda k: (k - k[0] >= 0) & (k - k[0] < 1),
    "one more term": lambda k: (k >= 1) & (k % 2 == 1) & (k < 2),
    "empty": lambda k: (k >= 2) & (k < 1),
    "at the end of the dtype": lambda k: (k >= k[0] + 0) & (k < 1),
}


@pytest.mark.parametrize("mask", MASKS)
def test_windows(same, eqns_of, mask):
    fn = masked(MASKS[mask], other=7)
    report = explain(fn, KEYS, passes=[NAME])
    site = [s for s in report.sites if s.primitive == "jit" and s.status.value == "applied"]
    if mask == "at the end of the dtype":  # no lower bound from the same base
        pass
    else:
        assert site, str(report)
        assert not eqns_of(optimize(fn, passes=[NAME]), KEYS, name="sort")
    for shift in range(E):
        same(fn, (KEYS + shift) % E, passes=[NAME])


OWN = {
    "start and size": lambda k, i, n: (k >= i() * n) & (k < i() * n + n),
    "this and the next": lambda k, i, n: (k >= i() * n) & (k < (i() + 1) * n),
    "by the difference": lambda k, i, n: (k - i() * n >= 0) & (k - i() * n < n),
    "where, nested": lambda k, i, n: ~((k < n * i()) | (k > n * i() + (n - 1))),
}


@pytest.mark.parametrize("spelling", OWN)
def test_every_shard_counts_its_own_experts(equal_bits, eqns_of, spelling):
    experts, shards = 8, 4
    mesh = jax.make_mesh((shards,), ("e",), axis_types=(AxisType.Auto,))
    mine = experts // shards

    def local(keys):
        keys = assume_range(keys, 0, experts - 1)
        inverse = jnp.argsort(jnp.argsort(keys))
        own = OWN[spelling](keys, lambda: lax.axis_index("e"), mine)
        return jnp.where(own, inverse, -1)[None]

    keys = np.random.RandomState(0).randint(0, experts, 999).astype(np.int32)
    for check_vma in (True, False):
        part = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("e"), check_vma=check_vma)
        assert not eqns_of(optimize(part), keys, name="sort")
        equal_bits(jax.jit(optimize(part))(keys), jax.jit(part)(keys))
    got = np.asarray(jax.jit(optimize(part))(keys))
    assert [(row >= 0).sum() for row in got] == np.bincount(keys // mine).tolist()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_keys_that_vary_over_devices(equal_bits, kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    fn = masked(MASKS["a window that moves"])
    keys = np.random.RandomState(0).randint(0, E, 4 * N).astype(np.int32)
    with jax.set_mesh(mesh):
        part = jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        placed = jax.device_put(keys, NamedSharding(mesh, P("d")))
        equal_bits(jax.jit(optimize(part))(placed), jax.jit(part)(placed))
        assert explain(part, placed, passes=[NAME]).counts()[NAME] >= 1


def test_windows_under_transforms(equal_bits, eqns_of):
    fn = masked(MASKS["constants"])

    def loss(x, keys):
        place = fn(keys)
        return (jnp.where(place >= 0, x[place], 0.0) * jnp.arange(1.0, N + 1)).sum()

    x = ROWS[:, 0]
    want = jax.jit(jax.grad(loss))(x, KEYS)
    assert np.any(want)
    equal_bits(jax.jit(jax.grad(optimize(loss)))(x, KEYS), want)
    equal_bits(jax.jit(optimize(jax.grad(loss)))(x, KEYS), want)
    scanned = lambda ks: lax.scan(lambda c, k: (c, jax.checkpoint(fn)(k)), 0, ks)[1]
    many = np.stack([KEYS, KEYS[::-1]])
    equal_bits(jax.jit(optimize(scanned))(many), jax.jit(scanned)(many))
    assert not eqns_of(optimize(scanned), many, name="sort")
    equal_bits(jax.jit(optimize(jax.vmap(fn)))(many), jax.jit(jax.vmap(fn))(many))


def window_codes(fn, *args):
    """Reasons at sites that are no sort and no argsort."""
    report = explain(fn, *args, passes=[NAME], choose={NAME: "window"})
    return report.counts(), codes(report)


def test_declines_where_the_inverse_is_read_outside_the_window(same):
    def and_returned(keys):
        inverse = ranks(keys)
        return jnp.where(keys == 1, inverse, -1), inverse

    def by_another_mask(keys):
        inverse = ranks(keys)
        return jnp.where(keys == 1, inverse, -1), jnp.where(keys == 2, inverse, -1)

    def by_an_unrelated_mask(keys):
        inverse = ranks(keys)
        return jnp.where(keys == 1, inverse, -1), jnp.where(inverse > 3, inverse, -1)

    def as_a_gather(keys):
        inverse = ranks(keys)
        return jnp.where(keys == 1, inverse, -1), jnp.arange(N)[inverse]

    for fn in (and_returned, by_another_mask, by_an_unrelated_mask, as_a_gather):
        counts, found = window_codes(fn, KEYS)
        assert counts == {}, fn.__name__
        assert "read-unmasked" in found, fn.__name__
        same(fn, KEYS)


NO_WINDOWS = {
    "either": lambda k: (k >= 1) | (k < 2),
    "keys of another array": lambda k: k[::-1] == 1,
    "different bases": lambda k: (k >= k[0]) & (k < k[1] + 1),
    "a bound for each element": lambda k: k == jnp.arange(N) % E,
    "no mask of keys": lambda k: jnp.arange(N) < 5,
    "a difference that may overflow": lambda k: (k - k[0] >= 0) & (k - k[0] < 1),
}


@pytest.mark.parametrize("mask", NO_WINDOWS)
def test_no_windows(same, mask):
    def fn(keys):
        k = keys if mask == "a difference that may overflow" else known(keys)
        return jnp.where(NO_WINDOWS[mask](k), jnp.argsort(jnp.argsort(k)), -1)

    assert window_codes(fn, KEYS)[0] == {}
    same(fn, KEYS)
    if mask == "a difference that may overflow":
        ends = np.array([2**31 - 1, -(2**31), 2**31 - 1, -(2**31)] * 6, np.int32)
        same(fn, ends)


def test_the_masks_other_side_is_not_counted(same):
    """Where the mask does not hold the inverse is read: outside the window."""
    fn = lambda keys: jnp.where(keys == 1, -1, ranks(keys))
    assert window_codes(fn, KEYS)[0] == {}
    same(fn, KEYS)


def test_a_window_that_costs_more_than_the_sort():
    def fn(keys):
        keys = assume_range(keys, 0, 511)
        return jnp.where((keys >= 0) & (keys < 400), jnp.argsort(jnp.argsort(keys)), -1)

    report = explain(fn, jax.ShapeDtypeStruct((81_920,), np.int32), passes=[NAME])
    assert "costs-more" in codes(report)
    assert [s.primitive for s in report.applied] == ["sort"]


# --- mutants --------------------------------------------------------------------------------------


def battery(same):
    same(there_and_back, KEYS)
    same(GRAD, *LAYERS)
    for mask in ("constants", "a window that moves"):
        for shift in range(E):
            same(masked(MASKS[mask]), (KEYS + shift) % E)
    same(lambda keys: (jnp.where(keys == 1, ranks(keys), -1), jnp.where(keys == 2, -1, 3)), KEYS)
    same(lambda keys: (lambda i: (jnp.where(keys == 1, i, -1), i))(ranks(keys)), KEYS)


def test_the_battery_passes_unmutated(same):
    battery(same)


def of_rank(change):
    rank = counting_rank.counting_rank
    mutated = lambda keys, lo, values: change(rank, keys, lo, values)
    return lambda m: m.setattr(inverse_permutation_ways, "counting_rank", mutated)


def reversed_ties(rank, keys, lo, values):
    return rank(keys[::-1], lo, values)[::-1]


def first_found(m):
    """Any index vector of the length is taken for the inverse."""
    m.setattr(inverse_permutation, "find_inverse",
              lambda scope, atom, before: atom if atom.aval.ndim == 1 else None)  # fmt: skip


MUTANTS = {
    "ties reversed": of_rank(reversed_ties),
    "ranks shifted by one": of_rank(lambda rank, k, lo, v: rank(k, lo, v) + 1),
    "the window shifted by one": of_rank(lambda rank, k, lo, v: rank(k, lo + 1, v)),
    "the permutation for its inverse": first_found,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs in its bits"):
        battery(same)


def test_a_window_whose_other_readers_are_not_looked_at_still_keeps_them(monkeypatch, same):
    """The select alone changes: whoever else reads the inverse keeps the sort. It only costs."""
    p = inverse_permutation.PASS
    kept = tuple(r for r in p.requirements if r.code != "read-unmasked")
    mutant = dataclasses.replace(p, requirements=kept)
    monkeypatch.setattr(registry, "all_passes", lambda: (mutant,))
    battery(same)
