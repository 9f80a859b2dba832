"""Reports for other programs: well-formed whatever the texts hold, and within their bounds."""

from pathlib import Path
from xml.etree import ElementTree as xml

import pytest

from relower.gates.cells import Cell, Node
from relower.gates.pass_sets import NONE
from relower.gates.reports import SUMMARY_BYTES, junit, step_summary
from relower.gates.results import CellResult, GateResult
from relower.gates.shard import Shard
from relower.lowering.change import Change, Difference, Group, Verdict


def result(name, status="holds", *messages, program="moe", text=None, identical=True):
    nodes = [Node(program, n, "none", f"m.py:{n}", (), None, NONE, None, None)
             for n in (name, "base")]  # fmt: skip
    found = None
    if text is not None:
        change = Change("operation", "a.b", "", text, "other", "main", "function")
        found = Difference(Verdict.DIFFERENT, "exact", ("a", "b"), groups=(Group((change,)),))
    return CellResult(Cell(program, *nodes, identical, "exact"), status, messages, found)


MIXED = GateResult(
    (
        result("same"),
        result("worse", "broken", "must be identical, and differs", text="x ``` </details> y"),
        result("gone", "undecided", "gone: no such file", program="other"),
        result("same"),
    ),
    ("a & b lower to one program",),
    None,
    4,
)


def test_junit():
    root = xml.fromstring(junit(MIXED).encode())
    counts = ("tests", "failures", "errors")
    assert [root.get(name) for name in counts] == ["5", "2", "1"]
    assert [[s.get(name) for name in ("name", *counts)] for s in root] == [
        ["moe", "3", "1", "0"],
        ["other", "1", "0", "1"],
        ["guards", "1", "1", "0"],
    ]
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert list(cases) == [
        "moe: same = base (exact)",
        "moe: worse = base (exact)",
        "moe: same = base (exact) #2",
        "other: gone = base (exact)",
        "a & b lower to one program",
    ]
    broken = cases["moe: worse = base (exact)"]
    assert broken.get("classname") == "relower.moe"
    (failure,) = broken
    assert (failure.tag, failure.get("message")) == ("failure", "must be identical, and differs")
    assert "- x ``` </details> y" in failure.text
    assert "DIFFERENT at level exact: 1 difference" in failure.text
    (error,) = cases["other: gone = base (exact)"]
    assert (error.tag, error.text) == ("error", "gone: no such file")
    assert list(cases["moe: same = base (exact)"]) == []


def test_junit_holds_what_xml_can_not():
    odd = "bell \x07 escape \x1b[2J half \ud800 not \ufffe <&\"'>"
    root = xml.fromstring(junit(GateResult((result("a", "broken", odd),), (odd,))).encode())
    messages = [failure.get("message") for failure in root.iter("failure")]
    assert messages == ["bell \\x07 escape \\x1b[2J half \\xd800 not \\xfffe <&\"'>"] * 2


def test_summary():
    text = step_summary(MIXED)
    head, *lines = text.splitlines()
    assert head == "## ❌ relower gate: 2 of 4 identical, 1 undecided, 1 guard failed"
    assert "- ❌ a &amp; b lower to one program" in lines
    rows = [line for line in lines if line.startswith("| ") and "cell" not in line]
    assert len(rows) == 4
    assert rows[1] == ("| ❌ | moe&#58; worse = base (exact) | must be identical, and differs |")
    # A fence inside the text doesn't end the block.
    block = text.split("````text\n")[1].split("````")[0]
    assert "- x ``` </details> y" in block
    assert text.count("<details>") == 2


def test_a_fence_is_one_whatever_the_text_holds():
    for quoted, fence in (("`a` b", "```"), ("a", "```"), ("```` a", "`````")):
        text = step_summary(GateResult((result("x", "broken", quoted),), ()))
        assert f"\n\n{fence}text\n{quoted}\n{fence}\n\n" in text


def test_summary_says_nothing_that_markdown_acts_on():
    odd = "a|b `c` <img src=x> *d* [e](http://f) @team #1 \x1b \ud800\nnext"
    row = step_summary(GateResult((result("a", "broken", odd),), ())).splitlines()[-1]
    assert row.count("|") == 4
    for char in "`*[]<>@":
        assert char not in row
    assert row.endswith("\\x1b &#92;xd800 next |".replace("\\x1b", "&#92;x1b"))


@pytest.mark.parametrize("count", [3, 5_000])
@pytest.mark.parametrize("room", [SUMMARY_BYTES, 3_000, 300])
def test_summary_is_bounded_and_says_when_it_was_cut(count, room):
    cells = [result(f"v{i}", "broken", "é" * 40, text="ü" * 200) for i in range(count)]
    text = step_summary(GateResult(tuple(cells), ()), room)
    assert len(text.encode()) <= room
    assert text.startswith(f"## ❌ relower gate: 0 of {count} identical")
    whole = count == 3 and room >= 3_000
    assert ("parts are left out, for GitHub takes 1 MiB" in text) is not whole
    if not whole and room == SUMMARY_BYTES:
        assert len(text.encode()) > room * 0.99
    assert text.count("<details>") == text.count("</details>")


def test_every_bound_is_kept():
    whole = step_summary(MIXED)
    size = len(whole.encode())
    texts = {room: step_summary(MIXED, room) for room in range(0, size + 20, 3)}
    assert all(len(text.encode()) <= room for room, text in texts.items())
    assert all((text == whole) is (room >= size) for room, text in texts.items())
    assert len(set(texts.values())) > 5


def test_no_room_at_all():
    assert step_summary(MIXED, 10) == ""
    assert step_summary(MIXED, -5) == ""


def test_a_shard_says_what_it_is():
    part = GateResult((result("a"), result("b", identical=False)), (), Shard(2, 3), 7)
    wanted = "1 of 1 identical, 1 of 1 controls differ, shard 2/3: 2 of 7 cells"
    assert part.closing == wanted
    assert "of this shard only" in step_summary(part)
    empty = GateResult((), (), Shard(2, 3), 7)
    assert (empty.closing, empty.exit_code) == ("shard 2/3 holds none of 7 cells", 0)
    assert xml.fromstring(junit(empty).encode()).get("tests") == "0"
    assert "holds none of 7 cells" in step_summary(empty)


def test_the_page_names_the_limit():
    page = (Path(__file__).parents[2] / "docs" / "gate.md").read_text()
    assert "GITHUB_STEP_SUMMARY" in page
    assert "1 MiB" in page
