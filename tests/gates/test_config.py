"""Reading ``relower.toml``: every mistake is one line that names the key."""

from pathlib import Path

import pytest

from relower.gates.config import load_matrix
from relower.gates.pass_sets import PassChoice
from relower.lowering.errors import InputError

GOOD = """
[gate]
level = "inlined"
timeout = 5

[[program]]
name = "moe"
variants.plain = "moe.py:plain"
variants.by_hand = { case = "moe.py:by_hand", mesh = { data = 4 } }
passes.packed = ["argsort_packed_key"]

[[program.cell]]
variant = "plain"
passes = ["packed", "default"]
identical-to = "by_hand"
level = "dataflow"
kernels = 3
ops."stablehlo.sort" = 1

[[program.cell]]
variant = "plain"
differs-from = "plain+packed"
only-in = ["scope:router", "kernel:gmm*"]
kernels.gmm = 2
allow = ["jax"]
"""


def matrix(tmp_path, text):
    (tmp_path / "relower.toml").write_text(text)
    return load_matrix(tmp_path / "relower.toml")


def test_lists_are_multiplied_out(tmp_path):
    found = matrix(tmp_path, GOOD)
    assert [cell.name for cell in found.cells] == [
        "moe: plain+packed = by_hand (dataflow)",
        "moe: plain+default = by_hand (dataflow)",
        "moe: plain ≠ plain+packed (inlined)",
    ]
    assert found.timeout == 5
    assert found.folder == tmp_path
    first, _, last = found.cells
    assert first.kernels == 3
    assert first.ops == {"stablehlo.sort": 1}
    assert first.node.choice.passes == ("argsort_packed_key",)
    assert first.other.mesh == (("data", 4),)
    assert last.kernels == {"gmm": 2}
    assert last.only_in == ("scope:router", "kernel:gmm*")
    assert last.node.choice == PassChoice()
    assert len(found.nodes()) == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[gate]", "[gat]", "unknown key 'gat'; did you mean 'gate'"),
        ("timeout = 5", "timeuot = 5", "unknown key 'timeuot'; did you mean 'timeout'"),
        ("timeout = 5", "timeout = 0", "timeout: 0; wanted seconds above 0"),
        ("identical-to", "identical_to", "unknown key 'identical_to'; did you mean 'identical-to'"),
        ('variant = "plain"\npasses', 'varient = "plain"\npasses', "did you mean 'variant'"),
        ('identical-to = "by_hand"', 'identical-to = "by_had"', "did you mean 'by_hand'"),
        ('["packed", "default"]', '["pakced"]', "did you mean 'packed'"),
        ('["packed", "default"]', "[]", "the list is empty"),
        ('identical-to = "by_hand"', "", "found none"),
        ('allow = ["jax"]', 'identical-to = "by_hand"', "found identical-to and differs-from"),
        ('identical-to = "by_hand"', "snapshot = false", "snapshot: False; wanted true"),
        ('differs-from = "plain+packed"', "snapshot = true", "only-in goes with differs-from"),
        (
            'differs-from = "plain+packed"\nonly-in = ["scope:router", "kernel:gmm*"]',
            "snapshot = true",
            "allow doesn't go with snapshot",
        ),
        ("kernels = 3", 'kernels = "~ 3"', "'~ 3'; wanted bounds such as"),
        ("kernels = 3", 'budget = "ops.total"', "wanted METRIC and bounds"),
        ("kernels = 3", 'budget = "op.total <= 1"', "no metric 'op.total'; did you mean 'ops'"),
        ("kernels = 3", 'budget = ["ops.stablehlo.sortt <= 1"]', "did you mean 'stablehlo.sort'"),
        ("kernels = 3", 'budget = "ops.total <= 1x by_had"', "did you mean 'by_hand'"),
        ("kernels = 3", 'budget = "ops.total <= 1x plain+packed"', "is relative to itself"),
        ("kernels.gmm = 2", 'kernels.gmm = ">= 0"', "'>= 0' always holds"),
        ("kernels.gmm = 2", "kernels.gmm = 2.5", "2.5; wanted a number, or bounds"),
        ('"stablehlo.sort" = 1', '"stablehlo.sortt" = "<= 1"', "did you mean 'stablehlo.sort'"),
        ("mesh = { data = 4 }", "inputs = 3", "inputs: 3; wanted a list of strings"),
        ('"plain+packed"', '"plain"', "compared with itself"),
        ('level = "dataflow"', 'level = "loose"', "'loose'; wanted one of exact"),
        ('level = "dataflow"', 'only-in = "scope:x"', "only-in goes with differs-from"),
        ('"scope:router"', '"router"', "wanted 'kernel:NAME' or 'scope:PATH'"),
        ("kernels = 3", "kernels = true", "wanted a number of calls"),
        ('ops."stablehlo.sort"', "ops.stablehlo.sort", "write names with dots in quotes"),
        ('"moe.py:plain"', '"moe.py"', "wanted 'FILE.py:NAME'"),
        ("data = 4", 'data = "4"', "wanted a number"),
        ('name = "moe"', 'name = "m/e"', "'m/e'; wanted letters"),
        ('name = "moe"', "", "name: None"),
        ("[[program]]", "[program]", "not TOML|two brackets|program"),
        ('passes.packed = ["argsort_packed_key"]', "passes.none = []", "'none' is defined already"),
        ('passes.packed = ["argsort_packed_key"]', "passes.packed = []", "wanted 'none'"),
        ("[gate]", "[gate", "not TOML"),
    ],
)
def test_mistakes(tmp_path, old, new, message):
    assert GOOD.count(old) >= 1
    with pytest.raises(InputError, match=message) as caught:
        matrix(tmp_path, GOOD.replace(old, new, 1))
    assert "\n" not in str(caught.value)
    assert "relower.toml" in str(caught.value)


def test_bounds_and_snapshots(tmp_path):
    text = GOOD.replace("kernels = 3", 'kernels = "<= 3"').replace("gmm = 2", 'gmm = ">= 1, <= 2"')
    text = text.replace('"stablehlo.sort" = 1', '"stablehlo.sort" = "<= 0.5x"\nops.total = 9')
    text += 'budget = ["ops.total <= 1.00x by_hand+default"]\n'
    text += '[[program.cell]]\nvariant = "plain"\nsnapshot = true\n'
    text = text.replace('name = "moe"', 'name = "moe"\ninputs = ["a/*"]')
    text = text.replace("mesh = {", 'inputs = ["b"], mesh = {')
    first, _, control, last = matrix(tmp_path, text).cells
    assert (first.kernels, first.ops) == (None, {})
    assert [(b.metric, b.bounds[0].text) for b in first.budgets] == [
        ("ops.stablehlo.sort", "<= 0.5x"),
        ("ops.total", "== 9"),
        ("kernels", "<= 3"),
    ]
    assert [n.name for n in control.references.values()] == ["by_hand+default"]
    assert [n.name for n in control.nodes()] == ["plain", "plain+packed", "by_hand+default"]
    assert (first.node.inputs, first.other.inputs) == (("a/*",), ("a/*", "b"))
    assert (last.name, last.kind, last.other) == (
        "moe: plain = snapshot (inlined)",
        "snapshot",
        None,
    )
    with pytest.raises(InputError, match="nothing to refer to beside a snapshot"):
        matrix(tmp_path, text + 'budget = "ops.total <= 1x"\n')


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="can't be read: No such file"):
        load_matrix(tmp_path / "none.toml")


def test_a_program_without_cells(tmp_path):
    with pytest.raises(InputError, match=r"has no \[\[program.cell\]\]"):
        matrix(tmp_path, '[[program]]\nname = "a"\n')


def test_an_empty_file_is_a_matrix_without_cells(tmp_path):
    assert matrix(tmp_path, "").cells == ()


ROOT = Path(__file__).parents[2]


def test_the_projects_own_gate():
    found = load_matrix(ROOT / "relower.toml")
    assert {cell.identical for cell in found.cells} == {True, False}
    for node in found.nodes():
        file, _, name = node.spec.rpartition(":")
        assert f"def {name}(" in (ROOT / file).read_text(), node.spec


def test_the_example_in_the_documentation(tmp_path):
    page = (ROOT / "docs" / "gate.md").read_text()
    found = matrix(tmp_path, page.split("```toml\n")[1].split("```")[0])
    assert [cell.name for cell in found.cells] == [
        "moe: plain+packed = by_hand (dataflow)",
        "moe: plain+packed ≠ plain (inlined)",
        "moe: plain+default ≠ plain (inlined)",
        "moe: plain = snapshot (inlined)",
    ]
    small = page.partition("small = ")[2].partition("\n")[0]
    assert all(key in small for key in ("case", "args", "mesh", "target"))


def test_every_operation_of_stablehlo_is_known():
    import inspect

    from jaxlib.mlir.dialects import stablehlo

    from relower.gates.operations import STABLEHLO

    names = {str(getattr(c, "OPERATION_NAME", "")) for _, c in inspect.getmembers(stablehlo)}
    named = {n.removeprefix("stablehlo.") for n in names if n.startswith("stablehlo.")}
    assert named <= STABLEHLO
    assert len(named) > 100


@pytest.mark.parametrize(
    ("name", "hint"),
    [("stablehlo.mul", "multiply"), ("stablehlo.allgather", "all_gather"), ("nonsense", None)],
)
def test_a_mistyped_operation_is_noticed_also_where_none_is_expected(name, hint):
    from relower.gates.operations import check_operation
    from relower.lowering.errors import InputError

    with pytest.raises(InputError, match="no operation is called") as found:
        check_operation(name, "cell 1 ops")
    assert hint is None or f"did you mean 'stablehlo.{hint}'" in str(found.value)


PACKED = 'passes.packed = ["argsort_packed_key"]'


def test_a_pass_set_may_be_told_things(tmp_path):
    written = '{ names = ["argsort_packed_key"], quiet = true, frozen = "router" }'
    found = matrix(tmp_path, GOOD.replace(PACKED, f"passes.packed = {written}"))
    choice = found.cells[0].node.choice
    assert choice == PassChoice(("argsort_packed_key",), frozen="router", quiet=True)
    plain, told = found.cells[2].node, found.cells[2].other
    assert plain.work != told.work
    found = matrix(tmp_path, GOOD.replace(PACKED, 'passes.packed = { contract = "rounding" }'))
    assert found.cells[0].node.choice == PassChoice("default", contract="rounding")
    found = matrix(tmp_path, GOOD.replace(PACKED, 'passes.packed = { disable = ["late_cast"] }'))
    assert found.cells[0].node.choice == PassChoice("default", disable=("late_cast",))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("7", "passes.packed: 7; wanted a list of names, 'default', or a table"),
        ("{}", "found an empty table, wanted one of names, contract, disable"),
        ("{ quiet = true }", "quiet: True; wanted true or false, beside names"),
        (
            '{ names = ["a"], contract = "value" }',
            "found both names and a contract, wanted one of them",
        ),
        ("{ names = [] }", "wanted a list of names"),
        ('{ names = ["a"], disable = ["a"] }', "packed disable: a is asked for by name, too"),
        ('{ names = ["a"], disable = ["b@f#1"] }', "b@f#1 turns nothing off: the pass b doesn't"),
        ('{ names = ["a"], quite = true }', "did you mean 'quiet'"),
        ('{ names = ["a"], quiet = 1 }', "quiet: 1; wanted true or false"),
        ('{ contract = "value", quiet = true }', "quiet: True; wanted true or false, beside names"),
        ('{ contract = "loose" }', "contract: 'loose'; wanted one of bitwise, value, rounding"),
    ],
)
def test_a_pass_set_that_says_something_else_is_one_clear_line(tmp_path, written, message):
    with pytest.raises(InputError) as error:
        matrix(tmp_path, GOOD.replace(PACKED, f"passes.packed = {written}"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
