"""The gate on programs that are lowered for real, and its guards."""

import pytest

from relower.gates import child
from relower.gates import matrix as matrix_module
from relower.gates.child import ChildFailed, Job, environment, passes_from, run
from relower.gates.config import load_matrix
from relower.gates.matrix import run_matrix, steps
from relower.gates.shard import Shard
from relower.lowering.errors import InputError


def gate(cases, text, name="relower.toml"):
    head = '[[program]]\nname = "step"\n'
    for variant in (
        "base",
        "mul",
        "constant",
        "undonated",
        "swapped",
        "greedy",
        "nothing",
        "fails",
    ):
        head += f'variants.{variant} = "cases.py:{variant}"\n'
    (cases / name).write_text(head + text)
    return load_matrix(cases / name)


HOLDS = """
[[program.cell]]
variant = "mul"
differs-from = "base"
only-in = "kernel:scaled"
kernels = 1

[[program.cell]]
variant = ["constant", "swapped"]
differs-from = "base"
only-in = "scope:router"
kernels.scaled = 1
ops."stablehlo.subtract" = 1
ops."stablehlo.sort" = 0

[[program.cell]]
variant = "undonated"
differs-from = "base"
"""

BROKEN = """
[[program.cell]]
variant = "swapped"
identical-to = "base"

[[program.cell]]
variant = "constant"
differs-from = "base"
only-in = "scope:loop"

[[program.cell]]
variant = "mul"
differs-from = "base"
kernels = 7
ops."stablehlo.sort" = 3

[[program.cell]]
variant = "undonated"
differs-from = "base"
kernels = { scaled = 2, gmm = 0, "s*" = 1 }

[[program.cell]]
variant = "greedy"
differs-from = "base"

[[program.cell]]
variant = "nothing"
differs-from = "base"
"""


def test_a_gate_that_holds(cases):
    seen = []
    matrix = gate(cases, HOLDS)
    result = run_matrix(matrix, seen.append)
    assert [(c.cell.name, c.messages) for c in result.cells if c.status != "holds"] == []
    assert result.guards == ()
    assert result.exit_code == 0
    assert result.closing == "4 of 4 controls differ"
    assert len(seen) == steps(matrix) == 9
    places = {c.cell.node.name: c.difference.changes[0] for c in result.cells}
    lines = {name: c.where_a.line for name, c in places.items() if c.where_a}
    source = (cases / "cases.py").read_text().split("\n")
    assert "# a constant" in source[lines["constant"] - 1]
    assert "# a subtract" in source[lines["swapped"] - 1]
    assert (places["mul"].a, places["mul"].b) == ("arith.mulf", "arith.addf")
    sides = {c.cell.node.name: c.sides for c in result.cells}  # as the cell's name reads
    assert sides["mul"] == ("- a: mul", "+ b: base")
    found = next(c for c in result.cells if c.cell.node.name == "undonated").difference.changes
    called, argument = found  # how the program is called, and how it aliases its memory
    assert (called.a, called.b) == ("module call.donated = none", "module call.donated = 0")
    assert (argument.path, argument.a) == (("argument 0",), "(absent)")


def test_several_at_once_and_in_parts(cases, monkeypatch):
    """One real run, two lowerings at a time; then the same programs in shards."""
    kept = {}
    really = matrix_module._lower

    def kept_lower(node, levels, matrix, cache):
        kept[node.work] = really(node, levels, matrix, cache)
        return kept[node.work]

    monkeypatch.setattr(matrix_module, "_lower", kept_lower)
    matrix = gate(cases, HOLDS)
    seen = []
    whole = run_matrix(matrix, seen.append, jobs=2)
    assert (whole.exit_code, whole.closing) == (0, "4 of 4 controls differ")
    assert len(seen) == steps(matrix)
    lowered = []

    def replayed(node, levels, matrix, cache):
        lowered.append(node.name)
        return kept[node.work]

    monkeypatch.setattr(matrix_module, "_lower", replayed)
    assert run_matrix(matrix).to_json() == whole.to_json()
    assert lowered == ["mul", "base", "constant", "swapped", "undonated"]
    names = []
    for number in range(1, 10):
        lowered.clear()
        shard = Shard(number, 9)
        part = run_matrix(matrix, shard=shard)
        names += [cell.cell.name for cell in part.cells]
        assert (part.exit_code, part.guards) == (0, ()), part.guards
        wanted = {n for c in part.cells for n in (c.cell.node.name, c.cell.other.name)}
        assert sorted(lowered) == sorted(wanted)  # no more than its cells need
        assert part.cells or part.closing == f"shard {number}/9 holds none of 4 cells"
        assert part.to_json()["shard"] == f"{number}/9"
    assert sorted(names) == sorted(cell.name for cell in matrix.cells)


def test_guards_of_a_part(cases, monkeypatch):
    monkeypatch.setattr(matrix_module, "_lower", lambda *_: ChildFailed("not now", "input"))
    (cases / "empty.toml").write_text("")
    empty = run_matrix(load_matrix(cases / "empty.toml"), shard=Shard(1, 2))
    assert (empty.exit_code, empty.closing) == (1, "no cells, 1 guard failed")
    text = (
        'variants.twin = "cases.py:renamed"\n'
        '[[program.cell]]\nvariant = "twin"\nidentical-to = "base"\n'
    )
    only = gate(cases, text)
    for number in (1, 2):  # the matrix lacks a control, and so does each part of it
        assert "there is no control" in run_matrix(only, shard=Shard(number, 2)).guards[0]
    control = '[[program.cell]]\nvariant = "mul"\ndiffers-from = "base"\n'
    both = gate(cases, text + control)
    for number in range(1, 6):  # the matrix has one, so no part needs its own
        assert run_matrix(both, shard=Shard(number, 5)).guards == ()


def test_a_gate_that_is_broken(cases):
    result = run_matrix(gate(cases, BROKEN))
    said = {c.cell.node.name: " | ".join(c.messages) for c in result.cells}
    assert [c.status for c in result.cells] == ["broken"] * 6
    assert "must be identical, and differs" in said["swapped"]
    assert "outside scope:loop" in said["constant"]
    assert "calls 1 kernel; wanted 7" in said["mul"]
    assert said["undonated"] == "undonated calls kernel 'scaled' 1 time; wanted 2"
    assert "has 0 stablehlo.sort; wanted 3" in said["mul"]
    assert "its case expects at least 2" in said["greedy"]
    assert said["nothing"] == "nothing has no operations: nothing was compared"
    assert result.exit_code == 1
    assert "greedy and undonated lower to one program" in result.guards[0].replace(
        "undonated and greedy", "greedy and undonated"
    )
    assert result.closing == "0 of 1 identical, 0 of 5 controls differ, 1 guard failed"


def test_a_control_that_matches_and_two_variants_that_are_one(cases):
    text = HOLDS.split("[[program.cell]]")[1]
    extra = (
        'variants.twin = "cases.py:renamed"\nvariants.third = { case = "cases.py:base", '
        "mesh = { device = 1 } }\n"
        f"[[program.cell]]{text}"
        '[[program.cell]]\nvariant = "twin"\ndiffers-from = "base"\n'
        '[[program.cell]]\nvariant = "third"\ndiffers-from = "mul"\n'
    )
    result = run_matrix(gate(cases, extra))
    status = {c.cell.node.name: (c.status, c.messages) for c in result.cells}
    assert status["twin"][0] == "broken"
    assert "the control shows nothing" in status["twin"][1][0]
    assert any("base and third lower to one program" in text for text in result.guards)
    assert not any("base and twin lower" in text for text in result.guards)
    assert result.exit_code == 1


def test_no_cells_is_a_failure(cases):
    (cases / "empty.toml").write_text("")
    result = run_matrix(load_matrix(cases / "empty.toml"))
    assert result.exit_code == 1
    assert result.closing == "no cells, 1 guard failed"


def test_no_control_is_a_failure_unless_waived(cases):
    text = (
        'variants.twin = "cases.py:renamed"\n'
        '[[program.cell]]\nvariant = "twin"\nidentical-to = "base"\n'
    )
    result = run_matrix(gate(cases, text))
    assert [c.status for c in result.cells] == ["holds"]
    assert "there is no control" in result.guards[0]
    assert result.exit_code == 1
    matrix = gate(cases, text)
    (cases / "waived.toml").write_text("[gate]\ncontrols = false\n" + matrix.path.read_text())
    waived = run_matrix(load_matrix(cases / "waived.toml"))
    assert (waived.exit_code, waived.closing) == (0, "1 of 1 identical")


def test_what_can_not_be_lowered_is_undecided(cases):
    result = run_matrix(gate(cases, '[[program.cell]]\nvariant = "fails"\ndiffers-from = "base"\n'))
    assert result.cells[0].status == "undecided"
    assert "takes 1 argument" in result.cells[0].messages[0]
    assert result.exit_code == 2
    assert result.closing == "0 of 1 controls differ, 1 undecided"


def lowering(cases, name, **options):
    job = Job("lower", spec=f"cases.py:{name}", output=str(cases / "x.program"), **options)
    return lambda timeout=None: run(job, timeout=timeout, cwd=cases)


def test_a_child_that_hangs_is_ended(cases, monkeypatch):
    started = []
    start = child._start
    monkeypatch.setattr(child, "_start", lambda *a: started.append(start(*a)) or started[-1])
    with pytest.raises(ChildFailed, match=r"not done after 0\.5 s") as caught:
        lowering(cases, "sleeps")(timeout=0.5)
    assert caught.value.kind == "timeout"
    assert started[0].returncode == -9


def test_a_child_that_dies_leaves_its_last_words(cases):
    with pytest.raises(ChildFailed, match=r"died.*SIGABRT.*last words") as caught:
        lowering(cases, "dies")()
    assert caught.value.kind == "crash"
    assert "\n" not in str(caught.value)


def test_a_function_that_can_not_be_traced(cases):
    with pytest.raises(ChildFailed, match="can't be traced: TypeError") as caught:
        lowering(cases, "fails", args=("f32[8,3]",))()
    assert caught.value.kind == "input"
    assert "cases.py:" in str(caught.value)


def test_noise_stays_out_of_the_terminal(cases, capfd):
    lowering(cases, "plain", args=("f32[8]",), levels=("exact",))()
    assert capfd.readouterr() == ("", "")


def test_the_environment_of_a_child():
    found = environment({"JAX_PLATFORMS": "tpu", "TPU_SKIP_MDS_QUERY": "0"})
    assert found["JAX_PLATFORMS"] == "tpu"
    assert found["TPU_SKIP_MDS_QUERY"] == found["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert environment({})["JAX_PLATFORMS"] == "cpu"


def test_pass_sets():
    assert passes_from(None) is passes_from("none") is None
    assert passes_from("default") == "default"
    assert passes_from("a, b") == passes_from(["a", "b"]) == ("a", "b")
    for bad in ("a,,b", ",", []):
        with pytest.raises(InputError, match="wanted 'none', 'default' or names"):
            passes_from(bad)
