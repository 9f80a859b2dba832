"""What is shown while a command works."""

import pytest
from rich.table import Table

from relower.cli.show import console, progress, tabled


def test_lines_of_a_table_end_where_their_text_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("pass", "reasons", box=None, pad_edge=False)
    table.add_row("short", "a [bold]reason[/] that is wrapped, since it is long")
    table.add_row("a longer name", "")
    tabled(console(), table)
    assert capsys.readouterr().out.splitlines() == [
        "pass           reasons",
        "short          a reason that is wrapped,",
        "               since it is long",
        "a longer name",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_nothing_in_a_file(capfd, monkeypatch, terminal):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR" if terminal else "TERM", "1" if terminal else "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    with progress(3) as note:
        note("moe: plain")
        note("moe: by_hand")
    out, err = capfd.readouterr()
    assert out == ""
    assert ("2/3" in err, "moe: by_hand" in err) == (terminal, terminal)
    assert terminal or err == ""
