"""Combinators: what matches, and the exact words of every mismatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs, tracing
from relower.compat.primitives import primitive
from relower.matchers.dataflow import Dataflow
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.pattern import Bind, Constant, Mismatch, OneOf, Op, Where, commuted

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def scope_of(fn, *args):
    avals = [tracing.type_of(a) for a in args]
    closed = tracing.trace(fn, args, {}, avals).closed
    return Dataflow(closed, Analysis(), (UNKNOWN,) * len(avals)).root


def output(scope, index=0):
    return jaxprs.opened(scope.body).outvars[index]


def match(pattern, fn, *args):
    scope = scope_of(fn, *args)
    captures = {}
    return pattern.match(scope, output(scope), captures), captures


ADD, MUL, SIN, CONVERT = (
    primitive(n) for n in ("add_p", "mul_p", "sin_p", "convert_element_type_p")
)
ANY_ACCURACY = {"accuracy": "for the test"}


def times(a, b):
    return Op(MUL, (a, b), ignore={"out_dtype": "for the test"})


def sine(of):
    return Op(SIN, (of,), ignore=ANY_ACCURACY)


class TestOp:
    def test_matches_and_captures(self):
        found, captures = match(Op(ADD, (sine(Bind("x")), Bind("x"))), lambda x: lax.sin(x) + x, X)
        assert found is None
        assert set(captures) == {"x"}

    def test_another_primitive(self):
        found, _ = match(Op(ADD, (Bind("a"), Bind("b"))), lambda x: x * x, X)
        assert str(found) == "at root: found mul, wanted add"

    def test_of_the_same_name(self):
        # Primitives are compared as objects.
        impostor = jax.extend.core.Primitive("mul")
        found, _ = match(Op(impostor, (Bind("a"), Bind("b"))), lambda x: x * x, X)
        assert str(found) == "at root: found mul, wanted mul"

    def test_an_input(self):
        found, _ = match(Op(ADD, (Bind("a"), Bind("b"))), lambda x: x, X)
        assert str(found) == "at root: found an input of type float32[4], wanted add(a, b)"

    def test_a_literal(self):
        found, _ = match(Op(ADD, (Bind("a"), sine(Bind("b")))), lambda x: x + 2.0, X)
        assert str(found) == ("at add → operand 1: found the literal 2.0, wanted sin(b)")

    def test_deep_inside(self):
        pattern = Op(ADD, (Bind("a"), times(Bind("a"), sine(Bind("a")))))
        found, _ = match(pattern, lambda x: x + x * jnp.cos(x), X)
        assert found.path == ("add", "operand 1", "mul", "operand 1")
        assert found.depth == 4
        assert str(found) == "at add → operand 1 → mul → operand 1: found cos, wanted sin"

    def test_a_param_not_named(self):
        found, _ = match(Op(SIN, (Bind("x"),)), lambda x: lax.sin(x), X)
        assert str(found) == (
            "at sin → param accuracy: found None, wanted only params that the pattern names"
        )

    def test_a_param_of_another_value(self):
        pattern = Op(SIN, (Bind("x"),), params={"accuracy": 3})
        found, _ = match(pattern, lambda x: lax.sin(x), X)
        assert str(found) == "at sin → param accuracy: found None, wanted 3"

    def test_a_param_that_is_not_there(self):
        pattern = Op(SIN, (Bind("x"),), params={"mode": 1}, ignore=ANY_ACCURACY)
        found, _ = match(pattern, lambda x: lax.sin(x), X)
        assert str(found) == "at sin → param mode: found no such param, wanted a value"
        pattern = Op(SIN, (Bind("x"),), capture={"mode": "m"}, ignore=ANY_ACCURACY)
        found, _ = match(pattern, lambda x: lax.sin(x), X)
        assert str(found) == "at sin → param mode: found no such param, wanted a value"

    def test_a_captured_param_is_one_value_throughout(self):
        def convert(of):
            return Op(
                CONVERT,
                (of,),
                capture={"new_dtype": "dtype"},
                ignore={"weak_type": "for the test", "sharding": "for the test"},
            )

        pattern = Op(ADD, (convert(Bind("a")), convert(Bind("b"))))
        to = lax.convert_element_type
        same = lambda x, y: to(x, jnp.bfloat16) + to(y, jnp.bfloat16)
        i32 = jax.ShapeDtypeStruct((4,), jnp.int32)
        found, captures = match(pattern, same, X, i32)
        assert found is None
        assert captures["dtype"] == jnp.bfloat16

        nested = convert(convert(Bind("a")))
        found, _ = match(nested, lambda x: to(to(x, jnp.int32), jnp.bfloat16), X)
        assert str(found) == (
            "at convert_element_type → operand 0 → convert_element_type → param new_dtype: "
            "found dtype('int32'), wanted bfloat16, as elsewhere in the pattern"
        )

    def test_operands(self):
        pattern = Op(primitive("concatenate_p"), (Bind("a"),), params={"dimension": 0})
        found, _ = match(pattern, lambda x: jnp.concatenate([x, x]), X)
        assert str(found) == "at concatenate: found 2 operands, wanted 1 operands"

    def test_another_result(self):
        pattern = Op(
            primitive("sort_p"),
            (Bind("a"), Bind("b")),
            result=0,
            ignore=dict.fromkeys(("dimension", "is_stable", "num_keys"), "test"),
        )
        found, _ = match(pattern, lambda x: lax.sort((x, x + 1))[1], X)
        assert str(found) == "at root: found result 1, wanted result 0"

    def test_array_params_compare(self):
        # A param that holds an array must not raise "truth value is ambiguous".
        def custom(x):
            return jax.lax.gather(
                x,
                jnp.zeros((2, 1), jnp.int32),
                jax.lax.GatherDimensionNumbers((), (0,), (0,)),
                (1,),
            )

        pattern = Op(primitive("gather_p"), (Bind("x"), Bind("i")), params={"slice_sizes": (2,)})
        found, _ = match(pattern, custom, X)
        assert "param" in found.path[1]

    def test_through_calls_in_both_directions(self):
        def f(x):
            y = lax.sin(x)
            return jax.jit(lambda a: jax.jit(lambda b: b + 0.5)(a) * 2)(y)

        pattern = times(Op(ADD, (sine(Bind("x")), Bind("half"))), Constant(2))
        found, captures = match(pattern, f, X)
        assert found is None
        assert not jaxprs.is_literal(captures["x"].atom)

    def test_not_out_of_a_branch(self):
        f = lambda x: lax.cond(x[0] > 0, lambda y: lax.sin(y), lambda y: y, x)
        found, _ = match(sine(Bind("x")), f, X)
        assert str(found) == "at root: found cond, wanted sin"


class TestBind:
    def test_another_value(self):
        found, _ = match(Op(ADD, (Bind("x"), Bind("x"))), lambda x, y: x + y, X, X)
        assert str(found) == (
            "at add → operand 1: found an input of type float32[4], wanted the same value as x, "
            "an input of type float32[4]"
        )

    def test_equal_literals_of_one_type(self):
        f = lambda x: jnp.concatenate([lax.add(x, np.float32(2)), lax.mul(x, np.float32(2))])
        pattern = Op(
            primitive("concatenate_p"),
            (Op(ADD, (Bind("x"), Bind("two"))), times(Bind("x"), Bind("two"))),
            params={"dimension": 0},
        )
        assert match(pattern, f, X)[0] is None

    def test_zeros_of_either_sign_differ(self):
        f = lambda x: jnp.concatenate([lax.add(x, np.float32(0)), lax.mul(x, np.float32(-0.0))])
        pattern = Op(
            primitive("concatenate_p"),
            (Op(ADD, (Bind("x"), Bind("z"))), times(Bind("x"), Bind("z"))),
            params={"dimension": 0},
        )
        assert match(pattern, f, X)[0] is not None

    def test_the_same_value_by_way_of_a_call(self):
        f = lambda x: jax.jit(lambda a: a)(x) + x
        assert match(Op(ADD, (Bind("x"), Bind("x"))), f, X)[0] is None


class TestConstant:
    def test_words(self):
        found, _ = match(Op(ADD, (Bind("x"), Constant(1))), lambda x: x + 2.0, X)
        assert str(found) == "at add → operand 1: found the literal 2.0, wanted the constant 1"
        found, _ = match(Op(ADD, (Bind("x"), Constant(1))), lambda x: x + lax.sin(x), X)
        assert str(found) == (
            "at add → operand 1: found a result of sin of type float32[4], wanted the constant 1"
        )

    def test_a_known_constant_array(self):
        f = lambda x: x + jnp.full((4,), 1.0)
        assert match(Op(ADD, (Bind("x"), Constant(1))), f, X)[0] is None


class TestWhere:
    pattern = Where(Bind("x"), lambda s, a: a.aval.shape == (3,), "three of them")

    def test_words(self):
        found, _ = match(self.pattern, lambda x: lax.sin(x), X)
        assert found.path == ()
        assert found.wanted == "three of them"
        assert found.found.startswith("a result of sin of type float32[4], ")
        assert self.pattern.describe() == "x, three of them"

    def test_the_inner_mismatch_first(self):
        pattern = Where(Op(ADD, (Bind("a"), Bind("b"))), lambda s, a: False, "never")
        found, _ = match(pattern, lambda x: x, X)
        assert found.wanted == "add(a, b)"


class TestOneOf:
    def test_the_nearest_miss_is_explained(self):
        near = Op(ADD, (Bind("a"), times(Bind("a"), Constant(3))))
        found, captures = match(OneOf((sine(Bind("x")), near)), lambda x: x + x * 2.0, X)
        assert str(found) == (
            "at add → operand 1 → mul → operand 1: found the literal 2.0, wanted the constant 3"
        )
        assert captures == {}

    def test_captures_of_a_failed_alternative_are_dropped(self):
        first = Op(ADD, (Bind("a"), Constant(9)))
        second = Op(ADD, (Bind("b"), Bind("c")))
        found, captures = match(OneOf((first, second)), lambda x: x + x, X)
        assert found is None
        assert set(captures) == {"b", "c"}

    def test_commuted(self):
        pattern = commuted(ADD, Constant(2), Bind("x"))
        for f in (lambda x: lax.add(x, np.float32(2)), lambda x: lax.add(np.float32(2), x)):
            assert match(pattern, f, X)[0] is None
        found, _ = match(pattern, lambda x: x + 3.0, X)
        assert found.wanted == "the constant 2"
        assert pattern.describe() == "add(the constant 2, x) or add(x, the constant 2)"

    def test_none(self):
        found, _ = match(OneOf(()), lambda x: x, X)
        assert str(found) == "at root: found an input of type float32[4], wanted one of no patterns"


def test_a_mismatch_at_the_root():
    assert str(Mismatch((), "a", "b")) == "at root: found a, wanted b"


@pytest.mark.parametrize("fn", [lambda x: x + x])
def test_match_equation(fn):
    scope = scope_of(fn, X)
    captures = {}
    assert Op(ADD, (Bind("a"), Bind("a"))).match_equation(scope, 0, captures) is None
    assert set(captures) == {"a"}
