"""The shell of an HTML report: one file that needs no server and loads nothing.

What stands in a report may come from strangers (an artifact names functions, files and scopes as
it likes), so every text goes through `text`, and the page's own policy forbids anything but its
own style and its own script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Collection, Sequence

_NOT_SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
"""Controls, and what would hide text or turn its direction."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --dim: #626b78; --paper: #fff; --card: #f6f7f9;
  --line: #dfe3e8; --red: #b3261e; --green: #1a7f37; --amber: #8a5a00; --link: #0b57a4;
  --minus: #ffebe9; --minus-mark: #ffc4bf; --plus: #e6ffec; --plus-mark: #a6efb8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ec; --dim: #98a2b0; --paper: #14171c;
  --card: #1c2128; --line: #333a44; --red: #ff8a80; --green: #6fdc8c; --amber: #f0c060;
  --link: #8ab8ff; --minus: #3a1d1c; --minus-mark: #7a302b; --plus: #14301d;
  --plus-mark: #23663a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
code, pre, .mono { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { margin: 0; padding: .15rem .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: .05rem .6rem; border-radius: 4px; font-weight: 600;
  color: #fff; background: var(--dim); }
.identical, .holds { background: #1a7f37; } .different, .broken { background: #b3261e; }
.unknown, .undecided { background: #8a5a00; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 600; color: var(--dim); }
.worse { color: var(--red); font-weight: 600; } .better { color: var(--green); }
td.number, th.number { text-align: right; white-space: nowrap; }
.note { border-left: 3px solid var(--amber); padding: .15rem .75rem; margin: .4rem 0; }
.dim { color: var(--dim); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0;
  background: var(--card); }
summary { cursor: pointer; padding: .4rem .75rem; overflow-wrap: anywhere; }
details > .body { padding: 0 .75rem .5rem; }
.change { border-top: 1px solid var(--line); padding: .5rem 0; content-visibility: auto;
  contain-intrinsic-size: auto 6rem; }
.change > p { margin: 0 0 .2rem; overflow-wrap: anywhere; }
.minus { background: var(--minus); } .minus mark { background: var(--minus-mark); color: inherit; }
.plus { background: var(--plus); } .plus mark { background: var(--plus-mark); color: inherit; }
.place { color: var(--link); overflow-wrap: anywhere; }
input[type=search] { width: 100%; max-width: 30rem; padding: .35rem .6rem; font: inherit;
  color: inherit; background: var(--paper); border: 1px solid var(--line); border-radius: 6px; }
"""

SCRIPT = """
const box = document.querySelector('input[type=search]');
if (box) {
  const changes = [...document.querySelectorAll('.change')]
    .map(element => [element, element.textContent.toLowerCase()]);
  const shown = document.querySelector('#shown');
  let waiting;
  box.hidden = false;
  box.addEventListener('input', () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
      let count = 0;
      for (const [element, text] of changes) {
        const keep = words.every(word => text.includes(word));
        element.hidden = !keep;
        count += keep;
      }
      for (const section of document.querySelectorAll('details.section')) {
        section.hidden = !section.querySelector('.change:not([hidden])');
        if (words.length && !section.hidden) section.open = true;
      }
      shown.textContent = words.length ? `${count} of ${changes.length} shown` : '';
    }, 150);
  });
}
"""


def text(value: object) -> str:
    """``value`` as it may stand in a page: nothing in it is markup, hidden or turned round."""
    shown = _NOT_SHOWN.sub(lambda m: f"\\x{ord(m[0]):02x}", str(value))
    return html.escape(shown.encode("utf-8", "backslashreplace").decode())


def page(title: str, body: str) -> str:
    """A whole document; ``title`` is text, ``body`` is HTML."""
    digests = [
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (STYLE, SCRIPT)
    ]
    policy = (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def badge(name: str, said: str | None = None) -> str:
    """A verdict in its colour, in other words where ``said`` has them."""
    return f'<span class="verdict {text(name.lower())}">{text(said or name)}</span>'


def folded(title: str, body: str) -> str:
    """HTML that is a click away."""
    return f'<details><summary>{text(title)}</summary><div class="body">{body}</div></details>'


def table(
    rows: Sequence[tuple[str, ...]],
    head: bool = False,
    numbers: bool = False,
    words: Collection[int] = (0,),
) -> str:
    """Rows of HTML cells; with ``numbers`` all columns but those in ``words`` hold figures."""
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if head and i == 0 else "td"
        styles = [' class="number"' if numbers and j not in words else "" for j in range(len(row))]
        cells = "".join(f"<{tag}{s}>{c}</{tag}>" for s, c in zip(styles, row, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"
