"""One GEMM for those of one operand with the parts of one array."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import PassNotApplicable, explain, optimize
from relower.passes import registry, shared_lhs_dot

NAME = "shared_lhs_dot"
ours = functools.partial(optimize, passes=[NAME])
DOT = ("dot_general", "ragged_dot_general")
SIZES = np.array([3, 0, 4], np.int32)


def data(*shapes, seed=0, dtype=np.float32):
    r = np.random.RandomState(seed)
    return tuple(jnp.asarray(r.randn(*s), dtype) for s in shapes)


X, W = (8, 6), (6, 10)


@pytest.fixture(autouse=True)
def profit_apart(request, monkeypatch):
    """What may be done is tested apart from what pays: nearly all here is of dense GEMMs."""
    if "really" not in request.node.name:
        mutated(monkeypatch, profitable=lambda match: None)


def halves(x, w):
    a, b = jnp.split(w, 2, -1)
    return x @ a, x @ b


def swapped(x, w):
    """The second half is read first."""
    return x @ w[:, 5:], x @ w[:, :5]


def three(x, w):
    q, k, v = w[:, :2], w[:, 2:6], w[:, 6:]
    return x @ v, jnp.tanh(x @ q), x @ k


def converted(x, w):
    x, *parts = (a.astype(jnp.bfloat16) for a in (x, *jnp.split(w, 2, -1)))
    return tuple(x @ part for part in parts)


def transposed(x, w):
    a, b = jnp.split(w.T, 2, 0)
    return jnp.einsum("mk,nk->mn", x, a), jnp.einsum("mk,nk->mn", x, b)


def batched(x, w):
    a, b = jnp.split(w.reshape(2, 3, 10), 2, -1)
    x = x.reshape(8, 2, 3)
    return jnp.einsum("mbk,bkn->bmn", x, a), jnp.einsum("mbk,bkn->bmn", x, b)


def grouped(x, w):
    w = jnp.stack([w, w * 2, w + 1])
    a, b = jnp.split(w, 2, -1)
    return lax.ragged_dot(x, a, SIZES), lax.ragged_dot(x, b, SIZES)


FORMS = [halves, swapped, three, converted, transposed, batched, grouped]


def loss(form):
    def run(x, w):
        outs = form(x, w)
        return sum((o.astype(np.float32) ** 2 * (i + 1)).sum() for i, o in enumerate(outs))

    return run


def close(got, want, what="", tolerance=1e-5):
    """To some units of float32, of the largest element: sums are taken in another order."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, what
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.any(b), what
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), what


def gemms(eqns_of, fn, *args):
    return sum(len(eqns_of(fn, *args, name=n)) for n in DOT)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_every_way_to_write_it(form, eqns_of):
    x, w = data(X, W)
    assert explain(form, x, w, passes=[NAME]).counts() == {NAME: 1}
    assert gemms(eqns_of, ours(form), x, w) == 1
    tolerance = 1e-5 if form is not converted else 2e-2  # in bfloat16: some units of it
    close(jax.jit(ours(form))(x, w), jax.jit(form)(x, w), tolerance=tolerance)
    grad = jax.grad(loss(form), (0, 1))
    assert explain(grad, x, w, passes=[NAME]).counts() == {NAME: 1}
    want = jax.jit(grad)(x, w)
    close(jax.jit(ours(grad))(x, w), want, "optimize(grad)", tolerance)
    inside = jax.grad(ours(loss(form)), (0, 1))
    close(jax.jit(inside)(x, w), want, "grad(optimize)", tolerance)
    # Forward, w's cotangent, and x's: in float32 as many sums as before, of one part each.
    parts = {three: 3, converted: 1}.get(form, 2)
    assert gemms(eqns_of, inside, x, w) == 2 + parts


@pytest.mark.parametrize("wrap", ["jit", "vmap", "scan", "remat", "custom_vjp"])
def test_under_transforms(wrap):
    block = lambda x, w: sum(halves(x, w)) @ jnp.ones((5, 6))
    if wrap == "jit":
        block = jax.jit(block)
    if wrap == "remat":
        block = jax.checkpoint(block)
    if wrap == "custom_vjp":
        plain = block
        block = jax.custom_vjp(plain)
        block.defvjp(lambda x, w: (plain(x, w), (x, w)), lambda r, ct: jax.vjp(plain, *r)[1](ct))
    args = data(X, W)

    def whole(x, w):
        if wrap == "vmap":
            return (jax.vmap(block)(jnp.stack([x, x + 1]), jnp.stack([w, w * 2])) ** 2).sum()
        run = lambda x, _: (jnp.tanh(block(x, w)), None)
        return (lax.scan(run, x, None, length=2)[0] ** 2).sum() if wrap == "scan" else (
            (block(x, w) ** 2).sum()
        )  # fmt: skip

    want = jax.jit(jax.grad(whole, (0, 1)))(*args)
    for done in (ours(jax.grad(whole, (0, 1))), jax.grad(ours(whole), (0, 1))):
        close(jax.jit(done)(*args), want)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    x, w = data(X, W)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
        spread = jax.shard_map(halves, in_specs=(P("d"), P()), out_specs=P("d"))
        grad = jax.grad(loss(spread), (0, 1))
        assert explain(grad, x, w, passes=[NAME]).counts() == {NAME: 1}
        want = jax.jit(grad)(x, w)
        for done in (ours(grad), jax.grad(ours(loss(spread)), (0, 1))):
            close(jax.jit(done)(x, w), want)


def halves_of_groups(x, w, sizes):
    a, b = jnp.split(w, 2, -1)
    return lax.ragged_dot(x, a, sizes), lax.ragged_dot(x, b, sizes)


def with_cotangents(form):
    """Results, and the cotangents of x and w."""

    def run(x, w, g, sizes):
        outs, back = jax.vjp(lambda x, w: form(x, w, sizes), x, w)
        return (*outs, *back(tuple(jnp.split(g, 2, -1))))

    return jax.jit(run)


def by_hand(x, w, g, sizes):
    """The same in float64, group by group; the rows of no group are zero."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    out, dx, dw = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum([0, *sizes])
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        rows = slice(start, stop)
        out[rows], dx[rows], dw[i] = x[rows] @ w[i], g[rows] @ w[i].T, x[rows].T @ g[rows]
    return (*np.split(out, 2, -1), dx, dw)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_the_error_is_at_most_1_10_of_the_originals(dtype):
    """The cotangent of x is added up in float32 by one GEMM, not of two rounded results.

    Both of a product and of its cotangents, in full buffers and where rows were dropped.
    """
    before, after = with_cotangents(halves_of_groups), with_cotangents(ours(halves_of_groups))
    for seed, sizes in itertools.product(range(6), ([9, 0, 23], [5, 11, 0])):
        args = data((32, 64), (3, 64, 96), (32, 96), seed=seed, dtype=dtype)
        sizes = np.array(sizes, np.int32)
        want = by_hand(*args, sizes)
        old, new = ([np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2))
                     for a, b in zip(run(*args, sizes), want, strict=True)]
                    for run in (before, after))  # fmt: skip
        assert all(b <= 1.10 * a for a, b in zip(old, new, strict=True)), (seed, sizes, old, new)


def test_what_really_pays():
    x, w = data(X, W)
    assert explain(grouped, x, w, passes=[NAME]).counts() == {NAME: 1}
    report = explain(halves, x, w, passes=[NAME])
    assert [r.code for s in report.declined for r in s.reasons] == ["dense"]
    assert not report.applied


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_what_gmm_swiglu_takes_is_really_left_to_it(dtype):
    """Joined, too, where the derivative needs nothing that would hide gate and up from it."""
    x, w = data((16, 128), (3, 128, 256), dtype=dtype)

    def activated(x, w):
        gate, up = halves_of_groups(x, w, SIZES)
        return jax.nn.silu(gate) * up

    report = explain(activated, x, w, passes=[NAME, "gmm_swiglu"])
    assert report.counts() == {"gmm_swiglu": 1, **({NAME: 1} if dtype != np.float32 else {})}
    reasons = {r.code for s in report.declined for r in s.reasons}
    assert ("swiglu" in reasons) == (dtype == np.float32)


@pytest.mark.parametrize("form", [grouped, three], ids=lambda f: f.__name__)
def test_second_derivatives_and_forward_mode(form):
    x, w, dx, dw = data(X, W, X, W)

    def along(form):
        second = jax.jvp(jax.grad(loss(form), (0, 1)), (x, w), (dx, dw))
        by_x = jax.jvp(lambda x: form(x, w), (x,), (dx,))
        by_w = jax.jvp(lambda w: form(x, w), (w,), (dw,))
        return second, by_x, by_w

    close(jax.jit(lambda: along(ours(form)))(), jax.jit(lambda: along(form))())


# --- near misses ----------------------------------------------------------------------------------

NEAR = {
    "params": lambda x, w: (x @ w[:, :5], lax.dot(x, w[:, 5:], precision="highest")),
    "params ": lambda x, w: (x @ w[:, :5], lax.dot(x, w[:, 5:], preferred_element_type="bfloat16")),
    "casts": lambda x, w: (x @ w[:, :5], x @ w[:, 5:].astype(jnp.bfloat16).astype(np.float32)),
    "axis": lambda x, w: (lambda x: (x @ w[:3], x @ w[3:]))(x[:, :3]),
    "not-all": lambda x, w: (x @ w[:, :5], x @ w[:, 6:]),
    "not-all ": lambda x, w: (x @ w[:, :6], x @ w[:, 5:]),
    "not-all  ": lambda x, w: (x @ w[:, :5], x @ w[:, 5:9]),
    "not-all   ": lambda x, w: (x @ w[:, :5], x @ w[:, :5] * 2),
}  # fmt: skip


@pytest.mark.parametrize("code", NEAR)
def test_declined_for(code):
    args = data(X, W)
    report = explain(NEAR[code], *args, passes=[NAME])
    assert not report.applied, str(report)
    assert code.strip() in {r.code for s in report.declined for r in s.reasons}
    with pytest.raises(PassNotApplicable):
        ours(NEAR[code])(*args)


def test_declined_where_parts_are_other_devices():
    mesh = jax.make_mesh((5,), ("d",), axis_types=(AxisType.Explicit,))
    x, w = data(X, W)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, jax.NamedSharding(mesh, P(None, "d")))
        x = jax.device_put(x, jax.NamedSharding(mesh, P()))
        fn = lambda x, w: (x @ w[:, :5], x @ w[:, 5:])
        report = explain(fn, x, w, passes=[NAME])
    assert {r.code for s in report.declined for r in s.reasons} == {"sharding"}


def test_other_gemms_are_no_candidates():
    x, w = data(X, W)
    for fn in (lambda x, w: (x @ w[:, :5], (x + 1) @ w[:, 5:]),
               lambda x, w: (x @ w[:, :5], x @ (w * 1)[:, 5:]),
               lambda x, w: (x @ w[:, :9:2], x @ w[:, 1::2]),
               lambda x, w: x @ w[:, :5]):  # fmt: skip
        assert not explain(fn, x, w, passes=[NAME]).sites


def mutated(monkeypatch, **changed):
    changed.setdefault("profitable", lambda match: None)
    mutant = dataclasses.replace(shared_lhs_dot.PASS, **changed)
    monkeypatch.setattr(registry, "all_passes", lambda: (mutant,))


def without(code):
    return tuple(r for r in shared_lhs_dot.PASS.requirements if r.code != code)


def results_swapped(match):
    made = shared_lhs_dot.PASS.replace(match)
    return dataclasses.replace(made, results=made.results[::-1])


NARROW = lambda x, w: (x @ w[:, :5], x @ w[:, 5:].astype(jnp.float8_e4m3fn).astype(np.float32))
MUTANTS = {
    "halves swapped": ({"replace": results_swapped}, swapped),
    "conversions not compared": ({"requirements": without("casts")}, NARROW),
    "a gap not seen": ({"requirements": without("not-all")}, NEAR["not-all"]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    changed, form = MUTANTS[mutant]
    args = data(X, W)
    want = jax.jit(form)(*args)
    mutated(monkeypatch, **changed)
    # A wrong type or shape is found before anything is run.
    with pytest.raises((AssertionError, TypeError, ValueError)):
        close(jax.jit(ours(form))(*args), want)
