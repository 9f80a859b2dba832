"""What the pages show is what happens: their files are written, their commands run."""

from __future__ import annotations

from pathlib import Path

import literate
import pytest

DOCS = Path(literate.__file__).parent
WALKS = [DOCS / "getting-started.md", *sorted(DOCS.glob("recipes/*.md"))]
"""Pages that a reader follows from top to bottom: they must hold on every jax."""
CAPTURES = [page for page in literate.pages() if page not in WALKS]


def assert_current(page: Path, folder: Path) -> None:
    complaints = [ran.complaint(literate.NEWEST) for ran in literate.run_page(page, folder)]
    assert not [text for text in complaints if text], "\n\n".join(filter(None, complaints))


def shows_commands(page: Path) -> bool:
    found = literate.blocks(page.read_text(encoding="utf-8"))
    return any(b.language == "console" and "not run" not in b.notes for b in found)


@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    assert_current(page, tmp_path / "reader")


@pytest.mark.skipif(not literate.NEWEST, reason="reference pages show the newest jax")
@pytest.mark.parametrize("page", list(filter(shows_commands, CAPTURES)), ids=lambda page: page.stem)
def test_captures_are_current(page: Path, tmp_path: Path) -> None:
    assert_current(page, tmp_path / "reader")


def test_every_recipe_runs_all_of_its_code() -> None:
    """Code without a title would be shown and never run."""
    for page in WALKS:
        for block in literate.blocks(page.read_text(encoding="utf-8")):
            runs = block.language == "console" or block.title is not None
            assert runs, f"{page.name}:{block.line}: a block of {block.language!r} is not run"
