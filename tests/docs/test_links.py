"""Every link of the README and the documentation leads somewhere, by GitHub's rules for anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```\s*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its code, headings' code apart: there it is part of the anchor."""
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    return (match[1] for match in _LINK.finditer(prose(page)))


def anchors(page: Path) -> set[str]:
    fenced = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)
    text = fenced.sub("", page.read_text(encoding="utf-8"))
    return {slug(line.lstrip("#").strip()) for line in text.splitlines() if line.startswith("#")}


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def broken(page: Path) -> Iterator[str]:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme != "https" or "." not in parts.netloc:
                yield f"{link}: wanted https and a host"
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif ROOT / "docs" in page.parents and ROOT / "docs" not in target.parents:
            yield f"{link}: leads out of the documentation, which is published alone"
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `name`: here\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#a-name-here) [b](there.md#a-name) [c](gone.md) [d](http://x.y) `[e](f)`\n"
    )
    assert [text.partition(":")[0] for text in broken(page)] == [
        "there.md#a-name",
        "gone.md",
        "http",
    ]


class _Loader(yaml.SafeLoader):
    """Of mkdocs' settings, whose tags name functions."""


_Loader.add_multi_constructor("!", lambda loader, tag, node: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: None)


def test_every_page_is_in_the_navigation() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)

    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            entry = list(entry.values())
        if isinstance(entry, list):
            for inner in entry:
                yield from pages(inner)

    named = sorted(pages(settings["nav"]))
    there = sorted(str(p.relative_to(ROOT / "docs")) for p in PAGES if p != ROOT / "README.md")
    assert named == there
