"""What a child says of its progress is shown, and what it hasn't finished writing isn't."""

import threading

import pytest

from relower.cli.progress import bar, following, line, read


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3 8 argsort@f#1 and more", (3, 8, "argsort@f#1 and more")),
        ("3 8", (3, 8, "")),
        ("3", None),
        ("", None),
        ("a b c", None),
    ],
)
def test_what_stands_in_the_file(tmp_path, text, wanted):
    assert read(tmp_path / "none") is None
    place = tmp_path / "progress"
    place.write_text(text)
    assert read(place) == wanted


def test_it_is_followed_and_ends(tmp_path):
    place, seen, met = tmp_path / "progress", [], threading.Event()

    def show(*said):
        seen.append(said)
        met.set()

    with following(place, show):
        place.write_text("1 2 here")
        assert met.wait(20)
    assert seen[0] == (1, 2, "here")
    assert not [t for t in threading.enumerate() if "follow" in t.name and t.is_alive()]


def test_nothing_is_shown_where_there_is_no_terminal():
    for made in (bar(), line("bisecting", lambda a, b: "")):
        with made as (place, shown), following(place, shown):
            assert shown is None
            assert place.parent.is_dir()
        assert not place.parent.exists()
