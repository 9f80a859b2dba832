"""Lines of operations in functions that jax lowers without any."""

import jax
import jax.numpy as jnp
import pytest

from relower.compat.call_places import _inside, with_call_places

X = jax.ShapeDtypeStruct((1000,), jnp.float32)


def module_of(fn):
    return jax.jit(fn).lower(X).compiler_ir("stablehlo")


def placed(fn):
    """The text of the module, and of the one with lines; only locations differ."""
    module = module_of(fn)
    before = module.operation.get_asm(enable_debug_info=True)
    found = with_call_places(module)
    assert module.operation.get_asm(enable_debug_info=True) == before
    assert found.operation.get_asm() == module.operation.get_asm()
    return before, found.operation.get_asm(enable_debug_info=True)


def once(x):
    with jax.named_scope("mine"):
        return jnp.cumsum(x)


def nested(x):
    return jax.jit(lambda y: y + once(y))(x) * 2


@pytest.mark.parametrize(("fn", "scope"), [(once, "jit(once)/mine/"), (nested, '"mine/')])
def test_an_operation_has_the_line_and_scope_of_its_call(fn, scope):
    before, after = placed(fn)
    wanted = f'{scope}jit(cumsum)/reduce_window_sum"'
    assert wanted not in before
    (line,) = [line for line in after.splitlines() if wanted in line and line.startswith("#loc")]
    assert line.count("(#loc") == 1  # which is the call's own


def test_of_a_function_called_from_several_lines_none_is_taken():
    def twice(x):
        a = jnp.cumsum(x)
        return a + jnp.cumsum(x + 1)

    module = module_of(twice)
    assert module.operation.get_asm().count("call @cumsum(") == 2
    assert with_call_places(module) is module


def test_calls_of_one_line_from_several_have_that_line_and_no_scope():
    def outer(x):
        with jax.named_scope("first"):
            a = once(x)
        return a + once(x + 1)

    module = with_call_places(module_of(outer))
    found = set()
    for function in module.body.operations:
        for op in _inside(function):
            if op.name == "stablehlo.reduce_window":
                found.add(str(op.location))
    (location,) = found
    line = once.__code__.co_firstlineno + 2
    assert location.startswith('loc("reduce_window_sum"(')
    assert f'{__file__}":{line}:' in location
    assert "first" not in location
    assert "outer" not in location


def test_a_module_whose_operations_have_their_lines_is_itself():
    module = module_of(lambda x: jnp.sin(x) + jax.jit(lambda y: jnp.cos(y))(x))
    assert with_call_places(module) is module
