"""What the pages show is what happens: their files are written, their commands run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import literate
import pytest

DOCS = Path(literate.__file__).parent
WALKS = [DOCS / "getting-started.md", *sorted(DOCS.glob("recipes/*.md"))]
"""Pages that a reader follows from top to bottom: they must hold on every jax."""
CAPTURES = [page for page in literate.pages() if page not in WALKS]


def assert_current(page: Path, folder: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for library in re.findall(r"^(?:import|from) (flax|equinox)\b", text, re.MULTILINE):
        pytest.importorskip(library, reason="libraries come with the extra `recipes`")
    complaints = [ran.complaint(literate.NEWEST) for ran in literate.run_page(page, folder)]
    assert not [text for text in complaints if text], "\n\n".join(filter(None, complaints))


def shows_commands(page: Path) -> bool:
    return any(map(literate.is_run, literate.blocks(page.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    assert_current(page, tmp_path / "reader")


def captures() -> list[Any]:
    """Reference pages whose commands run here; some with libtpu only."""
    found = []
    for page in filter(shows_commands, CAPTURES):
        marks = [pytest.mark.libtpu] if page.stem == "cost" else []
        found.append(pytest.param(page, id=page.stem, marks=marks))
    return found


@pytest.mark.skipif(not literate.NEWEST, reason="reference pages show the newest jax")
@pytest.mark.parametrize("page", captures())
def test_captures_are_current(page: Path, tmp_path: Path) -> None:
    assert_current(page, tmp_path / "reader")


def test_every_recipe_runs_all_of_its_code() -> None:
    """Code without a title would be shown and never run."""
    for page in WALKS:
        for block in literate.blocks(page.read_text(encoding="utf-8")):
            runs = block.language == "console" or block.title is not None
            assert runs, f"{page.name}:{block.line}: a block of {block.language!r} is not run"


def test_what_stands_in_another_page_stands_there() -> None:
    found = 0
    for page in literate.pages():
        for block in literate.blocks(page.read_text(encoding="utf-8")):
            if "as in" in block.notes:
                other = page.parent / block.notes["as in"]
                assert f"```console\n{block.text}```\n" in other.read_text(encoding="utf-8"), (
                    f"{page.name}:{block.line} isn't what {other.name} shows"
                )
                found += 1
    assert found


def test_every_command_is_listed() -> None:
    from relower.cli.main import COMMANDS

    for page in (DOCS / "cli.md", DOCS.parent / "README.md"):
        text = page.read_text(encoding="utf-8")
        missing = [name for name in COMMANDS if f"relower {name}" not in text]
        assert not missing, f"{page.name} lacks {missing}"


SHOWN = """\
Some text.

<!-- exit: 1 -->
```console
$ relower diff a \\
    b
one 0123456789abcdef…
…
last
$ true
```

```python title="a/b.py"
x = 1
```
"""


class TestLiterate:
    def test_blocks_and_commands(self) -> None:
        console, file = literate.blocks(SHOWN)
        assert (console.line, console.notes) == (5, {"exit": "1"})
        assert (file.title, file.text, file.notes) == ("a/b.py", "x = 1\n", {})
        first, second = literate.commands(console)
        assert first.command == "relower diff a \\\n    b"
        assert (second.command, second.output) == ("true", "")

    @pytest.mark.parametrize(
        ("shown", "found", "same"),
        [
            ("a\n…\nc\n", "a\nb\nb\nc\n", True),
            ("a\n…\nc\n", "a\nc\n", True),
            ("a\n…\nc\n", "a\nb\n", False),
            ("a … c\n", "a b c\n", True),
            ("sha256 0123456789abcdef…\n", "sha256 fedcba9876543210…\n", True),
            ("not (dae86f7f → e46e8e31)\n", "not (00000000 → 11111111)\n", True),
            ("1 passed in 1.84s\n", "1 passed in 12.01s\n", True),
            ("1 passed in 1.84s\n", "2 passed in 1.84s\n", False),
            (
                "a\nb\n",
                "a\nx: not kept in the\ncache: /y.py was written, or just before\nb\n",
                True,
            ),
            ("a\n", "a\nb\n", False),
            ("", "b\n", False),
        ],
    )
    def test_agreement(self, shown: str, found: str, same: bool) -> None:
        assert literate.agree(shown, found, newest=True) is same

    def test_counts_are_those_of_the_newest_jax(self) -> None:
        shown, found = "94 equations in 9 bodies\n", "1,092 equations in 10 bodies\n"
        assert not literate.agree(shown, found, newest=True)
        assert literate.agree(shown, found, newest=False)

    def test_a_page_that_shows_something_else_is_noticed(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("```console\n$ echo one\none\n$ echo two; false\none\n```\n")
        ran = list(literate.run_page(page, tmp_path / "reader"))
        assert ran[0].complaint(newest=True) is None
        assert "exit code 1, wanted 0" in (ran[1].complaint(newest=True) or "")
        page.write_text("```console\n$ echo two\none\n```\n")
        ran = list(literate.run_page(page, tmp_path / "reader"))
        assert "prints\ntwo" in (ran[0].complaint(newest=True) or "")
        assert literate.rewritten(page.read_text(), ran).endswith("$ echo two\ntwo\n```\n")
