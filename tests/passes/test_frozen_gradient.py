"""frozen_gradient: through every construct, in both ways in, and what keeps a gradient alive."""

import contextlib
import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import Frozen, PassNotApplicable, explain, keep, optimize
from relower.compat import bodies, jaxprs, tracing
from relower.compat.primitives import primitive
from relower.compat.source import is_kept
from relower.matchers import demand
from relower.passes import base, registry
from relower.passes import frozen as declarations
from relower.passes.engine import check
from relower.passes.parts import frozen_masks

NAME = "frozen_gradient"
STEPS, ROWS = 3, 8
SHAPES = {"first": (4, 5), "kernel": (5, 6), "last": (6, 3)}


def loss(p, x):
    h = jnp.tanh(x @ p["first"])
    h = jnp.tanh(h @ p["kernel"])
    return jnp.sum(jnp.square(h @ p["last"]))


def data(seed=0):
    r = np.random.RandomState(seed)
    p = {name: jnp.asarray(r.randn(*shape), jnp.float32) for name, shape in SHAPES.items()}
    return p, jnp.asarray(r.randn(STEPS, ROWS, 4), jnp.float32)


def added(fn):
    """A step that adds what ``fn`` returns to what a loop carries."""
    return lambda sums, x: (jax.tree.map(jnp.add, sums, fn(x)), None)


def in_scan(p, xs):
    return lax.scan(added(lambda x: jax.grad(loss)(p, x)), zeros(p), xs)[0]


def in_while(p, xs):
    def step(carry):
        i, sums = carry
        return i + 1, jax.tree.map(jnp.add, sums, jax.grad(loss)(p, xs[i]))

    return lax.while_loop(lambda carry: carry[0] < STEPS, step, (0, zeros(p)))[1]


def in_cond(p, xs):
    def branches(x):
        grad = lambda scale: lambda: jax.grad(loss)(p, scale * x)
        return lax.cond(x[0, 0] > 0, grad(1.0), grad(2.0))

    return lax.scan(added(branches), zeros(p), xs)[0]


def in_jit(p, xs):
    step = jax.jit(lambda sums, x: jax.tree.map(jnp.add, sums, jax.jit(jax.grad(loss))(p, x)))
    sums = zeros(p)
    for x in xs:
        sums = step(sums, x)
    return sums


def in_remat(p, xs):
    return lax.scan(added(lambda x: jax.grad(jax.checkpoint(loss))(p, x)), zeros(p), xs)[0]


def stacked(p, xs):
    grads = lax.scan(lambda _, x: (None, jax.grad(loss)(p, x)), None, xs)[1]
    return jax.tree.map(lambda g: g.sum(0), grads)


def in_vmap(p, xs):
    return jax.tree.map(lambda g: g.sum(0), jax.vmap(lambda x: jax.grad(loss)(p, x))(xs))


def mesh_of(kind):
    return jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))


def in_shard_map(p, xs, kind="Auto"):
    """Summed over the devices in each step, by the transpose of what makes weights vary."""

    def local(p, xs):
        total = lambda p, x: lax.psum(loss(p, x), "d")
        return lax.scan(added(lambda x: jax.grad(total)(p, x)), zeros(p), xs)[0]

    specs = {"in_specs": (P(), P(None, "d")), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh_of(kind), **specs)(p, xs)


def zeros(p):
    return jax.tree.map(jnp.zeros_like, p)


PLACES = {
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "jit": in_jit,
    "remat": in_remat,
    "stacked": stacked,
    "vmap": in_vmap,
    "shard_map": in_shard_map,
    "explicit shard_map": functools.partial(in_shard_map, kind="Explicit"),
}
WAYS = {
    "declared": lambda fn: fn,
    "ignored": lambda fn: lambda p, xs: {k: g for k, g in fn(p, xs).items() if k != "kernel"},
    "selected": lambda fn: (
        lambda p, xs: {k: jnp.where(k != "kernel", g, 0) for k, g in fn(p, xs).items()}
    ),
}


def equations(fn, *args):
    """All equations of a function, those of dead bodies too."""

    def walk(body):
        for eqn in jaxprs.opened(body).eqns:
            yield eqn
            for entered in bodies.carried(eqn).entered:
                yield from walk(entered.body)

    return list(walk(jax.make_jaxpr(fn)(*args)))


def transposed_dots(fn, *args):
    """Shapes of the products in backward passes; what jax leaves of a dead forward isn't one."""
    dot = primitive("dot_general_p")
    return Counter(
        tuple(sorted(e.outvars[0].aval.shape)) for e in equations(fn, *args) if e.primitive is dot
    )


def differing(got, want):
    """Paths of leaves whose bits differ."""
    left, right = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (got, want))
    assert len(left) == len(right)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, a), (_, b) in zip(left, right, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]


@pytest.mark.parametrize(("place", "way"), [
    *((place, "declared") for place in PLACES),
    ("scan", "ignored"), ("while", "ignored"), ("shard_map", "ignored"),
    ("scan", "selected"), ("jit", "selected"), ("vmap", "selected"), ("shard_map", "selected"),
])  # fmt: skip
def test_everywhere(place, way):
    explicit = place.startswith("explicit")
    with jax.set_mesh(mesh_of("Explicit")) if explicit else contextlib.nullcontext():
        everywhere(place, way)


def everywhere(place, way):
    fn, args = WAYS[way](PLACES[place]), data()
    if place.startswith("explicit"):
        args = args[0], jax.device_put(args[1], P(None, "d"))
    told = {"frozen": "^kernel$"} if way == "declared" else {}
    (leaf,) = explain(fn, *args, passes=[NAME], **told).frozen
    assert leaf.status.value == "applied"
    assert leaf.way == ("declared" if told else "recognised")
    assert leaf.path == ("kernel" if told else "p/kernel")
    assert leaf.flops >= 2 * ROWS * 30 / 4
    done = optimize(fn, passes=[NAME], **told)
    fewer = transposed_dots(fn, *args) - transposed_dots(done, *args)
    more = transposed_dots(done, *args) - transposed_dots(fn, *args)
    assert not more
    assert fewer[(5, 6)] or fewer[(3, 5, 6)]
    check.check_closed(jax.make_jaxpr(done)(*args))
    got, want = jax.jit(done)(*args), jax.jit(fn)(*args)
    if told:
        assert not np.any(got["kernel"])
        want["kernel"] = got["kernel"]
    assert differing(got, want) == []
    assert not explain(done, *args, passes=[NAME]).applied  # nothing is left to do


@pytest.mark.parametrize("place", ["scan", "while", "shard_map"])
def test_eager(place):
    args = data()
    fn = WAYS["ignored"](PLACES[place])
    plain, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat = tracing.evaluate(plain, *jax.tree.leaves(args))
    want = jax.tree.unflatten(jax.tree.structure(shape), flat)
    assert differing(optimize(fn, passes=[NAME])(*args), want) == []


def test_loops_carry_one_accumulator_less():
    args = data()
    for place, name in (("scan", "scan"), ("while", "while")):
        done = optimize(PLACES[place], frozen="kernel")
        (before,) = [e for e in equations(PLACES[place], *args) if e.primitive.name == name]
        (after,) = [e for e in equations(done, *args) if e.primitive.name == name]
        assert len(after.outvars) == len(before.outvars) - 1
        assert len(after.invars) == len(before.invars) - 1


def test_its_reductions_over_devices_go():
    args = data()
    fn = PLACES["shard_map"]
    reductions = lambda f: Counter(
        e.outvars[0].aval.shape for e in equations(f, *args) if "psum" in e.primitive.name
    )
    gone = reductions(fn) - reductions(optimize(fn, frozen="kernel"))
    assert gone[(5, 6)] == 1
    assert set(gone) <= {(5, 6), ()}  # of the loss, too, where nothing but its gradient is used
    (leaf,) = explain(fn, *args, frozen="kernel").frozen
    assert (leaf.collective_bytes, leaf.accumulator_bytes) == (STEPS * 120, 120)


def test_the_gradient_through_a_frozen_weight_stays():
    args = data()
    got = optimize(in_scan, frozen="kernel|last")(*args)
    assert np.any(got["first"])
    assert differing({"first": got["first"]}, {"first": jax.jit(in_scan)(*args)["first"]}) == []


def test_a_shared_body_is_told_apart_by_its_calls():
    """One jitted layer, run with a frozen weight and with a trained one."""

    @jax.jit
    def layer(w, x):
        return jnp.tanh(x @ w)

    def fn(p, x):
        total = lambda p: jnp.sum(layer(p["trained"], layer(p["frozen"], x)))
        return jax.grad(total)(p)

    r = np.random.RandomState(0)
    p = {k: jnp.asarray(r.randn(4, 4), jnp.float32) for k in ("frozen", "trained")}
    x = jnp.asarray(r.randn(8, 4), jnp.float32)
    done = optimize(fn, passes=[NAME], frozen="frozen")
    got, want = jax.jit(done)(p, x), jax.jit(fn)(p, x)
    assert not np.any(got["frozen"])
    assert differing(got["trained"], want["trained"]) == []


# --- optimizers -------------------------------------------------------------------------------


def step_with(optimizer, metric=lambda grads: 0.0):
    def step(p, state, xs):
        grads = in_scan(p, xs)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, metric(grads)

    return step


LABELS = {"first": "trained", "kernel": "frozen", "last": "trained"}
FROZEN_MASK = {name: label == "frozen" for name, label in LABELS.items()}
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def by_label(trained):
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, LABELS)


APPLIED = {
    "clip of the trained": by_label(CLIPPED),
    "set_to_zero first": optax.chain(
        optax.masked(optax.set_to_zero(), FROZEN_MASK), optax.clip_by_global_norm(1.0), ADAM
    ),
}


@pytest.mark.parametrize("name", APPLIED)
def test_optimizers_that_drop_it(name):
    p, xs = data()
    step, args = step_with(APPLIED[name]), (p, APPLIED[name].init(p), xs)
    (leaf,) = explain(step, *args, passes=[NAME]).frozen
    assert (leaf.path, leaf.status.value) == ("p/kernel", "applied")
    done, plain = jax.jit(optimize(step, passes=[NAME])), jax.jit(step)
    got = want = args
    for _ in range(3):
        got, want = (*done(*got)[:2], xs), (*plain(*want)[:2], xs)
    assert differing(got, want) == []
    assert differing(got[0]["kernel"], p["kernel"]) == []


READ = {
    "clip of all": (optax.chain(optax.clip_by_global_norm(1.0), by_label(ADAM)), None, "square"),
    "moments of all": (
        optax.chain(ADAM, optax.masked(optax.set_to_zero(), FROZEN_MASK)), None, "integer_pow",
    ),
    "a metric": (by_label(ADAM), optax.global_norm, "square"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_optimizers_and_metrics_that_read_it(name):
    optimizer, metric, by = READ[name]
    p, xs = data()
    step = step_with(optimizer, metric or (lambda grads: 0.0))
    args = p, optimizer.init(p), xs
    report = explain(step, *args, passes=[NAME])
    (leaf,) = report.frozen
    assert (leaf.path, leaf.status.value) == ("p/kernel", "declined")
    (reason,) = leaf.reasons
    assert reason.code == "read-first"
    assert f"{leaf.flops:,} FLOPs, {leaf.accumulator_bytes:,} bytes of acc" in reason.sentence
    assert (leaf.flops, leaf.accumulator_bytes) == (STEPS * 2 * ROWS * 30, 120)
    assert any(reader.startswith(by) for reader in leaf.readers), leaf.readers
    assert __file__ in reason.found  # the user's line, though optax wrote the equation
    with pytest.raises(PassNotApplicable, match="read-first"):
        optimize(step, passes=[NAME])(*args)


def test_a_sum_that_decides_how_long_a_loop_runs():
    """What a condition reads is read in each iteration, whatever becomes of it afterwards."""

    def step(p, xs):
        def more(carry):
            return (carry[0] < STEPS) & (jnp.sum(carry[2]["kernel"]) < 1e9)

        def add(carry):
            i, total, sums = carry
            made, grads = jax.value_and_grad(loss)(p, xs[i])
            return i + 1, total + made, jax.tree.map(jnp.add, sums, grads)

        _, total, sums = lax.while_loop(more, add, (0, 0.0, zeros(p)))
        return {**jax.tree.map(lambda w, g: w - 0.1 * g, p, sums), "kernel": p["kernel"]}, total

    (leaf,) = explain(step, *data(), passes=[NAME]).frozen
    assert (leaf.path, leaf.status.value) == ("p/kernel", "declined")
    assert leaf.reasons[0].code == "read-first"
    assert any(reader.startswith("reduce_sum") for reader in leaf.readers), leaf.readers


def test_a_sum_over_several_steps_that_the_state_keeps():
    """`optax.MultiSteps` around everything sums up every gradient; around the trained, only these.

    The sum is part of the state that the step returns, so that without it another state would.
    """
    p, xs = data()
    every = lambda optimizer: optax.MultiSteps(optimizer, 2).gradient_transformation()
    around, inside = every(by_label(ADAM)), by_label(every(ADAM))
    (leaf,) = explain(step_with(around), p, around.init(p), xs, passes=[NAME]).frozen
    assert (leaf.path, leaf.status.value) == ("p/kernel", "declined")
    (reason,) = leaf.reasons
    assert reason.code == "read-first"
    assert leaf.readers == ("the output 1/acc_grads/kernel",)
    done = explain(step_with(inside), p, inside.init(p), xs, passes=[NAME])
    assert [(one.path, one.status.value) for one in done.frozen] == [("p/kernel", "applied")]
    step = step_with(inside)
    got = want = (p, inside.init(p), xs)
    run, plain = jax.jit(optimize(step, passes=[NAME])), jax.jit(step)
    for _ in range(4):
        got, want = (*run(*got)[:2], xs), (*plain(*want)[:2], xs)
    assert differing(got, want) == []
    assert differing(got[0], p)  # it trains


def test_a_declared_gradient_that_is_read_stays_and_the_reader_is_named():
    def fn(p, xs):
        grads = in_scan(p, xs)
        return jnp.sum(jnp.abs(grads["kernel"])), grads

    args = data()
    declared = Frozen("kernel|last", grads=lambda out: out[1])
    leaves = {leaf.path: leaf for leaf in explain(fn, *args, frozen=declared).frozen}
    assert leaves["last"].status.value == "applied"
    assert [r.code for r in leaves["kernel"].reasons] == ["read-first"]
    assert leaves["kernel"].readers[0].startswith(f"abs at {__file__}")
    got, want = jax.jit(optimize(fn, frozen=declared))(*args), jax.jit(fn)(*args)
    assert differing(got, want) == ["1/last"]


# --- masks by multiplication ------------------------------------------------------------------


def multiplied(p, xs):
    grads = in_scan(p, xs)
    return {k: g * (0.0 if k == "kernel" else 1.0) for k, g in grads.items()}


def test_a_product_with_zero_needs_an_assumption(why):
    p, xs = data()
    report = explain(multiplied, p, xs, passes=[NAME])
    ((reason,),) = why(report, NAME)
    assert reason.startswith("maybe-not-finite: inf or NaN times zero is NaN")
    assert "test_frozen_gradient.py" in reason
    done = optimize(multiplied, passes=[NAME], assume="finite_grads")
    got, want = jax.jit(done)(p, xs), jax.jit(multiplied)(p, xs)
    assert not np.any(got["kernel"])
    assert set(differing(got, want)) <= {"kernel"}  # where it may be the other zero
    with np.errstate(all="ignore"):
        bad = jax.jit(multiplied)(p, xs * np.inf)
    assert np.isnan(bad["kernel"]).any()


# --- outputs that hold no gradient ------------------------------------------------------------


@pytest.mark.parametrize(("fn", "found"), [
    (lambda p, xs: jax.tree.map(lambda w, g: w - g, p, in_scan(p, xs)), "a sum with p/kernel"),
    (lambda p, xs: (in_scan(p, xs), p)[1], "an argument of the function"),
    (lambda p, xs: zeros(p), "a constant"),
    (lambda p, xs: jax.tree.map(jnp.exp, p), "what exp makes at "),
    (lambda p, xs: {"kernel": xs[0] @ p["first"] @ p["kernel"]}, "what dot_general makes at "),
], ids=["updated", "argument", "constant", "other", "activation"])  # fmt: skip
def test_outputs_that_hold_no_gradient(why, fn, found):
    args = data()
    report = explain(fn, *args, passes=[NAME], frozen="kernel")
    reasons = [r for site in why(report, NAME) for r in site if r.startswith("no-gradient")]
    assert len(reasons) == 1
    assert f"found {found}" in reasons[0]
    got = jax.jit(optimize(fn, frozen="kernel"))(*args)
    assert differing(got, jax.jit(fn)(*args)) == []


def test_a_gradient_by_hand_is_one_where_it_is_said_to_be():
    def fn(w, x):
        y = x @ w
        return y, {"kernel": x.T @ (2 * y)}

    p, xs = data()
    args = p["first"], xs[0]
    (leaf,) = explain(fn, *args, frozen=Frozen("kernel", grads=lambda out: out[1])).frozen
    assert leaf.status.value == "applied"
    (leaf,) = explain(fn, *args, frozen="kernel").frozen
    assert [r.code for r in leaf.reasons] == ["no-gradient"]


def test_calls_of_one_function_are_told_apart():
    grads = jax.jit(jax.grad(loss))

    def fn(p, q, x):
        return {"frozen": grads(p, x), "trained": grads(q, x)}

    p, xs = data()
    q = data(1)[0]
    leaves = explain(fn, p, q, xs[0], frozen="frozen/kernel").frozen
    assert [leaf.status.value for leaf in leaves] == ["applied"]
    got = jax.jit(optimize(fn, frozen="frozen/kernel"))(p, q, xs[0])
    assert differing(got, jax.jit(fn)(p, q, xs[0])) == ["frozen/kernel"]
    assert not np.any(got["frozen"]["kernel"])


def test_an_accumulator_handed_in_is_no_parameter():
    def fn(sums, p, x):
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(p, x))

    p, xs = data()
    (leaf,) = explain(fn, p, p, xs[0], passes=[NAME], frozen="kernel").frozen
    assert leaf.status.value == "applied"
    run, plain = jax.jit(optimize(fn, passes=[NAME], frozen="kernel")), jax.jit(fn)
    got = want = zeros(p)
    for x in xs:  # the sums of the others, running from call to call
        got, want = run(got, p, x), plain(want, p, x)
        assert differing(got, want) == ["kernel"]
    assert not np.any(got["kernel"])


def test_a_kernel_that_makes_more_than_the_gradient():
    def kernel(x, g, dw, dx):
        dw[...] = x[...].T @ g[...]
        dx[...] = g[...] * 2

    @jax.custom_vjp
    def product(w, x):
        return x @ w

    def backward(saved, g):
        x, w = saved
        shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, g))
        dw, dx = pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x, g)
        return dw, dx @ w.T

    product.defvjp(lambda w, x: (product(w, x), (x, w)), backward)

    def fn(p, x):
        inner = lambda p: jnp.sum(jnp.square(product(p["kernel"], x @ p["first"])))
        return jax.grad(inner)(p)

    p, xs = data()
    p = {k: p[k] for k in ("first", "kernel")}
    (leaf,) = explain(fn, p, xs[0], passes=[NAME], frozen="kernel").frozen
    assert leaf.status.value == "applied"
    alone = explain(fn, p, xs[0], passes=[NAME], frozen="kernel|first")
    assert [leaf.status.value for leaf in alone.frozen] == ["applied", "applied"]


# --- nothing else is touched ------------------------------------------------------------------


UNREAD = {
    "a loop's sum": lambda w, xs: summed_up(w, xs, jnp.sum),
    "by way of a call that doesn't read it": lambda w, xs: summed_up(
        w, xs, lambda g: jax.jit(lambda a, b: a + 1)(jnp.sum(xs), jnp.sum(g)) + jnp.sum(g)
    ),
}


def summed_up(w, xs, read):
    """The loss, and what ``read`` makes of its gradient, the larger of the two."""

    def step(sums, x):
        made = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)
        return jax.tree.map(jnp.add, sums, made), None

    (loss, gradient), _ = lax.scan(step, (0.0, jnp.zeros_like(w)), xs)
    return jnp.maximum(loss, read(gradient))


@pytest.mark.parametrize("name", UNREAD)
def test_a_gradient_whose_only_reader_another_pass_takes_away(engine, name):
    def first_operand(match):
        return base.Replacement((match.eqn.invars[0],), tuple(match.eqn.outvars), None, ())

    first = engine.make_pass("first", "max_p", engine.every, first_operand)
    args = jnp.ones((4, 4)), jnp.ones((3, 2, 4))
    mine = registry.by_name(NAME)
    alone = engine.run(UNREAD[name], [mine], *args)
    assert engine.names(alone.closed).count("dot_general") == 2
    done = engine.run(UNREAD[name], [first, mine], *args)
    assert engine.names(done.closed).count("dot_general") == 1
    assert done.report.counts() == {"first": 1, NAME: 1}


def test_without_a_frozen_gradient_nothing_changes():
    args = data()
    others = [p.name for p in registry.all_passes() if p.name != NAME]
    for place in ("scan", "while", "remat", "shard_map"):
        fn = PLACES[place]
        assert not explain(fn, *args, passes=[NAME]).sites
        plain, done = (jax.jit(f).lower(*args).as_text() for f in (
            fn, optimize(fn, disable=others)
        ))  # fmt: skip
        assert done == plain


def returned_with_parameters(p, x):
    value, grads = jax.value_and_grad(loss)(p, x)
    return value, grads, p


def with_a_norm(p, x):
    _, grads, p = returned_with_parameters(p, x)
    return jnp.sum(jnp.square(grads["last"])), grads, p


def partly_updated(p, x):
    _, grads, p = returned_with_parameters(p, x)
    return jnp.sum(jnp.square(grads["last"])), grads, p | {"first": p["first"] - grads["first"]}


@pytest.mark.parametrize("fn", [returned_with_parameters, with_a_norm, partly_updated])
def test_a_gradient_that_is_returned_and_never_masked_is_no_candidate(fn):
    p, xs = data()
    assert not explain(fn, p, xs[0], passes=[NAME]).sites
    declared = Frozen("kernel", grads=lambda out: out[1])
    leaves = explain(fn, p, xs[0], passes=[NAME], frozen=declared).frozen
    assert [(leaf.path, leaf.status.value) for leaf in leaves] == [("kernel", "applied")]


def test_a_norm_beside_parameters_that_are_never_updated_is_no_mask():
    fn = lambda p, x: (with_a_norm(p, x)[0], p)
    p, xs = data()
    leaves = explain(fn, p, xs[0], passes=[NAME]).frozen
    # Those that nothing reads go all the same.
    assert {leaf.path: leaf.status.value for leaf in leaves} == {
        "p/first": "applied", "p/kernel": "applied",
    }  # fmt: skip


@jax.custom_vjp
def product_by_rule(x, w):
    return x @ w


product_by_rule.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def masked_by_rule(mask):
    def fn(p, x):
        def inner(p):
            h = jnp.tanh(product_by_rule(x, p["first"]))
            h = jnp.tanh(product_by_rule(h, p["kernel"]))
            return jnp.sum(jnp.square(product_by_rule(h, p["last"])))

        return {k: mask(k, g) for k, g in jax.grad(inner)(p).items()}

    return fn


@pytest.mark.parametrize("name", SHAPES)
def test_cotangents_beside_a_masked_gradient_are_no_parameters(name):
    fn = masked_by_rule(lambda k, g: jnp.where(k != name, g, 0))
    p, xs = data()
    report = explain(fn, p, xs[0], passes=[NAME])
    assert [leaf.type for leaf in report.frozen] == ["f32[{},{}]".format(*SHAPES[name])]
    assert len(report.sites) == 1
    got, want = (jax.jit(f)(p, xs[0]) for f in (optimize(fn, passes=[NAME]), fn))
    assert differing(got, want) == []


def test_cotangents_beside_a_product_with_zero_are_no_parameters():
    fn = masked_by_rule(lambda k, g: g * (k != "first"))
    p, xs = data()
    (leaf,) = explain(fn, p, xs[0], passes=[NAME]).frozen
    assert (leaf.type, leaf.reasons[0].code) == ("f32[4,5]", "maybe-not-finite")


def test_a_rules_gradient_that_an_optimizer_drops():
    optimizer = by_label(optax.sgd(0.1))

    def step(p, state, x):
        grads = masked_by_rule(lambda k, g: g)(p, x)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    p, xs = data()
    (leaf,) = explain(step, p, optimizer.init(p), xs[0], passes=[NAME]).frozen
    assert (leaf.type, leaf.status.value) == ("f32[5,6]", "applied")


def cubes_of_largest(x):
    return jnp.sum(lax.top_k(x, 2)[0] ** 3)


@pytest.mark.parametrize("product", [
    lambda x: jax.jvp(jax.grad(cubes_of_largest), (x,), (x,))[1],
    lambda x: jax.grad(lambda y: jnp.vdot(jax.grad(cubes_of_largest)(y), x))(x),
], ids=["forward over reverse", "reverse over reverse"])  # fmt: skip
def test_the_input_of_a_hessians_product_is_not_frozen(product):
    assert not explain(product, jnp.arange(5.0), passes=[NAME]).sites


def test_effects_stay():
    def fn(p, xs):
        def step(sums, x):
            grads = jax.grad(loss)(p, x)
            jax.debug.print("{}", grads["last"][0, 0], ordered=False)
            return jax.tree.map(jnp.add, sums, grads), None

        return lax.scan(step, zeros(p), xs)[0]

    args = data()
    done = optimize(fn, passes=[NAME], frozen="kernel|last")
    leaves = {leaf.path: leaf for leaf in explain(fn, *args, frozen="kernel|last").frozen}
    assert leaves["kernel"].status.value == "applied"
    assert [r.code for r in leaves["last"].reasons] == ["read-first"]
    names = [e.primitive.name for e in equations(done, *args)]
    assert sum("debug" in name for name in names) == 1


def test_grad_of_it():
    """A masked gradient that is differentiated again."""

    def fn(p, xs):
        return sum(jnp.sum(g) for g in WAYS["selected"](in_vmap)(p, xs).values())

    args = data()
    want = jax.jit(jax.grad(fn))(*args)
    assert all(np.any(g) for g in jax.tree.leaves(want))
    got = jax.jit(jax.grad(optimize(fn, passes=[NAME])))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)  # jax may sum cotangents in another order


# --- mutants: a stop that also hits a trainable leaf is caught, and named ---------------------


def widened(monkeypatch):
    resolve = declarations._chosen
    monkeypatch.setattr(
        declarations, "_chosen",
        lambda *a: [c or n for c, n in zip(resolve(*a), [*resolve(*a)[1:], False], strict=True)],
    )  # fmt: skip


def next_output(monkeypatch):
    resolve = declarations._resolve
    monkeypatch.setattr(
        declarations, "_resolve",
        lambda *a: [dataclasses.replace(d, output=d.output + 1) for d in resolve(*a)],
    )  # fmt: skip


def masks_the_wrong_case(monkeypatch):
    def wrong(self, scope, index):
        known = scope.fact(scope.eqns[index].invars[0]).constant
        return known and demand.Cut(2 - int(known.value))

    monkeypatch.setattr(frozen_masks.Cutter, "_selected", wrong)


def any_product_is_zero(monkeypatch):
    zero = lambda self, scope, index, finite: (
        demand.Cut(None)
        if scope.eqns[index].primitive is primitive("mul_p")
        and scope.eqns[index].outvars[0].aval.shape == (6, 3)
        else None
    )
    monkeypatch.setattr(frozen_masks.Cutter, "cut", zero)


MUTANTS = {
    "the leaf before goes too": (widened, "declared", {"first"}),
    "the next output": (next_output, "declared", {"kernel", "last"}),
    "the other case of a mask": (masks_the_wrong_case, "selected", {"first", "kernel", "last"}),
    "a product that isn't with zero": (any_product_is_zero, "scaled", {"last"}),
}
SCALED = lambda fn: (
    lambda p, xs: {k: g * (0.0 if k == "kernel" else 0.5) for k, g in fn(p, xs).items()}
)


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_stop_that_hits_a_trained_leaf_is_caught_and_named(monkeypatch, mutant):
    change, way, named = MUTANTS.get(mutant, (None, "declared", set()))
    if change is not None:
        change(monkeypatch)
    fn = SCALED(in_scan) if way == "scaled" else WAYS[way](in_scan)
    told = {"frozen": "^kernel$"} if way == "declared" else {}
    args = data()
    got = jax.jit(optimize(fn, **told, assume="finite_grads"))(*args)
    want = jax.jit(fn)(*args)
    wrong = set(differing(got, want))
    if way == "declared":
        wrong ^= {"kernel"}  # which is to differ, by being zero
    assert wrong == named


def test_a_loop_that_forgets_what_it_carries_is_refused(monkeypatch):
    """Where a carried value isn't followed round the loop, the check finds its reader."""
    from relower.passes.engine.check import IllFormed

    def fn(p, xs):
        def step(carry, x):
            scale, sums = carry
            grads = jax.tree.map(lambda g: g * scale, jax.grad(loss)(p, x))
            return (scale * 2, jax.tree.map(jnp.add, sums, grads)), None

        return lax.scan(step, (1.0, zeros(p)), xs)[0][1]

    args = data()
    want = jax.jit(fn)(*args)
    got = jax.jit(optimize(fn, frozen="kernel"))(*args)
    assert differing(got, want) == ["kernel"]
    monkeypatch.setattr(demand, "carried_inputs", lambda entered: [])
    with pytest.raises((IllFormed, TypeError, ValueError, AssertionError)):
        jax.jit(optimize(fn, frozen="kernel"))(*args)


def test_a_kept_region_stays(why):
    def fn(p, xs):
        def inner(p, x):
            h = keep(lambda w, x: jnp.tanh(x @ w))(p["kernel"], jnp.tanh(x @ p["first"]))
            return jnp.sum(jnp.square(h @ p["last"]))

        return lax.scan(added(lambda x: jax.grad(inner)(p, x)), zeros(p), xs)[0]

    args = data()
    report = explain(fn, *args, passes=[NAME], frozen="kernel|last")
    ((reason,),) = why(report, NAME)
    assert reason.startswith("kept: this stands in a function given to relower.keep")
    assert report.counts() == {NAME: 1}
    done = optimize(fn, passes=[NAME], frozen="kernel|last")
    count = lambda f: sum(1 for e in equations(f, *args) if is_kept(e))
    assert count(done) == count(fn) > 0
    assert differing(jax.jit(done)(*args), jax.jit(fn)(*args)) == ["last"]
    ignored = lambda p, xs: fn(p, xs)["first"]
    assert count(optimize(ignored)) == count(ignored) > 0


def test_what_a_custom_derivative_makes_for_nobody_stays():
    """Its results can't be fewer, so nothing goes, and nothing is said to have been applied."""

    @jax.custom_jvp
    def both(w, x):
        return jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)), (0, 1))(w, x)

    both.defjvp(lambda primals, tangents: jax.jvp(both.fun, primals, tangents))
    args = np.ones((4, 3), np.float32), np.ones((2, 4), np.float32)
    fn = lambda w, x: (both(w, x)[1], w)
    report = explain(fn, *args, passes=[NAME])
    assert not report.applied, str(report)
