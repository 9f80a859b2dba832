"""``relower fuzz``: exit codes and reports; the work itself is tested beside the fuzzer."""

import pytest

from relower.cli import fuzz
from relower.cli.main import main
from relower.gates.fuzz.run import Found
from relower.passes import registry


def of_seeds(n=1000):
    found = Found(("affine_gather",))
    for seed in range(n):
        found.add({"seed": seed, "state": "held", "detail": ""})
    return found


def test_the_command(capsys, parsed):
    assert main(["fuzz", "--seed", "4", "--count", "2", "--lower-every", "4", "--json"]) == 0
    value = parsed("fuzz", capsys.readouterr().out)
    assert value["holds"]
    assert sum(value["states"].values()) == 2
    assert value["lowered"] <= 1
    assert {p["name"] for p in value["passes"]} == {p.name for p in registry.all_passes()}


VIOLATION = {
    "property": "contract", "detail": "result 0: at [1] wanted 2.0, found 3.0", "plan": None,
    "first_detail": "", "text": "float32[4,4]\n  layer 3", "passes": ["affine_gather"], "tries": 3,
    "jaxpr": "{ lambda ; }",
}  # fmt: skip


def test_exit_codes_and_the_report(monkeypatch, capsys, parsed):
    def give(found):
        monkeypatch.setattr(fuzz, "fuzz", lambda asked, note: found)

    bad = of_seeds(n=3)
    bad.add({"seed": 3, "state": "violated", "detail": "", "violation": VIOLATION})
    give(bad)
    assert main(["fuzz"]) == 1
    out = capsys.readouterr().out
    assert "seed 3 breaks: contract" in out
    assert "wanted 2.0, found 3.0" in out
    assert "layer 3" in out
    assert main(["fuzz", "--json"]) == 1
    assert parsed("fuzz", capsys.readouterr().out)["violations"][0]["seed"] == 3
    give(of_seeds())
    assert main(["fuzz"]) == 2
    assert "affine_gather was applied nowhere" in capsys.readouterr().out
    give(of_seeds(n=3))
    assert main(["fuzz"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [["--count", "0"], ["--seed", "-1"], ["--seconds", "0"], ["--passes", "nothing"],
     ["--save", "/nowhere/at/all"], ["--jobs", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_line(arguments, capsys):
    assert main(["fuzz", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
