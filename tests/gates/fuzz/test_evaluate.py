"""The evaluator's rules, each against jax itself, and what its other modes promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.compat import tracing
from relower.gates.fuzz.evaluate.core import Evaluation
from relower.gates.fuzz.evaluate.mode import PLAIN, Mode
from relower.gates.fuzz.evaluate.promises import BrokenPromise

R = np.random.RandomState(0)
X = R.standard_normal((4, 6)).astype(np.float32)
Y = R.standard_normal((4, 6)).astype(np.float32)
TIES = R.choice(np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0], np.float32), (4, 6))
INTS, MORE = (R.randint(-9, 9, (4, 6)).astype(np.int32) for _ in range(2))
ORDER = R.permutation(4).astype(np.int32)
W = R.standard_normal((2, 6, 3)).astype(np.float32)
SIZES = np.array([1, 3], np.int32)
GROUPS = R.standard_normal((4, 3)).astype(np.float32)
LOWER = (np.eye(4) + np.tril(R.rand(4, 4), -1)).astype(np.float32)


def closed(fn, *args):
    return tracing.trace(fn, args, {}, [tracing.type_of(a) for a in args]).closed


def evaluated(fn, *args, mode=PLAIN):
    run = Evaluation(mode)
    results = run.run(closed(fn, *args), args)
    assert not run.by_jax, run.by_jax
    return results


def same(got, want, exact=True):
    assert len(got) == len(want)
    for a, b in zip(got, map(np.asarray, want), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if exact:
            assert np.array_equal(a, b, equal_nan=jnp.issubdtype(b.dtype, jnp.floating))
            if jnp.issubdtype(b.dtype, jnp.floating):  # which NaN is nobody's promise, but a zero's
                finite = ~np.isnan(b)
                assert np.array_equal(np.signbit(a[finite]), np.signbit(b[finite]))
        else:
            np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-6)


EXACT = {
    "add": (lambda x, y: x + y, X, Y),
    "arithmetic with NaNs": (lambda x, y: (x + y, x * y, jnp.maximum(x, y)), TIES, X),
    "integers": (
        lambda i, j: (i + j, i * j, lax.div(i, j), lax.rem(i, j), i // j, i % j), INTS, MORE,
    ),
    "bits": (
        lambda i, j: (i & j, i | j, i ^ j, ~i, i << 3, lax.shift_right_logical(i, 1)), INTS, MORE,
    ),
    "shifts too far": (lambda i: (i << 40, i >> 40, lax.shift_right_logical(i, 33)), INTS),
    "comparisons": (lambda x, y: (x < y, x <= y, x == y, x != y, x > y, x >= y), TIES, X),
    "select": (lambda x, y: jnp.where(x > 0, x, y), TIES, Y),
    "conversions": (
        lambda x: (x.astype(jnp.int32), x.astype(jnp.bfloat16), x > 0, x.astype(jnp.int8)), X * 90,
    ),
    "to bfloat16 and back": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), TIES),
    "unsigned": (lambda i: (i.astype(jnp.uint8), i.astype(jnp.uint32).astype(jnp.float32)), INTS),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
    "floors": (lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.trunc(x)), X * 3),
    "signs": (lambda x: (jnp.abs(x), -x, jnp.sign(x)), TIES),
    "layout": (
        lambda x: (x.T, x.reshape(3, 8), x[::-1], x[1:, ::2], x[None], jnp.tile(x, (2, 1)),
                   jnp.stack([x, x], 1), jnp.concatenate([x, x], 1), *jnp.split(x, 2, 1)), X,
    ),
    "pads": (
        lambda x: (lax.pad(x, 1.0, [(1, 2, 1), (0, 0, 0)]),
                   lax.pad(x, 0.0, [(-1, 1, 0), (0, -2, 2)])),
        X,
    ),
    "iotas": (lambda x: (jnp.arange(5), lax.broadcasted_iota(jnp.int32, (2, 3), 1), x), X),
    "gathers": (
        lambda x, o: (x[o], x[:, o], jnp.take(x, o + 2, axis=0), x.at[o + 2].get(mode="clip"),
                      jnp.take_along_axis(x, o[:, None], 1), x[o, o]), X, ORDER,
    ),
    "scatters": (
        lambda x, o: (x.at[o].add(x), x.at[o + 2].add(x, mode="drop"), x.at[o].set(x),
                      x.at[o].max(x), x.at[o, o].multiply(2), x.at[:, o].add(1)), X, ORDER,
    ),
    "batched gathers": (lambda x, i: jax.vmap(lambda a, b: a[b])(x, abs(i) % 6), X, INTS),
    "batched scatters": (
        lambda x, i: jax.vmap(lambda a, b: jnp.zeros(6).at[b].add(a))(x, abs(i) % 6),
        X.round(), INTS,
    ),
    "dynamic slices": (
        lambda x: (lax.dynamic_slice(x, (2, 9), (2, 3)),
                   lax.dynamic_update_slice(x, x[:2], (3, 1))),
        X,
    ),
    "sorts": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), jnp.argsort(x, descending=True)), TIES),
    "sorts by two": (lambda i, j: lax.sort((i % 2, j), num_keys=2), INTS, MORE),
    "top_k": (lambda x: lax.top_k(x, 4), TIES),
    "top_k of integers": (lambda i: lax.top_k(i, 3), INTS),
    "argmax": (lambda x, i: (jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmax(i, 1)), TIES, INTS),
    "reductions": (lambda i, x: (i.sum(1), i.max(0), x.max(1), x.min(), (x > 0).any(0)), INTS, X),
    "running": (lambda i: (jnp.cumsum(i, 0), lax.cummax(i, 1), lax.cumsum(i, reverse=True)), INTS),
    "a reduction of pairs": (
        lambda x, i: lax.reduce((x, i), (np.float32(-9), np.int32(0)), lambda a, b: (
            jnp.maximum(a[0], b[0]), a[1] + b[1]), (1,)), X, INTS,
    ),
    "scan": (
        lambda x: lax.scan(lambda c, v: (c + v, c * v), x[0], x[1:], reverse=True), X,
    ),
    "while": (lambda i: lax.while_loop(lambda c: c.sum() < 90, lambda c: c + abs(i), abs(i)), INTS),
    "vmapped while": (
        lambda i: jax.vmap(lambda n: lax.while_loop(lambda c: c < 40, lambda c: c * 2 + 1, n))(i),
        np.array([1, 7, 50], np.int32),
    ),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: -x, x), X),
    "switch": (lambda i: lax.switch(i[0, 0], [lambda: 1, lambda: 2, lambda: 3]), INTS),
    "remat and a derivative": (
        lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: (x * x).sum())(x))(x), X,
    ),
    "platforms": (
        lambda x: lax.platform_dependent(x, tpu=lambda x: x, default=lambda x: x + 1), X,
    ),
}  # fmt: skip

NEARLY = {
    "functions": (
        lambda x: (jnp.exp(x), jnp.log(abs(x)), jnp.tanh(x), jnp.sin(x), jax.nn.sigmoid(x), x**3,
                   lax.rsqrt(abs(x)), jnp.sqrt(abs(x)), lax.erf(x), jnp.log1p(abs(x)),
                   jnp.expm1(x), abs(x) ** 1.5, x * x, lax.cos(x)), X,
    ),
    "sums": (lambda x: (x.sum(1), x.mean(0), jnp.cumsum(x, 1), jnp.prod(x, 0)), X),
    "products": (
        lambda x, y: (x @ y.T, jnp.einsum("ab,ac->bc", x, y), jnp.einsum("ab,ab->a", x, y)), X, Y,
    ),
    "ragged": (lambda x, w, s: lax.ragged_dot(x, w, s), X, W, SIZES),
    "ragged, transposed": (
        lambda x, w, s, g: jax.vjp(lambda x, w: lax.ragged_dot(x, w, s), x, w)[1](g),
        X, W, SIZES, GROUPS,
    ),
    "solves": (
        lambda a, b: tuple(jax.scipy.linalg.solve_triangular(a.T if t else a, b, lower=not t,
                           trans=u) for t in (0, 1) for u in (0, 1)), LOWER, X,
    ),
    "a solve from the right": (
        lambda a, b: lax.linalg.triangular_solve(a, b.T, lower=True, left_side=False), LOWER, X,
    ),
    "softmax": (lambda x: jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(x), X),
}  # fmt: skip


def expected(fn, args):
    return jax.tree.leaves(jax.jit(fn)(*args))


@pytest.mark.parametrize("name", EXACT)
def test_what_jax_computes_to_the_bit(name):
    fn, *args = EXACT[name]
    flat = lambda *args: jax.tree.leaves(fn(*args))
    same(evaluated(flat, *args), expected(flat, args))


@pytest.mark.parametrize("name", NEARLY)
def test_what_jax_computes_but_for_roundings(name):
    fn, *args = NEARLY[name]
    flat = lambda *args: jax.tree.leaves(fn(*args))
    same(evaluated(flat, *args), expected(flat, args), exact=False)


@functools.cache
def mesh():
    return jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "d"),
    "psum over two": lambda x: lax.psum(x, ("d", "m")),
    "all_gather": lambda x: lax.all_gather(x, "d", tiled=True),
    "all_gather apart": lambda x: lax.all_gather(x, "d", axis=1).reshape(-1, 6),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.tile(x, (4, 1)), "d", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(jnp.tile(x, (4, 1)), "d", 0, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "d", [(0, 1), (1, 2), (3, 0)]),
    "axis_index": lambda x: x * lax.axis_index("d") + lax.axis_index("m"),
    "pmax": lambda x: lax.pmax(x, "d"),
    "ways apart": lambda x: lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: -x, x),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    x = np.round(R.standard_normal((16, 6)) * 4).astype(np.float32)
    with jax.set_mesh(mesh()):
        fn = jax.shard_map(COLLECTIVES[name], in_specs=P(("d", "m")), out_specs=P(("d", "m")),
                           check_vma=False)  # fmt: skip
        flat = lambda x: [fn(x)]
        same(evaluated(flat, x), expected(flat, (x,)))


def test_an_unstable_sort_leaves_ties_as_nobody_expects():
    keys = np.zeros(4, np.int32)
    fn = lambda k: lax.sort((k, lax.iota(np.int32, 4)), num_keys=1, is_stable=False)
    assert evaluated(fn, keys)[1].tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x.at[i].get(mode="promise_in_bounds"),
        lambda x, i: x.at[i % 2].set(x, unique_indices=True),
        lambda x, i: x.at[i % 4].get(indices_are_sorted=True),
    ],
    ids=["in bounds", "unique", "sorted"],
)
def test_promises_that_are_broken(fn):
    with pytest.raises(BrokenPromise):
        evaluated(fn, X, np.array([9, 0, 1, 0], np.int32))


def test_zeros_without_a_sign():
    fn = lambda x: (x, 1 / x, -x)
    results = evaluated(fn, np.array([-0.0, 0.0], np.float32), mode=Mode(unsigned=True))
    assert not any(np.signbit(r).any() for r in results)


def test_wide_values_are_as_exact_as_float64():
    fn = lambda x: [(x * x).sum()]
    (got,) = evaluated(fn, X, mode=Mode(wide=True))
    assert got.dtype == np.float64
    assert got == pytest.approx((X.astype(np.float64) ** 2).sum(), rel=1e-15)


def test_noise_is_of_the_size_of_a_rounding():
    fn = lambda x: [x * 3]
    (got,) = evaluated(fn, X, mode=Mode(noise=np.random.default_rng(0)))
    off = np.abs(got - 3 * X) / np.abs(3 * X)
    assert 0 < off.max() < 2**-22
