"""The backward kernel of the grouped SwiGLU, interpreted, against plain jnp; compiled for TPU7x."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divisions import GROUPS, divisions, outside
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import relower
from relower.kernels.grouped_dswiglu import problem as problem_module
from relower.kernels.grouped_dswiglu import reference, tpu
from relower.kernels.grouped_dswiglu.api import grouped_dswiglu
from relower.kernels.grouped_dswiglu.problem import Problem, choose_tiling
from relower.kernels.grouped_swiglu import problem as forward_problem
from relower.kernels.grouped_swiglu import tpu as forward
from relower.kernels.grouped_swiglu.problem import Extents, Tiling

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
    problem: Problem
    m: int
    k: int
    n: int
    tiling: Tiling | None
    dtype: object
    saved: object = F32


CONFIGS = {
    "side by side, every tile whole but the last rows'": Config(
        Problem(F32, together=True), 200, 384, 384, Tiling(64, 128, 128), F32),
    "bfloat16, the up first, not transposed": Config(
        Problem(BF16, together=True, gate_first=False, transpose_rhs=False),
        144, 384, 384, Tiling(48, 128, 128), BF16, BF16),
    "read apart, partial steps of the sum": Config(
        Problem(BF16), 80, 300, 384, Tiling(32, 128, 128), BF16, BF16),
    "read and written apart, of two types": Config(
        Problem(F32, out_together=False, transpose_rhs=False),
        80, 300, 384, Tiling(32, 128, 128), F32, BF16),
    "tiles as chosen": Config(Problem(BF16, together=True), 600, 128, 256, None, BF16, BF16),
}  # fmt: skip


def data(config, seed=0):
    """Small integers over a power of two, so that products are exact; gates of every size."""
    r = np.random.RandomState(seed)
    matrix = (config.n, config.k) if config.problem.transpose_rhs else (config.k, config.n)
    g = r.randint(-3, 4, (config.m, config.k)).astype(config.dtype)
    w = (r.randint(-3, 4, (GROUPS, *matrix)) / 64).astype(config.dtype)
    shape = (config.m, config.n * (2 if config.problem.together else 1))
    number = 1 if config.problem.together else 2
    return g, w, tuple((3 * r.randn(*shape)).astype(config.saved) for _ in range(number))


@functools.cache
def compiled(config, interpreted):
    fn = functools.partial(tpu.grouped_dswiglu, tiling=config.tiling, interpret=True) if (
        interpreted
    ) else reference.grouped_dswiglu  # fmt: skip
    return jax.jit(functools.partial(fn, config.problem))


def check(config, run=None, seed=0, names=None):
    run = run or compiled(config, True)
    g, w, saved = data(config, seed)
    for name, (sizes, offset) in divisions(config).items():
        if names is not None and name not in names:
            continue
        args = g, w, saved, np.array(sizes, np.int32), np.int32(offset)
        got, want = run(*args), compiled(config, False)(*args)
        assert len(got) == len(want) == (1 if config.problem.out_together else 2)
        none = outside(config, sizes, offset)
        for a, b in zip(got, want):
            assert a.dtype == b.dtype == config.problem.out_dtype
            a, b = np.asarray(a, F32), np.asarray(b, F32)
            # Sixteen units of float32, as two logistics differ; or one of bfloat16.
            rtol = 4e-6 if config.problem.out_dtype == F32 else 2**-7
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6, err_msg=name)
            assert not a[none].any()
            assert a[~none].any() or not (~none).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_against_the_reference(name):
    config = CONFIGS[name]
    if config.tiling is not None:
        t = config.tiling
        grid = [-(-a // b) for a, b in ((config.m, t.m), (config.k, t.k), (config.n, t.n))]
        assert min(grid) >= 3
    check(config)


def test_rows_of_no_group_are_zero_whatever_they_hold():
    config = CONFIGS["side by side, every tile whole but the last rows'"]
    g, w, (both,) = data(config)
    sizes = np.array([10, 0, 70, 20, 0], np.int32)
    bad = [np.array(a) for a in (g, both)]
    for a in bad:
        a[:10], a[100:] = np.nan, np.inf
    (want,) = compiled(config, True)(g, w, (both,), sizes, np.int32(1))
    for interpreted in (True, False):
        (got,) = compiled(config, interpreted)(bad[0], w, (bad[1],), sizes, np.int32(1))
        np.testing.assert_allclose(got, want, rtol=4e-6, atol=1e-6)


def _elsewhere(column):
    """Gate and up read as if a forward had written them tile by tile, `[g0 | u0 | g1 | u1]`."""

    def change(original):
        def spec(tiling, first):
            up = first > 0
            return tpu.pl.BlockSpec(
                (tiling.m, tiling.n), lambda n, v, k, b, s, t: (t[v], 2 * n + up)
            )

        return spec

    return change(column)


MUTANTS = {
    "the group offset ignored": (
        "boundaries", lambda f: lambda s, o, g, m: f(s, None, g, m)),
    "gate and up swapped": ("dswiglu", lambda f: lambda dh, gate, up: f(dh, up, gate)),
    "the gradients' halves swapped": ("dswiglu", lambda f: lambda *a: f(*a)[::-1]),
    "a gradient of the wrong sign": (
        "dswiglu", lambda f: lambda *a: (f(*a)[0], -f(*a)[1])),
    "silu without its slope": (
        "dswiglu", lambda f: lambda *a: (a[0] * a[2] * jax.nn.sigmoid(a[1]), f(*a)[1])),
    "another layout read": ("_saved_spec", _elsewhere),
    "a segment's first row left out": (
        "_store", lambda f: lambda v, k, b, start, end: f(v, k, b, start + 1, end)),
    "the row before a segment overwritten": (
        "_store", lambda f: lambda v, k, b, start, end: f(v, k, b, start - 1, end)),
    "the last visit forgotten": ("visits", lambda f: lambda *a: (*f(*a)[:2], f(*a)[2] - 1)),
    "the first step of a sum left out": (
        "products", lambda f: lambda *a: [p * (a[3] > 0) for p in f(*a)]),
    "tiles copied to the next tile's place": (
        "_copies", lambda f: lambda *a: f(*a[:-1], lax.rem(a[-1] + 1, 9))),
    "the other buffer copied": (
        "_copies", lambda f: lambda *a: f(*a[:-2], lax.rem(a[-2] + 1, 2), a[-1])),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    name, change = MUTANTS[mutant]
    monkeypatch.setattr(tpu, name, change(getattr(tpu, name)))
    config = Config(Problem(F32, together=True), 96, 256, 384, Tiling(32, 128, 128), F32)
    run = jax.jit(functools.partial(
        tpu.grouped_dswiglu, config.problem, tiling=config.tiling, interpret=True))  # fmt: skip
    with pytest.raises(AssertionError):
        check(config, run, names=("boundaries inside tiles", "every row has a group"))


# --- after the forward kernel, in the layout that it wrote --------------------------------------

M, D, WIDE = 48, 128, 2048
SIZES = np.array([20, 0, 25], np.int32)


def whole(forward_tile, backward_tile, layout):
    """The gradients of rows and of both weights of a SwiGLU MLP, by both kernels."""
    problem = forward_problem.Problem(F32, F32, with_gemm=True)
    backward = Problem(F32, together=layout == "plain")

    def run(x, w, wo, ct):
        h, gate, up = forward.grouped_swiglu(
            problem, x, (w,), SIZES, None, tiling=Tiling(16, D, forward_tile),
            interpret=True)  # fmt: skip
        saved = (lax.ragged_dot(x, w, SIZES),) if layout == "plain" else (gate, up)
        (both,) = tpu.grouped_dswiglu(
            backward, ct, wo, saved, SIZES, None, tiling=Tiling(16, D, backward_tile),
            interpret=True)  # fmt: skip
        dx, dw = jax.vjp(lambda x, w: lax.ragged_dot(x, w, SIZES), x, w)[1](both)
        return dx, dw, jax.vjp(lambda wo: lax.ragged_dot(h, wo, SIZES), wo)[1](ct)[0]

    return jax.jit(run)


def mlp_data():
    r = np.random.RandomState(0)
    shapes = (M, D), (GROUPS, D, 2 * WIDE), (GROUPS, WIDE, D), (M, D)
    return [(r.randn(*s) * c).astype(np.float32)
            for s, c in zip(shapes, (1, D**-0.5, WIDE**-0.5, 1))]  # fmt: skip


def check_direction(run):
    """Each gradient is the dense program's, and points the same way."""
    x, w, wo, ct = mlp_data()

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def loss(x, w, wo):
        total, start = 0.0, 0
        for group, size in enumerate(SIZES):
            rows = slice(start, start + size)
            gate, up = jnp.split(x[rows] @ w[group], 2, -1)
            total += ((jax.nn.silu(gate) * up) @ wo[group] * ct[rows]).sum()
            start += size
        return total

    for got, want in zip(run(x, w, wo, ct), jax.jit(loss)(x, w, wo)):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        cosine = (got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want)
        assert cosine > 0.99999
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("forward_tile", "backward_tile", "layout"), [
    (1024, 512, "kernel"), (512, 1024, "kernel"), (1024, 1024, "plain"),
])  # fmt: skip
def test_gradients_through_both_kernels(forward_tile, backward_tile, layout):
    check_direction(whole(forward_tile, backward_tile, layout))


def _swapped(f):
    return lambda dh, gate, up: f(dh, gate, up)[::-1]


@pytest.mark.parametrize(("name", "change", "tile"), [
    ("_saved_spec", _elsewhere, 512), ("_saved_spec", _elsewhere, 1024), ("dswiglu", _swapped, 512),
    ("dswiglu", lambda f: lambda *a: tuple(-v for v in f(*a)), 1024),
], ids=["layout, 512", "layout, 1024", "halves", "direction"])  # fmt: skip
def test_a_wrong_layout_or_direction_is_caught(monkeypatch, name, change, tile):
    monkeypatch.setattr(tpu, name, change(getattr(tpu, name)))
    with pytest.raises(AssertionError):
        check_direction(whole(tile, tile, "plain"))


# --- tiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [
    (8192, 4096, 1536, 64), (65536, 4096, 1024, 16), (8, 128, 128, 64), (1, 256, 384, 1),
    (131072, 7168, 2048, 8), (4096, 16384, 640, 4), (256, 2880, 2944, 32),
])  # fmt: skip
def test_chosen_tiles_fit(size):
    extents = Extents(*size)
    for width in (2, 4):
        problem = Problem(BF16 if width == 2 else F32)
        tiling = choose_tiling(problem, extents, width, width)
        problem_module.check_tiling(extents, tiling, width)
        taken = problem_module.vmem_bytes(problem, tiling, width, width, tiling.k == extents.k)
        assert taken <= forward_problem.VMEM_BUDGET
        assert extents.k % tiling.k == 0
        assert extents.m % 128 or extents.m % tiling.m == 0  # nothing to cut off
        assert tiling.m <= max(32 // width, 2 * extents.m, 128)


def test_tiles_that_are_none_are_refused():
    extents = Extents(64, 256, 384, 4)
    for tiling, message in (
        (Tiling(20, 256, 128), "20 rows; wanted a multiple of 16"),
        (Tiling(32, 100, 128), "100 along k; wanted a multiple of 128, or all 256"),
        (Tiling(32, 256, 256), "256 columns of 384"),
    ):
        with pytest.raises(ValueError, match=message):
            problem_module.check_tiling(extents, tiling, 2)
    with pytest.raises(ValueError, match="100 columns"):
        choose_tiling(Problem(BF16), Extents(64, 256, 100, 4), 2, 2)
    with pytest.raises(ValueError, match="no tiles of"):
        choose_tiling(Problem(BF16), Extents(64, 10_000_001, 128, 4), 2, 2)


# --- as a function ----------------------------------------------------------------------------


def small(seed=0):
    r = np.random.RandomState(seed)
    g, wo, both = r.randn(24, 16), r.randn(3, 128, 16) / 4, r.randn(24, 256)
    return *(a.astype(np.float32) for a in (g, wo, both)), np.array([5, 0, 12], np.int32)


def plain(g, wo, both, sizes):
    """By jax's own derivative of the forward."""
    gate, up = jnp.split(both, 2, -1)
    zero = jnp.zeros((g.shape[0], wo.shape[1]), g.dtype)
    (dh,) = jax.vjp(lambda h: lax.ragged_dot(h, wo, sizes), zero)[1](g)
    return jnp.concatenate(jax.vjp(lambda a, b: jax.nn.silu(a) * b, gate, up)[1](dh), 1)


def function(*args, **options):
    return grouped_dswiglu(*args, **options)[0]


def test_values_and_second_derivatives_in_both_modes():
    args = small()

    def derivatives(fn):
        loss = lambda g, wo, both: (fn(g, wo, both, args[3]) ** 2).sum()
        tangent = jax.jvp(loss, args[:3], tuple(np.cos(a) for a in args[:3]))[1]
        return fn(*args), *jax.grad(loss, (0, 1, 2))(*args[:3]), tangent

    for a, b in zip(derivatives(function), derivatives(plain)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_of_a_shard_with_an_offset():
    g, wo, both, _ = small()
    sizes, offset = np.array([4, 5, 0, 9, 3], np.int32), jnp.int32(1)
    whole = np.concatenate([np.zeros_like(wo[:1]), wo, np.zeros_like(wo[:1])])
    got = function(g, wo, both, sizes, group_offset=offset)
    np.testing.assert_allclose(got, plain(g, whole, both, sizes), rtol=1e-5, atol=1e-5)


def test_mapped_by_vmap_one_after_another():
    first, second = small(0), small(1)
    args = [np.stack(a) for a in zip(first, second)]
    want = np.stack([function(*first), function(*second)])
    np.testing.assert_allclose(jax.vmap(function)(*args), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind):
    """Each device has the weights of one group of all, and the rows of every group."""
    mesh = jax.make_mesh((3,), ("e",), axis_types=(getattr(AxisType, kind),))
    g, wo, both, sizes = small()

    def local(g, wo, both, sizes):
        offset = lax.axis_index("e").astype(jnp.int32)
        return lax.psum(function(g, wo, both, sizes, group_offset=offset), "e")

    with jax.set_mesh(mesh):
        placed = jax.device_put(wo, NamedSharding(mesh, P("e")))
        spread = jax.shard_map(local, in_specs=(P(), P("e"), P(), P()), out_specs=P())
        got = jax.jit(spread)(g, placed, both, sizes)
    np.testing.assert_allclose(got, plain(g, wo, both, sizes), rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit_are_refused():
    g, wo, both, sizes = small()
    with pytest.raises(ValueError, match="wanted 16 contracted elements"):
        grouped_dswiglu(g, wo.swapaxes(1, 2), both, sizes)
    with pytest.raises(ValueError, match=r"and saved \[24, 128\]"):
        grouped_dswiglu(g, wo, (both[:, :128], both), sizes)
    with pytest.raises(ValueError, match="wanted one type"):
        grouped_dswiglu(g, wo, (both[:, :128], both[:, 128:].astype(BF16)), sizes)
    with pytest.raises(ValueError, match=r"found ranks \(2, 2, 1\)"):
        grouped_dswiglu(g, wo[0], both, sizes)


# --- on TPU7x ---------------------------------------------------------------------------------

S = jax.ShapeDtypeStruct


@pytest.mark.libtpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")
@pytest.mark.parametrize("name", ["bfloat16", "float32", "apart", "of two types"])
def test_mosaic_compiles_it_for_tpu7x(name):
    """Not only lowered: libtpu makes machine code of the kernel, and has room for its blocks."""
    g, wo, sizes = S((1000, 512), BF16), S((8, 768, 512), BF16), S((16,), jnp.int32)
    fn, args = {
        "bfloat16": (lambda g, w, b, s, o: grouped_dswiglu(g, w, b, s, group_offset=o),
                     (g, wo, S((1000, 1536), BF16), sizes, S((), jnp.int32))),
        "float32": (lambda g, w, b, s: grouped_dswiglu(
            g, w, b, s, transpose_rhs=False, gate_first=False, precision=lax.Precision.HIGHEST),
            (S((1024, 512), F32), S((8, 512, 768), F32), S((1024, 1536), F32), sizes)),
        "apart": (lambda g, w, a, b, s: grouped_dswiglu(
            g, w, (a, b), s, together=False, tiling=Tiling(64, 128, 128)),
            (S((100, 300), BF16), S((8, 384, 300), BF16), *[S((100, 384), BF16)] * 2, sizes)),
        "of two types": (lambda g, w, a, b, s: grouped_dswiglu(g, w, (a, b), s, out_dtype=F32),
                         (g, wo, *[S((1000, 768), F32)] * 2, sizes)),
    }[name]  # fmt: skip
    found = relower.cost(fn, *args)
    assert [k.name.partition(".")[0] for k in found.kernels] == ["grouped_dswiglu"]
