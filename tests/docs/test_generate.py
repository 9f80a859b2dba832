"""The generated pages are what the passes say today."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

GENERATE = Path(__file__).parents[2] / "docs" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", GENERATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_current(generate: ModuleType) -> None:
    assert generate.main(["--check"]) == 0


def test_every_pass_says_what_it_saves_or_why_that_is_not_known(generate: ModuleType) -> None:
    pages = [p for p in (generate.DOCS / "passes").glob("*.md") if p.stem != "index"]
    assert pages
    assert not [p.stem for p in pages if "cycles" not in p.read_text(encoding="utf-8").lower()]


@pytest.mark.parametrize("name", ["json.md", "passes/affine_gather.md"])
def test_a_stale_page_is_noticed(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copy(generate.DOCS / "json.schema.json", tmp_path)
    (tmp_path / "passes").mkdir()
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    page = tmp_path / name
    page.write_text(page.read_text() + "edited by hand\n")
    assert generate.main(["--check"]) == 1
