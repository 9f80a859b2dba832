"""Run what the pages of the documentation show, and compare with what they say it prints.

    python docs/literate.py [PAGE.md …]            exit 1 where a page shows something else
    python docs/literate.py --write [PAGE.md …]    put what was printed into the pages

A fenced block with a title is a file: it is written under that name into an empty folder, one
folder a page; a second block of the same title is appended. In a block of ``console``, lines that
begin with ``$ `` are commands, run in that folder in the order of the page, and the lines under
them what they print. Commands that name ``examples/`` run at the top of the repository.

In the output shown, ``…`` alone on a line stands for any lines, and within one for any text.
Digests, seconds and versions aren't compared; counts of equations and operations only on the
newest jax. A comment before a block says what differs from the usual:

    <!-- exit: 1 -->             its last command ends with this code, not 0
    <!-- picture: img/x.svg -->  the picture is what this block's command looks like on a terminal
    <!-- not run: REASON -->     its commands can't run here
    <!-- needs: libtpu -->       run only where this module is installed
    <!-- as in: OTHER.md -->     it stands in that page, too, and is run there
    <!-- installs: . -->         nor can this one, `pip install -e`; what it declares is declared
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import terminal  # noqa: E402

NEWEST = terminal.jax_version() >= (0, 12)
"""Whether the counts in the pages are those of the jax at hand."""

_FENCE = re.compile(r'^```(?P<language>[\w-]+)?(?: +title="(?P<title>[^"]+)")?\s*$')
_NOTE = re.compile(r"^<!-- (?P<key>exit|picture|not run|installs|as in|needs): (?P<value>.+) -->$")
_ANYWHERE = (
    (re.compile(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{16}(?=…)"), "<digest>"),
    (re.compile(r"(?<=-)[0-9a-f]{8}(?=\.snapshot)|\b[0-9a-f]{8}(?= → )"), "<digest>"),
    (re.compile(r"(?<=<digest> → )[0-9a-f]{8}\b"), "<digest>"),
    (re.compile(r"\b\d+\.\d+ ?s\b"), "<seconds>"),
    (re.compile(r"\bjax-\d+(\.\d+)+"), "jax-<version>"),
)
_YOUNG = re.compile(
    r"^[^\n]*: not kept in\s+the\s+cache:.*?\bjust\s+before\n", re.MULTILINE | re.DOTALL
)
"""The cache's note on files that are seconds old, as a page's are."""
_OLDER_JAX = (
    (re.compile(r"\b\d[\d,]*(?= (equations?|bodies|operations?|details|rounds?)\b)"), "n"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str
    line: int
    """Of its first line, counted from 1."""
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """A command of a page and what stands under it."""

    command: str
    output: str


@dataclass(frozen=True)
class Ran:
    """A command that was run, beside what the page says of it."""

    block: Block
    shown: Shown
    code: int
    output: str
    wanted_code: int
    picture: tuple[Path, str] | None
    """A picture of it, as SVG, and where the page has it."""

    def complaint(self, newest: bool) -> str | None:
        """How the page is wrong; None where it isn't."""
        where = f"line {self.block.line}: $ {self.shown.command}"
        if self.code != self.wanted_code:
            codes = f"exit code {self.code}, wanted {self.wanted_code}"
            return f"{where}\n{codes}; it printed\n{self.output}"
        if not agree(self.shown.output, self.output, newest):
            return f"{where}\nprints\n{self.output}\nand the page shows\n{self.shown.output}"
        if newest and self.picture and _read(self.picture[0]) != self.picture[1]:
            return f"{where}\n{self.picture[0].name} is not the picture of what it prints"
        return None

    def is_written(self) -> bool:
        """Whether ``--write`` puts the output into the page: not where the page shortens it."""
        return self.code == self.wanted_code and "\n…" not in f"\n{self.shown.output}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, with the notes in the comments right before them."""
    notes: dict[str, str] = {}
    inside: tuple[str, str | None, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.splitlines(), 1):
        if inside is not None:
            if line != "```":
                lines.append(line)
                continue
            yield Block(inside[0], inside[1], "".join(f"{t}\n" for t in lines), inside[2], notes)
            inside, lines, notes = None, [], {}
        elif fence := _FENCE.match(line):
            inside = fence["language"] or "", fence["title"], number + 1
        elif note := _NOTE.match(line):
            notes = {**notes, note["key"]: note["value"]}
        elif line.strip():
            notes = {}
    if inside is not None:
        raise ValueError(f"the block that begins in line {inside[2]} doesn't end")


def is_run(block: Block) -> bool:
    """Whether the commands of a block are run."""
    if block.language != "console" or {"not run", "as in", "installs"} & set(block.notes):
        return False
    needs = block.notes.get("needs")
    return needs is None or importlib.util.find_spec(needs) is not None


def commands(block: Block) -> Iterator[Shown]:
    """The commands of a ``console`` block; a line that ends in a backslash goes on in the next."""
    command: str | None = None
    output: list[str] = []
    for line in block.text.splitlines():
        if command is not None and command.endswith("\\") and not output:
            command += "\n" + line
        elif line.startswith("$ "):
            if command is not None:
                yield Shown(command, "".join(output))
            command, output = line[2:], []
        elif command is None:
            raise ValueError(f"line {block.line}: output before the first command")
        else:
            output.append(line + "\n")
    if command is not None:
        yield Shown(command, "".join(output))


def agree(shown: str, found: str, newest: bool) -> bool:
    """Whether the output is what a page shows, ``…`` standing for anything."""
    shown, found = _plain(shown, newest), _plain(found, newest)
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.split("…"))) + "\n"
    return re.fullmatch(pattern, found) is not None


def _plain(text: str, newest: bool) -> str:
    text = _YOUNG.sub("", text)
    lines = (line.rstrip() for line in text.strip("\n").splitlines())
    text = "".join(f"{line}\n" for line in lines)
    for pattern, name in _ANYWHERE + (() if newest else _OLDER_JAX):
        text = pattern.sub(name, text)
    return text


def run_page(path: Path, folder: Path) -> Iterator[Ran]:
    """Write the files of a page into ``folder`` and run its commands there, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    written: set[str] = set()
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.title is not None and block.language != "console":
            target = folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("a" if block.title in written else "w", encoding="utf-8") as file:
                file.write(block.text)
            written.add(block.title)
        elif "installs" in block.notes:
            terminal.declare(folder / block.notes["installs"])
        elif is_run(block):
            yield from _run_block(block, path, folder)


def _run_block(block: Block, path: Path, folder: Path) -> Iterator[Ran]:
    shown = list(commands(block))
    for one in shown:
        is_last = one is shown[-1]
        code, output = terminal.run(one.command, ROOT if "examples/" in one.command else folder)
        picture = None
        if is_last and "picture" in block.notes:
            picture = path.parent / block.notes["picture"], terminal.picture(one.command, output)
        wanted = int(block.notes.get("exit", "0")) if is_last else 0
        yield Ran(block, one, code, terminal.without_colours(output), wanted, picture)


def rewritten(page: str, ran: Sequence[Ran]) -> str:
    """The page with what its commands print; blocks that shorten it with ``…`` stay."""
    lines = page.splitlines(keepends=True)
    by_line: dict[int, list[Ran]] = {}
    for one in ran:
        by_line.setdefault(one.block.line, []).append(one)
    for line, of_block in sorted(by_line.items(), reverse=True):
        block = of_block[0].block
        text = ""
        for one in of_block:
            kept = one.complaint(newest=True) is None or not one.is_written()
            found = one.output.strip("\n")
            output = one.shown.output if kept else found + "\n" * bool(found)
            text += f"$ {one.shown.command}\n{output}"
        lines[line - 1 : line - 1 + block.text.count("\n")] = [text]
    return "".join(lines)


def pages() -> list[Path]:
    """Every page that may show commands."""
    written_by_hand = [*DOCS.glob("*.md"), *DOCS.glob("recipes/*.md")]
    return [ROOT / "README.md", *sorted(written_by_hand)]


def main(argv: Sequence[str] | None = None) -> int:
    """Check or write the pages given, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE.md")
    parser.add_argument("--write", action="store_true", help="put what was printed into the pages")
    parser.add_argument(
        "--printed",
        type=Path,
        metavar="FILE",
        help="run nothing: the page's first block of text or console shows what this file holds",
    )
    parser.add_argument("--of", metavar="COMMAND", help="of --printed: not the first, but this one")
    options = parser.parse_args(argv)
    if options.printed is not None:
        printed = options.printed.read_text(encoding="utf-8")
        return _compared(options.pages[0], printed, options.of)
    complaints = 0
    for path in [page.resolve() for page in options.pages] or pages():
        with tempfile.TemporaryDirectory(prefix="relower-page-") as folder:
            ran = list(run_page(path, Path(folder)))
        if options.write:
            path.write_text(rewritten(path.read_text(encoding="utf-8"), ran), encoding="utf-8")
            for picture in (one.picture for one in ran if one.picture):
                picture[0].parent.mkdir(exist_ok=True)
                picture[0].write_text(picture[1], encoding="utf-8")
        for one in ran:
            complaint = one.complaint(newest=NEWEST)
            if complaint is not None and not (options.write and one.is_written()):
                complaints += 1
                print(f"{path.relative_to(ROOT)}: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def shown_of(page: str, command: str | None = None) -> tuple[Block, str]:
    """What a page shows of a command; of None, its first block of text or console."""
    for block in blocks(page):
        if command is None and block.language == "text":
            return block, block.text
        for one in commands(block) if block.language == "console" else ():
            if command in (None, one.command):
                return block, one.output
    raise ValueError(f"the page shows nothing of {command or 'any command'}")


def _compared(page: Path, printed: str, command: str | None) -> int:
    """Whether a page shows what a command printed that was run elsewhere; counts aside."""
    block, shown = shown_of(page.read_text(encoding="utf-8"), command)
    if agree(shown, terminal.without_colours(printed), newest=False):
        return 0
    print(f"{page}, line {block.line}, shows something else than\n{printed}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
