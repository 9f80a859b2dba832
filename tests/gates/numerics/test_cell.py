"""Cells of kind numerics, from the file to the exit code."""

import shutil
from pathlib import Path

import pytest

from relower.cli.main import main
from relower.gates.config import load_matrix
from relower.lowering.errors import InputError

CASES = Path(__file__).parents[1] / "numerics_cases.py"
CELLS = """
[gate]
controls = false
[[program]]
name = "toy"
variants.right = "numerics_cases.py:right"
"""


def cell(text, variants=""):
    return f"{CELLS}{variants}\n[[program.cell]]\n{text}"


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    shutil.copy(CASES, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def gate(capfd, text, code):
    Path("relower.toml").write_text(text)
    assert main(["gate"]) == code, capfd.readouterr()
    return capfd.readouterr().out


def test_a_broken_step_is_caught_and_a_right_one_agrees(capfd, parsed):
    text = CELLS + 'variants.sign = "numerics_cases.py:broken[sign]"\n'
    text += '[[program.cell]]\nvariant = "sign"\ndisagrees-with = "right"\nsteps = 1\n'
    text += 'caught-by = ["grads/wo l2", "grads/wo cosine", "grads/wo scale"]\n'
    text += '[[program.cell]]\nvariant = "right"\npasses = "default"\nagrees-with = "right"\n'
    Path("relower.toml").write_text(text)
    code = main(["gate", "--json"])
    found = parsed("gate", capfd.readouterr().out)
    assert (code, found["closing"]) == (
        0,
        "1 of 1 agree in numbers, 1 of 1 numeric controls caught",
    )
    control, right = found["cells"]
    assert control["expects"] == "numerics-control"
    # The figure that is furthest over its limit comes first.
    assert "caught: grads/wo cosine 2 at step 1" in control["messages"][0]
    # What six scalars alone would never see.
    wrong = {c["of"] for c in control["numerics"]["checks"] if c["status"] == "broken"}
    assert wrong == {"grads/wo"}
    assert right["numerics"]["contract"] == "bitwise"
    assert right["numerics"]["equal"]
    assert right["numerics"]["sites"] >= 1


def test_a_case_that_says_nothing_is_undecided(capfd):
    out = gate(
        capfd,
        cell('variant = "x"\nagrees-with = "right"\n',
             'variants.x = "numerics_cases.py:others[silent]"\n'),
        2,
    )  # fmt: skip
    assert "the case says nothing of what its step returns" in " ".join(out.split())
    assert "0 of 1 agree in numbers, 1 undecided" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('steps = 0\nagrees-with = "b"', "steps: 0; wanted a number of at least 1"),
        ('factor = 0.5\nagrees-with = "b"', "factor: 0.5; wanted a number of at least 1"),
        ('contract = "exact"\nagrees-with = "b"', "contract: 'exact'; wanted one of bitwise"),
        ('kernels = 1\nagrees-with = "b"', "of kind numerics: unknown key 'kernels'"),
        ('caught-by = ["loss"]\nagrees-with = "b"', "of kind numerics: unknown key 'caught-by'"),
        ('steps = 1\nidentical-to = "b"', "steps goes with agrees-with or disagrees-with"),
        ('agrees-with = "b"\nidentical-to = "b"', "found identical-to and agrees-with"),
        ('agrees-with = "right"', "right is compared with itself"),
    ],
)
def test_mistakes_in_the_file(text, said):
    variants = 'variants.b = "numerics_cases.py:right"\n'
    Path("relower.toml").write_text(cell(f'variant = "right"\n{text}\n', variants))
    with pytest.raises(InputError) as error:
        load_matrix("relower.toml")
    assert said in str(error.value)
