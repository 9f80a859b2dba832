"""A page says all that the difference holds, loads nothing, and takes no text for markup."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from relower.gates.cells import Cell, Node
from relower.gates.html_report import OPEN_GROUPS, diff_page, gate_page
from relower.gates.page import SCRIPT, STYLE, page, text
from relower.gates.pass_sets import NONE
from relower.gates.results import CellResult, GateResult
from relower.lowering.change import Change, Difference, Group, Verdict
from relower.lowering.program import Form, Location, Program, Stamp, Unknown

VOID = {"meta", "input", "br"}
NAMES = ("old.program", "train.py:step")


class Reader(HTMLParser):
    """The document's tags, attributes and visible text; fails where a tag isn't closed."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.seen = [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.seen.append(data)

    @property
    def text(self):
        return "".join(self.seen)


def change(**changes):
    where = Location("/code/train.py", 7, "jit(step)/mul")
    base = Change(
        kind="attribute",
        op="stablehlo.add",
        detail="value",
        a="dense<1.5> : tensor<f32>",
        b="dense<2.5> : tensor<f32>",
        section="main",
        section_kind="function",
        where_a=where,
        where_b=where,
    )
    return replace(base, **changes)


def difference(*groups, verdict=Verdict.DIFFERENT, **more):
    return Difference(verdict, "exact", ("a" * 64, "b" * 64), groups=groups, **more)


def program(**fields):
    return Program(
        forms={"exact": Form("exact", (), "a" * 64)},
        kernels={},
        kernel_calls={"kernel:ab": 3},
        ops={"stablehlo.add": 1234},
        ledger={"locations": 56},
        stamp=Stamp({"jax": "1.2.3", **fields}),
    )


def read(found, a=None, b=None):
    return Reader(diff_page(found, NAMES, (a or program(), b or program())))


def test_a_difference_is_told_in_full():
    alike = tuple(change(section=f"f{i}") for i in range(3))
    found = read(
        difference(
            Group((change(path=("stablehlo.while",)),)),
            Group(alike),
            notes=("cut short",),
            allowed=("jaxlib",),
            unknowns=(("b", Unknown("callback", "two can't be told apart")),),
        ),
        b=program(jax="9.9.9"),
    ).text
    for wanted in (
        "DIFFERENT at level exact: 4 differences in 2 groups",
        *NAMES,
        "stablehlo.while › stablehlo.add value differs",
        "- dense<1.5> : tensor<f32>",
        "+ dense<2.5> : tensor<f32>",
        "/code/train.py:7  jit(step)/mul",
        "in 3 functions alike",
        "f0, f1, f2",
        "note: cut short",
        "allowed to differ: jaxlib",
        "unknown in b: callback: two can't be told apart",
        "1,234",
        "0 in 3 calls",
        "locations",
        "9.9.9",
    ):
        assert wanted in found


def test_only_the_part_that_differs_is_marked():
    source = diff_page(difference(Group((change(),))), NAMES, (program(), program()))
    assert "- dense&lt;<mark>1</mark>.5&gt; : tensor&lt;f32&gt;" in source
    assert "+ dense&lt;<mark>2</mark>.5&gt; : tensor&lt;f32&gt;" in source


@pytest.mark.parametrize(("a", "b"), [("abc", "abxbc"), ("aa", "aaa"), ("", "whole"), ("x", "")])
def test_what_is_marked_never_loses_or_repeats_text(a, b):
    found = read(difference(Group((change(a=a, b=b),)))).text
    for sign, side in (("- ", a), ("+ ", b)):
        assert (sign + side in found) == bool(side)


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_named(verdict):
    reasons = () if verdict is Verdict.IDENTICAL else ("stamp: jax is 1 in a and 2 in b",)
    found = read(difference(verdict=verdict, reasons=reasons)).text
    assert f"{verdict.name} at level exact" in found
    assert all(reason in found for reason in reasons)


HOSTILE = (
    "</pre></style><script>alert(1)</script><img src=http://x/y onerror=z> & \"'\u202e\x1b[2J\ud800"
)


def test_nothing_in_an_artifact_is_taken_for_markup():
    hostile = change(
        op=HOSTILE, detail=HOSTILE, a=HOSTILE, b=HOSTILE + "!", section=HOSTILE,
        path=(HOSTILE,), where_a=Location(HOSTILE, 3, HOSTILE), where_b=None,
    )  # fmt: skip
    clean = read(difference(Group((change(path=("outer",), where_b=None),))))
    side = replace(program(**{HOSTILE: HOSTILE}), ledger={HOSTILE: 1})
    source = diff_page(
        difference(Group((hostile,)), notes=(HOSTILE,), reasons=(HOSTILE,)), (HOSTILE,) * 2,
        (side, side),
    )  # fmt: skip
    found = Reader(source)
    assert set(found.tags) == set(clean.tags)
    assert found.tags.count("script") == 1
    assert "\u202e" not in source
    assert "\x1b" not in source
    assert "alert(1)" in found.text
    source.encode("utf-8")


def test_the_page_loads_nothing_and_its_policy_says_so():
    found = read(difference(Group((change(),))))
    assert not {"img", "link", "iframe", "object", "a"} & set(found.tags)
    assert not [a for a in found.attributes if a[1] in ("src", "href", "style")]
    assert not [a for a in found.attributes if a[1].startswith("on")]
    policy = next(a[2] for a in found.attributes if a[1] == "content" and "default-src" in a[2])
    assert policy.startswith("default-src 'none'")
    for part in (STYLE, SCRIPT):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "http" not in STYLE + SCRIPT
    assert "innerHTML" not in SCRIPT


def test_the_style_and_script_stand_in_the_page_as_they_were_digested():
    source = page("t", "<p>x</p>")
    assert re.search(r"<style>(.*?)</style>", source, re.S)[1] == STYLE
    assert re.search(r"<script>(.*?)</script>", source, re.S)[1] == SCRIPT


def test_ten_thousand_differences_stay_readable():
    groups = [
        Group((change(section=f"f{i // 100}", a=f"dense<{i}>", b=f"dense<{i}.5>"),))
        for i in range(10_000)
    ]
    source = diff_page(difference(*groups), NAMES, (program(), program()))
    found = Reader(source)
    assert found.tags.count("pre") == 20_000
    sections = [a for a in found.attributes if a[:2] == ("details", "class")]
    opened = [a for a in found.attributes if a[:2] == ("details", "open")]
    assert len(sections) == 100
    assert len(opened) == OPEN_GROUPS // 100
    assert len(source) < 600 * len(groups)


def cell(name, status, found=None, messages=()):
    nodes = [
        Node(program="p", variant=v, pass_set="none", spec=f"m.py:{v}", args=(), mesh=None,
             choice=NONE, target=None, route=None)
        for v in (name, "base")
    ]  # fmt: skip
    made = Cell(program="p", node=nodes[0], other=nodes[1], identical=True, level="exact")
    return CellResult(made, status, messages, found)


def test_a_gate_tells_every_cell_and_what_differs_in_those_that_do_not_hold():
    result = GateResult(
        (
            cell("first", "holds", difference(Group((change(a="kept quiet"),)))),
            cell("second", "broken", difference(Group((change(),))), ("DIFFERENT",)),
            cell("third", "undecided", None, ("no such file",)),
        ),
        guards=("two variants are one program",),
        total=3,
    )
    found = Reader(gate_page(result)).text
    for wanted in (
        result.closing,
        "first",
        "second",
        "third",
        "no such file",
        "two variants are one program",
        "- dense<1.5> : tensor<f32>",
    ):
        assert wanted in found
    assert "kept quiet" not in found


def test_text_shows_what_would_be_hidden():
    assert text("a\u200bb\x07<\ud800") == "a\\x200bb\\x07&lt;\\ud800"
