"""The gradient of routing weights from the product that the backward computes anyway."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from relower import PassNotApplicable, explain, optimize
from relower.compat import tracing
from relower.matchers import weighted_rows
from relower.passes import router_grad_from_wo_input as module

NAME = "router_grad_from_wo_input"
EXPERTS, CHOICES, TOKENS = 4, 2, 48
BUFFERS = {"full": None, "dropping": TOKENS}
PRODUCTS = ("ragged_dot_general", "dot_general")


def experts(wo, x, weights, ids, buffer):
    """Rows sorted by expert, some of them dropped, weighted and added to their tokens."""
    order = jnp.argsort(ids.reshape(-1))[:buffer]
    sizes = jnp.bincount(ids.reshape(-1), length=EXPERTS)
    sizes = jnp.diff(jnp.minimum(jnp.cumsum(sizes), order.shape[0]), prepend=0)
    token = order // CHOICES
    rows = lax.ragged_dot(jnp.tanh(x)[token], wo, sizes)
    rows = rows * weights.reshape(-1)[order][:, None]
    return jnp.zeros((x.shape[0], rows.shape[1]), rows.dtype).at[token].add(rows)


def by_choice(wo, x, weights, ids, buffer):
    """The rows are taken to the tokens' choices, and weighted there."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(flat, length=EXPERTS)
    rows = flat.size if buffer is None else buffer
    sizes = jnp.diff(jnp.minimum(jnp.cumsum(sizes), rows), prepend=0)
    rows = lax.ragged_dot(jnp.tanh(x)[order[:buffer] // CHOICES], wo, sizes)
    rows = jnp.where(inverse[:, None] < rows.shape[0], rows[inverse], 0)
    rows = rows.reshape(*ids.shape, -1).astype(weights.dtype)
    return jnp.einsum("tkd,tk->td", rows, weights)


def dense(wo, x, weights, ids, buffer):
    """The same with every expert on every token, and the dropped rows' weights at zero."""
    flat = ids.reshape(-1)
    kept = (jnp.argsort(jnp.argsort(flat)) < (buffer or flat.size)).reshape(ids.shape)
    every = jnp.einsum("tm,emd->ted", jnp.tanh(x), wo)
    chosen = jnp.take_along_axis(every, ids[..., None], axis=1)
    return (chosen * (weights * kept)[..., None]).sum(1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of rows and matrices, of the loss' cotangents, and ``m`` and ``d``."""

    dtype: object
    target: object
    width: int
    hidden: int


KINDS = {
    "f32": Kind(np.float32, np.float32, 128, 64),
    "f32, nearly as wide": Kind(np.float32, np.float32, 128, 96),
    "bf16 rows, f32 weights": Kind(jnp.bfloat16, jnp.bfloat16, 48, 48),
    "bf16, four times as wide": Kind(jnp.bfloat16, jnp.bfloat16, 32, 128),
    "bf16, f32 cotangents": Kind(jnp.bfloat16, np.float32, 96, 192),
}


def inputs(seed, kind):
    r = np.random.RandomState(seed)
    normal = lambda *shape: r.randn(*shape) / np.sqrt(shape[-2])
    weights = r.dirichlet(np.ones(CHOICES), TOKENS)
    ids = np.stack([r.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).astype(np.int32)
    args = (normal(EXPERTS, kind.width, kind.hidden), r.randn(TOKENS, kind.width), weights)
    dtypes = (kind.dtype, kind.dtype, np.float32)
    # As the program gets them: the reference starts from the rounded numbers.
    exact = [np.asarray(jnp.asarray(a, d)) for a, d in zip(args, dtypes, strict=True)]
    target = np.asarray(jnp.asarray(r.randn(TOKENS, kind.hidden), kind.target))
    return exact, ids, target


def gradient(layer, buffer):
    def loss(wo, x, weights, ids, target):
        run = lambda *a: layer(*a, ids, buffer)
        out = jax.checkpoint(run)(wo, x, weights)
        return jnp.sum(out.astype(target.dtype) * target)

    return jax.grad(loss, argnums=(0, 1, 2))


GRADIENTS = {name: gradient(experts, buffer) for name, buffer in BUFFERS.items()}
GRADIENTS["dropping, by choice"] = gradient(by_choice, TOKENS)


def op_by_op(fn, *args):
    """Each operation compiled by itself: within one, a CPU keeps bfloat16 unrounded."""
    return tracing.evaluate(jax.make_jaxpr(fn)(*args), *args)


@functools.cache
def exact(name):
    return jax.jit(gradient(dense, None if name == "full" else TOKENS))


def reference(args, ids, target, name):
    jax.config.update("jax_enable_x64", True)
    try:
        wide = [np.asarray(a, np.float64) for a in args]
        return [np.asarray(g) for g in exact(name)(*wide, ids, np.asarray(target, np.float64))]
    finally:
        jax.config.update("jax_enable_x64", False)


def errors(found, wanted):
    return np.array([
        np.linalg.norm(np.asarray(f, np.float64) - w) / np.linalg.norm(w)
        for f, w in zip(found, wanted, strict=True)
    ])  # fmt: skip


SEEDS = range(6)


@pytest.fixture(scope="module")
def originals():
    """Errors of the original program, and what they are measured against."""
    found = {}
    for kind in KINDS:
        for name, fn in GRADIENTS.items():
            for seed in SEEDS:
                args, ids, target = inputs(seed, KINDS[kind])
                wanted = reference(args, ids, target, name)
                plain = op_by_op(fn, *args, ids, target)
                found[kind, name, seed] = wanted, errors(plain, wanted)
    return found


def ratios(originals, kind, name):
    """How many times the original's error that of the rewritten program is, by gradient."""
    rewritten = []
    for seed in SEEDS:
        args, ids, target = inputs(seed, KINDS[kind])
        done = optimize(GRADIENTS[name], passes=[NAME])
        wanted, _ = originals[kind, name, seed]
        rewritten.append(errors(op_by_op(done, *args, ids, target), wanted))
    before = np.array([originals[kind, name, seed][1] for seed in SEEDS])
    return np.sqrt((np.array(rewritten) ** 2).sum(0) / (before**2).sum(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_error_is_at_most_a_tenth_larger(originals, kind, name):
    found = ratios(originals, kind, name)
    assert (found <= 1.10).all(), found
    of_wo, of_x, of_weights = found
    if KINDS[kind].target is jnp.bfloat16:
        # Of the roundings that went into it one is gone; what is left is that of h itself.
        assert of_weights < 0.75
        assert of_x < 0.95
    elif KINDS[kind].dtype is jnp.bfloat16:
        assert of_wo == pytest.approx(1, abs=1e-3)  # left alone


def _rounded_weight(m):
    scaled = module.scaled
    m.setattr(module, "scaled", lambda rows, column, dtype: scaled(
        rows, column.astype(jnp.bfloat16), dtype))  # fmt: skip


def _shrunk(m):
    rowwise = module.rowwise
    m.setattr(module, "rowwise", lambda a, b, dtype: rowwise(a, b, jnp.float32) * 0.995)


MUTANTS = {
    "the routing weight rounded to bfloat16": _rounded_weight,
    "the routing gradient shrunk by half a percent": _shrunk,
}


@pytest.mark.parametrize("kind", ["f32", "bf16 rows, f32 weights"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_less_exact(originals, monkeypatch, mutant, kind):
    MUTANTS[mutant](monkeypatch)
    found = ratios(originals, kind, "full")
    assert (found > 1.10).any(), found


# --- one matrix product fewer ---------------------------------------------------------------------


def products_of(eqns_of, fn, *args):
    return sum(len(eqns_of(fn, *args, name=name)) for name in PRODUCTS)


def vjp_of(product, widen=False):
    def weighted(h, wo, w):
        y = product(h, wo)
        return (y.astype(jnp.float32) if widen else y) * w[..., None]

    return lambda h, wo, w, g: jax.vjp(weighted, h, wo, w)[1](g)


SHAPES = {
    "one matrix": (lambda h, wo: h @ wo, (24, 8), (8, 6)),
    "more dimensions": (lambda h, wo: jnp.einsum("bsm,md->bsd", h, wo), (3, 8, 8), (8, 6)),
    "transposed": (lambda h, wo: jnp.einsum("rm,dm->rd", h, wo), (24, 8), (6, 8)),
    "batched": (lambda h, wo: jnp.einsum("ecm,emd->ecd", h, wo), (4, 6, 8), (4, 8, 6)),
    "grouped": (
        lambda h, wo: lax.ragged_dot(h, wo, jnp.array([5, 0, 9, 3], jnp.int32)), (24, 8), (4, 8, 6),
    ),
}  # fmt: skip


def integers(*shapes, dtype=np.float32):
    r = np.random.RandomState(0)
    return [jnp.asarray(r.choice([-3, -2, -1, 1, 2, 3], s), dtype) for s in shapes]


def equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_every_kind(eqns_of, shape):
    product, of_h, of_wo = SHAPES[shape]
    args = integers(of_h, of_wo, of_h[:-1], (*of_h[:-1], 6))
    fn = vjp_of(product)
    done = optimize(fn, passes=[NAME])
    equal(jax.jit(done)(*args), jax.jit(fn)(*args))
    live = lambda f: products_of(eqns_of, f, *args)
    assert (live(fn), live(done)) == (3, 2)


def test_rows_widened_before_they_are_weighted(eqns_of):
    h, wo = integers((24, 8), (8, 6), dtype=jnp.bfloat16)
    w, g = integers((24,), (24, 6))
    fn = vjp_of(lambda h, wo: h @ wo, widen=True)
    equal(jax.jit(optimize(fn, passes=[NAME]))(h, wo, w, g), jax.jit(fn)(h, wo, w, g))


def step(fn):
    def loss(h, wo, w):
        out = fn(h, wo, w)
        return jnp.sum(out * jnp.arange(1.0, out.shape[-1] + 1))

    return jax.grad(loss, argnums=(0, 1, 2))


def plain(h, wo, w):
    return (h @ wo) * w[:, None]


def scanned(h, wo, w):
    layer = lambda c, wo: (c + jnp.pad(plain(c, wo, w), ((0, 0), (0, 2))), None)
    return lax.scan(jax.checkpoint(layer), h, jnp.stack([wo, wo[::-1]]))[0]


def sharded(h, wo, w):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    return jax.shard_map(jax.checkpoint(plain), mesh=mesh, in_specs=(P("d"), P(), P("d")),
                         out_specs=P("d"))(h, wo, w)  # fmt: skip


@pytest.mark.parametrize("wrap", [
    jax.checkpoint(plain), jax.jit(jax.checkpoint(plain)), scanned, sharded,
    lambda h, wo, w: jax.vmap(jax.checkpoint(plain), (0, None, 0))(
        h.reshape(2, 12, 8), wo, w.reshape(2, 12)).reshape(24, 6),
], ids=["remat", "jit", "scan", "shard_map", "vmap"])  # fmt: skip
def test_in_the_backward_of(wrap):
    args = integers((24, 8), (8, 6), (24,))
    fn = step(wrap)
    assert explain(fn, *args, passes=[NAME]).counts()[NAME] >= 1
    equal(jax.jit(optimize(fn, passes=[NAME]))(*args), jax.jit(fn)(*args))


def by_einsum(rows, w):
    return jnp.einsum("tkd,tk->td", rows, w)


def by_element(rows, w):
    return (rows * w[..., None]).sum(1)


def routed(rows_of, choices=2, mask=True, weigh=by_einsum):
    """``[tokens, d]`` from rows in some order, gathered by its inverse."""

    def fn(h, wo, w, ids):
        order = jnp.argsort(ids)
        inverse = jnp.argsort(order)
        rows = (h @ wo)[rows_of(inverse, ids)]
        if mask:
            rows = jnp.where(inverse[:, None] < h.shape[0] - 3, rows, 0)
        return weigh(rows.reshape(-1, choices, rows.shape[-1]), w)

    def vjp(h, wo, w, ids, g):
        return jax.vjp(lambda *a: fn(*a, ids), h, wo, w)[1](g)

    return vjp


IDS = np.random.RandomState(3).randint(0, 5, 24).astype(np.int32)


def of_choices(choices, rows=24):
    return integers((rows, 8), (8, 6), (24 // choices, choices), (24 // choices, 6))


@pytest.mark.parametrize("weigh", [by_einsum, by_element])
@pytest.mark.parametrize(
    ("choices", "rows", "mask"), [(1, 24, False), (2, 24, True), (4, 20, True)]
)
def test_rows_taken_to_their_choices(eqns_of, choices, rows, mask, weigh):
    h, wo, w, g = of_choices(choices, rows)
    fn = routed(lambda inverse, ids: inverse, choices, mask, weigh)
    args = (h, wo, w, IDS, g)
    done = optimize(fn, passes=[NAME])
    equal(jax.jit(done)(*args), jax.jit(fn)(*args))
    shapes = lambda f: [e.outvars[0].aval.shape for e in eqns_of(f, *args, name="dot_general")]
    assert (rows, 6) in shapes(fn)  # the product itself
    assert (rows, 6) not in shapes(done)
    together = optimize(fn, contract="rounding")  # whatever else finds something to do
    equal(jax.jit(together)(*args), jax.jit(fn)(*args))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("product", ["dot", "ragged_dot"])
def test_rows_that_lie_at_their_choices(eqns_of, product, dtype):
    h, wo, w, g = of_choices(2)
    h, wo = h.astype(dtype), wo.astype(dtype)
    if product == "ragged_dot":
        wo = jnp.stack([wo, 2 * wo])
    multiply = {"dot": jnp.dot, "ragged_dot": lambda *a: lax.ragged_dot(*a, jnp.array([9, 15]))}
    rows = lambda h, wo: multiply[product](h, wo).reshape(*w.shape, -1)
    fn = lambda h, wo, w, g: jax.vjp(lambda h, wo, w: by_element(rows(h, wo), w), h, wo, w)[1](g)
    assert explain(fn, h, wo, w, g, passes=[NAME]).counts() == {NAME: 1}
    equal(jax.jit(optimize(fn, passes=[NAME]))(h, wo, w, g), jax.jit(fn)(h, wo, w, g))


def test_sums_of_other_rows_are_not_replaced():
    h, wo, w, g = of_choices(2)

    def fn(h, wo, w, g, x):
        rows = (h @ wo).reshape(12, 2, 6)
        d = g[:, None] * w[..., None]
        weights = (g[:, None] * x).sum(-1), (g[::-1, None] * rows).sum(-1), (d * rows).sum(-1)
        return *weights, d.reshape(24, 6) @ wo.T, h.T @ d.reshape(24, 6)

    args = h, wo, w, g, *integers((12, 2, 6))
    assert not explain(fn, *args, passes=[NAME]).counts()


@pytest.mark.parametrize("weigh", [by_einsum, by_element])
def test_declined_where_choices_may_share_a_row(why, weigh):
    h, wo, w, g = of_choices(2)
    for rows_of in (lambda inverse, ids: ids, lambda inverse, ids: inverse // 2):
        report = explain(routed(rows_of, weigh=weigh), h, wo, w, IDS, g, passes=[NAME])
        assert [r[0].split(":")[0] for r in why(report, NAME)] == ["places"]


def test_shared_rows_let_through_are_caught(monkeypatch):
    monkeypatch.setattr(weighted_rows, "distinct", lambda scope, placed: True)
    h, wo, w, g = of_choices(2)
    fn = routed(lambda inverse, ids: ids)
    with pytest.raises(AssertionError):
        equal(optimize(fn, passes=[NAME])(h, wo, w, IDS, g), fn(h, wo, w, IDS, g))


# --- near misses ----------------------------------------------------------------------------------


def named(h, wo, w):
    return checkpoint_name(h @ wo, "rows") * w[:, None]


SAVED = jax.checkpoint_policies.save_only_these_names("rows")


def by_hand(h, wo, w):
    """The weighted cotangents are a result of their own."""
    g = h[:, :6] + 1
    d = g * w[:, None]
    wide = jnp.einsum("rm,rd->md", h, d)
    return (g * (h @ wo)).sum(-1), jnp.einsum("rd,md->rm", d, wo), wide, d


MISSES = {
    "saved": step(jax.checkpoint(named, policy=SAVED)),
    "named": step(jax.checkpoint(named)),
    "read-elsewhere": step(lambda h, wo, w: jnp.square(plain(h, wo, w))),
    "other-reader": by_hand,
}
CODES = {"named": "saved"}


@pytest.mark.parametrize("miss", MISSES)
def test_declined(why, miss):
    args = integers((24, 8), (8, 6), (24,))
    report = explain(MISSES[miss], *args, passes=[NAME])
    assert not report.applied
    (reasons,) = why(report, NAME)
    assert [r.split(":")[0] for r in reasons] == [CODES.get(miss, miss)], reasons


def test_declined_where_the_input_has_no_gradient(why):
    h, wo, w = integers((24, 8), (8, 6), (24,))
    loss = lambda wo, w: jnp.sum(jax.checkpoint(plain)(h, wo, w) * jnp.arange(1.0, 7))
    report = explain(jax.grad(loss, argnums=(0, 1)), wo, w, passes=[NAME])
    assert [r[0].split(":")[0] for r in why(report, NAME)] == ["no-input-gradient"]


def test_declined_where_the_product_is_of_another_layout(why):
    fn = vjp_of(lambda h, wo: jnp.einsum("rnm,mnd->rd", h, wo))
    args = integers((24, 2, 8), (8, 2, 6), (24,), (24, 6))
    report = explain(fn, *args, passes=[NAME])
    assert [r[0].split(":")[0] for r in why(report, NAME)] == ["layout"]


def test_sums_of_other_products_are_no_candidates():
    fns = [
        lambda h, g, w: (h * g).sum(-1),
        lambda h, g, w: ((h @ h.T @ g) * g).sum(-1),  # nothing weighted by rows
        lambda h, g, w: ((h @ h.T @ g) * g).sum(0),
    ]
    args = integers((8, 6), (8, 6), (8,))
    for fn in fns:
        assert not explain(fn, *args, passes=[NAME]).sites
        with pytest.raises(PassNotApplicable, match=NAME):
            optimize(fn, passes=[NAME])(*args)


def test_declined_in_float32_where_the_sums_would_be_longer(why):
    """Of rows that are rounded to bfloat16, any length is shorter than that."""
    wide = vjp_of(lambda h, wo: h @ wo)
    for d, codes in ((6, []), (7, ["longer-sum"])):
        args = integers((24, 8), (8, d), (24,), (24, d))
        report = explain(wide, *args, passes=[NAME])
        assert [r[0].split(":")[0] for r in why(report, NAME)] == codes
        narrow = [a.astype(jnp.bfloat16) for a in args[:2]]
        assert explain(wide, *narrow, *args[2:], passes=[NAME]).counts() == {NAME: 1}


def test_declined_where_only_the_cotangents_are_rounded(why):
    def fn(h, wo, w, g):
        y = jnp.dot(h, wo, preferred_element_type=jnp.float32)
        d = (g * w[:, None]).astype(h.dtype)
        dwo = jnp.einsum("rm,rd->md", h, d)
        return (g * y).sum(-1), jnp.einsum("rd,md->rm", d, wo), dwo

    h, wo = integers((24, 8), (8, 6), dtype=jnp.bfloat16)
    report = explain(fn, h, wo, *integers((24,), (24, 6)), passes=[NAME])
    assert [r[0].split(":")[0] for r in why(report, NAME)] == ["rounded-cotangents"]


def test_cotangents_that_would_be_rounded_leave_the_weights_gradient_alone(eqns_of):
    """Two products of the rewritten three, or one and the plain one, by what g is known to hold."""
    h, wo = integers((24, 8), (8, 6), dtype=jnp.bfloat16)
    w, g = integers((24,), (24, 6))
    fn = vjp_of(lambda h, wo: h @ wo, widen=True)

    def of_wo(g_of):
        done = optimize(lambda h, wo, w, g: fn(h, wo, w, g_of(g)), passes=[NAME])
        (found,) = [e for e in eqns_of(done, h, wo, w, g, name="dot_general")
                    if e.outvars[0].aval.shape in ((8, 6), (6, 8))]  # fmt: skip
        return done, found

    held, by_held = of_wo(lambda g: jnp.where(g > 0, g.astype(jnp.bfloat16), 0).astype(jnp.float32))
    rounded, by_rounded = of_wo(lambda g: g * 1.5)
    assert by_held.invars != by_rounded.invars
    for run, g_of in ((held, lambda g: jnp.where(g > 0, g, 0)), (rounded, lambda g: g * 1.5)):
        equal(jax.jit(run)(h, wo, w, g), jax.jit(fn)(h, wo, w, g_of(g)))
