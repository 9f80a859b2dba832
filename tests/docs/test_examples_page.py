"""docs/examples.md names what there is: every case it lists, every option it shows."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = re.findall(
    r"^## `(examples/[\w/]+\.py)`[^\n]*\n(.*?)(?=^## |\Z)",
    (ROOT / "docs" / "examples.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("path", "text"), SECTIONS, ids=[path for path, _ in SECTIONS])
def test_what_is_listed_is_there(path: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    module = importlib.import_module(Path(path).stem)
    (table,) = re.findall(r"^\| case \|.*\n(?:\|.*\n)+", text, re.MULTILINE) or [""]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    cases = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert [name for name in cases if not hasattr(module, name)] == []
    source = (ROOT / path).read_text(encoding="utf-8")
    runs = re.findall(rf"python {re.escape(path)}([^\n#]*)", text)
    options = {option for run in runs for option in re.findall(r"--[\w-]+", run)}
    assert [option for option in options if f'"{option}"' not in source] == []


def test_every_example_has_a_section() -> None:
    there = {f"examples/{p.name}" for p in (ROOT / "examples").glob("*.py")}
    assert there - {path for path, _ in SECTIONS} == set()
