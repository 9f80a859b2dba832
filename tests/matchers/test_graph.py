"""The dataflow view: scopes, callers, liveness, definitions seen through calls."""

import jax
import jax.numpy as jnp
from jax import lax

from relower.compat import jaxprs, tracing
from relower.matchers.dataflow import Dataflow
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.graph import OUTPUT

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def flow_of(fn, *args):
    avals = [tracing.type_of(a) for a in args]
    closed = tracing.trace(fn, args, {}, avals).closed
    return Dataflow(closed, Analysis(), (UNKNOWN,) * len(avals))


def find(flow, name):
    return [(s, i) for s in flow.scopes for i in s.live if s.eqns[i].primitive.name == name]


class TestScopes:
    def test_a_body_called_twice_is_one_scope_where_the_facts_agree(self):
        g = jax.jit(lambda x: jnp.sin(x))
        flow = flow_of(lambda x: g(g(x)), X)
        ((scope, _),) = find(flow, "sin")
        assert [c.index for c in scope.callers] == [0, 1]
        assert len(list(flow.scopes)) == 2

    def test_and_two_where_they_differ(self):
        g = jax.jit(lambda x: x + 1)
        flow = flow_of(lambda x: g(x) * 1.0 + g(jnp.zeros(4)), X)
        inner = {id(s) for s, i in find(flow, "add") if s is not flow.root}
        assert len(inner) == 2

    def test_inner_scopes_come_first(self):
        flow = flow_of(lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) * 2)(x), X)
        seen = []
        for scope in flow.scopes:
            inner = [c for by_key in scope.children.values() for c in by_key.values()]
            assert all(any(c is s for s in seen) for c in inner)
            seen.append(scope)
        assert len(seen) == 3
        assert seen[-1] is flow.root

    def test_dead_equations_and_what_only_they_call(self):
        def f(x):
            jax.jit(jnp.sin)(x)
            jax.debug.callback(lambda v: None, jnp.cos(x))
            return x * 2

        flow = flow_of(f, X)
        assert find(flow, "sin") == []
        assert len(find(flow, "cos")) == 1
        assert [flow.root.eqns[i].primitive.name for i in flow.root.live] == [
            "cos",
            "debug_callback",
            "mul",
        ]

    def test_demand_goes_into_calls(self):
        g = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))
        flow = flow_of(lambda x: g(x)[1], X)
        assert find(flow, "sin") == []
        assert len(find(flow, "cos")) == 1

    def test_a_carry_is_demanded_always(self):
        f = lambda x: lax.scan(lambda c, v: (jnp.sin(c), v * 2), x[0], x)[1]
        assert len(find(flow_of(f, X), "sin")) == 1

    def test_every_body_is_entered_or_listed(self):
        @jax.custom_vjp
        def h(x):
            return x

        h.defvjp(lambda x: (x, ()), lambda r, g: (g,))
        flow = flow_of(lambda x: h(lax.reduce(x, 0.0, lax.add, (0,))), X)
        listed = {n.param for s in flow.scopes for _, n in s.not_entered}
        assert {"bwd", "fwd_jaxpr_thunk"} <= listed


class TestResolve:
    def test_inwards_and_outwards(self):
        def f(x):
            y = jnp.sin(x)
            z = jax.jit(lambda a: jax.jit(lambda b: b)(a))(y)
            return z * 2

        flow = flow_of(f, X)
        ((scope, index),) = find(flow, "mul")
        producer = scope.producer(scope.eqns[index].invars[0])
        assert producer.eqn.primitive.name == "sin"
        assert producer.scope is flow.root

    def test_every_result_of_a_call(self):
        g = jax.jit(lambda *xs: [jnp.sin(x) if i % 2 else x for i, x in enumerate(xs)][::-1])
        flow = flow_of(lambda *xs: g(*xs), *[X] * 5)
        outs = jaxprs.opened(flow.root.body).outvars
        names = [flow.root.producer(o) for o in outs]
        assert [p and p.eqn.primitive.name for p in names] == [None, "sin", None, "sin", None]
        inputs = jaxprs.invars(flow.root.body)
        assert flow.root.resolve(outs[0]).atom is inputs[4]
        assert flow.root.resolve(outs[4]).atom is inputs[0]

    def test_not_outwards_of_a_body_with_two_callers(self):
        g = jax.jit(lambda a: a * 2)
        flow = flow_of(lambda x: g(jnp.sin(x)) + g(jnp.cos(x)), X)
        ((scope, index),) = [m for m in find(flow, "mul")]
        assert scope.producer(scope.eqns[index].invars[0]) is None

    def test_calls_of_one_body_have_values_of_their_own(self):
        inner = jax.jit(lambda x: jnp.sin(x) * 2)
        outer = jax.jit(lambda x: inner(x))  # shared, with a body of one caller inside
        flow = flow_of(lambda x, y: (outer(x), outer(y), outer(x)), X, X)
        root = flow.root
        x, y = jaxprs.opened(root.body).invars
        first, second, third = jaxprs.opened(root.body).outvars
        assert len({root.resolve(v) for v in (first, second, third)}) == 3
        assert root.resolve(first) == root.resolve(first)
        for result, operand in ((first, x), (second, y), (third, x)):
            product = root.producer(result)
            sine = product.scope.producer(product.eqn.invars[0])
            assert sine.eqn.primitive.name == "sin"
            found = sine.scope.resolve(sine.eqn.invars[0])
            assert found.scope is root
            assert found.atom is operand

    def test_constants_of_loops_but_not_carries_or_slices(self):
        def f(x):
            y = jnp.sin(x)
            return lax.scan(lambda c, v: (c * y[0] + v, c - v), y[1], y)

        flow = flow_of(f, X)
        body = next(s for s in flow.scopes if s is not flow.root)
        constant, carry, sliced = jaxprs.invars(body.body)
        assert body.producer(constant).eqn.primitive.name in ("sin", "squeeze", "slice")
        assert body.producer(carry) is None
        assert body.producer(sliced) is None

    def test_not_into_a_loop_or_a_branch(self):
        f = lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        flow = flow_of(f, X)
        out = jaxprs.opened(flow.root.body).outvars[0]
        assert flow.root.producer(out).eqn.primitive.name == "cond"


class TestReaders:
    def test_live_readers_and_outputs(self):
        def f(x):
            y = jnp.sin(x)
            y + 5  # dead
            return y * 2, y

        root = flow_of(f, X).root
        y = root.eqns[0].outvars[0]
        readers = root.readers(y)
        assert OUTPUT in readers
        assert [root.eqns[i].primitive.name for i in readers if i != OUTPUT] == ["mul"]


class TestNames:
    def test_path_of_names(self):
        def f(x):
            with jax.named_scope("top"):
                return jax.jit(lambda y: lax.cond(y[0] > 0, jnp.sin, jnp.cos, y))(x)

        flow = flow_of(f, X)
        ((scope, index),) = find(flow, "sin")
        stack = scope.name_stack(scope.eqns[index])
        assert stack.startswith("top/jit(<lambda>)/cond[1]"), stack
        assert "test_graph.py" in scope.source_line(scope.eqns[index])

    def test_the_line_of_the_call_of_a_function_of_jax(self):
        flow = flow_of(lambda x: jnp.argsort(x), X)
        ((scope, index),) = find(flow, "sort")
        assert "test_graph.py" in scope.source_line(scope.eqns[index])
