"""Substitution in nested bodies: what changes, what stays, what is shared, what goes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.compat import bodies, jaxprs
from relower.compat.source import name_stack
from relower.passes import registry

F32 = jnp.float32


@functools.cache
def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


@jax.custom_jvp
def soft(x):
    return jnp.sin(x) * 2


soft.defjvp(lambda p, t: (soft(*p), t[0] * jnp.cos(p[0]) * 2))


@jax.custom_vjp
def hard(x):
    return jnp.sin(x) * 3


hard.defvjp(lambda x: (hard(x), x), lambda x, g: (g * jnp.cos(x) * 3,))


def in_jit(x):
    return jax.jit(lambda y: jnp.sin(y) + 1)(x)


def in_scan(x):
    def body(c, v):
        return c + jnp.sin(v) + jnp.sin(x), jnp.sin(c)

    return lax.scan(body, x, jnp.stack([x, x * 2]))


def in_while(x):
    return lax.while_loop(
        lambda c: jnp.sum(jnp.sin(c[0])) > c[1] - 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0)
    )


def in_fori_with_constant(x):
    return lax.fori_loop(0, 3, lambda i, c: c + jnp.sin(x) * i, x)


def in_cond(x):
    return lax.cond(x[0] > 0, lambda y: jnp.sin(y), lambda y: y * 2, x)


def in_switch(x):
    branches = [jnp.sin, lambda y: y + jnp.sin(y), lambda y: y]
    return lax.switch(jnp.int32(x[0]), branches, x)


def in_remat(x):
    return jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x)


def in_grad_of_remat(x):
    return jax.value_and_grad(lambda y: jnp.sum(in_remat(y) ** 2))(x)


def in_grad_of_scan_of_remat(x):
    @jax.checkpoint
    def body(c, v):
        return jnp.sin(c) * v, jnp.sum(jnp.sin(c))

    def f(y):
        c, s = lax.scan(body, y, jnp.stack([x, x + 1]))
        return jnp.sum(c) + jnp.sum(s)

    return jax.value_and_grad(f)(x)


def in_custom_jvp(x):
    return soft(x)


def in_grad_of_custom_jvp(x):
    return jax.value_and_grad(lambda y: jnp.sum(jnp.sin(soft(y))))(x)


def in_custom_vjp(x):
    return hard(x)


def in_grad_of_custom_vjp(x):
    return jax.value_and_grad(lambda y: jnp.sum(jnp.sin(hard(y))))(x)


def in_shard_map(x):
    f = lambda y: jnp.sin(y) + lax.psum(jnp.sin(y), "data")
    return jax.shard_map(f, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"))(x)


def in_scan_in_shard_map_in_jit(x):
    def device(y):
        return lax.scan(lambda c, v: (c + jnp.sin(v), jnp.sin(c)), jnp.sum(y), y)

    f = jax.shard_map(
        device, mesh=mesh_of(), in_specs=P("data"), out_specs=(P(), P("data")), check_vma=False
    )
    return jax.jit(f)(x)


def in_vmap(x):
    def one(y):
        return lax.cond(y > 0, jnp.sin, jnp.cos, y) + lax.fori_loop(
            0, 2, lambda i, c: jnp.sin(c), y
        )

    return jax.vmap(one)(x)


def in_custom_vmap(x):
    @jax.custom_batching.custom_vmap
    def f(y):
        return jnp.sin(y)

    f.def_vmap(lambda size, batched, y: (jnp.sin(y), True))
    return f(x)


def in_linear_solve_nothing(x):
    # custom_linear_solve's bodies are not entered: nothing inside changes.
    return lax.custom_linear_solve(lambda v: v * 2, jnp.sin(x), lambda _, b: b / 2)


PLACES = [f for name, f in list(globals().items()) if name.startswith("in_")]


@pytest.mark.parametrize("fn", PLACES, ids=lambda f: f.__name__)
def test_every_sine_is_replaced_wherever_it_stands(engine, fn):
    x = jnp.linspace(-0.5, 1.5, 4, dtype=F32)
    closed = engine.trace(fn, x)
    before = engine.names(closed)
    done = engine.run(fn, [engine.SIN], x)
    after = engine.names(done.closed)
    assert "sin" in before
    assert "sin" not in after
    assert done.report.counts()["sin_to_cos"] >= 1
    got = jax.jit(engine.function(done.closed))(x)
    want = jax.tree.leaves(jax.jit(fn)(x))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6)


DIFFERENTIABLE = [
    in_jit,
    in_scan,
    in_fori_with_constant,
    in_cond,
    in_remat,
    in_custom_jvp,
    in_custom_vjp,
    in_shard_map,
    in_vmap,
]


@pytest.mark.parametrize("fn", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_grad_of_the_rewritten_program(engine, fn):
    x = jnp.linspace(0.1, 1.5, 4, dtype=F32)
    done = engine.run(fn, [engine.SIN], x)

    def total(outs):
        return sum(jnp.sum(o) for o in jax.tree.leaves(outs))

    got = jax.grad(lambda x: total(engine.function(done.closed)(x)))(x)
    want = jax.grad(lambda x: total(fn(x)))(x)
    assert float(jnp.abs(want).max()) > 0
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def by_source(engine, closed):
    return [e for _, e in engine.walk(closed)]


class TestSurgery:
    def test_equations_outside_a_site_are_the_same_objects(self, engine):
        def f(x):
            y = x * 2  # before
            z = jnp.sin(y)
            return jnp.exp(z) + y

        closed = engine.trace(f, jnp.ones(4))
        new = engine.rewrite(closed, [engine.SIN]).closed
        old_eqns, new_eqns = jaxprs.opened(closed).eqns, jaxprs.opened(new).eqns
        kept = [e for e in old_eqns if e.primitive.name != "sin"]
        assert len(kept) == 3
        assert all(any(e is n for n in new_eqns) for e in kept)

    def test_carriers_keep_all_but_their_body(self, engine):
        def f(x):
            with jax.named_scope("outer"):
                return jax.jit(lambda y: lax.scan(lambda c, v: (jnp.sin(c) * v, c), y[0], y))(x)

        closed = engine.trace(f, jnp.ones(4))
        new = engine.rewrite(closed, [engine.SIN]).closed
        (old_jit,), (new_jit,) = jaxprs.opened(closed).eqns, jaxprs.opened(new).eqns
        assert old_jit is not new_jit
        self.same_but(old_jit, new_jit, "jaxpr")
        assert name_stack(new_jit) == "outer"
        old_scan = next(
            e for e in jaxprs.opened(old_jit.params["jaxpr"]).eqns if e.primitive.name == "scan"
        )
        new_scan = next(
            e for e in jaxprs.opened(new_jit.params["jaxpr"]).eqns if e.primitive.name == "scan"
        )
        self.same_but(old_scan, new_scan, "jaxpr")

    def same_but(self, old, new, *params):
        assert old.primitive is new.primitive
        assert list(old.invars) == list(new.invars)
        assert list(old.outvars) == list(new.outvars)
        assert old.effects == new.effects
        assert old.source_info is new.source_info
        assert old.ctx is new.ctx
        for name, value in old.params.items():
            if name not in params:
                assert new.params[name] is value

    def test_replacement_takes_name_stack_line_and_context(self, engine):
        def f(x):
            with jax.named_scope("here"), jax.default_matmul_precision("highest"):
                return jnp.sin(x)

        closed = engine.trace(f, jnp.ones(4))
        (site,) = jaxprs.opened(closed).eqns
        new = jaxprs.opened(engine.rewrite(closed, [engine.SIN]).closed).eqns
        assert [e.primitive.name for e in new] == ["sub", "cos"]
        for e in new:
            assert e.source_info is site.source_info
            assert name_stack(e) == "here"

    def test_untouched_bodies_are_the_same_objects(self, engine):
        def f(x):
            plain = lax.scan(lambda c, v: (c * v, c), x[0], x)
            return plain, lax.scan(lambda c, v: (jnp.sin(c) * v, c), x[0], x)

        closed = engine.trace(f, jnp.ones(4))
        new = engine.rewrite(closed, [engine.SIN]).closed
        old_scans = [e for e in jaxprs.opened(closed).eqns if e.primitive.name == "scan"]
        new_scans = [e for e in jaxprs.opened(new).eqns if e.primitive.name == "scan"]
        assert old_scans[0] is new_scans[0]
        assert old_scans[1] is not new_scans[1]

    def test_effects_and_their_order_stay(self, engine):
        seen = []

        def f(x):
            def body(c, v):
                jax.debug.callback(lambda a: seen.append(float(a)), v, ordered=True)
                y = jnp.sin(c)
                jax.debug.callback(lambda a: seen.append(-float(a)), v, ordered=True)
                return y, ()

            return lax.scan(body, x[0], x)[0]

        x = jnp.arange(3.0)
        closed = engine.trace(f, x)
        done = engine.run(f, [engine.SIN], x)
        assert jaxprs.opened(done.closed).effects == jaxprs.opened(closed).effects
        jax.jit(engine.function(done.closed))(x)
        jax.effects_barrier()
        assert seen == [0, 0, 1, -1, 2, -2]

    def test_a_value_replaced_by_an_operand_reaches_every_reader(self, engine):
        def f(x, one):
            y = x * 1.0
            inner = jax.jit(lambda a: (a * 1.0, jnp.exp(a)))(y)
            return y, inner, lax.cond(y[0] > 0, lambda: y * 1.0, lambda: y), y

        x = jnp.arange(1.0, 4.0)
        done = engine.run(f, [engine.ONE], x, jnp.ones(3))
        assert "mul" not in engine.names(done.closed)
        got = engine.function(done.closed)(x, jnp.ones(3))
        for g, w in zip(got, jax.tree.leaves(f(x, jnp.ones(3))), strict=True):
            np.testing.assert_array_equal(g, w)

    def test_an_output_that_is_an_input(self, engine):
        done = engine.run(lambda x: (x * 1.0, (x * 1.0) * 1.0), [engine.ONE], jnp.ones(3))
        assert engine.names(done.closed) == []
        np.testing.assert_array_equal(engine.function(done.closed)(jnp.ones(3))[1], np.ones(3))

    def test_one_value_for_two_results(self, engine):
        both = engine.make_pass(
            "both",
            "sort_p",
            engine.every,
            engine.whole(lambda a, b, **k: [lax.sort(a)] * 2 if a is b else [a * 2, a * 2]),
        )

        def f(x):
            return lax.sort((x, x + 0), num_keys=1)

        doubled = engine.make_pass(
            "doubled", "sort_p", engine.every, engine.whole(lambda a, b: (lambda y: [y, y])(a + b))
        )
        done = engine.run(f, [doubled], jnp.ones(3))
        got = engine.function(done.closed)(jnp.ones(3))
        np.testing.assert_array_equal(got[0], 2 * np.ones(3))
        np.testing.assert_array_equal(got[1], 2 * np.ones(3))
        del both

    def test_literals_as_operands_and_results(self, engine):
        zero = engine.make_pass(
            "zero", "sin_p", engine.every, engine.whole(lambda x, **k: [jnp.float32(0)])
        )

        def f(x):
            y = jnp.sin(x)
            return y, y + 1, lax.scan(lambda c, _: (c + y, jnp.sin(x)), x, None, length=2)

        done = engine.run(f, [zero], jnp.float32(2))
        np.testing.assert_array_equal(
            [np.sum(o) for o in engine.function(done.closed)(jnp.float32(2))], [0, 1, 2, 0]
        )

    def test_a_constant_array_is_refused(self, engine):
        table = np.arange(3.0, dtype=np.float32)
        bad = engine.make_pass(
            "bad", "sin_p", engine.every, engine.whole(lambda x, **k: [x + jnp.asarray(table)])
        )
        with pytest.raises(ValueError, match="closed over 1 array constant"):
            engine.run(jnp.sin, [bad], jnp.ones(3))

    def test_another_type_is_declined(self, engine):
        bad = engine.make_pass(
            "bad", "sin_p", engine.every, engine.whole(lambda x, **k: [x.astype(jnp.bfloat16)])
        )
        done = engine.run(lambda x: jax.jit(jnp.sin)(x), [bad], jnp.ones(3))
        (site,) = done.report.declined
        (reason,) = site.reasons
        assert str(reason) == (
            "the replacement by bad has another type (found bfloat16[3]; wanted float32[3])"
        )
        assert "sin" in engine.names(done.closed)

    def test_a_wrong_number_of_values_is_an_error(self, engine):
        bad = engine.make_pass("bad", "sin_p", engine.every, engine.whole(lambda x, **k: [x, x]))
        with pytest.raises(ValueError, match="bad returned 2 values, wanted 1"):
            engine.run(jnp.sin, [bad], jnp.ones(3))

    def test_local_x64_site(self, engine):
        # The replacement is traced where 64-bit types are off: it must decline or keep the type.
        def f(x):
            with jax.enable_x64(True):
                return jnp.sin(x.astype(jnp.float64)).astype(F32)

        done = engine.run(f, [engine.SIN], jnp.ones(3))
        np.testing.assert_allclose(
            jax.jit(engine.function(done.closed))(jnp.ones(3))[0], np.sin(np.ones(3)), rtol=1e-6
        )


def functions(engine, closed, *args):
    """The functions in the lowered module, and how often each is called."""
    text = jax.jit(engine.function(closed)).lower(*args).as_text()
    made = re.findall(r"func\.func (?:private|public) @([\w.]+)", text)
    return made, text


class TestSharing:
    def test_one_body_at_four_sites_stays_one_function(self, engine):
        @jax.jit
        def layer(x):
            return jnp.sin(x) * 2

        def f(x):
            return layer(layer(layer(layer(x))))

        x = jnp.ones(4)
        done = engine.run(f, [engine.SIN], x)
        calls = [e for e in jaxprs.opened(done.closed).eqns if e.primitive.name == "jit"]
        assert len({id(e.params["jaxpr"]) for e in calls}) == 1
        assert done.report.counts() == {"sin_to_cos": 1}
        (site,) = done.report.applied
        assert site.calls == 4
        made, text = functions(engine, done.closed, x)
        assert sorted(made) == ["layer", "main"]
        assert text.count("call @layer") == 4
        assert text.count("stablehlo.cosine") == 1

    def test_dropped_operands_leave_the_body_shared(self, engine):
        @jax.jit
        def layer(x, unused_after):
            return x * unused_after + x

        # One fact, two calls: both lose the operand and go on sharing the body.
        def f(x):
            one = jnp.ones(4)
            return layer(layer(x, one), one)

        x = jnp.arange(4.0)
        done = engine.run(f, [engine.ONE], x)
        calls = [e for e in jaxprs.opened(done.closed).eqns if e.primitive.name == "jit"]
        assert [len(e.invars) for e in calls] == [1, 1]
        assert len({id(e.params["jaxpr"]) for e in calls}) == 1
        assert "broadcast_in_dim" not in engine.names(done.closed)
        np.testing.assert_array_equal(engine.function(done.closed)(x)[0], f(x))

    def test_specialised_where_facts_differ(self, engine):
        @jax.jit
        def layer(x, scale):
            return x * scale + 1

        def f(x):
            one, two = jnp.ones(4), jnp.full(4, 2.0)
            return layer(layer(layer(layer(x, one), two), one), two)

        x = jnp.arange(4.0)
        done = engine.run(f, [engine.ONE], x)
        calls = [e for e in jaxprs.opened(done.closed).eqns if e.primitive.name == "jit"]
        assert [len(e.invars) for e in calls] == [1, 2, 1, 2]
        assert len({id(e.params["jaxpr"]) for e in calls}) == 2
        made, _ = functions(engine, done.closed, x)
        assert len(made) == 3
        np.testing.assert_array_equal(engine.function(done.closed)(x)[0], f(x))

    def test_a_body_shared_by_two_scans(self, engine):
        @jax.jit
        def body(c, v):
            return jnp.sin(c) * v, c

        def f(x):
            return lax.scan(body, *lax.scan(body, x[0], x))

        x = jnp.linspace(0.1, 1, 4)
        closed = engine.trace(f, x)
        done = engine.run(f, [engine.SIN], x)

        def distinct(c):
            scans = [e for e in jaxprs.opened(c).eqns if e.primitive.name == "scan"]
            inner = [e.params["jaxpr"] for e in scans]
            nested = [e.params["jaxpr"] for b in inner for e in jaxprs.opened(b).eqns]
            return len({id(b) for b in inner}), len({id(b) for b in nested})

        assert distinct(done.closed) == distinct(closed)
        made, _ = functions(engine, done.closed, x)
        plain, _ = functions(engine, closed, x)
        assert len(made) == len(plain)

    def test_a_body_with_different_demand_and_a_dead_site(self, engine):
        # Where only exp is demanded the sine is dead, and a dead site is none.
        @jax.jit
        def two(x):
            return jnp.sin(x), jnp.exp(x)

        def f(x):
            return two(x)[1], two(x + 1)

        x = jnp.ones(4)
        done = engine.run(f, [engine.SIN], x)
        for g, w in zip(engine.function(done.closed)(x), jax.tree.leaves(f(x)), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5)

    def test_operands_are_part_of_what_is_done(self, engine):
        # Two calls of one body, in each of which another operand is the one that is kept.
        @jax.jit
        def product(a, b):
            return a * b

        def find(scope, index):
            for position, atom in enumerate(scope.eqns[index].invars):
                known = scope.fact(atom).constant
                if known is not None and known.value == 1:
                    return engine.every(scope, index).__class__(scope, index, {"o": 1 - position})
            return None

        def replace(match):
            from relower.passes.base import Replacement

            operand = match.eqn.invars[match.captures["o"]]
            return Replacement((operand,), tuple(match.eqn.outvars), lambda x: [x], ())

        one = engine.make_pass("one", "mul_p", find, replace)

        def f(x):
            return product(x, jnp.ones(4)), product(jnp.ones(4), x)

        x = jnp.arange(4.0)
        done = engine.run(f, [one], x)
        for out in engine.function(done.closed)(x):
            np.testing.assert_array_equal(out, x)


class TestDeadCode:
    def test_only_what_the_rewrite_killed_goes(self, engine):
        def f(x):
            jnp.exp(x)  # dead before
            one = jnp.full((3,), 1.0, F32)  # killed
            y = x * one
            dead = jnp.log(y)  # dead before, reads the site
            del dead
            return y

        done = engine.run(f, [engine.ONE], jnp.ones(3))
        assert engine.names(done.closed) == ["exp", "log"]
        assert engine.names(engine.trace(f, jnp.ones(3))) == [
            "exp",
            "broadcast_in_dim",
            "mul",
            "log",
        ]

    def test_a_dead_site_is_left_alone(self, engine):
        def f(x):
            jnp.sin(x)
            return lax.scan(lambda c, v: (c + v, ()), 0.0, x)[0], jax.jit(
                lambda y: (jnp.sin(y), y)
            )(x)[1]

        closed = engine.trace(f, jnp.ones(3))
        done = engine.rewrite(closed, [engine.SIN])
        assert done.closed is closed
        assert done.report.sites == ()

    @pytest.mark.parametrize(
        "kind", ["jit", "scan", "cond", "while", "shard_map", "remat", "grad_remat"]
    )
    def test_unread_operands_leave_with_their_producers(self, engine, kind):
        def carrier(x, one):
            if kind == "jit":
                return jax.jit(lambda o, y: y * o)(one, x)
            if kind == "scan":
                return lax.scan(lambda c, v: (c * one + v, c), x, jnp.stack([x, x]))
            if kind == "cond":
                return lax.cond(x[0] > 0, lambda o, y: y * o, lambda o, y: y, one, x)
            if kind == "while":
                return lax.while_loop(lambda c: c[0] < 9, lambda c: c * one + 1, x)
            if kind == "shard_map":
                return jax.shard_map(
                    lambda o, y: y * o,
                    mesh=mesh_of(),
                    in_specs=(P("data"), P("data")),
                    out_specs=P("data"),
                )(one, x)
            if kind == "remat":
                return jax.checkpoint(lambda o, y: y * o + 1, prevent_cse=(True, False))(one, x)
            return jax.grad(lambda y: jnp.sum(jax.checkpoint(lambda o, y: jnp.exp(y * o))(one, y)))(
                x
            )

        def f(x):
            return carrier(x, jnp.full((4,), 1.0))

        x = jnp.arange(4.0)
        closed = engine.trace(f, x)
        done = engine.run(f, [engine.ONE], x)
        assert done.report.counts()["times_one"] >= 1
        outer = [e.primitive.name for e in jaxprs.opened(done.closed).eqns]
        if kind == "grad_remat":
            return
        assert "broadcast_in_dim" not in outer
        (old,) = [e for e in jaxprs.opened(closed).eqns if bodies.carried(e).entered]
        (new,) = [e for e in jaxprs.opened(done.closed).eqns if bodies.carried(e).entered]
        assert len(new.invars) == len(old.invars) - 1
        for g, w in zip(
            jax.jit(engine.function(done.closed))(x), jax.tree.leaves(f(x)), strict=True
        ):
            np.testing.assert_array_equal(g, w)

    def test_an_operand_that_one_body_still_reads_stays(self, engine):
        def f(x, one):
            o = jnp.full((4,), 1.0)
            return lax.cond(x[0] > 0, lambda o, y: y * o, lambda o, y: y - o, o, x)

        x = jnp.arange(4.0)
        done = engine.run(f, [engine.ONE], x, x)
        assert "broadcast_in_dim" in [e.primitive.name for e in jaxprs.opened(done.closed).eqns]
        np.testing.assert_array_equal(engine.function(done.closed)(x, x)[0], f(x, x))

    def test_refs_beside_a_dropped_operand(self, engine):
        def f(x):
            ref = jax.new_ref(x)
            one = jnp.full((4,), 1.0)

            @jax.jit
            def g(o, y, r):
                r[...] = r[...] + y * o

            g(one, x, ref)
            g(one, x, ref)
            return ref[...]

        x = jnp.arange(4.0)
        done = engine.run(f, [engine.ONE], x)
        assert done.report.counts() == {"times_one": 1}
        np.testing.assert_array_equal(jax.jit(engine.function(done.closed))(x)[0], 3 * x)

    def test_refs_in_a_scan(self, engine):
        def f(x):
            ref = jax.new_ref(x)
            one = jnp.full((4,), 1.0)

            def body(c, v):
                ref[...] = ref[...] + v * one
                return c * one, ref[0]

            out = lax.scan(body, x, jnp.stack([x, x]))
            return out, ref[...]

        x = jnp.arange(4.0)
        done = engine.run(f, [engine.ONE], x)
        for g, w in zip(
            jax.jit(engine.function(done.closed))(x), jax.tree.leaves(jax.jit(f)(x)), strict=True
        ):
            np.testing.assert_array_equal(g, w)


def sine_kernel(x_ref, s_ref, o_ref):
    @pl.when(pl.program_id(0) >= 0)
    def _():
        o_ref[...] = jnp.sin(x_ref[...]) * 1.0

    s_ref[...] += jnp.sin(x_ref[...])

    def body(i, c):
        o_ref[...] = o_ref[...] + jnp.sin(c)
        return c * 1.0

    lax.fori_loop(0, 2, body, x_ref[...])


def scoped_kernel(x_ref, s_ref, o_ref):
    def inner(tmp_ref):
        tmp_ref[...] = jnp.sin(x_ref[...])
        o_ref[...] = tmp_ref[...] * 1.0
        s_ref[...] = tmp_ref[...]

    from jax.experimental.pallas import tpu as pltpu

    pl.run_scoped(inner, pltpu.VMEM((8, 128), F32))


@pytest.mark.parametrize("kernel", [sine_kernel, scoped_kernel])
class TestPallas:
    def call(self, kernel, interpret):
        from jax.experimental.pallas import tpu as pltpu

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[spec],
            out_specs=[spec, spec],
            out_shape=[jax.ShapeDtypeStruct((16, 128), F32)] * 2,
            interpret=pltpu.InterpretParams() if interpret == "tpu" else interpret,
        )

    def test_interpreted(self, engine, kernel):
        x = jnp.linspace(0, 1, 16 * 128, dtype=F32).reshape(16, 128)
        f = self.call(kernel, "tpu")
        done = engine.run(f, [engine.SIN, engine.ONE], x)
        names = engine.names(done.closed)
        assert "sin" not in names
        assert "cos" in names
        assert done.report.counts()["times_one"] >= 1
        old, new = jaxprs.opened(engine.trace(f, x)).eqns, jaxprs.opened(done.closed).eqns
        olds = [e for e in old if e.primitive.name == "pallas_call"]
        news = [e for e in new if e.primitive.name == "pallas_call"]
        assert olds[0].effects == news[0].effects
        assert olds[0].params["jaxpr"].effects == news[0].params["jaxpr"].effects
        got, want = jax.jit(engine.function(done.closed))(x), jax.jit(f)(x)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)

    def test_lowered_for_tpu(self, engine, kernel):
        from jax.sharding import AbstractDevice, AbstractMesh

        x = jax.ShapeDtypeStruct((16, 128), F32)
        f = self.call(kernel, False)
        mesh = AbstractMesh((1,), ("d",), abstract_device=AbstractDevice("TPU7x", 1, "tpu"))

        def kernel_text(f):
            return jax.jit(f).trace(x).lower(lowering_platforms=("tpu",)).as_text()

        with jax.sharding.use_abstract_mesh(mesh):
            done = engine.run(f, [engine.SIN, engine.ONE], x)
            text = kernel_text(engine.function(done.closed))
            assert "tpu_custom_call" in text
            assert text != kernel_text(f)

    def test_effects_of_a_replacement_name_the_refs(self, engine, kernel):
        from relower.compat import tracing

        get = tracing.primitive("state.primitives.get_p")

        def not_yet_negated(scope, index):
            (var,) = scope.eqns[index].outvars
            done = [i for i in scope.readers(var) if scope.eqns[i].primitive.name == "neg"]
            return None if done else engine.every(scope, index)

        def negated_twice(match):
            from relower.passes.base import Replacement

            return Replacement(
                (match.eqn.invars[0],),
                tuple(match.eqn.outvars),
                lambda ref: [lax.neg(lax.neg(ref[...]))],
                (),
            )

        reads = dataclasses.replace(
            engine.make_pass("reads", "sin_p", not_yet_negated, negated_twice),
            roots=lambda: frozenset({get}),
        )
        x = jnp.linspace(0, 1, 16 * 128, dtype=F32).reshape(16, 128)
        f = self.call(kernel, "tpu")
        done = engine.run(f, [reads], x)
        assert done.report.counts()["reads"] >= 2
        for _, eqn in engine.walk(done.closed):
            refs = {e.input for e in eqn.effects if hasattr(e, "input")}
            assert all(any(r is a for a in eqn.invars) for r in refs)
        got, want = jax.jit(engine.function(done.closed))(x), jax.jit(f)(x)
        np.testing.assert_array_equal(got[1], want[1])

    def test_under_shard_map_and_scan(self, engine, kernel):
        def f(x):
            def device(y):
                def body(c, _):
                    return self.call(kernel, True)(c)[1], ()

                return lax.scan(body, y, None, length=2)[0]

            return jax.shard_map(
                device, mesh=mesh_of(), in_specs=P("data"), out_specs=P("data"), check_vma=False
            )(x)

        x = jax.ShapeDtypeStruct((64, 128), F32)
        done = engine.run(f, [engine.SIN], x)
        assert "sin" not in engine.names(done.closed)


def test_nothing_in_the_report_of_what_is_not_entered_is_lost(engine):
    def f(x):
        return in_linear_solve_nothing(x), hard(x), soft(x), jnp.cumsum(x)

    report = engine.run(f, [engine.SIN], jnp.ones(4)).report
    kinds = {(g.primitive, g.param) for g in report.coverage}
    assert ("custom_vjp_call", "bwd") in kinds
    assert any(p.startswith("custom_jvp_call") for p, _ in kinds)
    assert any("linear_solve" in p for p, _ in kinds)


class TestLiterals:
    @pytest.mark.parametrize("kind", ["weak float", "bf16", "int8", "weak int", "bool", "f32"])
    def test_a_literal_operand_keeps_its_type(self, engine, kind):
        turned = engine.make_pass(
            "turned",
            "max_p",
            engine.every,
            engine.whole(lambda a, b: [lax.neg(lax.min(lax.neg(a), lax.neg(b)))]),
        )
        turned_bool = engine.make_pass(
            "turned", "or_p", engine.every, engine.whole(lambda a, b: [~(~a & ~b)])
        )
        x = {
            "weak float": jax.jit(lambda: 3.0)(),
            "bf16": jnp.ones(4, jnp.bfloat16),
            "int8": jnp.ones(4, jnp.int8),
            "weak int": jax.jit(lambda: 3)(),
            "bool": jnp.asarray([True, False]),
            "f32": jnp.ones(4),
        }[kind]
        f = (lambda x: x | False) if kind == "bool" else (lambda x: jnp.maximum(x, 2))
        flat = lambda x: f(x)
        done = engine.run(flat, [turned_bool if kind == "bool" else turned], x)
        assert done.report.declined == ()
        assert done.report.counts() == {"turned": 1}
        (got,), want = engine.function(done.closed)(x), f(x)
        assert got.dtype == want.dtype
        assert got.weak_type == want.weak_type
        np.testing.assert_array_equal(got, want)


def test_declining_many_sites_redoes_little(engine, monkeypatch):
    """A site that can't be substituted is taken out without doing all the others again."""
    from relower.passes.engine import interpreter

    counted = []
    original = interpreter.Interpreter._rewrite

    def counting(self, scope):
        counted.append(scope)
        return original(self, scope)

    monkeypatch.setattr(interpreter.Interpreter, "_rewrite", counting)
    wrong = engine.make_pass(
        "wrong", "sin_p", engine.every, engine.whole(lambda x, **k: [x.astype(jnp.int32)])
    )
    right = engine.make_pass(
        "right", "cos_p", engine.every, engine.whole(lambda x, **k: [lax.exp(x)])
    )
    n = 12

    def f(x):
        for i in range(n):
            x = jax.jit(lambda y, i=i: jnp.sin(y) + i)(x)
            x = jax.jit(lambda y, i=i: jnp.cos(y) + i)(x)
        return x

    done = engine.run(f, [wrong, right], jnp.ones(3))
    assert len(done.report.declined) == n
    assert done.report.counts() == {"right": n}
    assert len(counted) <= 5 * n


def test_a_shared_site_is_declined_once(engine):
    wrong = engine.make_pass(
        "wrong", "sin_p", engine.every, engine.whole(lambda x, **k: [x.astype(jnp.int32)])
    )
    layer = jax.jit(lambda x, s: jnp.sin(x) * s)

    def f(x):
        return layer(layer(x, jnp.ones(4)), jnp.full(4, 2.0)) * 1.0

    x = jnp.ones(4)
    done = engine.run(f, [wrong, engine.ONE], x)
    assert {s.pass_name for s in done.report.declined} == {"wrong"}
    assert done.report.counts()["times_one"] == 2
    np.testing.assert_array_equal(engine.function(done.closed)(x)[0], f(x))


def widened(x):
    """Parts of an array that was widened, and a result of the whole."""
    wide = x.astype(jnp.float32)
    return wide[:3] * 2 + wide[1:], wide + 1


def of_late_cast(engine, fn, *args):
    late = dataclasses.replace(registry.by_name("late_cast"), profitable=lambda match: None)
    return engine.run(fn, [late], *args)


def test_a_dead_reader_of_what_is_replaced_goes_with_it(engine):
    def fn(x):
        parts, _ = widened(x)
        return parts

    done = of_late_cast(engine, fn, jnp.ones(4, jnp.bfloat16))
    assert done.report.counts() == {"late_cast": 1}


def test_a_reader_whose_result_no_caller_reads_keeps_a_site(engine):
    """The loop stacks a result for nobody; the body computes it all the same."""

    def fn(xs):
        step = lambda carry, x: (carry, widened(x))
        return lax.scan(step, jnp.zeros(()), xs)[1][0]

    done = of_late_cast(engine, fn, jnp.ones((2, 4), jnp.bfloat16))
    (site,) = done.report.declined
    assert [r.code for r in site.reasons] == ["unused-reader"]
    assert not done.report.applied
