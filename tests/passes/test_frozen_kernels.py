"""frozen_gradient through Pallas kernels that make a gradient together with something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import relower
from relower import explain, optimize

NAME = "frozen_gradient"
N, D = 16, 128
HALF = N // 2


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ROWS = pl.BlockSpec((HALF, D), lambda i: (i, 0))
SQUARE = pl.BlockSpec((D, D), lambda i: (0, 0))
SCALE = pl.BlockSpec((1, D), lambda i: (0, 0))


def full(x, g, w, dw, dx, ds, seen):
    """The backward pass of ``(x @ w) * scale``-like layers, two blocks of rows: three results."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        dw[...] = jnp.zeros_like(dw)
        ds[...] = jnp.zeros_like(ds)
        seen[...] = jnp.zeros_like(seen)

    seen[...] += jnp.sum(g[...], axis=0, keepdims=True)
    product = jnp.dot(x[...].T, g[...], preferred_element_type=jnp.float32)
    dw[...] += product
    dx[...] = jnp.dot(g[...], w[...].T, preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(0) == 1)
    def _():
        ds[...] = seen[...]
        dw[...] = dw[...] * 2


def without_dw(g, w, dx, ds, seen):
    """What a person leaves of it who doesn't want ``dw``."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        ds[...] = jnp.zeros_like(ds)
        seen[...] = jnp.zeros_like(seen)

    seen[...] += jnp.sum(g[...], axis=0, keepdims=True)
    dx[...] = jnp.dot(g[...], w[...].T, preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(0) == 1)
    def _():
        ds[...] = seen[...]


WHOLE = {
    "grid": (2,),
    "in_specs": [ROWS, ROWS, SQUARE],
    "out_specs": [SQUARE, ROWS, SCALE],
    "out_shape": [shaped(D, D), shaped(N, D), shaped(1, D)],
    "scratch_shapes": [pltpu.VMEM((1, D), jnp.float32)],
    "name": "backward",
}
SMALLER = WHOLE | {
    "in_specs": [ROWS, SQUARE],
    "out_specs": [ROWS, SCALE],
    "out_shape": [shaped(N, D), shaped(1, D)],
}


def layer(backward):
    @jax.custom_vjp
    def product(w, s, x):
        return x @ w + s

    product.defvjp(lambda w, s, x: (product(w, s, x), (w, x)), backward)
    return product


def loss_with(backward):
    product = layer(backward)

    def loss(p, x):
        h = product(p["kernel"], p["scale"], jnp.tanh(x @ p["first"]))
        return jnp.sum(jnp.square(h))

    return loss


def by(kernel, call, operands=lambda x, g, w: (x, g, w)):
    """A backward pass by a kernel with all three results."""

    def backward(saved, g):
        w, x = saved
        dw, dx, ds = pl.pallas_call(kernel, **call)(*operands(x, g, w))
        return dw, ds, dx

    return backward


def by_hand(saved, g):
    w, _ = saved
    dx, ds = pl.pallas_call(without_dw, **SMALLER)(g, w)
    return jnp.zeros_like(w), ds, dx


def data():
    r = np.random.RandomState(0)
    p = {"first": (D, D), "kernel": (D, D), "scale": (1, D)}
    p = {n: jnp.asarray(r.randn(*shape), jnp.float32) for n, shape in p.items()}
    return p, jnp.asarray(r.randn(N, D), jnp.float32)


INTERPRETED = WHOLE | {"interpret": True}


def in_scan(loss):
    def fn(p, xs):
        step = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(p, x)), None)
        return lax.scan(step, jax.tree.map(jnp.zeros_like, p), xs[None])[0]

    return fn


PLACES = {"alone": jax.grad, "scan": in_scan, "remat": lambda f: jax.grad(jax.checkpoint(f)),
          "jit": lambda f: jax.grad(jax.jit(f))}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_kernel_makes_its_other_results_only(place, eqns_of):
    fn = PLACES[place](loss_with(by(full, INTERPRETED)))
    p, x = data()
    (leaf,) = explain(fn, p, x, passes=[NAME], frozen="kernel").frozen
    assert (leaf.path, leaf.status.value) == ("kernel", "applied")
    assert leaf.flops == 2 * N * D * D
    better = optimize(fn, passes=[NAME], frozen="kernel")
    (call,) = eqns_of(better, p, x, name="pallas_call")
    assert [v.aval.shape for v in call.outvars] == [(N, D), (1, D)]
    assert [a.aval.shape for a in call.invars] == [(N, D), (D, D)]
    got, want = jax.jit(better)(p, x), jax.jit(fn)(p, x)
    assert not np.any(got["kernel"])
    for name in ("first", "scale"):
        assert np.asarray(got[name]).tobytes() == np.asarray(want[name]).tobytes(), name


def test_lowered_for_tpu_it_is_the_kernel_that_a_person_writes():
    shapes = jax.tree.map(lambda a: shaped(*a.shape), data())
    lower = lambda fn: relower.lower(fn, *shapes, target="TPU7x:1x1x1")
    before = jax.grad(loss_with(by(full, WHOLE)))
    after = lower(jax.grad(loss_with(by_hand)))
    found = relower.diff(lower(optimize(before, passes=[NAME], frozen="kernel")), after,
                         level="dataflow")  # fmt: skip
    assert found.verdict.name == "IDENTICAL", found
    assert relower.diff(lower(before), after, level="dataflow").verdict.name == "DIFFERENT"


def test_every_result_but_one_can_go():
    p, x = data()
    fn = jax.grad(loss_with(by(full, INTERPRETED)))
    want = jax.jit(fn)(p, x)
    for frozen in ("kernel|scale", "kernel|first", "scale|first"):
        leaves = explain(fn, p, x, passes=[NAME], frozen=frozen).frozen
        assert {leaf.status.value for leaf in leaves} == {"applied"}, frozen
        # The product that makes each, and the one in front of the kernel that makes `first`'s.
        costs = {"kernel": 2 * N * D * D, "scale": 0, "first": 2 * N * D * D}
        assert {leaf.path: leaf.flops for leaf in leaves} == {
            n: costs[n] for n in frozen.split("|")
        }
        got = jax.jit(optimize(fn, passes=[NAME], frozen=frozen))(p, x)
        for name in p.keys() - set(frozen.split("|")):
            assert np.asarray(got[name]).tobytes() == np.asarray(want[name]).tobytes()


def masked(loss):
    def fn(p, x):
        grads = jax.grad(loss)(p, x)
        return {n: jnp.where(n != "kernel", g, 0) for n, g in grads.items()}

    return fn


def updated(loss):
    """Trains all but the one, whose gradient nothing reads."""

    def fn(p, x):
        grads = jax.grad(loss)(p, x)
        return {n: v if n == "kernel" else v - 0.1 * grads[n] for n, v in p.items()}

    return fn


@pytest.mark.parametrize(("step", "path"), [(masked, None), (updated, "p/kernel")])
def test_recognised(step, path, eqns_of):
    fn = step(loss_with(by(full, INTERPRETED)))
    p, x = data()
    (leaf,) = explain(fn, p, x, passes=[NAME]).frozen
    assert (leaf.path, leaf.status.value, leaf.way) == (path, "applied", "recognised")
    assert leaf.flops == 2 * N * D * D
    better = optimize(fn, passes=[NAME])
    (call,) = eqns_of(better, p, x, name="pallas_call")
    assert [v.aval.shape for v in call.outvars] == [(N, D), (1, D)]
    got, want = jax.jit(better)(p, x), jax.jit(fn)(p, x)
    for name, value in want.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name


def test_recognised_and_not_separable(why):
    report = explain(updated(loss_with(by(read_back, WHOLE))), *data(), passes=[NAME])
    ((reason,),) = why(report, NAME)
    assert reason.startswith("inseparable: ")
    assert "result 0, which get at" in reason
    assert "(the call: jax keeps no line of what a backward rule does) touches" in reason


# --- near misses --------------------------------------------------------------------------------


def read_back(x, g, w, dw, dx, ds, seen):
    full(x, g, w, dw, dx, ds, seen)
    dx[...] = dx[...] + dw[0, 0]


def read_in_a_branch(x, g, w, dw, dx, ds, seen):
    full(x, g, w, dw, dx, ds, seen)

    @pl.when(pl.program_id(0) == 1)
    def _():
        ds[...] += dw[0:1, :]


def through_scratch(x, g, w, dw, dx, ds, seen):
    full(x, g, w, dw, dx, ds, seen)
    seen[...] += dw[0:1, :]


def printed(x, g, w, dw, dx, ds, seen):
    full(x, g, w, dw, dx, ds, seen)
    pl.debug_print("{}", dw[0, 0])


def scoped(x, g, w, dw, dx, ds, seen):
    full(x, g, w, dw, dx, ds, seen)

    def copied(buffer):
        buffer[...] = dw[...]
        dw[...] = buffer[...]

    pl.run_scoped(copied, pltpu.VMEM((D, D), jnp.float32))


EFFECT = WHOLE | {"compiler_params": pltpu.CompilerParams(has_side_effects=True)}
MISSES = {
    "read back": (read_back, WHOLE, "result 0, which get at"),
    "read in a branch": (read_in_a_branch, WHOLE, "result 0, which get at"),
    "read through scratch": (through_scratch, WHOLE, "result 0, which get at"),
    "printed": (printed, WHOLE, "result 0, which get at"),
    "touched by a scope of its own": (scoped, WHOLE, "result 0, which run_scoped at"),
    "in the place of an operand": (full, WHOLE | {"input_output_aliases": {2: 0}},
                                   "result 0, which is written in the place of operand 2"),
    "side effects": (full, EFFECT, "a kernel with side effects"),
}  # fmt: skip


@pytest.mark.parametrize("miss", MISSES)
def test_declined(why, miss):
    kernel, call, found = MISSES[miss]
    fn = jax.grad(loss_with(by(kernel, call)))
    report = explain(fn, *data(), passes=[NAME], frozen="kernel")
    ((reason,),) = why(report, NAME)
    start = (
        f"inseparable: what makes the gradient makes something else too, which keeps {4 * D * D:,}"
    )
    assert reason.startswith(start), reason
    assert found in reason, reason


def test_another_result_in_the_place_of_an_operand_stays_there(eqns_of):
    """The operands and results that go come before: the numbers of those that stay change."""
    call = INTERPRETED | {"input_output_aliases": {1: 1}}
    fn = jax.grad(loss_with(by(full, call)))
    better = optimize(fn, passes=[NAME], frozen="kernel")
    p, x = data()
    (found,) = eqns_of(better, p, x, name="pallas_call")
    assert found.params["input_output_aliases"] == ((0, 0),)
    got, want = jax.jit(better)(p, x), jax.jit(fn)(p, x)
    assert np.asarray(got["first"]).tobytes() == np.asarray(want["first"]).tobytes()


def test_what_nobody_read_in_the_first_place_stays(eqns_of):
    def backward(saved, g):
        w, x = saved
        dw, dx, _ = pl.pallas_call(full, **INTERPRETED)(x, g, w)
        return dw, jnp.ones((1, D)), dx

    fn = jax.grad(loss_with(backward))
    better = optimize(fn, passes=[NAME], frozen="kernel")
    (found,) = eqns_of(better, *data(), name="pallas_call")
    assert [v.aval.shape for v in found.outvars] == [(N, D), (1, D)]
