"""``FILE.py:NAME``, and one line for everything that can be wrong with it."""

import jax
import pytest

from relower.lowering import Case, InputError, load_case, lower
from relower.lowering.artifact import save

TEXT = """
import jax
import jax.numpy as jnp
from relower.lowering import case

X = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)

def plain(x, w):
    return x @ w

def nothing():
    return case(plain, X, X)

def several():
    return {"a": case(plain, X, X), "b": nothing}

ready = case(plain, X, X)
cases = {"small": ready, "made": nothing}
number = 3

def wrong():
    return 3

def broken():
    return 1 / 0

def optional(x, scale=2):
    return x * scale
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "cases.py"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize(
    "name", ["ready", "nothing", "cases[small]", "cases[made]", "several[a]", "several[b]"]
)
def test_every_form_of_a_case(path, name):
    found = load_case(f"{path}:{name}")
    assert isinstance(found, Case)
    assert [leaf.shape for leaf in found.args] == [(8, 4), (8, 4)]


def test_a_function_with_specs(path):
    found = load_case(f"{path}:plain", ["bf16[8,16]", "bf16[16,4]"])
    assert [(a.shape, str(a.dtype)) for a in found.args] == [
        ((8, 16), "bfloat16"),
        ((16, 4), "bfloat16"),
    ]
    assert lower(found).ops["stablehlo.dot_general"] == 1


def test_an_argument_with_a_default_may_be_left_out(path):
    assert len(load_case(f"{path}:optional", ["f32[2]"]).args) == 1
    assert len(load_case(f"{path}:optional", ["f32[2]", "f32[]"]).args) == 2


BAD = {
    "no name": ("{path}", [], r"which of its cases\? Wanted FILE.py:NAME .*; it has broken, cases"),
    "no colon": ("plain", [], r"'plain': wanted FILE.py:NAME or"),
    "no file": ("{path}x.py:plain", [], r"no such file"),
    "not a name": ("{path}:a-b", [], r"wanted FILE.py:NAME"),
    "no such name": ("{path}:plane", [], r"no 'plane'; it has .*plain"),
    "too few specs": ("{path}:plain", ["f32[2]"], r"takes 2 arguments \(x, w\), found 1"),
    "no specs": ("{path}:plain", [], r"takes 2 arguments \(x, w\), found 0"),
    "too many specs": ("{path}:plain", ["f32[2]"] * 3, r"takes 2 arguments \(x, w\), found 3"),
    "bad spec": ("{path}:plain", ["f32", "f32[2]"], r"wanted DTYPE\[DIM"),
    "specs for a case": ("{path}:ready", ["f32[2]"], r"arguments of its own; leave --arg out"),
    "specs for what returns one": (
        "{path}:nothing",
        ["f32[2]"],
        r"nothing takes no arguments, found"
        " 1 --arg: leave them out. A case has arguments of its own",
    ),
    "no key": ("{path}:cases", [], r"choose one as .*\[KEY\] of small, made"),
    "wrong key": ("{path}:cases[big]", [], r"no case 'big'; it has small, made"),
    "key of a case": ("{path}:ready[a]", [], r"no dict of cases but a Case"),
    "a number": ("{path}:number", [], r"wanted a case or a function, found an int"),
    "returns a number": ("{path}:wrong", [], r"returned an int, wanted a case or a dict"),
    "raises": ("{path}:broken", [], r"broken\(\) failed: ZeroDivisionError: .*cases.py:25"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(path, name):
    spec, args, wanted = BAD[name]
    with pytest.raises(InputError, match=wanted) as caught:
        load_case(spec.format(path=path), args)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_source_are_told_apart(path, tmp_path):
    made = tmp_path / "base.program"
    save(lower(load_case(f"{path}:optional", ["f32[2]"])), made)
    with pytest.raises(InputError, match=r"base.program is an artifact, .* `relower diff`"):
        load_case(str(made))
    (tmp_path / "notes").write_text("x")
    with pytest.raises(InputError, match=r"notes is no Python file: wanted FILE.py:NAME"):
        load_case(str(tmp_path / "notes"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
        ("def f(:\n  pass", r"SyntaxError: .* at .*bad.py:1"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1\ny = x / 0", r"ZeroDivisionError: division by zero at .*bad.py:2"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, text, wanted):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(InputError, match=wanted) as caught:
        load_case(f"{file}:f")
    assert "\n" not in str(caught.value)


def test_not_a_python_file(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="wanted a Python file"):
        load_case(f"{tmp_path / 'notes.txt'}:x")


def test_two_files_of_one_name_each_with_its_own_sibling(tmp_path):
    found = []
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sibling.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "program.py").write_text(
            "import jax\nimport sibling\ndef fn(x):\n    return x + sibling.VALUE\n"
        )
        found.append(load_case(f"{tmp_path / folder / 'program.py'}:fn", ["i32[]"]))
    again = load_case(f"{tmp_path / 'one' / 'program.py'}:fn", ["i32[]"])
    results = [chosen.fn(jax.numpy.int32(0)) for chosen in (*found, again)]
    assert [int(value) for value in results] == [1, 2, 1]
