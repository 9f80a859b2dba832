"""Parts of one array run through one chain, against the chain on the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.compat import tracing
from relower.matchers import along, cuts, lockstep
from relower.passes import split_fused_wi as module

NAME = "split_fused_wi"
ONE = {NAME: 1}
ODD = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 448.0, -3.5, 1e30, 0.1]
W = np.random.RandomState(0).choice(np.array(ODD, np.float32), (4, 6, 8))
X = np.random.RandomState(1).randn(4, 6, 8).astype(np.float32)
ROW = np.random.RandomState(2).randn(4, 6, 1).astype(np.float32)


def halves(chain, axis=2, n=2, split=False):
    """``chain`` on ``n`` parts along an axis, side by side again."""

    def fn(w, *others):
        if split:
            parts = jnp.split(w, n, axis)
        else:
            size = w.shape[axis] // n
            parts = [lax.slice_in_dim(w, i * size, (i + 1) * size, axis=axis) for i in range(n)]
        return jnp.concatenate([chain(p, *others) for p in parts], axis)

    return fn


def fake_quantised(w):
    scale = jnp.max(jnp.abs(w), axis=1, keepdims=True) / 448.0
    scale = jnp.where(scale == 0, 1, scale)
    return lax.optimization_barrier((w / scale).astype(jnp.float8_e4m3fn).astype(w.dtype) * scale)


def pair(w):
    """A barrier of two arrays that both are in parts."""
    scale = jnp.max(jnp.abs(w), axis=1, keepdims=True)
    w, scale = lax.optimization_barrier((w, scale))
    return w * scale


@jax.custom_vjp
def rounded(w, by):
    return jnp.round(w * by)


rounded.defvjp(
    lambda w, by: (rounded(w, by), (w, by)),
    lambda saved, g: (3 * g * saved[1], (g * saved[0]).sum((0, 2))[:, None]),
)


@jax.custom_vjp
def straight(w):
    """Quantised; its gradient passes through."""
    return fake_quantised(w)


straight.defvjp(lambda w: (straight(w), None), lambda _, g: (g,))


@jax.custom_jvp
def doubled(w):
    return jnp.tanh(w) * 2


doubled.defjvp(lambda p, t: (doubled(*p), 5 * t[0] * p[0]))

CHAINS = {
    "nothing": lambda w: w,
    "elementwise": lambda w: jnp.exp(-w) + jnp.where(w > 0, w, 2.5) * jnp.sign(w),
    "conversions": lambda w: w.astype(jnp.bfloat16).astype(jnp.float16).astype(jnp.float32),
    "bits": lambda w: lax.bitcast_convert_type(w, jnp.int32) ^ 5,
    "quantised": fake_quantised,
    "barrier of a pair": pair,
    "extrema": lambda w: jnp.max(w, 0) + jnp.min(w, 0, keepdims=True)[0],
    "arg": lambda w: jnp.argmax(w, 1, keepdims=True),
    "counts": lambda w: jnp.sum(w > 0, axis=1, keepdims=True),
    "reshaped": lambda w: (w.reshape(2, 2, 3, 2, w.shape[2])[::-1] * 2).reshape(w.shape),
    "transposed": lambda w: jnp.moveaxis(jnp.moveaxis(w, 2, 0) * 2, 0, 2),
    "padded": lambda w: jnp.pad(w, ((0, 0), (1, 2), (0, 0)))[:, 1:],
    "expanded": lambda w: jnp.squeeze(w[:, None] * 2, 1),
    "a call": jax.jit(lambda w: jnp.tanh(w) * 2),
    "custom jvp": lambda w: doubled(jax.nn.relu(w)),
    "a constant": lambda w: w * jnp.full(w.shape, 3.0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(same, eqns_of, name):
    axis = 1 if name == "extrema" else 2
    fn = halves(CHAINS[name])
    if name == "extrema":
        fn = lambda w: jnp.concatenate([CHAINS[name](w[:, :, :4]), CHAINS[name](w[:, :, 4:])], axis)
    same(fn, W, passes=[NAME], applied=ONE)
    assert not eqns_of(optimize(fn, passes=[NAME]), W, name="concatenate")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.int32])
def test_of_other_types(same, dtype):
    w = jnp.asarray(np.nan_to_num(W, posinf=9, neginf=-9), dtype)
    same(halves(lambda w: jnp.abs(w) * w), w, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("split", [False, True], ids=["sliced", "split"])
@pytest.mark.parametrize(("axis", "n"), [(0, 4), (1, 3), (2, 2)])
def test_any_number_of_parts_along_any_axis(same, axis, n, split):
    same(halves(lambda w: jnp.sin(w) * w, axis, n, split), W, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("inner", [jax.nn.silu, fake_quantised])
def test_a_jitted_function_called_twice_on_each_part(same, inner):
    """Its equations are the same objects in every call."""
    called = jax.jit(inner)
    same(halves(lambda w: called(called(w))), W, passes=[NAME], applied=ONE)


def test_parts_of_a_part(same, eqns_of):
    def fn(w):
        return jnp.concatenate([jnp.sin(w[1:3, :, 1:3]), jnp.sin(w[1:3, :, 3:6])], 2)

    same(fn, W, passes=[NAME], applied=ONE)
    assert [e.outvars[0].aval.shape for e in eqns_of(optimize(fn), W, name="slice")] == [(2, 6, 5)]


def test_one_barrier_of_both(same, eqns_of):
    def fn(w):
        a, b = lax.optimization_barrier((jnp.sin(w[..., :4]), jnp.sin(w[..., 4:])))
        return jnp.concatenate([a, b], 2)

    same(fn, W, passes=[NAME], applied=ONE)
    (barrier,) = eqns_of(optimize(fn), W, name="optimization_barrier")
    assert len(barrier.invars) == 1


def test_operands_in_lock_step_and_equal_ones(same):
    def fn(w, v, row):
        chain = lambda w, v: w * v + row
        return jnp.concatenate([chain(w[..., :4], v[..., :4]), chain(w[..., 4:], v[..., 4:])], 2)

    same(fn, W, X, ROW, passes=[NAME], applied=ONE)


# --- gradients ------------------------------------------------------------------------------------


def op_by_op(fn, *args):
    return tracing.evaluate(jax.make_jaxpr(fn)(*args), *args)


def loss(fn):
    return lambda w, *others: jnp.sum(fn(w, *others) * jnp.arange(8.0))


DIFFERENTIATED = {
    "quantised": (halves(straight), X),
    "custom jvp": (halves(doubled), X),
    "custom vjp": (halves(rounded), X, ROW[0]),
    "split": (halves(lambda w: jnp.tanh(w) * w, split=True), X),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_in_either_order(equal_bits, name):
    fn, *args = DIFFERENTIATED[name]
    argnums = tuple(range(len(args)))
    gradient = jax.grad(loss(fn), argnums)
    want = jax.jit(gradient)(*args)
    assert all(np.any(w) for w in want)
    inside = jax.jit(jax.grad(loss(optimize(fn, passes=[NAME])), argnums))(*args)
    for got, wanted in zip(inside, want, strict=True):
        if got.shape == X.shape:  # of zeros, the sign may differ
            equal_bits(np.asarray(got) + 0, np.asarray(wanted) + 0)
        else:  # what all parts share adds up their gradients
            np.testing.assert_allclose(got, wanted, rtol=1e-5)
    # Op by op: compiled, a CPU's order of multiplications depends on what stands around them.
    got, want = (op_by_op(f, *args) for f in (optimize(gradient, contract="value"), gradient))
    if name in (
        "quantised",
        "custom jvp",
    ):  # of the others an operation isn't on each part by itself
        assert explain(gradient, *args, contract="value").counts()[NAME] == 1
    for a, b in zip(got, want, strict=True):
        if a.shape == X.shape:
            equal_bits(np.asarray(a) + 0, np.asarray(b) + 0)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_second_derivatives_and_forward_mode():
    for fn, *args in (DIFFERENTIATED["custom jvp"], DIFFERENTIATED["split"]):
        done = optimize(fn, passes=[NAME])
        tangents = [np.ones_like(a) for a in args]
        for got, want in zip(jax.jvp(done, args, tangents), jax.jvp(fn, args, tangents)):
            np.testing.assert_allclose(got, want, rtol=1e-6)  # op by op, a CPU's tanh varies
        twice = lambda f: jax.grad(lambda x: jnp.sum(jax.grad(loss(f))(x) ** 2))
        np.testing.assert_allclose(twice(done)(*args), twice(fn)(*args), rtol=1e-4)


def layer(w):
    gate, up = w[..., :4], w[..., 4:]
    wi = jnp.concatenate([straight(gate), straight(up)], axis=-1)
    return jnp.einsum("edm,edm->dm", wi, wi)


def scanned(w):
    step = lambda c, w: (c + layer(w * 0.5), None)
    return lax.scan(jax.checkpoint(step), jnp.zeros(w.shape[2:]), w)[0]


@pytest.mark.parametrize("fn", [
    layer, jax.jit(layer), jax.checkpoint(layer),
    lambda w: scanned(jnp.stack([w, w + 1])), lambda w: jax.vmap(layer)(jnp.stack([w, -w])),
], ids=["plain", "jit", "remat", "scan", "vmap"])  # fmt: skip
def test_under_transforms(equal_bits, fn):
    gradient = jax.value_and_grad(lambda w: jnp.sum(fn(w) ** 2))
    assert explain(gradient, X, passes=[NAME]).counts()[NAME] >= 1
    got = jax.jit(optimize(gradient, passes=[NAME]))(X)
    equal_bits(got, jax.jit(gradient)(X))


def test_cut_outside_of_the_body_that_joins():
    """The array is brought into the loop's body in the place of its parts."""

    def fn(w):
        gate, up = w[..., :4], w[..., 4:]
        step = lambda c, _: (c + jnp.concatenate([jnp.tanh(gate * 2), jnp.tanh(up * 2)], 2), None)
        return lax.scan(step, jnp.zeros(w.shape), None, length=2)[0]

    assert explain(fn, X, passes=[NAME]).counts() == ONE
    np.testing.assert_array_equal(jax.jit(optimize(fn))(X), jax.jit(fn)(X))


# --- on a mesh ------------------------------------------------------------------------------------


def mesh_of(kind):
    return jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, kind),)))


def gathered(w):
    largest = lax.pmax(lax.stop_gradient(jnp.max(jnp.abs(w), axis=1, keepdims=True)), "d")
    return lax.all_gather(lax.optimization_barrier(w / largest), "d", axis=1, tiled=True)


def stacked(w):
    return lax.all_gather(w * 2, "d", axis=0)[:, 0]


def scattered(w):
    return lax.psum_scatter(jnp.tanh(w), "d", scatter_dimension=0, tiled=True)


def summed(w):
    """Which primitive that is depends on jax, and on whether it checks what varies."""
    return lax.psum(jnp.tanh(w), "d")


def scaled_by_sum(w):
    return w / lax.psum(jnp.abs(w), "d")


def local(chain):
    return lambda w: jax.shard_map(halves(chain), in_specs=P(None, "d"), out_specs=P("d"))(w)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("chain", [gathered, stacked, scattered])
def test_in_a_shard_map(same, eqns_of, chain, kind):
    with mesh_of(kind):
        w = jax.device_put(X, P(None, "d"))
        fn = local(chain)
        same(fn, w, passes=[NAME], applied=ONE)
        name = "reduce_scatter" if chain is scattered else "all_gather"
        assert len(eqns_of(optimize(fn), w, name=name)) == 1
        gradient = jax.grad(lambda w: jnp.sum(jnp.square(fn(w)) * jnp.arange(8.0)))
        np.testing.assert_array_equal(jax.jit(optimize(gradient))(w), jax.jit(gradient)(w))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("chain", [summed, scaled_by_sum])
def test_a_sum_over_devices_in_a_shard_map(same, eqns_of, chain, kind, check_vma):
    with mesh_of(kind):
        w = jax.device_put(X, P(None, "d"))
        out = P() if chain is summed else P(None, "d")
        fn = jax.shard_map(halves(chain), in_specs=P(None, "d"), out_specs=out,
                           check_vma=check_vma)  # fmt: skip
        same(fn, w, passes=[NAME], applied=ONE)
        sums = lambda f: sum(len(eqns_of(f, w, name=n)) for n in ("psum", "psum_invariant"))
        assert (sums(fn), sums(optimize(fn))) == (2, 1)
        gradient = jax.grad(lambda w: jnp.sum(jnp.square(fn(w)) * jnp.arange(8.0)))
        np.testing.assert_array_equal(jax.jit(optimize(gradient))(w), jax.jit(gradient)(w))


def constrained(spec):
    def chain(w):
        mesh = jax.sharding.get_abstract_mesh()
        return lax.with_sharding_constraint(jnp.tanh(w), NamedSharding(mesh, spec)) * 2

    return chain


def test_a_sharding_that_leaves_the_axis_whole(same):
    with mesh_of("Auto"):
        same(halves(constrained(P("d"))), X, passes=[NAME], applied=ONE)


# --- near misses ----------------------------------------------------------------------------------


def swapped(w):
    return jnp.concatenate([jnp.tanh(w[..., 4:]), jnp.tanh(w[..., :4])], 2)


def of_halves(one, other):
    return lambda w, *others: jnp.concatenate([one(w[..., :4], *others),
                                               other(w[..., 4:], *others)], 2)  # fmt: skip


def tied(w):
    return lax.optimization_barrier((w, jnp.float32(1)))[0]


def one_barrier(w):
    a, b, _ = lax.optimization_barrier((w[..., :4], w[..., 4:], jnp.float32(1)))
    return jnp.concatenate([a, b], 2)


def read_elsewhere(w):
    gate, up = jnp.tanh(w[..., :4]), jnp.tanh(w[..., 4:])
    return jnp.concatenate([jnp.sin(gate), jnp.sin(up)], 2), gate


def along_the_gather(w):
    fn = halves(lambda w: lax.all_gather(w * 2, "d", axis=2, tiled=True))
    return jax.shard_map(fn, in_specs=P(None, "d"), out_specs=P(None, None, None),
                         check_vma=False)(w)  # fmt: skip


def along_the_scatter(w):
    fn = halves(lambda w: lax.psum_scatter(w * 2, "d", scatter_dimension=2, tiled=True))
    return jax.shard_map(fn, in_specs=P(None, "d"), out_specs=P(None, None, "d"))(w)


def of_a_split_array(w):
    mesh = jax.sharding.get_abstract_mesh()
    return halves(jnp.tanh)(
        lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, None, "d")))
    )


def by_one_call(w):
    @jax.custom_jvp
    def both(a, b):
        return jnp.sin(a), jnp.sin(b)

    both.defjvp(lambda primals, tangents: (both(*primals), tangents))
    return jnp.concatenate(both(w[..., :4], w[..., 4:]), 2)


TANH, MASK = jnp.tanh, np.arange(4.0)
MISSES = {
    "cut: order": swapped,
    "cut: a gap": lambda w: jnp.concatenate([TANH(w[..., :3]), TANH(w[..., 4:])], 2),
    "cut: overlap": lambda w: jnp.concatenate([TANH(w[..., :5]), TANH(w[..., 4:])], 2),
    "cut: other rows": lambda w: jnp.concatenate([TANH(w[:3, :, :4]), TANH(w[1:, :, 4:])], 2),
    "different-ops": of_halves(jnp.tanh, jnp.sin),
    "together": by_one_call,
    "different-params": of_halves(lambda w: w**2, lambda w: w**3),
    "different-params: name": of_halves(
        lambda w: checkpoint_name(TANH(w), "gate"), lambda w: checkpoint_name(TANH(w), "up")
    ),
    "unsupported-op": halves(lambda w: jnp.cumsum(w, 2)),
    "unsupported-op: rev": halves(lambda w: w[..., ::-1] * 2),
    "float-sum": halves(lambda w: w / jnp.sum(w, axis=1, keepdims=True)),
    "operands: a scale of the part": halves(lambda w: w / jnp.max(jnp.abs(w))),
    "operands: numbers": of_halves(lambda w: w / 448.0, lambda w: w / 240.0),
    "operands: a scale along the axis": halves(lambda w: w / jnp.max(w, axis=2, keepdims=True)),
    "equal-operand": lambda w: halves(lambda w, m: w * m)(w, jnp.sin(w[..., :4])),
    "equal-operand: a mask": lambda w: halves(lambda w, m: jnp.where(m, w / 0.9, 0))(
        w, jnp.sin(w[..., :4]) > 0.1
    ),
    "reshape": halves(lambda w: TANH(w).reshape(4, 3, 2, 4).reshape(4, 3, 8).reshape(4, 6, 4)),
    "barrier": halves(tied),
    "barrier: of both": one_barrier,
    "collective-axis": along_the_gather,
    "collective-axis: scatter": along_the_scatter,
    "sharding": halves(constrained(P(None, None, "d"))),
    "sharding: of the array": of_a_split_array,
    "read-elsewhere": read_elsewhere,
}


@pytest.mark.parametrize("miss", MISSES)
def test_declined(why, miss):
    with mesh_of("Auto"):
        report = explain(MISSES[miss], X, passes=[NAME])
    assert not report.applied
    found = why(report, NAME)
    assert [r[0].split(":")[0] for r in found] == [miss.split(":")[0]], found


def test_what_differs_far_up_is_told_once(why):
    def scaled(w):
        return w / (jnp.maximum(jnp.max(jnp.abs(w)) / 127, 1e-6) * 2)

    (reason,) = why(explain(halves(scaled), X, passes=[NAME]), NAME)
    text = str(reason)
    assert "abs → reduce_max → div → max → mul, where the parts differ in start_indices" in text
    assert text.count("part differ") + text.count("parts differ") == text.count("found") == 1


def test_declined_in_a_context_of_its_own(why):
    def other(w):
        with jax.threefry_partitionable(False):
            return jnp.tanh(w)

    report = explain(halves(other), X, passes=[NAME])
    assert [r[0].split(":")[0] for r in why(report, NAME)] == ["context"]


def test_concatenations_of_other_things_are_no_candidates():
    for fn in (lambda w: jnp.concatenate([w, TANH(w)], 2), lambda w: jnp.concatenate([w, w], 1),
               lambda w: jnp.concatenate([w[..., :4], jnp.sin(ROW)], 2)):  # fmt: skip
        assert not explain(fn, X, passes=[NAME]).sites


# --- mutants --------------------------------------------------------------------------------------


def battery(same):
    for name in ("elementwise", "quantised", "transposed", "custom jvp"):
        same(halves(CHAINS[name]), X, passes=[NAME], applied=ONE)
    same(halves(jnp.sin, 0, 4), X, passes=[NAME], applied=ONE)


def test_the_battery_passes_unmutated(same):
    battery(same)


def _swapped_halves(m):
    run = module.run

    def swapped(root, values):
        whole = run(root, values)
        half = whole.shape[-1] // 2
        return jnp.concatenate([whole[..., half:], whole[..., :half]], -1)

    m.setattr(module, "run", swapped)


def _skipped_barrier_operand(m):
    on_whole = along.on_whole
    from relower.passes.parts import whole_chain

    def narrower(eqn, axis, size):
        params = dict(on_whole(eqn, axis, size))
        if eqn.primitive.name == "reduce_max":
            params["axes"] = (0,)
        return params

    m.setattr(whole_chain, "on_whole", narrower)


MUTANTS = {"halves swapped": _swapped_halves, "another reduction": _skipped_barrier_operand}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        battery(same)


def _any_cut(cut):
    def careless(made, axis):
        try:
            return cut(made, axis)
        except lockstep.Stop:
            value = cuts.box(made[0][0], made[0][0].eqns[made[0][1]], made[0][2])[0]
            shape = value.atom.aval.shape
            return cuts.Cut(value, axis, (0,) * len(shape), tuple(shape))

    return careless


def test_parts_taken_in_any_order_are_caught(monkeypatch, same):
    monkeypatch.setattr(lockstep, "cut", _any_cut(lockstep.cut))
    with pytest.raises((AssertionError, ValueError, TypeError)):
        same(swapped, X, passes=[NAME], applied=ONE)


def test_another_exponent_for_another_part_is_caught(monkeypatch, same):
    monkeypatch.setattr(lockstep._Matcher, "_alike", lambda *a, **k: None)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        same(MISSES["different-params"], X, passes=[NAME], applied=ONE)


def test_a_gather_along_the_axis_is_caught(monkeypatch, same):
    monkeypatch.setattr(along, "rules", _without_gathers(along.rules))
    with mesh_of("Auto"), pytest.raises((AssertionError, ValueError, TypeError)):
        same(along_the_gather, X, passes=[NAME], applied=ONE)


def _without_gathers(rules):
    changed = {**rules(), **{p: lambda eqn, axis: (axis,) for p in rules()
                             if p.name.startswith("all_gather")}}  # fmt: skip
    return lambda: changed


def test_a_derivative_of_another_rule_is_caught(monkeypatch):
    """The whole differentiated as what it computes, rather than by the parts' own rule."""
    from relower.passes.parts import whole_chain

    monkeypatch.setattr(whole_chain, "_with_jvp", lambda fn, parts: fn)
    fn, x = DIFFERENTIATED["custom jvp"]
    got = jax.grad(loss(optimize(fn, passes=[NAME])))(x)
    assert not np.allclose(got, jax.grad(loss(fn))(x))


def test_sites_that_differ_in_their_cuts_only(same):
    """What is put in place of one is no good for the other."""

    def fn(w):
        front = jnp.concatenate([w[..., :2], w[..., 2:4]], 2)
        back = jnp.concatenate([w[..., 4:6], w[..., 6:]], 2)
        return front * 2 - back

    same(fn, W, passes=[NAME], applied={NAME: 2})


def test_what_is_kept_stays(why):
    from relower import keep

    fn = of_halves(keep(jnp.tanh), keep(jnp.tanh))
    assert [r[0].split(":")[0] for r in why(explain(fn, X, passes=[NAME]), NAME)] == ["kept"]
