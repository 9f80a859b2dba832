"""Calls: what is inlined, what stays and why."""

import pytest

from relower.lowering import inline
from relower.lowering.inline import TooLarge

TEXT = """
module {{
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = call @twice(%x) {call}: (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
  func.func private @twice(%x: tensor<4xf32>{arg}) -> (tensor<4xf32>{result}) {{
    %0 = call @once(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %1 = call @once(%0) : (tensor<4xf32>) -> tensor<4xf32>
    return %1 : tensor<4xf32>
  }}
  func.func private @once(%x: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.sine %x {op}: tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
  func.func private @unused(%x: tensor<4xf32>) -> tensor<4xf32> {{
    return %x : tensor<4xf32>
  }}
}}
"""
BY_HAND = """
module {{
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.sine %x {op}: tensor<4xf32>
    %1 = stablehlo.sine %0 {op}: tensor<4xf32>
    return %1 : tensor<4xf32>
  }}
}}
"""


def text(call="", arg="", result="", op=""):
    return TEXT.format(call=call, arg=arg, result=result, op=op)


def attributes(value):
    return f'{{mhlo.frontend_attributes = {{a = "{value}"}}}} '


def test_nested_calls_are_inlined_and_unused_functions_dropped(normal):
    found = normal(text())
    by_hand = normal(BY_HAND.format(op=""))
    assert found.forms["inlined"].digest == by_hand.forms["inlined"].digest
    assert found.forms["exact"].digest != by_hand.forms["exact"].digest
    assert (found.ledger["call-inlined"], found.ledger["function-dropped"]) == (3, 3)


def test_unused_private_functions_count_at_exact(digests):
    without = text().replace("@unused", "@twice_unused", 1)
    head, tail = without.split("  func.func private @twice_unused")
    shorter = head + "}\n"
    assert tail
    assert digests(text())["exact"] != digests(shorter)["exact"]
    assert digests(text())["inlined"] == digests(shorter)["inlined"]


def test_frontend_attributes_of_a_call_go_onto_the_operations(digests):
    called, by_hand = text(call=attributes(1)), BY_HAND.format(op=attributes(1))
    assert digests(called)["inlined"] == digests(by_hand)["inlined"]
    assert digests(called)["inlined"] != digests(text())["inlined"]


def test_a_call_whose_frontend_attributes_conflict_stays(normal):
    found = normal(text(call=attributes(1), op=attributes(2)))
    assert found.ledger["call-kept"] > 0
    assert '"func.call"' in "".join(s.text for s in found.forms["inlined"].sections)
    other = normal(text(call=attributes(3), op=attributes(2)))
    assert found.forms["inlined"].digest != other.forms["inlined"].digest


@pytest.mark.parametrize(
    "changes",
    [
        {"arg": ' {mhlo.memory_kind = "device"}'},
        {"result": ' {mhlo.memory_kind = "device"}'},
        {"call": '{mhlo.memory_kind = "device"} '},
    ],
)
def test_a_call_with_other_attributes_stays(normal, changes):
    found = normal(text(**changes))
    assert found.ledger["call-kept"] == 1
    names = [s.name for s in found.forms["inlined"].sections]
    assert names == ["module", "main", "f1"]
    plain = normal(text())
    for level in ("exact", "inlined", "dataflow"):
        assert found.forms[level].digest != plain.forms[level].digest


def test_the_size_is_bounded_and_the_missing_levels_are_counted(normal, monkeypatch):
    monkeypatch.setattr(inline, "MAX_OPERATIONS", 2)
    found = normal(text())
    assert set(found.forms) == {"exact"}
    assert found.ledger["level-not-built"] == 2
    assert issubclass(TooLarge, Exception)


def test_a_function_duplicated_differs_at_exact_only(digests):
    once = text().split("  func.func private @unused")[0] + "}\n"
    copy = once[once.index("  func.func private @once") : once.rindex("}")].replace(
        "@once", "@other"
    )
    two = once.rstrip().removesuffix("}") + copy + "}\n"
    two = two.replace("call @once(%0)", "call @other(%0)")
    assert digests(once)["exact"] != digests(two)["exact"]
    assert digests(once)["inlined"] == digests(two)["inlined"]


def test_equal_functions_that_stay_are_merged_at_dataflow(digests, normal):
    kept = (
        text(arg=' {mhlo.memory_kind = "device"}').split("  func.func private @unused")[0] + "}\n"
    )
    copy = kept[kept.index("  func.func private @twice") : kept.index("  func.func private @once")]
    two = kept.rstrip().removesuffix("}") + copy.replace("@twice", "@again") + "}\n"
    call = "%0 = call @twice(%x) : (tensor<4xf32>) -> tensor<4xf32>\n"
    both = call + "    %1 = call @{}(%0) : (tensor<4xf32>) -> tensor<4xf32>\n"
    one = two.replace(call, both.format("twice")).replace("return %0", "return %1", 1)
    two = two.replace(call, both.format("again")).replace("return %0", "return %1", 1)
    assert digests(one)["inlined"] != digests(two)["inlined"]
    assert digests(one)["dataflow"] == digests(two)["dataflow"]
    assert normal(two).ledger["function-merged"] == 1


def test_which_function_a_call_calls_is_compared(digests):
    def sequence(*names):
        calls = "".join(
            f"%v{i + 1} = call @{name}(%v{i}) : (tensor<4xf32>) -> tensor<4xf32>\n"
            for i, name in enumerate(names)
        ).replace("%v0", "%x")
        bodies = "".join(
            f"func.func private @{name}(%x: tensor<4xf32>) -> tensor<4xf32> {{\n"
            f"%0 = stablehlo.{op} %x : tensor<4xf32>\nreturn %0 : tensor<4xf32>\n}}\n"
            for name, op in (("a", "sine"), ("b", "cosine"))
        )
        return (
            "module {\nfunc.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
            f"{calls}return %v{len(names)} : tensor<4xf32>\n}}\n{bodies}}}\n"
        )

    variants = [sequence(*names) for names in ("aab", "aba", "abb", "baa", "bba", "bab")]
    for level in ("exact", "inlined", "dataflow"):
        assert len({digests(text)[level] for text in variants}) == len(variants)
