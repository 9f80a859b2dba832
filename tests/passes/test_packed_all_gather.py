"""One all_gather for several: bits, gradients, where it may stand, and what is declined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.matchers import collectives
from relower.passes.parts import collective_site, joined

NAME = "packed_all_gather"
ONE = {NAME: 1}


def mesh(kind="Auto"):
    kinds = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((4, 2), ("expert", "data"), axis_types=kinds)


def sharded(fn, *, check_vma=True, out=None, over=None):
    """``fn`` on each device's part along the axis "expert"."""
    out = P("expert") if out is None else out
    return jax.shard_map(fn, mesh=over or mesh(), in_specs=P("expert"), out_specs=out,
                         check_vma=check_vma)  # fmt: skip


def gather(x, axis=0, tiled=True, name="expert", **more):
    return lax.all_gather(x, name, axis=axis, tiled=tiled, **more)


def scatter(x, axis=0, tiled=True, name="expert", **more):
    return lax.psum_scatter(x, name, scatter_dimension=axis, tiled=tiled, **more)


def numbers(program, *args):
    """How many all_gathers and psum_scatters a function has."""
    names = [e.primitive.name for e in every(jax.make_jaxpr(program)(*args))]
    return tuple(sum(n.startswith(kind) for n in names) for kind in ("all_gather", "reduce_sc"))


def every(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                    yield from every(part)


# --- the bits -----------------------------------------------------------------------------------

SPECIAL = {
    np.float32: (np.uint32, [0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF, 0, 1 << 31, 1,
                             0x80000001, 0x7F800000, 0xFF800000, 0x3F800000]),
    np.float16: (np.uint16, [0x7E00, 0xFE01, 0x7C01, 0xFFFF, 0, 0x8000, 1, 0x8001, 0x7C00]),
    jnp.bfloat16: (np.uint16, [0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0, 0x8000, 1, 0x8001, 0x7F80]),
    jnp.float8_e4m3fn: (np.uint8, [0x7F, 0xFF, 0, 0x80, 1, 0x81, 0x7E]),
    np.float64: (np.uint64, [0x7FF8 << 48, (0xFFF0 << 48) + 1, 2**64 - 1, 0, 1 << 63, 1]),
}  # fmt: skip


def specials(dtype, shape, seed=0, nans=False):
    """NaNs, zeros, denormals, infinities; integers at both ends, 4095 and -1.

    ``nans`` adds those that a CPU doesn't hand on as they are in less than 32 bits.
    """
    r = np.random.RandomState(seed)
    if dtype in SPECIAL:
        word, pool = SPECIAL[dtype]
        values = np.array(pool, word).view(dtype)
        kept = values if nans or dtype in (np.float32, np.float64) else np.append(
            values[values == values], values[:1]
        )  # fmt: skip
        return r.choice(kept.view(word), shape).view(dtype)
    if dtype is np.bool_:
        return r.rand(*shape) < 0.5
    info = np.iinfo(dtype)
    pool = {info.min, info.max, 0, 1, 255, 256, 257, 4095, -1}
    return r.choice(np.array([n for n in pool if info.min <= n <= info.max], dtype), shape)


WIDE = (np.float64, np.int64, np.uint64)


@pytest.mark.parametrize("dtypes", [
    (np.float32, np.int32), (jnp.bfloat16, np.int32), (np.float16, np.int16), (np.float32, np.int8),
    (np.float32, np.float32), (np.int32, np.int32), (np.bool_, jnp.bfloat16), (np.uint8, np.bool_),
    (jnp.float8_e4m3fn, np.int32, jnp.bfloat16), (np.float64, np.int32), (np.uint64, np.int64),
    (np.int64, jnp.bfloat16),
], ids=lambda d: "-".join(np.dtype(t).name for t in d))  # fmt: skip
def test_every_bit_arrives(request, same, equal_bits, dtypes):
    if set(dtypes) & set(WIDE):
        request.getfixturevalue("x64")
    args = [specials(d, (64, 3), seed) for seed, d in enumerate(dtypes)]
    fn = sharded(lambda *xs: [gather(x) for x in xs], out=P(None, "expert"))
    report = same(fn, *args, passes=[NAME], applied=ONE)
    assert not report.declined
    args = [specials(d, (64, 3), seed, nans=True) for seed, d in enumerate(dtypes)]
    got = [np.asarray(g)[:, :3] for g in jax.jit(optimize(fn))(*args)]
    if len(set(dtypes)) > 1:  # those of one dtype go as they are
        equal_bits(got, args)
    assert numbers(optimize(fn), *args) == (1, 0)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("axis", "shapes"), [
    (0, [(8, 2), (8, 2)]), (0, [(8, 2), (8, 5)]), (1, [(8, 2), (8, 2)]), (0, [(8,), (8,)]),
    (0, [(8,), (8, 3)]), (0, [(8, 3), (8, 2, 2), (8,)]), (1, [(8, 2, 3), (8, 2, 4)]),
    (2, [(4, 2, 3), (4, 5, 3)]), (1, [(4, 6, 3), (4, 6)]), (0, [(8, 0), (8, 2)]),
])  # fmt: skip
def test_any_shape(same, axis, shapes, tiled):
    args = [specials(d, (s[0] * 4, *s[1:]), i) for i, (s, d) in
            enumerate(zip(shapes, (jnp.bfloat16, np.int32, np.float32), strict=False))]  # fmt: skip
    fn = sharded(lambda *xs: [gather(x, axis, tiled) for x in xs])
    report = same(fn, *args, passes=[NAME], applied=ONE)
    assert not report.declined
    assert numbers(optimize(fn), *args) == (1, 0)


def test_numbers_of_no_dimension(same):
    fn = sharded(lambda x, i: [gather(x[0, 0], tiled=False), gather(i.sum(), tiled=False)])
    same(fn, specials(np.float32, (8, 3)), specials(np.int8, (8, 3)), passes=[NAME], applied=ONE)


def test_axis_groups_and_two_axes(same):
    groups = [[0, 2], [1, 3]]
    args = specials(np.float32, (32, 2)), specials(np.int32, (32, 2))
    for more in ({"axis_index_groups": groups}, {"name": ("expert", "data")}):
        fn = sharded(lambda *xs, more=more: [gather(x, **more) for x in xs], check_vma=False)
        same(fn, *args, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes(same, kind, check_vma):
    with jax.set_mesh(mesh(kind)):
        place = NamedSharding(mesh(kind), P("expert"))
        args = [jax.device_put(specials(d, (32, 2)), place) for d in (jnp.bfloat16, np.int32)]
        fn = sharded(lambda *xs: [gather(x) for x in xs], check_vma=check_vma, over=mesh(kind))
        same(fn, *args, passes=[NAME], applied=ONE)

        def loss(w, i):
            a, b = fn(w.astype(jnp.float32), i)
            return (a * (b % 7)).sum()

        w = jax.device_put(np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2), place)
        for done in (jax.grad(optimize(loss)), optimize(jax.grad(loss))):
            want = jax.jit(jax.grad(loss))(w, args[1])
            assert np.asarray(jax.jit(done)(w, args[1])).tobytes() == np.asarray(want).tobytes()
            assert np.any(np.asarray(want))


def test_a_mesh_of_which_only_one_axis_is_manual(same):
    args = specials(np.float32, (32, 2)), specials(np.int32, (32, 2))
    fn = jax.shard_map(lambda *xs: [gather(x) for x in xs], mesh=mesh(), in_specs=P("expert"),
                       out_specs=P("expert"), axis_names={"expert"})  # fmt: skip
    same(fn, *args, passes=[NAME], applied=ONE)


def test_weak_types(same):
    def fn(m):
        return gather(jnp.where(m, 2.0, -1.0)), gather(jnp.where(m, 1, 5)), gather(m)

    mask = specials(np.bool_, (32, 2))
    same(sharded(fn), mask, passes=[NAME], applied=ONE)
    got, want = (jax.eval_shape(f, mask) for f in (optimize(sharded(fn)), sharded(fn)))
    assert [g.weak_type for g in got] == [w.weak_type for w in want]


def test_vmap(same):
    args = specials(np.float32, (4, 32, 2)), specials(np.int32, (4, 32, 2))
    fn = sharded(lambda *xs: [gather(x) for x in xs])
    same(jax.vmap(fn), *args, passes=[NAME], applied=ONE)
    got, want = (jax.jit(jax.vmap(f))(*args) for f in (optimize(fn), fn))
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_gathers_typed_as_the_same_everywhere(same):
    fn = sharded(lambda *xs: [gather(x, to="invarying") for x in xs], out=P())
    args = specials(np.float32, (32, 2)), specials(np.int32, (32, 2))
    same(fn, *args, passes=[NAME], applied=ONE)


# --- a routed layer in chunks, and its gradients ------------------------------------------------


def layer(x, router, table, dtype=jnp.float32, chunks=2, named=False):
    """Weights and experts of all tokens come to every device, chunk by chunk; rows go back.

    On small whole numbers all sums are exact, in whatever order a compiler takes them.
    """
    outs = []
    for part in jnp.split(x, chunks):
        weights, ids = lax.top_k((part @ router).astype(dtype), 2)
        weights, ids = gather(weights), gather(ids)
        weights = checkpoint_name(weights, "weights") if named else weights
        rows = (table[ids] * weights.astype(jnp.float32)[..., None]).sum(1)
        outs.append(scatter(rows))
    return jnp.concatenate(outs)


def layers(x, router, table, policy=None, **how):
    step = jax.checkpoint(
        lambda x, w: (layer(x, w, table, **how) % 3 - 1, x.sum()), policy=policy
    )  # fmt: skip
    x, sums = lax.scan(step, x, router)
    return x * sums.sum()


def loss_of(body, check_vma=True, **how):
    def part(x, router, table):
        return body(x, router, table, **how)

    def loss(x, router, table):
        run = jax.shard_map(part, mesh=mesh(), in_specs=(P("expert"), P(), P()),
                            out_specs=P("expert"), check_vma=check_vma)  # fmt: skip
        y = run(x, router, table)
        return (y * y * (jnp.arange(y.size).reshape(y.shape) % 5 - 2)).sum()

    return loss


def small(*shape, seed=0):
    return np.random.RandomState(seed).randint(-2, 3, shape).astype(np.float32)


ONE_LAYER = small(64, 4), small(4, 8, seed=1), small(8, 4, seed=2)
SCANNED = small(64, 4), small(3, 4, 8, seed=1), small(8, 4, seed=2)


def check_gradients(equal_bits, loss, args, packed, plain):
    """Both ways round; ``packed`` and ``plain`` are the numbers of all_gathers and psum_scatters
    of the gradient, optimized and not."""
    grad = jax.grad(loss, argnums=(0, 1, 2))
    want = jax.jit(grad)(*args)
    assert all(np.any(np.asarray(w)) for w in want)
    equal_bits(jax.jit(jax.grad(optimize(loss, passes=[NAME]), argnums=(0, 1, 2)))(*args), want,
               "grad(opt)")  # fmt: skip
    both = optimize(grad, passes=[NAME])
    equal_bits(jax.jit(both)(*args), want, "opt(grad)")
    assert numbers(grad, *args) == plain
    assert numbers(both, *args) == packed


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_gather_for_all_chunks_and_one_scatter_for_their_cotangents(
    same, equal_bits, dtype, check_vma
):
    loss = loss_of(layer, check_vma, dtype=dtype)
    report = same(loss, *ONE_LAYER, passes=[NAME], applied={NAME: 2})
    assert not report.declined
    assert numbers(loss, *ONE_LAYER) == (4, 2)
    assert numbers(optimize(loss, passes=[NAME]), *ONE_LAYER) == (1, 1)
    alone = dtype == jnp.bfloat16  # the cotangents of such weights
    check_gradients(equal_bits, loss, ONE_LAYER, packed=(2, 2 + alone), plain=(6, 4))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_in_a_scan_with_remat(same, equal_bits, dtype):
    loss = loss_of(layers, dtype=dtype)
    same(loss, *SCANNED, passes=[NAME], applied={NAME: 2})
    assert numbers(optimize(loss, passes=[NAME]), *SCANNED) == (1, 1)
    # Forward, recomputed, and the transposes of scatters and gathers.
    alone = dtype == jnp.bfloat16
    check_gradients(equal_bits, loss, SCANNED, packed=(3, 3 + alone), plain=(10, 6))


def test_a_derivative_of_a_derivative(equal_bits):
    loss = loss_of(layer, dtype=jnp.bfloat16)

    def second(fn):
        inner = jax.grad(lambda t: (fn(ONE_LAYER[0], ONE_LAYER[1], t) ** 2) / 2)
        return jax.jit(jax.jvp, static_argnums=0)(inner, (ONE_LAYER[2],), (ONE_LAYER[2] + 1,))

    want = second(loss)
    assert np.any(np.asarray(want[1]))
    equal_bits(second(optimize(loss, passes=[NAME])), want)


def test_forward_mode_and_an_operand_that_nothing_depends_on(equal_bits):
    """Tangents travel for the operands that have some, and for no other."""

    def fn(w, v, ids):
        run = lambda w, v, i: (gather(w) * 3, gather(v), gather(i))
        return sharded(run)(w, v, ids)

    w, v, ids = small(32, 2), small(32, 2, seed=1).astype(jnp.bfloat16), small(32, 2).astype(int)

    def push(fn):
        return lambda w, t: jax.jvp(lambda w: fn(w, v, ids)[:2], (w,), (t,))[1][0]

    done = optimize(fn, passes=[NAME])
    equal_bits(jax.jit(push(done))(w, w + 1), jax.jit(push(fn))(w, w + 1))
    assert numbers(push(done), w, w) == (2, 0)
    pull = jax.grad(lambda v: done(w, v, ids)[1].astype(jnp.float32).sum())
    equal_bits(jax.jit(pull)(v), jax.jit(lambda v: jnp.full_like(v, 4))(v))
    assert numbers(pull, v) == (1, 1)


def test_a_name_is_kept_and_what_it_saves_is_not_gathered_again(equal_bits):
    policy = jax.checkpoint_policies.save_only_these_names("weights")
    loss = loss_of(layers, dtype=jnp.bfloat16, named=True, policy=policy)
    done = optimize(loss, passes=[NAME])
    names = [e.primitive.name for e in every(jax.make_jaxpr(done)(*SCANNED))]
    assert names.count("name") == 2
    want = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*SCANNED)
    equal_bits(jax.jit(jax.grad(done, argnums=(0, 1, 2)))(*SCANNED), want)
    equal_bits(jax.jit(optimize(jax.grad(loss, argnums=(0, 1, 2))))(*SCANNED), want)


def test_what_is_known_of_the_ids_stays_known():
    def fn(scores, w):
        _, ids = lax.top_k(scores, 2)
        return jnp.argsort(gather(ids).reshape(-1)), gather(w)

    args = small(32, 8), small(32, 2)
    both = ["argsort_packed_key", NAME]
    assert explain(sharded(fn), *args, passes=both).counts() == {"argsort_packed_key": 1, NAME: 1}

    def late(scores, w):  # found in the second round only, through what the first has rewritten
        _, ids = lax.top_k(scores, 2)
        ids, w = gather(ids), gather(w)
        i = jnp.arange(8)
        return w[jnp.where(ids < 0, ids + 8, ids), 0] + i[0]

    report = explain(sharded(late), *args, passes=[NAME, "nonnegative_index"])
    assert report.counts()["nonnegative_index"] >= 1


# --- psum_scatters ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize(("tiled", "shapes"), [
    (True, [(8, 3), (8, 3)]), (True, [(8, 3), (8, 1)]), (True, [(8,), (8,)]),
    (False, [(4, 3), (4, 5)]), (False, [(4, 2, 3), (4, 5)]), (True, [(8, 3), (8,)]),
])  # fmt: skip
def test_one_psum_scatter_for_several(same, dtype, tiled, shapes):
    args = [specials(dtype, (4 * s[0], *s[1:]), i) for i, s in enumerate(shapes)]
    if dtype != np.int32:  # which NaN a sum returns is the processor's affair
        args = [np.where(np.isnan(a), -0.0, a).astype(dtype) for a in args]
    fn = sharded(lambda *xs: [scatter(x, 0, tiled) for x in xs])
    report = same(fn, *args, passes=[NAME], applied=ONE)
    assert not report.declined
    assert numbers(optimize(fn), *args) == (0, 1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("work", [gather, scatter])
def test_compiled_bits_of_what_was_computed_just_before(same, dtype, work):
    """Whatever precision a compiler keeps beyond the dtype's."""

    def fn(x, y, ids):
        x = jnp.tanh(x * y) * y
        y = jnp.sin(y) * x
        a, b = work(x), work(y)
        return a * 3, b * 2, y, gather(ids), gather(x + y)

    def loss(x, y, ids):
        a, b, *_, ids, c = sharded(fn)(x, y, ids)
        return sum((v.astype(np.float32) * jnp.cos(i + jnp.arange(v.size).reshape(v.shape))).sum()
                   for i, v in enumerate((a, b, c * ids.astype(dtype))))  # fmt: skip

    r = np.random.RandomState(0)
    x, y = (r.randn(128, 4).astype(dtype) for _ in range(2))
    ids = r.randint(0, 9, (128, 4)).astype(np.int32)
    alone = work is gather or dtype == jnp.bfloat16
    same(sharded(fn), x, y, ids, passes=[NAME], applied={NAME: 1 if alone else 2})
    grad = jax.grad(loss, argnums=(0, 1))
    same(grad, x, y, ids, passes=[NAME])
    got = jax.jit(jax.grad(optimize(loss, passes=[NAME]), argnums=(0, 1)))(x, y, ids)
    for a, b in zip(got, jax.jit(grad)(x, y, ids), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_cotangents_are_joined_and_not_added_to_zeros():
    """Slices would add +0 to each part of the cotangent and lose the sign of -0."""
    fn = optimize(sharded(lambda *xs: [gather(x) for x in xs]), passes=[NAME])
    pull = lambda a, b, *ct: jax.vjp(fn, a, b)[1](list(ct))
    args = small(32, 2), small(32, 3), small(128, 2), small(128, 3)
    names = {e.primitive.name for e in every(jax.make_jaxpr(pull)(*args))}
    assert "concatenate" in names
    assert not names & {"pad", "add_any", "add"}


# --- where it may stand -------------------------------------------------------------------------


def test_the_one_stands_before_the_first_reader(same):
    def fn(x, i):
        w = gather(x)
        y = (w * 2).sum() + x
        return y, gather(i * 2 + 1), w

    same(sharded(fn), small(32, 2), small(32, 2).astype(np.int32), passes=[NAME], applied=ONE)


def test_two_groups_that_wait_for_each_other():
    """a0 → b0 and b1 → a1: either pair can be one, not both."""

    def fn(x, y):
        a0 = gather(x)
        b1 = gather(y, 0, False)
        b0 = gather(a0.sum(0) + y, 0, False)
        a1 = gather(b1.sum(0) + x)
        return a0, a1, b0, b1

    report = explain(sharded(fn), small(32, 2), small(32, 2), passes=[NAME])
    assert report.counts() == ONE
    args = small(32, 2), small(32, 2, seed=1)
    got, want = (jax.jit(f)(*args) for f in (optimize(sharded(fn)), sharded(fn)))
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_barrier_or_an_effect_that_no_operand_depends_on_is_no_hindrance(same):
    def fn(x, i):
        w = gather(x)
        jax.debug.callback(lambda _: None, w)
        w, x = lax.optimization_barrier((w, x))
        return w, gather(i), x

    args = small(32, 2), small(32, 2).astype(np.int32)
    same(sharded(fn, check_vma=False), *args, passes=[NAME], applied=ONE)


# --- near misses --------------------------------------------------------------------------------

X, IDS = np.zeros((32, 2), np.float32), np.zeros((32, 2), np.int32)


def declined(why, fn, *args, check_vma=True):
    report = explain(sharded(fn, check_vma=check_vma), *(args or (X, IDS)), passes=[NAME])
    assert not report.applied
    return why(report, NAME)


def test_declines_one_that_depends_on_the_other(why):
    assert declined(why, lambda x, i: gather(gather(x)[:8] * 2)) == [[
        "dependent: one depends on the other "
        "(found an operand computed from the other's result; wanted independent operands)"
    ]]  # fmt: skip


def test_declines_one_that_depends_through_a_barrier(why):
    def fn(x, i):
        w, i = lax.optimization_barrier((gather(x), i))
        return w, gather(i)

    (found,) = declined(why, fn)
    assert [f.partition(":")[0] for f in found] == ["dependent"]


def test_declines_other_axis_groups(why):
    def fn(x, i):
        one, other = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        return gather(x, axis_index_groups=one), gather(i, axis_index_groups=other)

    ((found,),) = declined(why, fn, check_vma=False)
    assert found.startswith("groups: they have different axis groups (found ")
    assert "0, 2" in found
    assert "wanted" in found


def test_declines_other_axes(why):
    fn = lambda x, i: (gather(x), gather(i, name="data"))
    ((found, *_),) = declined(why, fn, check_vma=False)
    assert found == ("axes: they run over different mesh axes (found ('data',) of 2; "
                     "wanted ('expert',) of 4)")  # fmt: skip


def test_declines_another_dimension(why):
    assert declined(why, lambda x, i: (gather(x), gather(i, 1))) == [
        ["dimension: they work on different dimensions (found 1; wanted 0)"]
    ]


def test_declines_another_tiling(why):
    assert declined(why, lambda x, i: (gather(x), gather(i, tiled=False))) == [
        ["tiling: one is tiled and the other is not (found False; wanted True)"]
    ]


def test_names_every_difference_at_once(why):
    ((one, other),) = declined(why, lambda x, i: (gather(x), gather(i, 1, tiled=False)))
    assert one.startswith("dimension:")
    assert other.startswith("tiling:")


def test_declines_other_varying_axes(why):
    def fn(x, i):
        return gather(x), gather(lax.pcast(i, ("data",), to="varying"))

    report = explain(sharded(fn, out=(P("expert"), P(("expert", "data")))), X, IDS, passes=[NAME])
    ((found,),) = why(report, NAME)
    assert found == ("varying: their operands vary over different mesh axes "
                     "(found data, expert; wanted expert)")  # fmt: skip


def test_declines_shapes_that_do_not_fit(why):
    fn = lambda x, i: (gather(x), gather(i[:3]))
    assert declined(why, fn) == [[
        "shapes: their operands don't fit side by side (found (8, 2) and (3, 2); "
        "wanted equal dimensions up to the one worked on, or all but one other)"
    ]]  # fmt: skip


@pytest.mark.parametrize("other", [jnp.int4, np.complex64])
def test_declines_elements_that_are_no_bits_of_a_word(why, other):
    fn = lambda x, i: (gather(x), gather(i.astype(other)))
    ((found,),) = declined(why, fn)
    assert found == (
        "dtype: their elements can't travel together (found float32 and "
        f"{np.dtype(other).name}; wanted elements of whole bytes, up to 64 bits)"
    )


def test_declines_sums_of_different_dtypes(why):
    fn = lambda x, i: (scatter(x), scatter(x.astype(np.float16)))
    assert declined(why, fn) == [[
        "dtype: their elements can't travel together (found float32 and float16; "
        "wanted float32, to be added)"
    ]]  # fmt: skip


def test_declines_sums_of_bfloat16(why):
    fn = lambda x, i: (scatter(x.astype(jnp.bfloat16)), scatter(i.astype(jnp.bfloat16)))
    assert declined(why, fn) == [[
        "dtype: their elements can't travel together (found sums of bfloat16; "
        "wanted sums that no compiler takes in another dtype)"
    ]]  # fmt: skip


def test_declines_a_gather_of_another_kind(why):
    fn = lambda x, i: (gather(x), gather(i, to="invarying") + x[0, 0].astype(int) * 0)
    ((found,),) = declined(why, fn)
    assert found == ("kind: they are collectives of different kinds (found all_gather_invariant; "
                     "wanted all_gather)")  # fmt: skip


def test_a_gather_and_a_scatter_are_no_candidates():
    fn = sharded(lambda x, i: (gather(x), scatter(i)))
    assert not explain(fn, X, IDS, passes=[NAME]).sites


def test_declines_the_same_operand_again(why):
    ((found,),) = declined(why, lambda x, i: (gather(x), gather(x)))
    assert found.startswith("same-operand: they have the same operand, which the compiler finds")


def test_declines_to_copy_large_arrays(why):
    big = jax.ShapeDtypeStruct((4096, 1024), np.float32)
    assert declined(why, lambda x, i: (gather(x), gather(i)), big, jax.ShapeDtypeStruct(
        (4096, 2), np.int32)) == [[
        "large: the copies cost more than a collective's latency "
        "(found 16,777,216 bytes; wanted at most 8,388,608 bytes each)"
    ]]  # fmt: skip
    half = jax.ShapeDtypeStruct((2048, 1024), np.float32)
    fn = sharded(lambda *xs: [gather(x) for x in xs])
    assert explain(fn, half, half, passes=[NAME]).counts() == ONE


def test_declines_to_cross_a_barrier(why):
    def fn(x, i):
        w = gather(x)
        (i,) = lax.optimization_barrier((i,))
        return w, gather(i + 1)

    assert declined(why, fn) == [[
        "barrier: one can't come before a barrier that its operand comes out of "
        "(found an operand that comes out of a barrier; wanted an operand that can be ready at "
        "the first)"
    ]]  # fmt: skip


def test_declines_to_cross_an_effect(why):
    def fn(x, i):
        w = gather(x)
        i = jax.experimental.io_callback(lambda i: i, jax.ShapeDtypeStruct(i.shape, i.dtype), i)
        return w, gather(i)

    ((found,),) = declined(why, fn, check_vma=False)
    assert found.startswith("effects: one can't come before an effect that its operand depends on")
    assert "io_callback" in found


def test_declines_one_in_a_loop_and_one_outside(why):
    def fn(x, i):
        def step(c, _):
            return c, gather(c).sum()

        return gather(i), lax.scan(step, x, None, length=3)[1].reshape(3, 1)

    assert declined(why, fn) == [[
        "scope: they stand in different bodies (found one in a body of scan; wanted both in one "
        "body)"
    ]]  # fmt: skip
    assert numbers(sharded(fn), X, IDS) == numbers(optimize(sharded(fn)), X, IDS) == (2, 0)


def test_a_gather_that_nobody_reads_is_left_alone():
    fn = sharded(lambda x, i: (gather(x), gather(i))[0])
    assert not explain(fn, X, IDS, passes=[NAME]).sites
    assert not explain(sharded(lambda x, i: gather(x) + i[0, 0]), X, IDS, passes=[NAME]).sites


def test_declines_a_param_that_it_does_not_know(monkeypatch, why):
    for module in (collectives, collective_site):
        monkeypatch.setattr(module, "PARAMS", collectives.PARAMS - {"tiled"})
    found = declined(why, lambda x, i: (gather(x), gather(i)))
    assert [f for (f,) in found] == [
        "near-miss: the pattern stopped at all_gather → param tiled "
        "(found True; wanted no such param)"
    ] * 2


@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float32, jnp.bfloat16)])
def test_the_linear_map_of_its_derivative_is_transposed(dtypes):
    """`linear_transpose` of what it makes itself is the one thing that mixed dtypes rule out."""
    fn = sharded(lambda x, y: (gather(x), gather(y)))
    args = [jnp.ones((32, 2), d) for d in dtypes]
    ours = optimize(fn, passes=[NAME])

    def transposed(linear):
        return jax.jit(lambda ct: jax.linear_transpose(linear, *args)(ct))(fn(*args))

    want = transposed(fn)
    for got in (jax.vjp(ours, *args)[1](fn(*args)), transposed(jax.linearize(ours, *args)[1])):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    if dtypes[0] == dtypes[1]:
        jax.tree.map(np.testing.assert_array_equal, transposed(ours), want)
    else:
        with pytest.raises(NotImplementedError, match="bitcast_convert_type"):
            transposed(ours)


def _many(x, n):
    return sum(gather(x * q)[:8] + gather((x * q).astype(jnp.bfloat16))[:8] for q in range(n))


def _chain(x, n):
    for _ in range(n):
        x = jnp.sin(gather(x)[:8]) + gather(x * 2)[:8]
    return x


def _bfloat16_sums(x, n):
    half = jnp.tile(x, (4, 1)).astype(jnp.bfloat16)
    return sum(scatter(half * q)[:8].astype(jnp.float32) for q in range(n))


def _barriers(x, n):
    found = x
    for _ in range(n):
        x = lax.optimization_barrier(x * 2)
        found = found + gather(x)[:8]
    return found


@pytest.mark.parametrize("body", [_many, _chain, _bfloat16_sums, _barriers])
def test_work_grows_no_faster_than_the_program(monkeypatch, body):
    """Comparisons of two collectives, and equations walked to see what stands between them."""

    def work(n):
        done = 0

        def counted(check):
            def run(*given):
                nonlocal done
                found = check(*given)
                done += 1 + (len(found) if isinstance(found, list) else 0)
                return found

            return run

        with monkeypatch.context() as patch:
            patch.setattr(collectives, "CHECKS", tuple(map(counted, collectives.CHECKS)))
            patch.setattr(collectives, "made_after", counted(collectives.made_after))
            explain(sharded(lambda x: body(x, n)), X, passes=[NAME])
        return done

    few, many = work(8), work(32)
    assert few > 0
    assert many <= 4.5 * few


# --- mutants ------------------------------------------------------------------------------------


def battery(same, equal_bits):
    pair = specials(np.float32, (32, 2)), specials(np.int32, (32, 2))
    fn = sharded(lambda *xs: [gather(x) for x in xs])
    same(fn, *pair, passes=[NAME])
    same(fn, pair[0], specials(np.float32, (32, 3), 1), passes=[NAME])
    same(sharded(lambda *xs: [gather(x, 1) for x in xs]), *pair, passes=[NAME])
    half = specials(jnp.bfloat16, (32, 2))
    same(fn, half, pair[1], passes=[NAME])
    loss = loss_of(layer, dtype=jnp.bfloat16)
    grads = lambda f: jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*ONE_LAYER)
    equal_bits(grads(optimize(loss, passes=[NAME])), grads(loss))


def test_the_battery_passes_unmutated(same, equal_bits):
    battery(same, equal_bits)


TO_BITS, FROM_BITS, TOGETHER = joined.to_bits, joined.from_bits, joined.Joined.together


def _by_value(x, word):
    return x.astype(word)


def _in_half(x, word):
    """What a bfloat16 holds of an id."""
    return TO_BITS(x.astype(jnp.bfloat16).astype(x.dtype), word)


def _reversed(self, xs, shapes):
    results = TOGETHER(self, xs[::-1], shapes[::-1])
    return [r.reshape(s) for r, s in zip(results, shapes, strict=True)]


def _rolled(self, *how):
    return [jnp.roll(r, 1, axis=-1) for r in TOGETHER(self, *how)]


MUTANTS = {
    "ids converted": (joined, "to_bits", _by_value),
    "ids through a bfloat16": (joined, "to_bits", _in_half),
    "no derivative": (joined.Joined, "_with_tangents", joined.Joined.bits),
    "parts in another order": (joined.Joined, "together", _reversed),
    "parts shifted": (joined.Joined, "together", _rolled),
    "a bit lost": (joined, "from_bits", lambda b, dtype: FROM_BITS(b & ~np.uint32(1), dtype)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, equal_bits, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError, match=r"differs in its bits|output"):
        battery(same, equal_bits)


def test_a_group_that_needs_itself_is_refused_again(monkeypatch):
    """Two more checks stand behind the first."""
    monkeypatch.setattr(collectives.Collectives, "_placing", lambda self, a, b: [])
    fn = sharded(lambda x, i: gather(gather(x)[:8] * 2))
    report = explain(fn, X, IDS, passes=[NAME])
    assert [[r.code for r in s.reasons] for s in report.declined] == [["order"]]
    monkeypatch.setattr(collectives.Collectives, "_closure", lambda self, groups, needs: 0)
    report = explain(fn, X, IDS, passes=[NAME])
    assert [[r.code for r in s.reasons] for s in report.declined] == [["dependent"]]


@pytest.mark.parametrize("code", ["dimension", "groups", "axes"])
def test_a_missing_check_is_caught(monkeypatch, same, code):
    check = collectives.CHECKS[("kind", "axes", "groups", "dimension").index(code)]
    kept = tuple(c for c in collectives.CHECKS if c is not check)
    monkeypatch.setattr(collectives, "CHECKS", kept)
    other = {
        "dimension": lambda x: gather(x, 1),
        "groups": lambda x: gather(x, axis_index_groups=[[0, 2], [1, 3]]),
        "axes": lambda x: gather(x, name="data"),
    }[code]

    def fn(x, i):
        first = gather(x, axis_index_groups=[[0, 1], [2, 3]]) if code == "groups" else gather(x)
        return first, other(i)

    args = specials(np.float32, (32, 2)), np.arange(64, dtype=np.int32).reshape(32, 2)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        same(sharded(fn, check_vma=False), *args, passes=[NAME])
