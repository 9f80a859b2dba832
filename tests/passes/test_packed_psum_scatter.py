"""One psum_scatter in float32 for several of bfloat16: errors, gradients, and what is declined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.passes.parts import joined

NAME = "packed_psum_scatter"
ONE = {NAME: 1}
HALF = jnp.bfloat16
DEVICES = 4


def mesh(kind="Auto"):
    kinds = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((DEVICES, 2), ("expert", "data"), axis_types=kinds)


def sharded(fn, over=None, check_vma=True, out=None):
    out = P("expert") if out is None else out
    return jax.shard_map(fn, mesh=over or mesh(), in_specs=P("expert"), out_specs=out,
                         check_vma=check_vma)  # fmt: skip


def scatter(x, axis=0, tiled=True, name="expert", **more):
    return lax.psum_scatter(x, name, scatter_dimension=axis, tiled=tiled, **more)


def both(*xs, axis=0, tiled=True):
    return [scatter(x, axis, tiled) for x in xs]


def small(*shape, seed=0):
    """Whole numbers whose sums are exact in bfloat16."""
    return np.random.RandomState(seed).randint(-9, 10, shape).astype(HALF)


def sums(fn, *args):
    """How many psum_scatters a function has, of which dtypes."""
    text = str(jax.make_jaxpr(fn)(*args))
    return text.count("reduce_scatter[")


def agree(same, fn, *args, applied=ONE):
    same(fn, *args, passes=[NAME], applied=applied)
    assert sums(optimize(fn, passes=[NAME]), *args) < sums(fn, *args)


# --- what it makes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("tiled", "shapes"), [
    (True, [(8, 3), (8, 3)]), (True, [(8, 3), (8, 1), (8, 2)]), (True, [(8,), (8, 3)]),
    (False, [(4, 3), (4, 5)]), (False, [(4, 2, 3), (4, 5)]),
])  # fmt: skip
def test_exact_sums_are_the_same_to_the_bit(same, tiled, shapes):
    args = [small(4 * s[0], *s[1:], seed=i) for i, s in enumerate(shapes)]
    agree(same, sharded(lambda *xs: both(*xs, tiled=tiled)), *args)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes_scan_remat_and_vmap(same, kind):
    over = mesh(kind)
    with jax.set_mesh(over):
        args = [jax.device_put(small(3, 32, n, seed=n), jax.NamedSharding(over, P(None, "expert")))
                for n in (2, 3)]  # fmt: skip
        body = jax.checkpoint(lambda c, xs: (c, both(*xs)))
        scanned = lambda *xs: lax.scan(body, 0, xs)[1]
        fn = jax.shard_map(scanned, mesh=over, in_specs=P(None, "expert"),
                           out_specs=P(None, "expert"))  # fmt: skip
        agree(same, fn, *args)
    mapped = jax.vmap(sharded(both))
    agree(same, mapped, small(3, 32, 2), small(3, 32, 3, seed=1))


SPECIAL = np.array([0x7FC0, 0x7F80, 0xFF80, 0, 0x8000, 0x7F7F, 0xFF7F, 0x3F80], np.uint16)


def test_specials_sum_to_what_they_did(same):
    """Infinities, zeros of either sign, NaNs and overflow; which NaN is the processor's affair."""
    r = np.random.RandomState(0)
    args = [r.choice(SPECIAL, (64, 4)) for _ in range(2)]
    for a in args:
        a[:, 0] = 0x8000  # negative zeros alone
    args = [a.view(HALF) for a in args]
    fn = sharded(both)
    for got, want in zip(jax.jit(optimize(fn, passes=[NAME]))(*args), jax.jit(fn)(*args)):
        got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
        assert (np.isnan(got) == np.isnan(want)).all()
        kept = ~np.isnan(want)
        assert (got[kept].view(np.uint32) == want[kept].view(np.uint32)).all()
        assert np.isinf(got).any()


# --- errors -------------------------------------------------------------------------------------


def computed(x, y):
    """Operands computed just before, in which a compiler may keep more than they have."""
    x = jnp.tanh(x * y) * y
    return both(x, jnp.sin(y) * x)


@pytest.mark.parametrize("fn", [both, computed], ids=["given", "computed"])
def test_the_error_is_no_larger(fn):
    """Against float64 on the same values, the root mean square over six draws each."""
    run = sharded(fn)
    for seed in range(6):
        r = np.random.RandomState(seed)
        args = [r.randn(512, 8).astype(HALF) for _ in range(2)]
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            wide = [jnp.asarray(a, jnp.float64) for a in args]
            exact = [np.asarray(e) for e in jax.jit(run)(*wide)]
        plain, done = (jax.jit(f)(*args) for f in (run, optimize(run, passes=[NAME])))
        for e, p, d in zip(exact, plain, done, strict=True):
            error = lambda out, e=e: np.sqrt(np.mean((np.asarray(out, np.float64) - e) ** 2))
            assert 0 < error(d) <= 1.10 * error(p)


def test_it_adds_in_float32():
    args = [jax.ShapeDtypeStruct((32, 2), HALF)] * 2
    text = str(jax.make_jaxpr(optimize(sharded(both), passes=[NAME]))(*args))
    (line,) = [t for t in text.splitlines() if "reduce_scatter[" in t]
    assert ":f32[" in line
    assert text.count("bf16[2,2]{") or text.count("bf16[2,2]")


# --- gradients ----------------------------------------------------------------------------------


def chunks(x, w):
    """Weights of two chunks brought to every device, whose cotangents are psum_scatters."""
    parts = [lax.all_gather(p, "expert", tiled=True) for p in jnp.split(x, 2)]
    return sum(scatter((p * w[0, 0]).astype(HALF)).sum() for p in parts)[None]


def test_gradients_both_ways_round(equal_bits):
    x, w = small(32, 2), np.array([[1], [2], [3], [5]], HALF)

    def loss(x, w):
        return (sharded(chunks)(x, w).astype(jnp.float32)).sum()

    grad = jax.grad(loss, argnums=(0, 1))
    want = jax.jit(grad)(x, w)
    assert all(np.any(np.asarray(g)) for g in want)
    equal_bits(jax.jit(optimize(grad, passes=[NAME]))(x, w), want, "opt(grad)")
    equal_bits(jax.jit(jax.grad(optimize(loss, passes=[NAME]), argnums=(0, 1)))(x, w), want,
               "grad(opt)")  # fmt: skip
    whole = jax.value_and_grad(loss, argnums=(0, 1))  # of the gradient alone the sums are dead
    assert explain(grad, x, w, passes=[NAME]).counts() == ONE
    assert explain(whole, x, w, passes=[NAME]).counts() == {NAME: 2}
    assert sums(whole, x, w) == 4
    assert sums(optimize(whole, passes=[NAME]), x, w) == 2


# --- by contract --------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", ["bitwise", "value"])
def test_it_has_to_be_asked_for(contract):
    args = [jax.ShapeDtypeStruct((32, 2), HALF)] * 2
    report = explain(sharded(both), *args, contract=contract)
    assert not report.applied
    assert [s.pass_name for s in report.declined] == ["packed_all_gather"]
    assert [r.code for s in report.declined for r in s.reasons] == ["dtype"]
    assert explain(sharded(both), *args, contract="rounding").counts() == ONE


# --- near misses --------------------------------------------------------------------------------


def through(x, y):
    one = scatter(x)
    return one, scatter(y + one[0, 0])


def behind_a_barrier(x, y):
    one = scatter(x)
    return one, scatter(lax.optimization_barrier(y + 1))


def behind_an_effect(x, y):
    one = scatter(x)
    y = jax.experimental.io_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
    return one, scatter(y)


def in_a_loop(x, y):
    return scatter(x), lax.scan(lambda c, _: (c, scatter(c)), y, None, length=2)[1][0]


NEAR = {
    "dependent": through,
    "barrier": behind_a_barrier,
    "effects": behind_an_effect,
    "scope": in_a_loop,
    "axes": lambda x, y: (scatter(x), scatter(y, name="data")),
    "groups": lambda x, y: (scatter(x, axis_index_groups=[[0, 1], [2, 3]]),
                            scatter(y, axis_index_groups=[[0, 2], [1, 3]])),
    "dimension": lambda x, y: (scatter(x), scatter(jnp.tile(y, (1, 2)), 1)),
    "tiling": lambda x, y: (scatter(x[:4]), scatter(y[:4], tiled=False)),
    "shapes": lambda x, y: (scatter(x), scatter(y[:4])),
    "same-operand": lambda x, y: (scatter(x), scatter(x) + y[0, 0]),
    "large": lambda x, y: [scatter(jnp.tile(v, (1, 1 << 18))) for v in (x, y)],
}  # fmt: skip


@pytest.mark.parametrize("code", NEAR)
def test_declined(why, code):
    args = [jax.ShapeDtypeStruct((32, 2), HALF)] * 2
    out = P(("expert", "data"))
    report = explain(sharded(NEAR[code], check_vma=False, out=out), *args, passes=[NAME])
    assert not report.applied
    ((reason, *_),) = why(report, NAME)
    assert reason.startswith(f"{code}: ")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_sums_in_other_dtypes_are_no_candidates(dtype):
    args = [jax.ShapeDtypeStruct((32, 2), dtype)] * 2
    assert not explain(sharded(both), *args, passes=[NAME]).sites
    mixed = lambda x, y: (scatter(x), scatter(y.astype(HALF)))
    assert not explain(sharded(mixed), *args, passes=[NAME]).sites


# --- mutants ------------------------------------------------------------------------------------

TOGETHER = joined.Joined.together
MUTANTS = {
    "parts in another order": lambda self, xs, shapes: [
        r.reshape(s) for r, s in zip(TOGETHER(self, xs[::-1], shapes[::-1]), shapes)],
    "parts shifted": lambda self, *how: [jnp.roll(r, 1, axis=0) for r in TOGETHER(self, *how)],
    "one part lost": lambda self, *how: [r * (i > 0) for i, r in enumerate(TOGETHER(self, *how))],
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    monkeypatch.setattr(joined.Joined, "together", MUTANTS[mutant])
    with pytest.raises(AssertionError, match="differs in its bits"):
        agree(same, sharded(both), small(32, 2), small(32, 2, seed=1))


def test_a_sum_in_fewer_bits_is_caught(monkeypatch):
    """The error test can fail: of numbers that are off by a unit in the last place."""

    def coarse(self, xs, shapes):
        return TOGETHER(self, [x * (1 + 2**-8) for x in xs], shapes)

    monkeypatch.setattr(joined.Joined, "together", coarse)
    with pytest.raises(AssertionError):
        test_the_error_is_no_larger(both)
