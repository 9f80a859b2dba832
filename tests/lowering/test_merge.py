"""Merging equal functions: what becomes one, and in how much work."""

import pytest

from relower.lowering import merge
from relower.lowering.ir import Block, Function, Module, Op
from relower.lowering.ledger import Ledger
from relower.lowering.printer import FunctionPrinter


def module(calls, public=("main",)):
    """A module of functions that call others, as a dictionary of names to the names they call."""
    made = Module({}, {}, {}, [])
    for key, callees in calls.items():
        value = made.new_value("tensor<f32>")
        block = Block([value])
        for callee in callees:
            result = made.new_value("tensor<f32>")
            block.ops.append(Op("func.call", [value], [result], {}, -1, callee=callee))
            value = result
        block.ops.append(Op("func.return", [value], [], {}, -1))
        made.functions[key] = Function(
            key, key in public, {}, [{}], ["tensor<f32>"], [{}], [block], -1
        )
    return made


def chains(length):
    """Two equal chains, each function of which calls the next, and one caller of both."""
    calls = {"main": ("a0", "b0")}
    for index in range(length):
        for chain in "ab":
            last = index == length - 1
            calls[f"{chain}{index}"] = () if last else (f"{chain}{index + 1}",)
    return calls


@pytest.fixture
def printed(monkeypatch):
    """The keys of the functions that were printed."""
    keys = []
    original = FunctionPrinter.function

    def counted(self, function):
        keys.append(function.key)
        return original(self, function)

    monkeypatch.setattr(FunctionPrinter, "function", counted)
    return keys


def merged(made):
    ledger = Ledger()
    merge.merge_functions(made, ledger)
    return {
        key: [op.callee for op in function.blocks[0].ops if op.callee]
        for key, function in made.functions.items()
    }, ledger.counts().get("function-merged", 0)


@pytest.mark.parametrize("length", [1, 5, 60])
def test_equal_chains_become_one_and_each_function_is_printed_once(length, printed):
    calls = chains(length)
    found, count = merged(module(calls))
    assert count == length
    assert found["main"] == ["a0", "a0"]
    assert sorted(found) == sorted(key for key in calls if not key.startswith("b"))
    assert sorted(printed) == sorted(key for key in calls if key != "main")


def test_the_first_of_the_module_stays_wherever_it_is_called():
    calls = {"main": ("b", "user", "a"), "a": (), "user": ("b",), "b": ()}
    found, count = merged(module(calls))
    assert found == {"main": ["a", "user", "a"], "a": [], "user": ["a"]}
    assert count == 1


def test_public_functions_and_different_ones_stay():
    calls = {"main": ("a", "b"), "other": ("a", "b"), "a": (), "b": ("a",), "c": ("a", "a")}
    found, count = merged(module(calls, ("main", "other")))
    assert {key: tuple(names) for key, names in found.items()} == calls
    assert count == 0


def test_functions_in_a_circle_merge_with_what_calls_the_same(printed):
    calls = {"main": ("x", "y", "z"), "x": ("y",), "y": ("x",), "w": ("x",), "z": ("w",)}
    found, count = merged(module(calls))
    assert found == {"main": ["x", "y", "x"], "x": ["y"], "y": ["x"]}
    assert count == 2
    assert len(printed) <= 3 * 4
