"""Trip counts, and loops whose count stays unknown."""

import pytest

from relower.lowering.cost.hlo import read_hlo
from relower.lowering.cost.trips import trip_count


def trips(text):
    module = read_hlo(text)
    (where, op) = next(
        (c, i) for c in module.computations.values() for i in c.instructions.values()
        if i.opcode == "while"
    )  # fmt: skip
    return trip_count(module, where, op)


def test_a_recorded_scan_of_seven_steps(scan_text):
    assert trips(scan_text) == 7


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ({}, 5),
        ({"condition": "compare(%i, %limit), direction=LE"}, 5),
        ({"condition": "compare(%limit, %i), direction=GT"}, 5),
        ({"start": "constant(3)"}, 3),
        ({"start": "constant(9)"}, 0),
        ({"start": "constant(20)"}, 0),
        ({"start": "constant(1)", "condition": "compare(%i, %limit), direction=NE"}, 4),
        ({"start": "constant(21)", "step": "subtract(%i, %one)",
          "condition": "compare(%i, %limit), direction=GT"}, 6),
        ({"step": "add(%one, %i)"}, 5),
    ],
)  # fmt: skip
def test_counts(loop, parts, count):
    assert trips(loop(**parts)) == count


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"start": "copy(%n)"}, "the start is an argument"),
        ({"step": "multiply(%i, %one)"}, "the step is no addition"),
        ({"step": "add(%i, %i)"}, "the step is no constant"),
        ({"condition": "compare(%i, %i), direction=LT"}, "the limit is carried"),
        ({"step": "subtract(%i, %one)"}, "it runs away from its limit"),
        ({"condition": "compare(%i, %limit), direction=NE"}, "it steps over its limit"),
        ({"condition": "compare(%i, %limit), direction=EQ"}, "it ends when it should go on"),
    ],
)
def test_unknown(loop, parts, why):
    assert trips(loop(**parts)) is None, why


def test_a_condition_inside_a_fusion_is_seen(loop):
    text = loop("fusion(%i, %limit), kind=kLoop, calls=%test").replace(
        "ENTRY",
        "%test (a: s32[], b: s32[]) -> pred[] {\n"
        "  %a = s32[] parameter(0)\n  %b = s32[] parameter(1)\n"
        "  ROOT %c = pred[] compare(%b, %a), direction=GT\n}\n\nENTRY",
    )
    assert trips(text) == 5
