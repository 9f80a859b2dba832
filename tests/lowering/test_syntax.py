"""Cutting MLIR's text at brackets, strings and commas."""

from hypothesis import given
from hypothesis import strategies as st

from relower.lowering.syntax import closing, entries, outside_strings, split, unquoted

LEAVES = st.sampled_from(
    (
        "1 : i32",
        "tensor<4x?xf32>",
        '"a, b} \\22 ]"',
        "array<i64: 1, 2>",
        "(a, b) -> c",
        "affine_set<(d0) : (d0 >= 0)>",
        "dense<[[1, 2], [3, 4]]> : tensor<2x2xi32>",
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"k{i} = {v}" for i, v in enumerate(items)) + "}"
        ),
    ),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=5))
def test_a_list_is_split_into_what_it_was_made_of(values):
    text = f"[{', '.join(values)}]"
    assert closing(text, 0) == len(text)
    assert closing(f"{text} and ]", 0) == len(text)
    assert entries(text) == values


@given(st.lists(VALUES, max_size=5))
def test_a_dictionary_is_split_into_what_it_was_made_of(values):
    named = {f"name.{i}" if i % 2 else f'"odd = {i}, "': v for i, v in enumerate(values)}
    text = "{" + ", ".join(f"{name} = {value}" for name, value in named.items()) + "}"
    assert entries(text) == named
    assert entries(f"<{text}>") == named


@given(st.text(alphabet='([{<>}])",->=\\ a', max_size=20))
def test_damaged_text_is_cut_somewhere(text):
    pieces = split(text)
    assert not pieces or ",".join(pieces).replace(" ", "") == text.replace(" ", "")
    if text and text[0] in '([{<"':
        assert 0 < closing(text, 0) <= len(text)


def test_names_that_occur_twice_are_no_dictionary():
    assert entries("{a = 1, a = 2}") is None
    assert entries("{a}") == {"a": "unit"}
    assert entries("(a)") is None


def test_strings_are_unescaped():
    assert unquoted('"a\\22b\\\\c\\0A"') == 'a"b\\c\n'
    assert unquoted('"\\C3\\A9"') == "é"
    assert unquoted("bare") == "bare"
    assert outside_strings('@f "@g \\22@h" @i') == "@f  @i"
