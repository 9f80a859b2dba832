"""The searches for the greatest elements against top_k itself."""

import dataclasses
from types import SimpleNamespace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.compat.top_k import reads_widened
from relower.passes import registry, top_k_by_argmax
from relower.passes.parts import greatest

NAME = "top_k_by_argmax"
ONE = {NAME: 1}
HAS_UNSTABLE = "is_stable" in jax.make_jaxpr(lambda x: lax.top_k(x, 1))(np.zeros(2)).eqns[0].params
PATTERNS = {
    np.float32: (np.uint32, [0x7FC00000, 0xFFC00000, 0x7FC00001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001,
                             0xFF800001, 0, 1 << 31, 0x7F800000, 0xFF800000, 1, 0x80000001,
                             0x007FFFFF, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF]),
    np.float16: (np.uint16, [0x7E00, 0xFE00, 0x7E01, 0xFFFF, 0x7FFF, 0x7C01, 0, 0x8000, 0x7C00,
                             0xFC00, 1, 0x8001, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF]),
    jnp.bfloat16: (np.uint16, [0x7FC0, 0xFFC0, 0x7FC1, 0xFFFF, 0x7FFF, 0x7F81, 0, 0x8000, 0x7F80,
                               0xFF80, 1, 0x8001, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F]),
    np.float64: (np.uint64, [0x7FF8 << 48, 0xFFF8 << 48, 2**64 - 1, 2**63 - 1, 0, 1 << 63,
                             0x7FF0 << 48, 0xFFF0 << 48, 1, (1 << 63) + 1, 0x3FF0 << 48]),
}  # fmt: skip
WIDENED = (jnp.bfloat16,) if jax.__version_info__[:2] == (0, 10) else ()
"""What a CPU takes through float32 even where one op stands alone, making all NaNs one."""


def top(k, axis=-1):
    return lambda x: lax.top_k(x, k, axis=axis)


def specials(dtype, shape, seed=0):
    """Special values of a float dtype, each many times, in random order."""
    word, patterns = PATTERNS[dtype]
    if dtype is jnp.bfloat16:  # where ops are fused, a CPU computes in float32 and has one NaN
        patterns = [p for p in patterns if p & 0x7FFF <= 0x7F80 or p & 0x7FFF == 0x7FC0]
    chosen = np.random.RandomState(seed).choice(len(patterns), shape)
    return np.array(patterns, word)[chosen].view(dtype)


def meant(x, k):
    """The places that IEEE's total order gives, from the bits and without jax."""
    bits = 8 * x.dtype.itemsize
    word = [int(v) for v in x.view(f"uint{bits}").reshape(-1)]
    keys = [-(w & (1 << (bits - 1)) - 1) - 1 if w >> (bits - 1) else w for w in word]
    keys = np.array(keys, object).reshape(x.shape)
    rows = [sorted(range(len(r)), key=lambda i, r=r: (-r[i], i))[:k] for r in keys]
    return np.array(rows, np.int32)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_nan_zero_infinity_and_ties_to_the_bit(request, same, dtype, k):
    if dtype is np.float64:
        request.getfixturevalue("x64")
    x = specials(dtype, (24, 64))
    same(top(k), x, passes=[NAME], applied=ONE, eager=k == 2)
    values, places = jax.jit(optimize(top(k)))(x)
    np.testing.assert_array_equal(places, meant(x, k))
    assert places.dtype == np.int32
    assert np.asarray(values).tobytes() == np.take_along_axis(x, meant(x, k), 1).tobytes()


@pytest.mark.parametrize(
    "dtype", [d for d in (np.float16, jnp.bfloat16, np.float32) if d not in WIDENED]
)
def test_every_payload_of_nan_is_told_apart(dtype):
    word, _ = PATTERNS[dtype]
    exponent = int(np.array(np.inf, dtype).view(word))
    sign = 1 << (8 * np.dtype(dtype).itemsize - 1)
    bits = [exponent + p + s for p in (1, 2, 3, 63) for s in (0, sign)] + [sign * 2 - 1, sign - 1]
    x = np.random.RandomState(0).choice(np.array(bits, word), (8, 32)).view(dtype)
    _, places = optimize(top(10))(x)  # op by op: fused, a CPU widens bfloat16, which quiets NaNs
    np.testing.assert_array_equal(places, meant(x, 10))


def test_rows_with_fewer_finite_values_than_k(same):
    x = np.full((6, 32), -np.inf, np.float32)
    x[1, 5] = 1.0
    x[2, [7, 3]] = [2.0, 2.0]
    x[3] = np.array([0xFFFFFFFF], np.uint32).view(np.float32)[0]  # the least key everywhere
    x[4, 1:] = x[3, 0]
    x[5, 9] = np.nan
    same(top(5), x, passes=[NAME], applied=ONE, eager=True)


INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_at_both_ends(request, same, dtype):
    if np.dtype(dtype).itemsize == 8:
        request.getfixturevalue("x64")
    info = np.iinfo(dtype)
    pool = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1], dtype)
    x = np.random.RandomState(0).choice(pool, (16, 40))
    x[0] = info.min
    x[1, :-1] = info.min
    same(top(7), x, passes=[NAME], applied=ONE)
    assert jax.jit(optimize(top(7)))(x)[1].dtype == np.int32


def test_bools(same):
    x = np.random.RandomState(0).rand(16, 40) < 0.1
    same(top(7), x, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("shape", [(8,), (9,), (1, 16), (3, 5, 33), (2, 1, 3, 8)])
@pytest.mark.parametrize("k", [1, 3])
def test_any_rank(same, shape, k):
    x = np.random.RandomState(0).randint(-2, 3, shape).astype(np.float32)
    same(top(k), x, passes=[NAME], applied=ONE)


def test_64_bit_types_do_not_widen_the_places(same, x64):
    x = np.random.RandomState(0).randint(-2, 3, (4, 16)).astype(np.float32)
    same(top(3), x, passes=[NAME], applied=ONE)


def test_weak_types(same, equal_bits):
    def fn(m):
        return lax.top_k(jnp.where(m, 2.0, -1.0), 3)

    mask = np.random.RandomState(0).rand(4, 16) < 0.3
    same(fn, mask, passes=[NAME], applied=ONE)
    assert jax.eval_shape(optimize(fn), mask)[0].weak_type == jax.eval_shape(fn, mask)[0].weak_type


def test_no_sort_is_left_in_the_program(eqns_of):
    x = np.zeros((4, 32), np.float32)
    assert not eqns_of(optimize(top(3)), x, name="top_k")
    assert "top_k" not in jax.jit(optimize(top(3))).lower(x).as_text()
    assert "top_k" in jax.jit(top(3)).lower(x).as_text()


def test_the_places_keep_their_range():
    """What is known of top_k's indices is known of the searches' too."""
    fn = lambda x: jnp.argsort(optimize(top(2))(x)[1].reshape(-1))
    x = np.zeros((4, 32), np.float32)
    assert explain(fn, x).counts() == {"argsort_packed_key": 1}


# --- gradients and transforms --------------------------------------------------------------------


def weighted(fn):
    def loss(x):
        values, places = fn(x)
        return (values * (places + 1) * jnp.arange(1.0, values.shape[-1] + 1)).sum()

    return loss


SCORES = np.random.RandomState(3).randint(-4, 5, (8, 32)).astype(np.float32)


def check_gradients(equal_bits, fn, args, loss=weighted):
    want = jax.jit(jax.grad(loss(fn)))(*args)
    assert np.any(want)
    equal_bits(jax.jit(jax.grad(loss(optimize(fn))))(*args), want, "grad(loss of opt)")
    equal_bits(jax.jit(jax.grad(optimize(loss(fn))))(*args), want, "grad(opt)")
    equal_bits(jax.jit(optimize(jax.grad(loss(fn))))(*args), want, "opt(grad)")
    assert explain(jax.grad(loss(fn)), *args, passes=[NAME]).counts() == ONE


def test_gradients(equal_bits):
    check_gradients(equal_bits, top(3), (SCORES,))
    equal_bits(jax.grad(weighted(optimize(top(3))))(SCORES), jax.grad(weighted(top(3)))(SCORES))


def test_gradients_in_bfloat16_and_of_infinities(equal_bits):
    check_gradients(equal_bits, top(3), (SCORES.astype(jnp.bfloat16),))
    x = SCORES.copy()
    x[0, :] = -np.inf
    x[1, 4] = np.inf
    loss = lambda fn: lambda x: jnp.where(jnp.isfinite(fn(x)[0]), fn(x)[0] * 3.0, 0.0).sum()
    want = jax.jit(jax.grad(loss(top(3))))(x)
    equal_bits(jax.jit(jax.grad(loss(optimize(top(3)))))(x), want)
    assert np.any(want)


def test_second_derivatives(equal_bits):
    loss = lambda fn: lambda x: (fn(x)[0] ** 3).sum()
    hess = lambda fn: jax.jit(jax.hessian(loss(fn)))(SCORES[0])
    equal_bits(hess(optimize(top(3))), hess(top(3)))
    assert np.any(hess(optimize(top(3))))


def test_forward_mode(equal_bits):
    push = lambda fn: jax.jit(lambda x: jax.jvp(fn, (x,), (x * 2,))[1][0])
    equal_bits(push(optimize(top(3)))(SCORES), push(top(3))(SCORES))
    equal_bits(jax.jit(optimize(push(top(3))))(SCORES), push(top(3))(SCORES))


@pytest.mark.parametrize("k", [1, 3])
def test_vmap(equal_bits, why, k):
    x = np.stack([SCORES, SCORES[::-1]])
    batched = jax.vmap(top(k))
    want = jax.jit(batched)(x)
    equal_bits(jax.jit(jax.vmap(optimize(top(k))))(x), want)
    equal_bits(jax.jit(optimize(batched))(x), want)
    check_gradients(equal_bits, batched, (x,))
    across = jax.vmap(optimize(top(k)), in_axes=2, out_axes=2)
    equal_bits(jax.jit(across)(np.moveaxis(x, 0, 2)), jax.tree.map(lambda a: np.moveaxis(a, 0, 2),
                                                                   want))  # fmt: skip


def test_scan_and_remat(equal_bits):
    def fn(x):
        step = jax.checkpoint(lambda c, row: (c + row.sum(), lax.top_k(row * 2, 3)))
        return lax.scan(step, 0.0, x)[1]

    def loss(fn):
        def total(x):
            values, places = fn(x)
            return (values * values * (places + 1)).sum()

        return total

    want = jax.jit(jax.grad(loss(fn)))(SCORES)
    assert np.any(want)
    for done in (jax.grad(loss(optimize(fn))), optimize(jax.grad(loss(fn)))):
        equal_bits(jax.jit(done)(SCORES), want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map(equal_bits, kind, varying, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    spec = P("d") if varying else P()
    with jax.set_mesh(mesh):
        placed = jax.device_put(SCORES, NamedSharding(mesh, spec))
        part = jax.shard_map(top(3), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        equal_bits(jax.jit(optimize(part))(placed), jax.jit(part)(placed))
        check_gradients(equal_bits, part, (placed,))


@pytest.mark.parametrize("n", [4, 8])
def test_rows_sharded_over_an_explicit_mesh(equal_bits, n):
    mesh = jax.make_mesh((n,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(SCORES, NamedSharding(mesh, P("d")))
        got, want = jax.jit(optimize(top(3)))(placed), jax.jit(top(3))(placed)
        assert explain(top(3), placed, passes=[NAME]).counts() == ONE
        equal_bits(got, want)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        check_gradients(equal_bits, top(3), (placed,))


def test_an_axis_split_over_an_explicit_mesh_is_refused_by_jax_itself():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(SCORES, NamedSharding(mesh, P(None, "d")))
        with pytest.raises(Exception, match="should be unsharded over the axis"):
            jax.jit(optimize(top(3)))(placed)


def test_an_operand_that_names_no_mesh_under_one(same):
    """jax 0.10 hands on the type of an argument, which names none."""
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert explain(top(3), jax.ShapeDtypeStruct((8, 32), np.float32)).counts() == ONE
        jax.jit(jax.grad(weighted(optimize(top(3))))).trace(
            jax.ShapeDtypeStruct((8, 32), np.float32)
        )


# --- a router in few bits, fused with the searches ------------------------------------------------


def router(dtype, k, steps=False):
    """Softmax, top_k and normalised weights, as a routed layer has them."""

    def layer(weights, x):
        scores = jax.nn.softmax(x.astype(dtype) @ weights.astype(dtype), axis=-1)
        values, places = lax.top_k(scores, k)
        values = values / jnp.sum(values, axis=-1, keepdims=True)
        return values.astype(x.dtype), places

    def loss(weights, x):
        if not steps:
            values, places = layer(weights, x)
            return (values * (places + 1)).sum()

        @jax.checkpoint
        def step(x, w):
            values, places = layer(w, x)
            return jnp.tanh(x + values.sum(1, keepdims=True)), (values * (places + 1)).sum()

        x, sums = lax.scan(step, x, jnp.stack([weights, weights * 2, -weights]))
        return sums.sum() + x.sum()

    return layer, jax.value_and_grad(loss, argnums=(0, 1))


def router_data(experts=32):
    r = np.random.RandomState(5)
    return r.randn(16, experts).astype(np.float32) / 4, r.randn(48, 16).astype(np.float32)


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_compiled_bits_of_a_router(same, dtype, steps, k):
    """Whatever precision a compiler keeps beyond the dtype's, the choice and the weights stay."""
    layer, grads = router(dtype, k, steps)
    same(grads, *router_data(), passes=[NAME], applied={NAME: 2 if steps else 1})
    if not steps:
        same(layer, *router_data(), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_compiled_bits_of_a_router_whose_roundings_are_kept(equal_bits, dtype):
    layer, grads = router(dtype, 4)
    options = {"xla_allow_excess_precision": False}
    for fn in (layer, grads):
        got, want = (
            jax.jit(f).lower(*router_data()).compile(options)(*router_data())
            for f in (optimize(fn, passes=[NAME]), fn)
        )
        equal_bits(got, want)


def test_reading_a_bfloat16_otherwise_than_top_k_does_is_caught(monkeypatch, same):
    monkeypatch.setattr(
        top_k_by_argmax, "reads_widened", lambda dtype, n: not reads_widened(dtype, n)
    )
    with pytest.raises(AssertionError, match="differs in its bits"):
        same(router(jnp.bfloat16, 6)[0], *router_data(), passes=[NAME])


# --- near misses ---------------------------------------------------------------------------------


def declined(why, fn, *args):
    (reasons,) = why(explain(fn, *args, passes=[NAME]), NAME)
    return reasons


@pytest.mark.parametrize(
    ("k", "n", "most"),
    [(17, 4096, 16), (5, 8, 3), (4, 8, 3), (2, 4, 1), (1, 2, 0), (1, 1, 0), (11, 64, 10)],
)
def test_declines_a_k_too_large(why, k, n, most):
    assert declined(why, top(k), np.zeros((3, n), np.float32)) == [
        "large-k: k passes cost more than half the stages of a sort, or are too many "
        f"(found k = {k} of {n}; wanted at most {most})"
    ]


@pytest.mark.parametrize(("k", "n"), [(16, 512), (10, 512), (3, 8), (1, 3), (10, 64), (16, 4096)])
def test_takes_a_k_that_is_small_enough(k, n):
    assert explain(top(k), np.zeros((3, n), np.float32), passes=[NAME]).counts() == ONE


def test_declines_another_axis(same, why):
    assert declined(why, top(2, axis=0), np.zeros((16, 8), np.float32)) == [
        "axis: top_k runs along another axis than the last (found axis 0; wanted axis 1)"
    ]
    same(top(2, axis=0), SCORES, applied={})


@pytest.mark.parametrize(("k", "shape", "found"), [
    (0, (3, 32), "k = 0 of f32[3,32]"), (2, (0, 32), "k = 2 of f32[0,32]"),
    (0, (3, 0), "k = 0 of f32[3,0]"),
])  # fmt: skip
def test_declines_nothing_to_choose(same, why, k, shape, found):
    x = np.zeros(shape, np.float32)
    assert declined(why, top(k), x) == [
        f"empty: there is nothing to choose (found {found}; wanted k of 1 or more, and elements)"
    ]
    same(top(k), x, applied={})


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4])
def test_declines_an_unknown_dtype(why, dtype):
    x = jax.ShapeDtypeStruct((3, 32), dtype)
    assert declined(why, top(2), x) == [
        "dtype: no integers are known to order as the elements do "
        f"(found {np.dtype(dtype).name}; wanted bool, an integer of 8 bits or more, "
        "float16, bfloat16, float32, float64)"
    ]


@pytest.mark.skipif(not HAS_UNSTABLE, reason="this jax has no unstable top_k")
def test_declines_an_unstable_top_k(why):
    fn = lambda x: lax.top_k(x, 2, is_stable=False)
    assert declined(why, fn, np.zeros((3, 32), np.float32)) == [
        "not-stable: top_k may leave equal elements in any order "
        "(found is_stable=False; wanted is_stable=True)"
    ]


def test_declines_a_param_that_it_does_not_know():
    params = {"k": 2, "axis": 1, "unheard_of": 3}
    scope = SimpleNamespace(eqns=[SimpleNamespace(params=params)])
    found = top_k_by_argmax.PASS.find(scope, 0)
    assert str(found) == "at top_k → param unheard_of: found 3, wanted no such param"


def test_an_approximate_top_k_is_no_candidate():
    assert not explain(lambda x: lax.approx_max_k(x, 2), SCORES, passes=[NAME]).sites


# --- mutants -------------------------------------------------------------------------------------


def battery(same, equal_bits):
    same(top(9), specials(np.float32, (24, 64)))
    below = np.array([0.0, -0.0, -1.0, -2.0, -np.inf, -np.nan], np.float32)
    same(top(9), np.random.RandomState(0).choice(below, (24, 64)))
    same(top(3), np.random.RandomState(0).randint(-2, 3, (8, 32)).astype(np.int32))
    least = np.full((2, 32), np.iinfo(np.int32).min, np.int32)
    least[0, 20] = 1
    same(top(3), least)
    got, want = (jax.jit(jax.grad(weighted(fn)))(SCORES) for fn in (optimize(top(3)), top(3)))
    equal_bits(got, want)


def test_the_battery_passes_unmutated(same, equal_bits):
    battery(same, equal_bits)


CHOOSE, SORTABLE, UNSORTED, GATHER = (
    getattr(greatest, n) for n in ("choose", "sortable", "unsorted", "gather_last")
)


def _masked(key, k):
    """Marks the taken by the least key, which others may hold."""
    keys, chosen = [], []
    for _ in range(k):
        keys.append(jnp.max(key, axis=-1, keepdims=True))
        chosen.append(jnp.argmax(key, axis=-1, keepdims=True).astype(np.int32))
        place = lax.broadcasted_iota(np.int32, key.shape, key.ndim - 1)
        key = jnp.where(place == chosen[-1], jnp.iinfo(key.dtype).min, key)
    return lax.concatenate(keys, key.ndim - 1), lax.concatenate(chosen, key.ndim - 1)


def _last_of_equals(key, k):
    keys, places = CHOOSE(key[..., ::-1], k)
    return keys, key.shape[-1] - 1 - places


def _least(key, k):
    keys, places = CHOOSE(~key, k)
    return ~keys, places


def _too_far(key, k):
    keys, places = CHOOSE(key, k)
    return keys, jnp.minimum(places + 1, 31)


def _twice(key, k):
    return tuple(jnp.repeat(a, k, axis=-1) for a in CHOOSE(key, 1))


def _by_the_bitcast(x, keys, places, widened):
    return UNSORTED(keys, x.dtype, widened)


MUTANTS = {
    "taken marked by the least key": ("choose", _masked),
    "the last of equals first": ("choose", _last_of_equals),
    "the least instead of the greatest": ("choose", _least),
    "one place too far": ("choose", _too_far),
    "one choice twice": ("choose", _twice),
    "negative floats not turned": ("_turned", lambda bits, width: bits),
    "zeros of either sign equal": (
        "sortable", lambda x, w: SORTABLE(jnp.where(x == 0, abs(x), x), w)
    ),
    "NaNs equal": ("sortable", lambda x, w: SORTABLE(jnp.where(x != x, abs(x), x), w)),
    "values through the bitcast": ("values", _by_the_bitcast),
    "tangents of the neighbours": ("gather_last", lambda x, i: GATHER(jnp.roll(x, 1, -1), i)),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, equal_bits, mutant):
    monkeypatch.setattr(greatest, *MUTANTS[mutant])
    with pytest.raises(AssertionError, match="differs in its bits"):
        battery(same, equal_bits)


def test_a_missing_requirement_is_caught(monkeypatch, same):
    """Without the check of the axis, values would come from along another one."""
    mutated = tuple(
        dataclasses.replace(p, requirements=(), profitable=lambda m: None) if p.name == NAME else p
        for p in registry.all_passes()
    )
    monkeypatch.setattr(registry, "all_passes", lambda: mutated)
    x = np.random.RandomState(0).rand(8, 8).astype(np.float32)
    with pytest.raises(Exception, match=r"another type|differs in its bits"):
        same(top(3, axis=0), x, passes=[NAME])


# --- anything ------------------------------------------------------------------------------------


@st.composite
def operands(draw):
    dtype = draw(st.sampled_from([np.float16, np.float32, np.int8, np.uint16, np.int32, np.uint32]))
    word = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    rows, (n, most) = 2, draw(st.sampled_from([(3, 1), (8, 3), (33, 5)]))
    k = draw(st.integers(1, most))
    pool = draw(st.lists(st.integers(0, int(np.iinfo(word).max)), min_size=1, max_size=6))
    seed = draw(st.integers(0, 2**16))
    picks = np.random.RandomState(seed).choice(len(pool), (rows, n))
    return np.array(pool, word)[picks].view(dtype), k


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(operands())
def test_any_operand(drawn):
    x, k = drawn
    for got, want in zip(optimize(top(k), passes=[NAME])(x), lax.top_k(x, k), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
