"""The grouped SwiGLU kernel, interpreted, against plain jnp; and compiled for TPU7x."""

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
from relower.kernels.grouped_swiglu import problem as problem_module
from relower.kernels.grouped_swiglu import reference, tpu
from relower.kernels.grouped_swiglu.api import grouped_swiglu
from relower.kernels.grouped_swiglu.problem import Extents, Problem, Tiling, choose_tiling

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
    problem: Problem
    m: int
    k: int
    n: int
    tiling: Tiling | None
    dtype: object


CONFIGS = {
    "fused, every tile whole but the last rows'": Config(
        Problem(F32, F32, with_gemm=True), 200, 384, 384, Tiling(64, 128, 128), F32),
    "bfloat16, the up first, transposed": Config(
        Problem(BF16, BF16, gate_first=False, transpose_rhs=True),
        144, 384, 384, Tiling(48, 128, 128), BF16),
    "apart, partial tiles along all dimensions": Config(
        Problem(BF16, F32, fused=False, with_gemm=True), 72, 300, 300, Tiling(32, 128, 128), BF16),
    "apart, transposed, partial tiles": Config(
        Problem(F32, BF16, fused=False, transpose_rhs=True),
        72, 300, 300, Tiling(24, 128, 128), F32),
    "tiles as chosen": Config(Problem(BF16, BF16, with_gemm=True), 600, 128, 256, None, BF16),
}  # fmt: skip


def data(config, seed=0):
    """Small integers over a power of two: every product and sum is exact in float32."""
    r = np.random.RandomState(seed)
    columns = 2 * config.n if config.problem.fused else config.n
    shape = (GROUPS, columns, config.k) if config.problem.transpose_rhs else (
        GROUPS, config.k, columns
    )  # fmt: skip
    x = r.randint(-3, 4, (config.m, config.k)).astype(config.dtype)
    weights = tuple((r.randint(-3, 4, shape) / 64).astype(config.dtype)
                    for _ in range(1 if config.problem.fused else 2))  # fmt: skip
    return x, weights


@functools.cache
def compiled(config, interpreted):
    fn = functools.partial(tpu.grouped_swiglu, tiling=config.tiling, interpret=True) if (
        interpreted
    ) else reference.grouped_swiglu  # fmt: skip
    return jax.jit(functools.partial(fn, config.problem))


def assert_close(config, got, want):
    """Gate and up to the bit, as their sums are exact; the activation to a unit in the last place.

    Its float32 value is rounded once to the result's type, and two compilations of a logistic may
    differ in their last bits: 4e-6, sixteen units of float32, or one unit of bfloat16.
    """
    assert len(got) == len(want) == (3 if config.problem.with_gemm else 1)
    for a, b in zip(got[1:], want[1:]):
        assert a.dtype == b.dtype == config.problem.gemm_dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    a, b = got[0], want[0]
    assert a.dtype == b.dtype == config.problem.out_dtype
    rtol = 4e-6 if a.dtype == F32 else 2**-7
    np.testing.assert_allclose(np.asarray(a, F32), np.asarray(b, F32), rtol=rtol, atol=1e-30)


def check(config, run=None, seed=0, names=None):
    run = run or compiled(config, True)
    x, weights = data(config, seed)
    for name, (sizes, offset) in divisions(config).items():
        if names is not None and name not in names:
            continue
        args = x, weights, np.array(sizes, np.int32), np.int32(offset)
        got = run(*args)
        assert_close(config, got, compiled(config, False)(*args))
        none = outside(config, sizes, offset)
        assert not np.asarray(got[0], F32)[none].any()
        assert np.asarray(got[0], F32)[~none].any() or not (~none).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_against_the_reference(name):
    config = CONFIGS[name]
    if config.tiling is not None:
        tiles = (
            (config.m, config.tiling.m),
            (config.k, config.tiling.k),
            (config.n, config.tiling.n),
        )
        assert all(-(-whole // tile) >= 3 for whole, tile in tiles)
    check(config)


def test_the_reference_against_a_loop_over_groups():
    config = CONFIGS["fused, every tile whole but the last rows'"]
    x, (w,) = data(config)
    for sizes, offset in divisions(config).values():
        want = np.zeros((config.m, 2 * config.n), np.float32)
        ends = np.cumsum([0, *sizes])
        for group in range(GROUPS):
            rows = slice(ends[offset + group], ends[offset + group + 1])
            want[rows] = x[rows] @ w[group]
        args = x, (w,), np.array(sizes, np.int32), np.int32(offset)
        _, gate, up = compiled(config, False)(*args)
        np.testing.assert_array_equal(np.concatenate([gate, up], 1), want)


def test_rows_of_no_group_are_zero_whatever_they_hold():
    config = CONFIGS["fused, every tile whole but the last rows'"]
    x, weights = data(config)
    sizes = np.array([10, 0, 70, 20, 0], np.int32)
    bad = np.array(x)
    bad[:10], bad[100:] = np.nan, np.inf
    want = compiled(config, True)(x, weights, sizes, np.int32(1))
    for interpreted in (True, False):
        got = compiled(config, interpreted)(bad, weights, sizes, np.int32(1))
        assert all(np.isfinite(a).all() for a in got)
    assert_close(config, compiled(config, True)(bad, weights, sizes, np.int32(1)), want)


MUTANTS = {
    "the group offset ignored": (
        tpu, "boundaries", lambda f: lambda s, o, g, m: f(s, None, g, m)),
    "gate and up swapped": (
        tpu, "weights_spec", lambda f: lambda p, s, t, start: f(p, s, t, 3 - start)),
    "a segment's first row left out": (
        tpu, "_store", lambda f: lambda v, o, start, end: f(v, o, start + 1, end)),
    "the row before a segment overwritten": (
        tpu, "_store", lambda f: lambda v, o, start, end: f(v, o, start - 1, end)),
    "the last visit forgotten": (
        tpu, "visits", lambda f: lambda *a: (*f(*a)[:2], f(*a)[2] - 1)),
    "the first step of a sum left out": (
        tpu, "products", lambda f: lambda *a: [v * (a[3] > 0) for v in f(*a)]),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    module, name, change = MUTANTS[mutant]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    config = Config(Problem(F32, F32), 96, 256, 128, Tiling(32, 128, 128), F32)
    run = jax.jit(functools.partial(
        tpu.grouped_swiglu, config.problem, tiling=config.tiling, interpret=True))  # fmt: skip
    with pytest.raises(AssertionError):
        check(config, run, names=("boundaries inside tiles", "every row has a group"))


def test_a_rest_of_the_contracted_dimension_that_is_not_masked_is_caught(monkeypatch):
    monkeypatch.setattr(tpu, "without_rest", lambda x, *a: x)
    config = CONFIGS["apart, transposed, partial tiles"]
    run = jax.jit(functools.partial(
        tpu.grouped_swiglu, config.problem, tiling=config.tiling, interpret=True))  # fmt: skip
    with pytest.raises(AssertionError):
        check(config, run, names=("boundaries inside tiles",))


# --- tiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("with_gemm", [True, False])
@pytest.mark.parametrize("size", [
    (8192, 4096, 1536, 64), (65536, 4096, 1024, 16), (8, 128, 128, 64), (1, 256, 384, 1),
    (131072, 7168, 2048, 8), (4096, 16384, 640, 4), (256, 2880, 2944, 32),
])  # fmt: skip
def test_chosen_tiles_fit(size, with_gemm, fused):
    for itemsize in (2, 4):
        problem = Problem(F32, F32, with_gemm=with_gemm, fused=fused)
        extents = Extents(*size)
        tiling = choose_tiling(problem, extents, itemsize)
        problem_module.check_tiling(problem, extents, tiling, itemsize)
        taken = problem_module.vmem_bytes(problem, tiling, itemsize, tiling.k == extents.k)
        assert taken <= problem_module.VMEM_BUDGET
        assert extents.k % tiling.k == 0
        assert tiling.m <= max(32 // itemsize, 2 * extents.m, 128)


def test_tiles_that_are_none_are_refused():
    problem, extents = Problem(BF16, BF16), Extents(64, 256, 384, 4)
    for tiling, message in (
        (Tiling(20, 256, 128), "20 rows; wanted a multiple of 16"),
        (Tiling(32, 100, 128), "100 along k; wanted a multiple of 128, or all 256"),
        (Tiling(32, 256, 256), "256 columns of 384 in each half"),
    ):
        with pytest.raises(ValueError, match=message):
            problem_module.check_tiling(problem, extents, tiling, 2)
    with pytest.raises(ValueError, match="100 columns in each half"):
        choose_tiling(problem, Extents(64, 256, 100, 4), 2)
    with pytest.raises(ValueError, match="no tiles of"):
        choose_tiling(problem, Extents(64, 10_000_001, 128, 4), 2)


# --- as a function ----------------------------------------------------------------------------


def plain(x, w, sizes):
    gate, up = jnp.split(lax.ragged_dot(x, w, sizes), 2, -1)
    return jax.nn.silu(gate) * up


def small(seed=0, dtype=np.float32):
    r = np.random.RandomState(seed)
    x, w = r.randn(24, 16), r.randn(3, 16, 256) / 4
    return x.astype(dtype), w.astype(dtype), np.array([5, 0, 12], np.int32)


def derivatives(fn, x, w, sizes):
    loss = lambda x, w: (fn(x, w, sizes) ** 2).sum()
    out, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w)
    tangent = jax.jvp(loss, (x, w), (jnp.cos(x), jnp.sin(w)))[1]
    return out, dx, dw, tangent


def test_derivatives_in_both_modes():
    """The same operations on the same values as the plain program's: float32's rounding only."""
    x, w, sizes = small()
    got = derivatives(lambda *a: grouped_swiglu(*a)[0], x, w, sizes)
    for a, b in zip(got, derivatives(plain, x, w, sizes)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    only_w = jax.make_jaxpr(jax.grad(lambda w: grouped_swiglu(x, w, sizes)[0].sum()))(w)
    made = [e for e in only_w.eqns if e.primitive.name == "ragged_dot_general"]
    assert len(made) == 1  # no cotangent of x, which nobody asked for


def test_derivatives_of_a_shard_with_an_offset():
    x, w, _ = small()
    sizes, offset = np.array([4, 5, 0, 9, 3], np.int32), jnp.int32(1)
    whole = np.concatenate([np.zeros_like(w[:1]), w, np.zeros_like(w[:1])])
    got = derivatives(lambda x, w, s: grouped_swiglu(x, w, s, group_offset=offset)[0], x, w, sizes)
    want = derivatives(lambda x, w, s: plain(x, w, s), x, whole, sizes)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[2], want[2][1:4], rtol=1e-5, atol=1e-5)


def test_gate_and_up_are_the_plain_gemm_to_the_bit_and_have_its_derivative():
    x, w, sizes = small(dtype=jnp.bfloat16)
    _, gate, up = jax.jit(lambda *a: grouped_swiglu(*a, with_gemm=True))(x, w, sizes)
    both = jax.jit(lax.ragged_dot)(x, w, sizes)
    np.testing.assert_array_equal(np.concatenate([gate, up], 1), both)

    def through(gemm):
        return jax.grad(lambda w: (gemm(w)[0] * 2 + gemm(w)[1] ** 2).sum().astype(np.float32))(w)

    got = through(lambda w: grouped_swiglu(x, w, sizes, with_gemm=True)[1:])
    want = through(lambda w: jnp.split(lax.ragged_dot(x, w, sizes), 2, -1))
    np.testing.assert_array_equal(got, want)


def test_mapped_by_vmap_one_after_another():
    xs, ws, sizes = (np.stack(a) for a in zip(small(0), small(1)))
    sizes[1] = [1, 20, 0]
    fn = lambda *a: grouped_swiglu(*a)[0]
    want = np.stack([fn(*a) for a in zip(xs, ws, sizes)])
    np.testing.assert_allclose(jax.vmap(fn)(xs, ws, sizes), want, rtol=1e-6)
    got = jax.vmap(fn, (0, None, None))(xs, ws[0], sizes[0])
    np.testing.assert_allclose(got[1], fn(xs[1], ws[0], sizes[0]), rtol=1e-6)
    loss = lambda *a: (fn(*a) ** 2).sum()
    got = jax.vmap(jax.grad(loss, 1))(xs, ws, sizes)
    want = np.stack([jax.grad(loss, 1)(*a) for a in zip(xs, ws, sizes)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind):
    """Each device has the weights of one group of all, and the rows of every group."""
    mesh = jax.make_mesh((3,), ("e",), axis_types=(getattr(AxisType, kind),))
    x, w, sizes = small()

    def local(x, w, sizes):
        offset = lax.axis_index("e").astype(jnp.int32)
        return lax.psum(grouped_swiglu(x, w, sizes, group_offset=offset)[0], "e")

    loss = lambda fn: lambda x, w: (fn(x, w, sizes) ** 2).sum()
    want = jax.value_and_grad(loss(plain), (0, 1))(x, w)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P("e")))
        spread = jax.shard_map(local, in_specs=(P(), P("e"), P()), out_specs=P())
        got = jax.jit(jax.value_and_grad(loss(spread), (0, 1)))(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit_are_refused():
    x, w, sizes = small()
    with pytest.raises(ValueError, match="wanted 16 contracted elements"):
        grouped_swiglu(x, w.swapaxes(1, 2), sizes)
    with pytest.raises(ValueError, match="wanted two of one shape"):
        grouped_swiglu(x, (w, w[:, :, 1:]), sizes)
    with pytest.raises(ValueError, match=r"found ranks \(2, 2, 1\)"):
        grouped_swiglu(x, w[0], sizes)


# --- on TPU7x ---------------------------------------------------------------------------------

S = jax.ShapeDtypeStruct


@pytest.mark.libtpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")
@pytest.mark.parametrize("name", ["bfloat16", "float32", "apart", "differentiated"])
def test_mosaic_compiles_it_for_tpu7x(name):
    """Not only lowered: libtpu makes machine code of the kernel, and has room for its blocks."""
    bf16 = jnp.bfloat16
    x, w, sizes = S((1000, 512), bf16), S((8, 512, 768), bf16), S((16,), jnp.int32)
    t = S((8, 768, 512), jnp.float32)
    offset = S((), jnp.int32)
    loss = lambda x, w, s: (grouped_swiglu(x, w, s)[0].astype(jnp.float32) ** 2).sum()
    fn, args = {
        "bfloat16": (lambda x, w, s, o: grouped_swiglu(x, w, s, group_offset=o, with_gemm=True,
                                                       precision=lax.Precision.HIGHEST),
                     (x, w, sizes, offset)),
        "float32": (lambda x, w, s: grouped_swiglu(x, w, s, transpose_rhs=True, gate_first=False),
                    (S((1000, 512), jnp.float32), t, sizes)),
        "apart": (lambda x, a, b, s: grouped_swiglu(x, (a, b), s, tiling=Tiling(64, 128, 128)),
                  (S((100, 300), bf16), S((8, 300, 300), bf16), S((8, 300, 300), bf16), sizes)),
        "differentiated": (jax.grad(loss, (0, 1)), (x, w, S((8,), jnp.int32))),
    }[name]  # fmt: skip
    found = relower.cost(fn, *args)
    assert [k.name.partition(".")[0] for k in found.kernels] == ["grouped_swiglu"]
