"""The checker against seeded faults in every kind of body, and against real programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import core
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.compat import bodies, jaxprs, vma
from relower.passes.engine.check import IllFormed, check_closed, check_rewritten

F32 = jnp.float32


@functools.cache
def mesh_of():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def core_of_body(x):
    """What every carrier's body computes: two equations in a row."""
    return jnp.exp(jnp.sin(x) * 2)


@jax.custom_jvp
def soft(x):
    return core_of_body(x)


soft.defjvp(lambda p, t: (soft(*p), t[0]))


@jax.custom_vjp
def hard(x):
    return core_of_body(x)


hard.defvjp(lambda x: (hard(x), x), lambda x, g: (g,))


def kernel(x_ref, o_ref):
    o_ref[...] = core_of_body(x_ref[...])


def per_device(x):
    return core_of_body(x)


CARRIERS = {
    "jit": lambda x: jax.jit(core_of_body)(x),
    "scan": lambda x: lax.scan(lambda c, v: (core_of_body(c), v * 2), x, jnp.stack([x, x]))[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 9, core_of_body, x),
    "cond": lambda x: lax.cond(x[0] > 0, core_of_body, lambda y: y, x),
    "custom_jvp_call": soft,
    "custom_vjp_call": hard,
    "remat": lambda x: jax.checkpoint(core_of_body)(x),
    "shard_map": lambda x: jax.shard_map(
        per_device, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data")
    )(x),
    "pallas_call": lambda x: pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x),
}
OTHER_NAMES = {"remat": "remat2"}


def replaced(body, eqns=None, outvars=None, invars=None, effects=None):
    """A body with parts replaced and nothing else kept consistent."""
    jaxpr = jaxprs.opened(body)
    parts = {"eqns": eqns, "outvars": outvars, "invars": invars, "effects": effects}
    changed = jaxpr.replace(
        **{k: v for k, v in parts.items() if v is not None},
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return body.replace(jaxpr=changed) if jaxpr is not body else changed


def edit_where(body, wanted, change):
    """Apply ``change`` to the first body below a ``wanted`` that holds a sine."""

    def visit(body, below):
        eqns = list(jaxprs.opened(body).eqns)
        if below and any(e.primitive.name == "sin" for e in eqns):
            return change(body)
        for index, eqn in enumerate(eqns):
            inside = below or eqn.primitive.name in (wanted, OTHER_NAMES.get(wanted))
            for e in bodies.carried(eqn).entered:
                new = visit(e.body, inside)
                if new is not None:
                    eqns[index] = bodies.with_bodies(eqn, {e.key: new})
                    return replaced(body, eqns=eqns)
        return None

    return visit(body, wanted is None)


def at(body, name):
    eqns = list(jaxprs.opened(body).eqns)
    return eqns, next(i for i, e in enumerate(eqns) if e.primitive.name == name)


def undefined_variable(body):
    eqns, i = at(body, "mul")
    stranger = jaxprs.new_var(eqns[i].invars[0].aval)
    eqns[i] = eqns[i].replace(invars=[stranger, *eqns[i].invars[1:]])
    return replaced(body, eqns=eqns)


def used_before_bound(body):
    eqns, i = at(body, "mul")
    eqns[i - 1], eqns[i] = eqns[i], eqns[i - 1]
    return replaced(body, eqns=eqns)


def retyped(body, change):
    eqns, i = at(body, "sin")
    old = eqns[i].outvars[0]
    new = jaxprs.new_var(change(old.aval))
    eqns[i] = eqns[i].replace(outvars=[new])
    eqns[i + 1 :] = [jaxprs.substitute(e, {old: new}) for e in eqns[i + 1 :]]
    return replaced(body, eqns=eqns)


def wrong_dtype(body):
    return retyped(body, lambda a: a.update(dtype=np.dtype("int32")))


def wrong_shape(body):
    return retyped(body, lambda a: a.update(shape=tuple(n + 3 for n in a.shape)))


def double_binding(body):
    eqns, i = at(body, "sin")
    eqns.insert(i, eqns[i])
    return replaced(body, eqns=eqns)


def rebinds_an_input(body):
    eqns, i = at(body, "sin")
    if eqns[i].invars[0] not in jaxprs.invars(body):  # in a kernel the inputs are Refs
        eqns.insert(i, eqns[i - 1])
    else:
        eqns[i] = eqns[i].replace(outvars=[eqns[i].invars[0]])
    return replaced(body, eqns=eqns)


def unbound_output(body):
    outvars = list(jaxprs.opened(body).outvars)
    if not outvars:
        return undefined_variable(body)
    return replaced(body, outvars=[jaxprs.new_var(outvars[0].aval), *outvars[1:]])


def wrong_param(body):
    eqns, i = at(body, "mul")
    eqns[i] = eqns[i].replace(
        primitive=lax.broadcast_in_dim_p,
        invars=eqns[i].invars[:1],
        params={"shape": (3, 3, 3), "broadcast_dimensions": (2,), "sharding": None},
    )
    return replaced(body, eqns=eqns)


ANYWHERE = [
    undefined_variable,
    used_before_bound,
    wrong_dtype,
    wrong_shape,
    double_binding,
    rebinds_an_input,
    unbound_output,
    wrong_param,
]


@pytest.mark.parametrize("fault", ANYWHERE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("carrier", CARRIERS)
class TestAnywhere:
    def test_caught_in_the_whole_program(self, engine, carrier, fault):
        closed = engine.trace(CARRIERS[carrier], jnp.ones(4))
        check_closed(closed)
        broken = edit_where(closed, carrier, fault)
        assert broken is not None, "the fault was not seeded"
        with pytest.raises(IllFormed):
            check_closed(broken)

    def test_caught_in_the_rewritten_body(self, engine, carrier, fault):
        # Between the old body and the new: what the interpreter checks as it goes.
        closed = engine.trace(CARRIERS[carrier], jnp.ones(4))
        pairs = []

        def change(body):
            pairs.append((body, fault(body)))
            return body

        edit_where(closed, carrier, change)
        ((old, new),) = pairs
        with _inside(closed, old), pytest.raises(IllFormed):
            check_rewritten(new, old)


def _inside(closed, wanted):
    """The contexts in which the body ``wanted`` was traced."""
    import contextlib

    from relower.compat import tracing

    def find(body):
        if body is wanted:
            return []
        for eqn in jaxprs.opened(body).eqns:
            for e in bodies.carried(eqn).entered:
                path = find(e.body)
                if path is not None:
                    return [eqn, *path]
        return None

    stack = contextlib.ExitStack()
    for eqn in find(closed):
        stack.enter_context(tracing.inside(eqn))
    return stack


def misses(closed):
    """Whether `jax.core.check_jaxpr` lets a program pass."""
    try:
        core.check_jaxpr(jaxprs.opened(closed))
    except Exception:
        return False
    return True


# jax looks into no other body.
SEEN_BY_JAX = {"jit", "remat", "shard_map"}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_jax_alone_misses(engine, carrier):
    """Why there is a checker of our own: an undefined variable, by carrier."""
    broken = edit_where(engine.trace(CARRIERS[carrier], jnp.ones(4)), carrier, undefined_variable)
    assert misses(broken) == (carrier not in SEEN_BY_JAX)


def with_param(closed, name, change):
    """The program with the first equation of a primitive changed."""

    def visit(body):
        eqns = list(jaxprs.opened(body).eqns)
        for index, eqn in enumerate(eqns):
            if eqn.primitive.name in (name, OTHER_NAMES.get(name)):
                eqns[index] = change(eqn)
                return replaced(body, eqns=eqns)
            for e in bodies.carried(eqn).entered:
                new = visit(e.body)
                if new is not None:
                    eqns[index] = bodies.with_bodies(eqn, {e.key: new})
                    return replaced(body, eqns=eqns)
        return None

    new = visit(closed)
    assert new is not None
    return new


def carry_of_another_type(eqn):
    e = bodies.carried(eqn).entered[-1]
    jaxpr = jaxprs.opened(e.body)
    first = jaxpr.outvars[0]
    half = jaxprs.new_var(first.aval.update(dtype=np.dtype("int32")))
    convert = engine_convert(first, half)
    body = replaced(e.body, eqns=[*jaxpr.eqns, convert], outvars=[half, *jaxpr.outvars[1:]])
    return bodies.with_bodies(eqn, {e.key: body})


def engine_convert(old, new):
    """An equation ``new = convert(old)``."""
    closed = jax.make_jaxpr(lambda x: lax.convert_element_type(x, new.aval.dtype))(
        jax.ShapeDtypeStruct(old.aval.shape, old.aval.dtype)
    )
    (eqn,) = jaxprs.opened(closed).eqns
    return eqn.replace(invars=[old], outvars=[new])


def one_input_less(eqn):
    return eqn.replace(invars=eqn.invars[:-1])


def one_input_more(eqn):
    return eqn.replace(invars=[*eqn.invars, eqn.invars[-1]])


def body_with_one_input_more(eqn):
    e = bodies.carried(eqn).entered[0]
    extra = jaxprs.new_var(jaxprs.invars(e.body)[-1].aval)
    return bodies.with_bodies(
        eqn, {e.key: replaced(e.body, invars=[*jaxprs.invars(e.body), extra])}
    )


def body_that_binds_an_input_twice(eqn):
    e = bodies.carried(eqn).entered[0]
    inputs = list(jaxprs.invars(e.body))
    return bodies.with_bodies(eqn, {e.key: replaced(e.body, invars=[*inputs[:-1], inputs[0]])})


def body_with_one_output_less(eqn):
    e = bodies.carried(eqn).entered[-1]
    return bodies.with_bodies(
        eqn, {e.key: replaced(e.body, outvars=jaxprs.opened(e.body).outvars[:-1])}
    )


def result_of_another_type(eqn):
    var = eqn.outvars[0]
    return eqn.replace(
        outvars=[jaxprs.new_var(var.aval.update(dtype=np.dtype("int32"))), *eqn.outvars[1:]]
    )


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    "fault",
    [
        one_input_less,
        one_input_more,
        body_with_one_input_more,
        body_with_one_output_less,
        result_of_another_type,
    ],
    ids=lambda f: f.__name__,
)
def test_boundaries(engine, carrier, fault):
    closed = engine.trace(CARRIERS[carrier], jnp.ones(4))
    if carrier == "pallas_call" and fault is body_with_one_output_less:
        pytest.skip("a kernel has no outputs")
    broken = with_param(closed, carrier, fault)
    with pytest.raises(IllFormed):
        check_closed(broken)


@pytest.mark.parametrize("carrier", ["scan", "while"])
def test_carry_of_another_type(engine, carrier):
    broken = with_param(
        engine.trace(CARRIERS[carrier], jnp.ones(4)), carrier, carry_of_another_type
    )
    with pytest.raises(IllFormed, match=r"int32\[4\]"):
        check_closed(broken)


@pytest.mark.parametrize("carrier", ["scan", "cond"])
def test_an_input_bound_twice(engine, carrier):
    def two(x):
        if carrier == "scan":
            return lax.scan(lambda c, v: (c + v, c), x, jnp.stack([x, x]))
        return lax.cond(x[0] > 0, lambda a, b: a + b, lambda a, b: a, x, x * 2)

    broken = with_param(engine.trace(two, jnp.ones(4)), carrier, body_that_binds_an_input_twice)
    with pytest.raises(IllFormed):
        check_closed(broken)


def test_mis_sliced_scan_inputs(engine):
    def scan(x):
        return lax.scan(lambda c, v: (c + jnp.sum(v), c), jnp.float32(0), jnp.stack([x, x, x]))[1]

    for wrong in ((2, 4), (3, 5), (4, 3)):

        def change(eqn, wrong=wrong):
            xs = eqn.invars[-1]
            other = jaxprs.new_var(xs.aval.update(shape=wrong, sharding=None))
            return eqn.replace(invars=[*eqn.invars[:-1], other])

        closed = engine.trace(scan, jnp.ones(4))
        with pytest.raises(IllFormed):
            check_closed(with_param(closed, "scan", change))

        def wrong_slice(eqn, wrong=wrong):
            # The stacked operand stays, the body takes another slice of it.
            (e,) = bodies.carried(eqn).entered
            inputs = list(jaxprs.invars(e.body))
            new = jaxprs.new_var(inputs[-1].aval.update(shape=wrong, sharding=None))
            eqns = [jaxprs.substitute(q, {inputs[-1]: new}) for q in jaxprs.opened(e.body).eqns]
            return bodies.with_bodies(
                eqn, {e.key: replaced(e.body, invars=[*inputs[:-1], new], eqns=eqns)}
            )

        with pytest.raises(IllFormed):
            check_closed(with_param(closed, "scan", wrong_slice))


def test_stacked_outputs_of_another_length(engine):
    def change(eqn):
        ys = eqn.outvars[-1]
        return eqn.replace(
            outvars=[*eqn.outvars[:-1], jaxprs.new_var(ys.aval.update(shape=(5, 4), sharding=None))]
        )

    f = lambda x: lax.scan(lambda c, v: (c + v, c), x, jnp.stack([x, x]))[1] * 2
    closed = engine.trace(f, jnp.ones(4))
    with pytest.raises(IllFormed):
        check_closed(with_param(closed, "scan", change))


EFFECTFUL = {
    name: f
    for name, f in {
        "jit": lambda g: lambda x: jax.jit(g)(x),
        "scan": lambda g: lambda x: lax.scan(lambda c, v: (g(c), v), x, jnp.stack([x, x]))[0],
        "while": lambda g: lambda x: lax.while_loop(lambda c: c[0] < 9, g, x),
        "cond": lambda g: lambda x: lax.cond(x[0] > 0, g, lambda y: y, x),
        "remat": lambda g: lambda x: jax.checkpoint(g)(x),
        "shard_map": lambda g: (
            lambda x: jax.shard_map(g, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))(x)
        ),
    }.items()
}


def tells(x):
    jax.debug.callback(lambda v: None, x)
    return core_of_body(x)


@pytest.mark.parametrize("carrier", EFFECTFUL)
class TestEffects:
    def test_missing_from_the_body(self, engine, carrier):
        closed = engine.trace(EFFECTFUL[carrier](tells), jnp.ones(4))
        check_closed(closed)
        broken = edit_where(closed, carrier, lambda b: replaced(b, effects=frozenset()))
        with pytest.raises(IllFormed, match="effect"):
            check_closed(broken)

    def test_missing_from_the_equation_inside(self, engine, carrier):
        def silent(body):
            eqns, i = at(body, "debug_callback")
            eqns[i] = eqns[i].replace(effects=frozenset())
            return replaced(body, eqns=eqns)

        closed = engine.trace(EFFECTFUL[carrier](tells), jnp.ones(4))
        with pytest.raises(IllFormed, match="effect"):
            check_closed(edit_where(closed, carrier, silent))

    def test_missing_from_the_carrier(self, engine, carrier):
        closed = engine.trace(EFFECTFUL[carrier](tells), jnp.ones(4))
        broken = with_param(closed, carrier, lambda e: e.replace(effects=frozenset()))
        with pytest.raises(IllFormed, match="effect"):
            check_closed(broken)

    def test_lost_in_a_rewrite(self, engine, carrier):
        closed = engine.trace(EFFECTFUL[carrier](tells), jnp.ones(4))

        def without(body):
            eqns, i = at(body, "debug_callback")
            new = replaced(body, eqns=eqns[:i] + eqns[i + 1 :])
            with _inside(closed, body), pytest.raises(IllFormed, match="effect"):
                check_rewritten(new, body)
            return body

        assert edit_where(closed, carrier, without) is not None


class TestVma:
    def program(self, engine, f, x=None):
        g = jax.shard_map(f, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))
        return engine.trace(g, jnp.ones(4) if x is None else x)

    def invariant_sine(self, body):
        return retyped(body, lambda a: vma.with_varying(a, frozenset()))

    def test_a_wrong_result(self, engine):
        closed = self.program(engine, core_of_body)
        broken = edit_where(closed, "shard_map", self.invariant_sine)
        with pytest.raises(IllFormed):
            check_closed(broken)

    @pytest.mark.parametrize(
        "carrier", ["jit", "scan", "cond", "while", "remat", "custom_jvp_call", "custom_vjp_call"]
    )
    def test_inside_a_nested_body(self, engine, carrier):
        closed = self.program(engine, CARRIERS[carrier])
        check_closed(closed)
        broken = edit_where(closed, carrier, self.invariant_sine)
        with pytest.raises(IllFormed):
            check_closed(broken)

    @pytest.mark.parametrize(
        "carrier", ["jit", "scan", "cond", "while", "remat", "custom_jvp_call", "custom_vjp_call"]
    )
    def test_a_result_that_is_invariant_outside_only(self, engine, carrier):
        closed = self.program(engine, CARRIERS[carrier])

        def change(eqn):
            var = eqn.outvars[0]
            new = jaxprs.new_var(vma.with_varying(var.aval, frozenset()))
            return eqn.replace(outvars=[new, *eqn.outvars[1:]])

        with pytest.raises(IllFormed):
            check_closed(with_param(closed, carrier, change))

    def test_a_varying_value_that_leaves_as_if_invariant(self, engine):
        closed = self.program(engine, core_of_body)

        def change(eqn):
            var = eqn.outvars[0]
            aval = var.aval.update(shape=(1,), sharding=None)
            return eqn.replace(
                params={**eqn.params, "out_specs": (P(None),)}, outvars=[jaxprs.new_var(aval)]
            )

        with pytest.raises(IllFormed):
            check_closed(with_param(closed, "shard_map", change))

    def test_a_spec_that_gives_another_shape(self, engine):
        closed = self.program(engine, core_of_body)
        change = lambda eqn: eqn.replace(params={**eqn.params, "in_specs": (P(None),)})
        with pytest.raises(IllFormed):
            check_closed(with_param(closed, "shard_map", change))


REAL = {
    **CARRIERS,
    "grad": lambda x: jax.grad(lambda y: jnp.sum(CARRIERS["scan"](y)))(x),
    "nested": lambda x: jax.grad(
        lambda y: jnp.sum(
            lax.scan(jax.checkpoint(lambda c, v: (soft(c) * v, hard(c))), y, jnp.stack([x, x]))[1]
        )
    )(x),
    "sort": lambda x: (jnp.argsort(x), jnp.take(x, jnp.argmax(x))),
    "random": lambda x: jax.random.permutation(jax.random.key(0), x),
    "vmapped": lambda x: jax.vmap(lambda y: lax.cond(y > 0, jnp.sin, jnp.cos, y))(x),
    "refs": lambda x: [r := jax.new_ref(x), r.__setitem__(0, 1.0), r[...]][2],
    "linalg": lambda x: jnp.linalg.solve(jnp.eye(4) + x, x),
    "psum": lambda x: jax.grad(
        lambda y: jnp.sum(
            jax.shard_map(
                lambda a: jnp.sin(a) + lax.psum(a, "data"),
                mesh=mesh_of(),
                in_specs=P("data"),
                out_specs=P("data"),
            )(y)
        )
    )(x),
    "effects": EFFECTFUL["scan"](tells),
}


@pytest.mark.parametrize("name", REAL)
def test_real_programs_pass(engine, name):
    closed = engine.trace(REAL[name], jnp.linspace(0.1, 1, 4))
    check_closed(closed)
    check_rewritten(closed, closed)


class TestInterface:
    def test_messages(self, engine):
        closed = engine.trace(lambda x: jnp.sin(x) * 2, jnp.ones(4))
        jaxpr = jaxprs.opened(closed)
        with pytest.raises(IllFormed, match=r"^2 outvars, wanted 1$"):
            check_rewritten(replaced(closed, outvars=[*jaxpr.outvars, *jaxpr.outvars]), closed)
        with pytest.raises(IllFormed, match=r"reads operand 0, a float32\[4\] that nothing before"):
            check_rewritten(undefined_variable(closed), closed)
        with pytest.raises(IllFormed, match=r"equation 1 \(sin\) binds a variable twice"):
            check_rewritten(double_binding(closed), closed)

    def test_weak_type_of_an_output(self, engine):
        strong = engine.trace(lambda x: lax.sin(x), jnp.ones((), F32))
        weak = engine.trace(lambda x: lax.sin(x), jax.jit(lambda: 1.0)())
        with pytest.raises(IllFormed):
            check_rewritten(weak, strong)

    def test_path_to_the_fault(self, engine):
        def f(x):
            return jax.jit(
                lambda y: lax.scan(lambda c, v: (core_of_body(c), v), y, jnp.stack([y, y]))[0]
            )(x)

        broken = edit_where(engine.trace(f, jnp.ones(4)), "scan", undefined_variable)
        with pytest.raises(IllFormed, match=r"^in jit's jaxpr: in scan's jaxpr: equation"):
            check_closed(broken)

    def test_wrong_constants(self, engine):
        table = np.arange(4.0, dtype=np.float32)
        closed = engine.trace(lambda x: x + jnp.asarray(table), jnp.ones(4))
        if not jaxprs.constvars(closed):
            pytest.skip("the table became a literal")
        jaxpr = jaxprs.opened(closed)
        from relower.compat import tracing

        with pytest.raises((IllFormed, AssertionError)):
            check_closed(tracing.close(jaxpr, [np.zeros(3)]))


@pytest.mark.parametrize("carrier", ["scan", "shard_map", "jit", "cond", "while", "remat"])
@pytest.mark.parametrize("fault", [one_input_less, one_input_more, body_with_one_output_less])
def test_boundaries_of_a_rewritten_equation(engine, carrier, fault):
    """What the interpreter checks around the equation, where jax's own rule is not asked."""
    closed = engine.trace(CARRIERS[carrier], jnp.ones(4))
    with pytest.raises(IllFormed):
        check_rewritten(with_param(closed, carrier, fault), closed)


def test_shapes_at_the_boundary_of_a_rewritten_equation(engine):
    closed = engine.trace(CARRIERS["shard_map"], jnp.ones(4))
    change = lambda eqn: eqn.replace(params={**eqn.params, "in_specs": (P(None),)})
    with pytest.raises(IllFormed, match=r"input 0 of shard_map's jaxpr has type"):
        check_rewritten(with_param(closed, "shard_map", change), closed)

    stacked = engine.trace(lambda x: lax.scan(lambda c, v: (c + v, c), x[0], x)[1], jnp.ones(4))
    shorter = lambda eqn: eqn.replace(params={**eqn.params, "length": 3})
    with pytest.raises(IllFormed, match=r"of a scan of 3"):
        check_rewritten(with_param(stacked, "scan", shorter), stacked)


def test_a_constant_that_a_shard_map_closes_over(engine):
    """Its type names no mesh, outside nor inside."""
    table = np.array([1.0, 2.0], np.float32)

    def fn(x):
        constant = jnp.asarray(table)
        local = lambda x: jnp.sin(x) * constant[0]
        return jax.shard_map(local, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))(x)

    with jax.set_mesh(mesh_of()):
        done = engine.run(fn, [engine.SIN], jnp.ones(8))
    assert done.report.counts() == {"sin_to_cos": 1}
