"""``relower selftest``: exit codes, reports and the page, with the work itself left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relower.cli import selftest
from relower.cli.main import main
from relower.gates.selftest.report import BEGIN, END
from relower.gates.selftest.score import Row, Score

LEVELS = ("exact", "inlined", "dataflow")
GOOD = Score(
    (
        Row("a", "swap", "mutant", "caught", sites=2, levels=LEVELS),
        Row("b", "swap", "mutant", "not applicable", "no subtraction"),
        Row("a", "rename", "noise", "matched", levels=LEVELS),
    )
)
BAD = Score(
    (
        *GOOD.rows,
        replace(GOOD.rows[0], name="lost", state="survived", reason="IDENTICAL at exact"),
    )
)


@pytest.fixture
def found(monkeypatch):
    def give(score):
        monkeypatch.setattr(selftest, "selftest", lambda *args, **kwargs: score)

    return give


def test_a_score_that_holds(found, capsys):
    found(GOOD)
    assert main(["selftest"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("2 of 2 mutants caught, 1 of 1 variations matched")
    assert "b: swap was not tried: no subtraction" in out


def test_a_survivor_is_named_with_its_reason(found, capsys):
    found(BAD)
    assert main(["selftest"]) == 1
    assert "a: lost survived: IDENTICAL at exact" in capsys.readouterr().out


def test_json(found, capsys, parsed):
    found(BAD)
    assert main(["selftest", "--json"]) == 1
    value = parsed("selftest", capsys.readouterr().out)
    assert value["holds"] is False
    assert [row["state"] for row in value["rows"]][-1] == "survived"


def test_the_page_is_written_and_checked(found, capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n{BEGIN}\n{END}\n")
    found(GOOD)
    assert main(["selftest", "--check", str(page)]) == 1
    assert "is stale" in capsys.readouterr().out
    assert main(["selftest", "--write", str(page)]) == 0
    assert "| swap | all levels | ✓ | – |" in page.read_text()
    assert main(["selftest", "--check", str(page)]) == 0
    found(BAD)
    assert main(["selftest", "--check", str(page)]) == 1


@pytest.mark.parametrize("text", [None, "no marks"])
def test_a_page_that_can_not_be_written_is_said_before_the_work(text, tmp_path, capsys):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    assert main(["selftest", "--write", str(page)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("relower: ")
    assert str(page) in error


def test_bad_cases_and_sites_are_one_line(capsys):
    assert main(["selftest", "--sites", "0"]) == 2
    assert main(["selftest", "nothing.py:case"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("relower: ") for line in lines)
