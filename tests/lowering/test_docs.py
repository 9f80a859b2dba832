"""The page on lowering names every rule as the ledger does, and its example runs."""

from pathlib import Path

from relower.lowering import RULES

PAGE = Path(__file__).parents[2] / "docs" / "lower.md"


def test_every_rule_has_its_row():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for name, text in RULES.items():
        assert f"| `{name}` | {text} |" in rows


def test_the_example_runs():
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["program"].ops["stablehlo.tanh"] == 1
