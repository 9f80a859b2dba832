"""``relower verify``: exit codes, text and JSON."""

import pytest

from relower.cli.main import main

CASES = """
import jax
import jax.numpy as jnp
import numpy as np
import relower

def known(t, i):
    return t[relower.assume_range(i, 0, 4)]

def nothing(t):
    return t * 2

case = relower.case(known, np.zeros(5, np.float32), np.zeros(3, np.int32))
shapes = relower.case(
    known, jax.ShapeDtypeStruct((5,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
)
meshed = relower.case(lambda mesh: (known, case.args), mesh={"x": 1})
empty = relower.case(nothing, np.zeros(5, np.float32))
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "cases.py"
    path.write_text(CASES)
    return path


def test_verified(cases, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", f"{cases}:case", "--mutants", "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert "VERIFIED  nonnegative_index@known#1  select_n → i32[3]" in out
    assert "bitwise on 18 inputs" in out
    assert out.rstrip().splitlines()[-1].startswith("VERIFIED: 1 of 1 site verified, ")
    assert max(map(len, out.splitlines())) <= 80


def test_json(cases, capsys, parsed):
    assert main(["verify", f"{cases}:case", "--json", "--seeds", "1"]) == 0
    found = parsed("verify", capsys.readouterr().out)
    assert found["verdict"] == "VERIFIED"
    assert found["sites"][0]["facts"] == ["i32[3] in [0, 4]"]
    assert found["mutants"] is None


def test_facts_on_made_up_arguments_are_said_to_be(cases, capsys, parsed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    how = ["--facts", "--seeds", "1"]
    assert main(["verify", f"{cases}:shapes", *how]) == 0
    out = capsys.readouterr().out
    assert "facts: the program was run on made-up arguments" in out
    assert out.rstrip().endswith("1 of 1 fact held on made-up arguments")
    for name, made_up in (("shapes", True), ("case", False), ("meshed", False)):
        assert main(["verify", f"{cases}:{name}", *how, "--json"]) == 0
        facts = parsed("verify", capsys.readouterr().out)["facts"]
        assert (facts["total"], facts["made_up"]) == (1, made_up)


def test_nothing_to_verify(cases, capsys):
    assert main(["verify", f"{cases}:empty"]) == 2
    assert "UNKNOWN: 0 of 0 sites verified" in capsys.readouterr().out


@pytest.mark.parametrize("off", ["nonnegative_index", "nonnegative_index@known#1"])
def test_what_is_turned_off_is_not_verified(cases, capsys, off):
    assert main(["verify", f"{cases}:case", "--disable", off]) == 2
    assert "UNKNOWN: 0 of 0 sites verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "wanted FILE.py:NAME, or --mutants"),
        (["--mutants", "--passes", "default"], "--passes, --arg and --mesh are for a case"),
        (["CASE", "--pass", "nonnegative_indx"], "did you mean 'nonnegative_index'"),
        (
            ["CASE", "--disable", "nonnegative_index@known#9"],
            "near ones: nonnegative_index@known#1",
        ),
        (["CASE", "--disable", "nonnegative_indx"], "did you mean 'nonnegative_index'"),
        (
            ["CASE", "--passes", "late_cast", "--pass", "nonnegative_index"],
            "as in --passes late_cast,nonnegative_index, or no --passes",
        ),
        (
            ["CASE", "--passes", "default,late_cast", "--pass", "sorted_scatter"],
            "sorted_scatter's sites are to be verified, and it isn't among the passes that run",
        ),
        (["CASE", "--pass", "late_cast", "--disable", "late_cast"], "asked for by name, too"),
        (["CASE", "--seeds", "0"], "wanted a number of at least 1"),
        (["CASE", "--passes", "none"], "--passes none: there is nothing to verify"),
    ],
)
def test_bad_input(cases, capsys, arguments, said):
    arguments = [f"{cases}:case" if a == "CASE" else a for a in arguments]
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
