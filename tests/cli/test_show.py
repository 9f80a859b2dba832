"""What is shown while a command works."""

import pytest

from relower.cli.show import progress


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
