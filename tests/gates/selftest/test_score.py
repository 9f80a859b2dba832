"""The score and its page: what holds, what doesn't, and that the page says what there is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from relower.gates.selftest import judge, sources
from relower.gates.selftest.elsewhere import CIRCUMSTANCES
from relower.gates.selftest.places import PROGRAMS
from relower.gates.selftest.report import BEGIN, END, written
from relower.gates.selftest.score import Row, Score

PAGE = Path(__file__).parents[3] / "docs" / "selftest.md"
CAUGHT = Row("p", "swap", "mutant", "caught", levels=("exact",))
MATCHED = Row("p", "rename", "noise", "matched", levels=("exact", "inlined", "dataflow"))


def test_a_survivor_and_unmatched_noise_do_not_hold():
    assert Score((CAUGHT, MATCHED)).holds
    assert not Score((replace(CAUGHT, state="survived"), MATCHED)).holds
    assert not Score((CAUGHT, replace(MATCHED, state="not matched"))).holds
    assert not Score(()).holds


def test_a_mutant_that_applies_nowhere_does_not_hold():
    absent = replace(CAUGHT, name="other", state="not applicable")
    score = Score((CAUGHT, absent, MATCHED))
    assert score.nowhere == ("other",)
    assert not score.holds
    assert Score((CAUGHT, absent, replace(absent, program="q", state="caught"))).holds


def test_the_line_counts_sites():
    survived = replace(CAUGHT, name="other", state="survived")
    absent = replace(CAUGHT, program="q", state="not applicable")
    score = Score((replace(CAUGHT, sites=3), survived, absent, MATCHED))
    assert score.line() == "3 of 4 mutants caught, 1 of 1 variations matched"


def test_rows_survive_json():
    assert Row.from_json(CAUGHT.to_json()) == CAUGHT


def test_the_table_is_put_between_the_marks():
    page = f"head\n{BEGIN}\nold\n{END}\ntail\n"
    new = written(page, Score((CAUGHT, MATCHED)))
    assert new.startswith("head\n")
    assert new.endswith("tail\n")
    assert "old" not in new
    assert "| swap | exact | ✓ |" in new
    assert written(new, Score((CAUGHT, MATCHED))) == new
    with pytest.raises(ValueError, match="wanted one line"):
        written("head", Score(()))


def test_the_page_lists_what_there_is_and_its_score_is_that_of_its_table():
    text = PAGE.read_text()
    rows = re.findall(r"^\| ([^|]+) \| (?:all levels|exact[^|]*) \| (.+) \|$", text, re.MULTILINE)
    wanted = [
        *(mutant.name for mutant in judge.MUTANTS),
        *(f"source: {m.name}" for m in (*sources.MUTANTS, sources.HOISTED)),
        *(variation.name for variation in judge.VARIATIONS),
        *(f"source: {name}" for name in sources.VARIATIONS),
        *(circumstance.name for circumstance in CIRCUMSTANCES),
    ]
    assert sorted(name for name, _ in rows) == sorted(wanted)
    noise = {*(v.name for v in judge.VARIATIONS), *(c.name for c in CIRCUMSTANCES)}
    noise |= {f"source: {name}" for name in sources.VARIATIONS}
    marks = {True: [], False: []}
    for name, cells in rows:
        assert len(cells.split(" | ")) == len(PROGRAMS)
        marks[name in noise] += cells.split(" | ")
    counts = {side: (found.count("✓"), len(found) - found.count("–"))
              for side, found in marks.items()}  # fmt: skip
    assert "✗" not in {mark for found in marks.values() for mark in found}
    line = "**{} of {} mutants caught, {} of {} variations matched.**"
    assert line.format(*counts[False], *counts[True]) in text


def test_every_source_mutant_changes_the_source():
    text = sources.SOURCE.read_text()
    for mutant in (*sources.MUTANTS, sources.HOISTED):
        assert mutant.old in text, mutant.name
    renamed = sources.renamed(text)
    for old, new in sources.CHOSEN_NAMES.items():
        assert old in text
        assert re.search(rf"\b{old}\b", renamed) is None, old
        assert new in renamed
    compile(renamed, "renamed", "exec")
