"""Run one command as a reader would, and draw what it looks like on a terminal.

``relower …`` and ``python FILE.py`` run in this process, which has jax loaded already; everything
that they would start themselves is started. Anything else runs in a shell.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 80
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's template without its fonts, which would be fetched from elsewhere."""

_THEME = TerminalTheme(
    (16, 20, 24), (220, 224, 228),
    [(16, 20, 24), (224, 90, 90), (120, 190, 110), (214, 170, 80),
     (110, 150, 220), (190, 130, 200), (100, 185, 190), (220, 224, 228)],
    [(110, 118, 126), (240, 120, 120), (150, 214, 140), (236, 200, 120),
     (150, 184, 240), (214, 164, 224), (140, 212, 216), (255, 255, 255)],
)  # fmt: skip


def jax_version() -> tuple[int, ...]:
    """As in ``(0, 12, 0, 1)``, without loading jax."""
    return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("jax")))


def run(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output, coloured, standard error included, of a command run in ``folder``."""
    folder = folder.resolve()
    cache = folder.parent / f"{folder.name}.cache"  # a page's own: nothing was lowered before it
    variables = _environment(cache)
    if list(folder.glob("*.dist-info")):
        variables["PYTHONPATH"] = str(folder)
    with mock.patch.dict(os.environ, variables), contextlib.chdir(folder):
        words = shlex.split(command) if "\n" not in command and not _needs_shell(command) else []
        if words[:1] == ["relower"]:
            return _here(lambda: _relower(words[1:]))
        if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
            return _here(lambda: _script(words[1:], folder))
        return _shell(command)


def declare(package: Path) -> None:
    """Leave in a package's folder what ``pip install -e`` would leave of its entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = package / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def without_colours(output: str) -> str:
    """The text alone."""
    return _COLOUR.sub("", output)


def picture(command: str, output: str) -> str:
    """An SVG of a terminal with a command and its output, coloured; it loads nothing."""
    drawn = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    drawn.print(Text.assemble(("$ ", "bright_black"), (command, "bold")))
    drawn.print(Text.from_ansi(output.rstrip("\n")))
    return drawn.export_svg(title="", theme=_THEME, code_format=_PICTURE, unique_id="relower")


def _environment(cache: Path) -> dict[str, str]:
    tools = str(Path(sys.executable).parent)
    return {
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "RELOWER_CACHE": str(cache),
        "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "reader", "GIT_AUTHOR_EMAIL": "reader@localhost",
        "GIT_COMMITTER_NAME": "reader", "GIT_COMMITTER_EMAIL": "reader@localhost",
    }  # fmt: skip


def _needs_shell(command: str) -> bool:
    return any(mark in command for mark in "|&;<>$=*`")


def _here(call: object) -> tuple[int, str]:
    assert callable(call)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = call()
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 1
    return int(code or 0), out.getvalue()


def _relower(arguments: list[str]) -> int:
    from relower.cli.main import main

    # On a terminal it would draw progress on standard error, and wipe it out again.
    with mock.patch("relower.cli.show.Console", _no_terminal_on_stderr):
        return main(arguments)


def _no_terminal_on_stderr(**options: object) -> Console:
    return Console(force_terminal=False, **options)  # type: ignore[arg-type]


def _script(words: list[str], folder: Path) -> int:
    with _imports_of(folder), _quickly_compiled(), mock.patch.object(sys, "argv", words):
        runpy.run_path(words[0], run_name="__main__")
    return 0


@contextlib.contextmanager
def _quickly_compiled() -> Iterator[None]:
    """The CPU's programs run for milliseconds: a third of a script's time is their optimization."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def _imports_of(folder: Path) -> Iterator[None]:
    """``folder`` first on the import path; its modules are forgotten afterwards."""
    before = set(sys.modules)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        yield
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None)
        if origin and Path(origin).is_relative_to(folder):
            del sys.modules[name]


def _shell(command: str) -> tuple[int, str]:
    os.environ.pop("FORCE_COLOR", None)  # of `run`'s own; a pipe is no terminal
    done = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout
