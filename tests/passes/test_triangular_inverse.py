"""Inverses by triangular solves against inverses by blocks, and both against float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.passes import triangular_inverse
from relower.passes.parts import block_inverse

NAME = "triangular_inverse"
ONE = {NAME: 1}
MOST = 1.10
"""How much larger than the original's an error may be."""


def opt(fn):
    return optimize(fn, passes=[NAME])


def run(fn, *args):
    """Compiled as a whole: op by op, there would be dozens of compilations."""
    return jax.jit(fn)(*args)


def keys(n, seed, batch=(4,)):
    """Overlaps of unit keys times a learning rate, as chunks of a delta rule have them."""
    r = np.random.RandomState(seed)
    k = r.randn(*batch, n, n // 2)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    overlap = np.einsum("...ik,...jk->...ij", k, k) * r.rand(*batch, n, 1)
    return np.tril(overlap, -1).astype(np.float32)


def inverse(lower):
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return solve_triangular(eye + lower, eye, lower=True, unit_diagonal=True)


def exact(lower):
    return np.linalg.inv(np.eye(lower.shape[-1]) + lower.astype(np.float64))


def exact_grad(lower, g):
    x = np.swapaxes(exact(lower), -1, -2)
    return -np.tril(x @ g.astype(np.float64) @ x, -1)


def error(got, want):
    return np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2))


@functools.cache
def compiled(n, way):
    """Output and gradient, as written or one of the two ways to optimize."""

    def both(fn):
        grad = lambda x, g: jax.grad(lambda x: (fn(x) * g).sum())(x)
        return fn, grad

    plain, grad = both(inverse)
    if way == "grad(opt)":
        plain, grad = both(opt(inverse))
    if way == "opt(grad)":
        plain, grad = opt(plain), opt(grad)
    return jax.jit(lambda x, g: (plain(x), grad(x, g)))


@pytest.mark.parametrize(("n", "seeds"), [(64, 6), (128, 2)])
def test_no_more_error_than_a_solve(n, seeds):
    for seed, masked in itertools.product(range(seeds), (False, True)):
        x, g = keys(n, seed), np.random.RandomState(seed).randn(4, n, n).astype(np.float32)
        if masked:  # a document's end: tokens that are padding have no keys and no rate
            x = x * (np.arange(n) < 3 * n // 4).astype(np.float32)[:, None]
            x[:, :, 5] = 0
        want = exact(x), exact_grad(x, g)
        plain = [error(a, w) for a, w in zip(compiled(n, "plain")(x, g), want, strict=True)]
        for way in ("grad(opt)", "opt(grad)"):
            got = [error(a, w) for a, w in zip(compiled(n, way)(x, g), want, strict=True)]
            for mine, theirs in zip(got, plain, strict=True):
                assert mine <= MOST * theirs, (way, seed, masked, mine / theirs)


EYE = lambda a: jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def solve(rhs, a, **options):
    options = {"left_side": True, "lower": True, "unit_diagonal": True, **options}
    return lax.linalg.triangular_solve(a, rhs, **options)


def rough(n, seed=0):
    """Garbage where a solve doesn't read: on the diagonal and in both triangles."""
    return np.random.RandomState(seed).randn(2, n, n).astype(np.float32) * 0.2


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_any_side_of_any_triangle(lower, left_side, transpose_a):
    fn = lambda a: solve(EYE(a), a, left_side=left_side, lower=lower, transpose_a=transpose_a)
    assert explain(fn, rough(32), passes=[NAME]).counts() == ONE
    fns = fn, opt(fn)
    grad = lambda f, a: jax.grad(lambda a: jnp.sin(f(a)).sum())(a)
    compiled = jax.jit(lambda a: ([f(a) for f in fns], [grad(f, a) for f in fns]))
    errors = np.zeros((2, 2))
    for seed in range(6):
        # Rows of the one are small where columns of the other are.
        for kind, a in enumerate(
            (rough(32, seed), keys(32, seed, (2,)) + keys(32, seed + 9, (2,)).mT)
        ):
            strict = np.tril(a, -1) if lower else np.triu(a, 1)
            want = np.linalg.inv(np.eye(32) + strict.astype(np.float64))
            want = np.swapaxes(want, -1, -2) if transpose_a else want
            results, grads = compiled(a)
            errors[kind] += [error(found, want) for found in results]
            np.testing.assert_allclose(*grads, rtol=1e-3, atol=1e-4)
    assert np.all(errors[:, 1] <= MOST * errors[:, 0]), errors
    assert not np.any(np.triu(grads[1]) if lower else np.tril(grads[1]))


EYES = {
    "eye": lambda a: jnp.broadcast_to(jnp.eye(32), a.shape),
    "lax.broadcast": lambda a: lax.broadcast(jnp.eye(32), (2,)),
    "identity": lambda a: jnp.broadcast_to(jnp.identity(32), a.shape),
    "where": lambda a: jnp.where(lax.broadcasted_iota(np.int32, a.shape, 2)
                                 == lax.broadcasted_iota(np.int32, a.shape, 1), 1.0, 0.0),
    "of integers": lambda a: jnp.broadcast_to(jnp.eye(32, dtype=np.int32).astype(np.float32),
                                              a.shape),
}  # fmt: skip


@pytest.mark.parametrize("eye", EYES)
def test_the_identity_in_any_spelling(eye):
    fn = lambda a: solve(EYES[eye](a), a)
    assert explain(fn, rough(32), passes=[NAME]).counts() == ONE


def test_without_and_with_several_batch_dimensions():
    for batch in ((), (2, 1, 3)):
        x = keys(32, 0, batch)
        assert explain(inverse, x, passes=[NAME]).counts() == ONE
        np.testing.assert_allclose(run(opt(inverse), x), run(inverse, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["vmap", "scan and remat"])
def test_gradients_under(how, eqns_of):
    x = keys(32, 1, (3,))

    def wrap(fn):
        if how == "vmap":
            return lambda x: jnp.sin(jax.vmap(fn)(x)).sum()
        step = lambda c, x: (c + jnp.sin(fn(x)).sum(), None)
        return lambda x: lax.scan(jax.checkpoint(step), jnp.float32(0), x)[0]

    plain = jax.value_and_grad(wrap(inverse))
    assert eqns_of(plain, x, name="triangular_solve")
    assert not eqns_of(opt(plain), x, name="triangular_solve")
    want = run(plain, x)
    inside = jax.value_and_grad(opt(wrap(inverse)))
    assert not eqns_of(inside, x, name="triangular_solve")
    for done in (inside, opt(plain)):
        for a, b in zip(run(done, x), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_under_shard_map(kind, eqns_of):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, kind),))
    # Rematerialised, so that the backward pass's body has the inverse too.
    part = jax.shard_map(jax.checkpoint(inverse), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    with jax.set_mesh(mesh):
        x = jax.device_put(keys(32, 2, (4,)), NamedSharding(mesh, P("d")))
        plain = jax.value_and_grad(lambda x: jnp.sin(part(x)).sum())
        assert not eqns_of(opt(plain), x, name="triangular_solve")
        for a, b in zip(run(opt(plain), x), run(plain, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_second_derivative():
    x = keys(32, 3, (1,))
    twice = lambda fn: jax.grad(
        lambda x: jnp.sin(jax.grad(lambda x: fn(x)[..., -1, 0].sum())(x)).sum()
    )
    got, want = run(twice(opt(inverse)), x), run(twice(inverse), x)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


# --- near misses --------------------------------------------------------------------------------

shaped = lambda n, dtype=np.float32: jax.ShapeDtypeStruct((2, n, n), dtype)

MISSES = {
    "another diagonal": ("rhs", lambda a: solve(
        jnp.broadcast_to(jnp.eye(32, k=1), a.shape), a), shaped(32)),
    "a multiple of it": ("rhs", lambda a: solve(2 * EYE(a), a), shaped(32)),
    "ones below it": ("rhs", lambda a: solve(jnp.broadcast_to(jnp.tri(32), a.shape), a),
                      shaped(32)),
    "its columns reversed": ("rhs", lambda a: solve(EYE(a)[..., ::-1], a), shaped(32)),
    "rows that repeat": ("rhs", lambda a: solve(jnp.broadcast_to(jnp.eye(32)[0], a.shape), a),
                         shaped(32)),
    "any other array": ("rhs", lambda a: solve(jnp.cos(a), a), shaped(32)),
    "a diagonal that is read": ("diagonal", lambda a: solve(EYE(a), a, unit_diagonal=False),
                                shaped(32)),
    "no power of two": ("size", lambda a: solve(EYE(a), a), shaped(48)),
    "complex": ("dtype", lambda a: solve(EYE(a), a), shaped(32, np.complex64)),
    "small": ("unprofitable", lambda a: solve(EYE(a), a), shaped(16)),
    "large": ("unprofitable", lambda a: solve(EYE(a), a), shaped(512)),
    "an inverse of another matrix": ("rhs", lambda a: solve(solve(EYE(a), a), a + 1), shaped(32)),
}  # fmt: skip


@pytest.mark.parametrize("miss", MISSES)
def test_declined(why, miss):
    code, fn, a = MISSES[miss]
    report = explain(fn, a, passes=[NAME])
    found = [line for site in why(report, NAME) for line in site]
    assert [line for line in found if line.startswith(f"{code}: ")], found
    assert len(report.declined) == 1


def test_an_inverse_at_hand_of_the_other_triangle_is_not_used(why):
    def fn(a, b):
        return solve(EYE(a), a), solve(b, a, lower=False)

    assert why(explain(fn, shaped(32), shaped(32), passes=[NAME]), NAME)[0][0].startswith("rhs: ")


@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_an_inverse_at_hand_is_multiplied_by(left_side, transpose_a):
    def fn(a, b):
        return solve(EYE(a), a), solve(b, a, left_side=left_side, transpose_a=transpose_a)

    a, b = rough(32), rough(32, seed=1)
    assert explain(fn, a, b, passes=[NAME]).counts() == {NAME: 2}
    for got, want in zip(run(opt(fn), a, b), run(fn, a, b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


GROWING = {
    "entries of one half": lambda r, shape: 0.5 * r.randn(*shape),
    "entries of one": lambda r, shape: r.randn(*shape),
    "of many sizes": lambda r, shape: 0.05 * r.randn(*shape) * np.exp(3 * r.randn(*shape)),
}
DRAWS = 512
"""Of fewer, the mean itself is off by several hundredths."""


def mean_ratio(fn, lower, exactly, *args):
    """Errors after over before, in the geometric mean over draws; args start with the matrices."""
    off = np.tril(args[0], -1) if lower else np.triu(args[0], 1)
    want = exactly(np.linalg.inv(np.eye(off.shape[-1]) + off.astype(np.float64)))
    axes = (-2, -1)
    errors = [
        np.linalg.norm(np.asarray(jax.jit(f)(*args), np.float64) - want, axis=axes)
        for f in (fn, opt(fn))
    ]
    return np.exp(np.mean(np.log(errors[1] / errors[0])))


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_inverses_that_grow_from_any_side(lower, left_side, kind):
    fn = lambda a: solve(EYE(a), a, left_side=left_side, lower=lower)
    a = GROWING[kind](np.random.RandomState(0), (DRAWS, 32, 32)).astype(np.float32)
    assert mean_ratio(fn, lower, lambda x: x, a) <= MOST


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_inverses_at_hand_that_grow(transpose_a, left_side, kind):
    def fn(a, b):
        x = solve(EYE(a), a)
        made = solve(b, a, left_side=left_side, transpose_a=transpose_a)
        return made + lax.optimization_barrier(x) * 0

    def exactly(x):
        x = x.swapaxes(-1, -2) if transpose_a else x
        return x @ b if left_side else b @ x

    r = np.random.RandomState(0)
    a, b = (
        f(r, (DRAWS, 32, 32)).astype(np.float32) for f in (GROWING[kind], GROWING["entries of one"])
    )
    assert explain(fn, a, b, passes=[NAME]).counts() == {NAME: 2}
    assert mean_ratio(fn, True, exactly, a, b) <= MOST


# --- mutants ------------------------------------------------------------------------------------

MATMUL, LEVEL = block_inverse.matmul, block_inverse._level


def rounded(a, b):
    """What a matrix unit does to float32 by default."""
    a, b = (x.astype(jnp.bfloat16).astype(np.float32) for x in (a, b))
    return MATMUL(a, b)


MUTANTS = {
    "products in the other order": (
        "matmul",
        lambda a, b: MATMUL(b, a) if a.shape == b.shape else MATMUL(a, b),
    ),
    "products rounded to bfloat16": ("matmul", rounded),
    "blocks above the diagonal": ("_level", lambda r, c, s: LEVEL(c, r, s)),
    "a level left out": ("_level", lambda r, c, s: LEVEL(r, c, s) & (s != 8)),
    "halves of other blocks": ("_level", lambda r, c, s: LEVEL(r + s, c + s, s)),
    "no refinement": ("solved", lambda a, x, b, lower, left, carefully=False: MATMUL(x, b)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    name, change = MUTANTS[mutant]
    x, g = keys(64, 0), np.random.RandomState(0).randn(4, 64, 64).astype(np.float32)
    want = exact(x), exact_grad(x, g)
    plain = [error(a, w) for a, w in zip(compiled(64, "plain")(x, g), want, strict=True)]
    module = triangular_inverse if name == "solved" else block_inverse
    monkeypatch.setattr(module, name, change)
    compiled.cache_clear()
    got = [error(a, w) for a, w in zip(compiled(64, "opt(grad)")(x, g), want, strict=True)]
    compiled.cache_clear()
    assert not all(mine <= MOST * theirs for mine, theirs in zip(got, plain, strict=True))


def test_a_residual_summed_up_at_once_is_caught(monkeypatch):
    monkeypatch.setattr(
        block_inverse, "_residual", lambda b, x, one, other: b - x - MATMUL(one, other)
    )
    with pytest.raises(AssertionError):
        test_inverses_that_grow_from_any_side(False, True, "entries of one")


def test_a_wrong_derivative_is_caught(monkeypatch):
    """One that reads the whole of the tangent, not its strict triangle."""
    monkeypatch.setattr(block_inverse.jnp, "tril", lambda x, k=0: x)
    x, g = keys(64, 0), np.random.RandomState(0).randn(4, 64, 64).astype(np.float32)
    got = run(jax.grad(lambda x: (opt(inverse)(x) * g).sum()), x)
    assert error(got, exact_grad(x, g)) > 1e-3


def test_the_sizes_are_the_ones_the_page_states():
    assert (triangular_inverse.LEAST, triangular_inverse.MOST) == (32, 256)
