"""Lines are broken where a reader would break them, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from relower.gates.wrap import lines


def broken(text, width, hang=0):
    return [text[start:end] for start, end in lines(text, width, hang)]


@pytest.mark.parametrize(
    ("text", "width", "wanted"),
    [
        ("one two three", 9, ["one two", "three"]),
        ("at examples/kernels.py:89", 22, ["at", "examples/kernels.py:89"]),
        ("at a_folder/examples/kernels.py:89", 22, ["at a_folder/examples/", "kernels.py:89"]),
        ("jit(step)/while/body/transpose(jvp())/mul", 30,
         ["jit(step)/while/body/", "transpose(jvp())/mul"]),
        ("moe.plain.exact.jax-0.12.0.1-a9c2a9c7.snapshot", 30,
         ["moe.plain.exact.jax-0.12.0.1-", "a9c2a9c7.snapshot"]),
        ("xxxxxxxxxxxxxxxxxxxxxxxxx", 10, ["xxxxxxxxxx", "xxxxxxxxxx", "xxxxx"]),
        ("first\n\n  second", 20, ["first", "", "  second"]),
        ("漢字漢字漢字", 5, ["漢字", "漢字", "漢字"]),
        ("ab  cd", 2, ["ab", "cd"]),
        ("", 10, [""]),
    ],
)  # fmt: skip
def test_where_lines_break(text, width, wanted):
    assert broken(text, width) == wanted


def test_a_hang_narrows_the_lines_after_the_first():
    assert broken("aaa bbb ccc ddd", 11, 4) == ["aaa bbb ccc", "ddd"]
    assert broken("aaa bbb ccc ddd eee", 11, 4) == ["aaa bbb ccc", "ddd eee"]


@given(st.text(alphabet="ab/.,( \n漢-", max_size=60), st.integers(2, 30))
def test_no_line_is_too_wide_and_no_character_is_lost(text, width):
    found = broken(text, width)
    assert all(cell_len(line) <= width for line in found)
    assert "".join("".join(found).split()) == "".join(text.split())
