"""Values that come to vary over a mesh axis: carried downstream, or declined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower.compat import jaxprs, tracing, vma
from relower.passes.base import Match, Replacement
from relower.passes.engine.check import IllFormed, check_closed
from relower.passes.engine.retype import retype_body
from relower.passes.engine.rewrite import rewrite

F32, I32 = jnp.float32, jnp.int32
N = 8


@functools.cache
def mesh_of(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return mesh_of(request.param)


def order_by_keys(keys, positions, **_):
    """An argsort whose positions come from the keys: typed as varying, as they are."""
    bits = lax.shift_left(keys, np.int32(8)) | positions
    packed = lax.sort(bits)
    return [lax.shift_right_arithmetic(packed, np.int32(8)), packed & np.int32(255)]


def two_operands(scope, index):
    eqn = scope.eqns[index]
    return Match(scope, index, {}) if len(eqn.invars) == 2 else None


def replace(match):
    return Replacement(tuple(match.eqn.invars), tuple(match.eqn.outvars), order_by_keys, ())


@pytest.fixture
def pack(engine):
    return engine.make_pass("pack", "sort_p", two_operands, replace)


def order(k):
    """An argsort as inside `jnp.argsort`: the positions are typed invariant."""
    positions = lax.iota(I32, k.shape[0])
    return lax.sort_p.bind(k, positions, dimension=0, is_stable=True, num_keys=1)[1]


def of_argsort(x, k):
    o = jnp.argsort(k)
    return x[o], jnp.argsort(o) + o


def plain_ops(x, k):
    o = order(k)
    return x[o] + lax.convert_element_type(o * 2 + 1, F32), o


def through_pvary(x, k):
    o = lax.pcast(order(k), ("data",), to="varying")
    return x * o, o + k


def through_jit(x, k):
    o = jax.jit(lambda a: a * 3 + 1)(order(k))
    return jax.jit(lambda a, b: a[b % N] * 2)(x, o), o


def through_shared_jit(x, k):
    f = jax.jit(lambda a: a * 3 + 1)
    return x * f(order(k)), f(lax.iota(I32, N)) + k


def through_scan_constant(x, k):
    o = order(k)
    return lax.scan(lambda c, v: (c + x[o], v), x, x)[0], o


def through_scan_inputs(x, k):
    o = order(k)
    return lax.scan(lambda c, i: (c + x[i], i + 1), x, o)


def through_scan_carry(x, k):
    o = order(k)
    total, _ = lax.scan(lambda c, i: (c + i, ()), jnp.int32(0), o)
    return x * total, o


def through_scan_carry_of_two(x, k):
    o = order(k)

    def body(c, i):
        a, b = c
        return (b, a + i), a * 2

    (a, b), ys = lax.scan(body, (jnp.int32(0), jnp.int32(1)), o)
    return x * a + b, ys


def through_remat(x, k):
    return jax.checkpoint(lambda a: x[a] * 2)(order(k)), k


def inside_scan(x, k):
    def body(c, v):
        return c + 1, (x[order(k + c)] * v, order(k)[c])

    c, (ys, firsts) = lax.scan(body, jnp.int32(0), x)
    return ys[0], k + c + firsts[0]


def inside_jit_inside_scan(x, k):
    f = jax.jit(lambda a, b: order(a + b))

    def body(c, v):
        return c * 0.5 + x[f(k, jnp.int32(2))], v

    return lax.scan(body, x, x)


CARRIED = [
    of_argsort,
    plain_ops,
    through_pvary,
    through_jit,
    through_shared_jit,
    through_scan_constant,
    through_scan_inputs,
    through_scan_carry,
    through_scan_carry_of_two,
    through_remat,
    inside_scan,
    inside_jit_inside_scan,
]


ROWS = P("data")


def sharded(f, mesh, outs=(ROWS, ROWS)):
    def first(x, k):
        return jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=outs)(x, k)

    return first


def data(mesh):
    rng = np.random.default_rng(0)
    place = lambda a: jax.device_put(a, NamedSharding(mesh, P("data")))
    x = place(jnp.asarray(rng.standard_normal(4 * N), F32))
    return x, place(jnp.asarray(rng.integers(0, 5, 4 * N), I32))


def types_inside(closed):
    """Every equation in the bodies of shard_map."""
    from relower.compat import bodies

    found = []

    def visit(body, inside):
        for e in jaxprs.opened(body).eqns:
            if inside:
                found.append(e)
            for child in bodies.carried(e).entered:
                visit(child.body, inside or e.primitive.name == "shard_map")

    visit(closed, False)
    return found


@pytest.mark.parametrize("fn", CARRIED, ids=lambda f: f.__name__)
def test_carried_downstream(engine, pack, mesh, fn):
    with jax.set_mesh(mesh):
        f = sharded(fn, mesh)
        x, k = data(mesh)
        closed = engine.trace(f, x, k)
        done = rewrite(closed, [pack])
        assert done.report.declined == ()
        assert done.report.counts()["pack"] >= 1
        check_closed(done.closed)
        ours = engine.function(done.closed)
        for g, w in zip(jax.jit(ours)(x, k), jax.tree.leaves(jax.jit(f)(x, k)), strict=True):
            np.testing.assert_array_equal(g, w)
            assert g.sharding.is_equivalent_to(w.sharding, g.ndim)
        # jax traces it again and finds the same types as are stated.
        again = engine.trace(ours, x, k)
        old = [[v.aval for v in e.outvars] for e in types_inside(done.closed)]
        new = [[v.aval for v in e.outvars] for e in types_inside(again)]
        assert old == new


@pytest.mark.parametrize("fn", CARRIED, ids=lambda f: f.__name__)
def test_under_an_outer_grad(engine, pack, mesh, fn):
    with jax.set_mesh(mesh):
        f = sharded(fn, mesh)
        x, k = data(mesh)
        ours = engine.function(rewrite(engine.trace(f, x, k), [pack]).closed)

        def total(g, x):
            outs = [o for o in jax.tree.leaves(g(x, k)) if o.dtype == F32]
            return sum(jnp.sum(o * jnp.arange(o.shape[0])) for o in outs)

        got = jax.jit(jax.grad(functools.partial(total, ours)))(x)
        want = jax.jit(jax.grad(functools.partial(total, f)))(x)
        assert float(jnp.abs(want).max()) > 0
        np.testing.assert_allclose(got, want, rtol=1e-6)


def to_cond(x, k):
    return x, lax.cond(order(k)[0] > 2, lambda o: o + 1, lambda o: o, k)


def to_cond_operand(x, k):
    return x, lax.cond(x[0] > 0, lambda o: o + 1, lambda o: o, order(k)) + k


def to_while(x, k):
    return x, lax.while_loop(lambda c: c[0] < 50, lambda c: c + 1, order(k)) + k


def to_invariant_spec(x, k):
    return x, order(k)


def to_float(x, k):
    # A float that is invariant meets the order: to cast it would move a sum in its gradient.
    s = lax.psum(jnp.sum(x), "data")
    return x * (lax.convert_element_type(order(k), F32) * s), k


def to_float_operand_of_jit(x, k):
    s = lax.psum(jnp.sum(x), "data")
    return x * jax.jit(lambda a, b: lax.convert_element_type(a, F32) * b)(order(k), s), k


def to_custom_jvp(x, k):
    relu = jax.nn.relu(lax.convert_element_type(order(k), F32))
    return x * relu, k


def to_psum(x, k):
    # The sum over devices of an invariant and of a varying value are two different things.
    return x, lax.psum(order(k), "data") + k


DECLINED = {
    to_cond: "cond",
    to_cond_operand: "cond",
    to_while: "while",
    to_invariant_spec: "out_specs",
    to_float: "invariant",
    to_float_operand_of_jit: "invariant",
    to_custom_jvp: "custom_jvp_call",
}


@pytest.mark.parametrize("fn", DECLINED, ids=lambda f: f.__name__)
def test_declined(engine, pack, mesh, fn):
    with jax.set_mesh(mesh):
        outs = (P("data"), P() if fn is to_invariant_spec else P("data"))
        f = sharded(fn, mesh, outs)
        x, k = data(mesh)
        closed = engine.trace(f, x, k)
        done = rewrite(closed, [pack])
        assert done.closed is closed
        (site,) = done.report.declined
        (reason,) = site.reasons
        assert reason.code == "vma-change"
        assert DECLINED[fn] in reason.found


def test_a_sum_over_devices_is_never_silently_another(engine, pack, mesh):
    with jax.set_mesh(mesh):
        f = sharded(to_psum, mesh)
        x, k = data(mesh)
        try:
            closed = engine.trace(f, x, k)
        except Exception:
            pytest.skip("jax itself refuses to sum an invariant value")
        done = rewrite(closed, [pack])
        for g, w in zip(jax.jit(engine.function(done.closed))(x, k), jax.jit(f)(x, k), strict=True):
            np.testing.assert_array_equal(g, w)


def test_one_declined_site_leaves_the_others(engine, pack, mesh):
    def both(x, k):
        bad = lax.cond(order(k)[0] > 2, lambda o: o + 1, lambda o: o, k)
        return x[order(k + 1)], bad

    with jax.set_mesh(mesh):
        f = sharded(both, mesh)
        x, k = data(mesh)
        done = rewrite(engine.trace(f, x, k), [pack])
        counts = done.report.counts().get("pack", 0), len(done.report.declined)
        assert sum(counts) == 2
        assert counts[1] >= 1
        check_closed(done.closed)
        for g, w in zip(jax.jit(engine.function(done.closed))(x, k), jax.jit(f)(x, k), strict=True):
            np.testing.assert_array_equal(g, w)


def test_unchecked_vma_has_nothing_to_carry(engine, pack, mesh):
    with jax.set_mesh(mesh):
        f = lambda x, k: jax.shard_map(
            to_while,
            mesh=mesh,
            in_specs=(P("data"), P("data")),
            out_specs=(P("data"), P("data")),
            check_vma=False,
        )(x, k)
        x, k = data(mesh)
        done = rewrite(engine.trace(f, x, k), [pack])
        assert done.report.counts() == {"pack": 1}
        check_closed(done.closed)


def invariant_instead(operands=1):
    """A replacement that varies over fewer axes than the original."""
    return lambda match: Replacement(
        (),
        tuple(match.eqn.outvars),
        lambda: [lax.broadcast(np.float32(0), match.eqn.outvars[0].aval.shape)],
        ("zero",),
    )


@pytest.mark.parametrize("where", ["flat", "jit", "scan", "shard_map result"])
def test_a_replacement_that_varies_less(engine, mesh, where):
    zero = engine.make_pass("zero", "sin_p", engine.every, invariant_instead())

    def f(x, k):
        if where == "jit":
            y = jax.jit(lambda a: jnp.sin(a))(x)
        elif where == "scan":
            y = lax.scan(lambda c, v: (jnp.sin(c), v), x, x)[0]
        else:
            y = jnp.sin(x)
        return (y if where == "shard_map result" else y + x), k

    with jax.set_mesh(mesh):
        x, k = data(mesh)
        g = sharded(f, mesh)
        done = rewrite(engine.trace(g, x, k), [zero])
        check_closed(done.closed)
        assert len(done.report.sites) == 1
        got = jax.jit(engine.function(done.closed))(x, k)[0]
        if done.report.applied:
            np.testing.assert_array_equal(got, x if where != "shard_map result" else 0 * x)


def test_what_todays_checks_miss(engine, pack):
    """A program left half way passes jax's own check and runs; it fails under an outer grad."""
    mesh = mesh_of(AxisType.Auto)
    f = sharded(plain_ops, mesh)
    x, k = data(mesh)
    closed = engine.trace(f, x, k)
    done = rewrite(closed, [pack])

    def half_way(body):
        eqns = []
        for e in jaxprs.opened(body).eqns:
            outvars = [
                jaxprs.new_var(vma.with_varying(v.aval, frozenset()))
                if e.primitive.name == "and" and vma.varying(v.aval)
                else v
                for v in e.outvars
            ]
            eqns.append(e.replace(outvars=outvars))
        return eqns

    # The checker sees that the stated type of the positions isn't the derived one.
    (shard,) = [e for e in jaxprs.opened(done.closed).eqns if e.primitive.name == "shard_map"]
    with tracing.inside(shard), pytest.raises(tracing.JaxprTypeError):
        tracing.check_equations(half_way(shard.params["jaxpr"]))


# --- results bound to nothing -------------------------------------------------------------------

AXES = frozenset({"data"})


@pytest.fixture
def unread():
    """``_ _ = sort a b`` beside an output: what is bound to ``_`` has a type all the same."""

    def fn(a, b):
        lax.sort((a, b), num_keys=1)
        return a + 1

    mesh = mesh_of(AxisType.Auto)
    whole = jax.shard_map(jax.jit(fn), mesh=mesh, in_specs=P(), out_specs=P())
    ids = jnp.arange(12)
    (mapped,) = jax.make_jaxpr(whole)(ids, ids).jaxpr.eqns
    (call,) = mapped.params["jaxpr"].eqns
    closed = call.params["jaxpr"]
    sort, add = jaxprs.opened(closed).eqns
    sort = sort.replace(outvars=[jaxprs.dropped(v.aval) for v in sort.outvars])
    with tracing.inside(mapped):
        yield jaxprs.rebuild(closed, eqns=[sort, add])


def test_results_bound_to_nothing_are_typed_again(unread):
    typed, outs = retype_body(unread, [AXES, frozenset()])
    (sort,) = [e for e in jaxprs.opened(typed).eqns if e.primitive.name == "sort"]
    assert [vma.varying(v.aval) for v in sort.outvars] == [AXES, frozenset()]
    assert [vma.varying(a) for a in outs] == [AXES]


def test_a_body_that_is_typed_wrongly_is_refused(monkeypatch, unread):
    invariant = lambda aval: jaxprs.DropVar(vma.with_varying(aval, frozenset()))
    monkeypatch.setattr(jaxprs, "dropped", invariant)
    with pytest.raises(IllFormed, match="inconsistently typed"):
        retype_body(unread, [AXES, frozenset()])
