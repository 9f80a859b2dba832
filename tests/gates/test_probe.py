"""The probe finds what a program depends on, names it, and leaves nothing behind."""

import shutil
from pathlib import Path

import pytest

from relower.gates.child import ChildFailed, Job
from relower.gates.probe import OFFSET, SEEDS, VARIATIONS, probe, variations
from relower.lowering.errors import InputError
from relower.lowering.program import LEVELS

CASES = Path(__file__).parent / "probe_cases.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copy(CASES, tmp_path)
    (tmp_path / "probe_neighbour.py").write_text("FACTOR = 2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def probed(name, *only, levels=("exact",), **options):
    without = [variation for variation in VARIATIONS if only and variation not in only]
    job = Job("lower", spec=f"probe_cases.py:{name}", levels=levels)
    return probe(job, without=without, **options)


def test_a_steady_case(folder):
    seen = []
    found = probed("steady", levels=LEVELS, jobs=2, progress=seen.append)
    assert [(o.what, o.failure) for o in found.outcomes if o.state != "stable"] == []
    assert (found.state, found.exit_code, found.reasons) == ("stable", 0, ())
    assert [o.name for o in found.outcomes if o.name != "hash-seed"] == [
        name for name in VARIATIONS if name != "hash-seed"
    ]
    assert len(found.outcomes) == len(VARIATIONS) - 1 + len(SEEDS)
    assert len(seen) == 1 + len(found.outcomes)
    said = found.to_json()
    assert all(said["levels"][level]["stable"] for level in LEVELS)
    assert {o["digests"]["exact"] for o in said["lowerings"]} == {found.digests["exact"]}


@pytest.mark.parametrize(
    ("name", "variation"),
    [
        ("hashed", "hash-seed"),
        ("placed", "cwd"),
        ("lined", "offset"),
        ("after", "history"),
        ("timed", "again"),
    ],
)
def test_what_a_case_depends_on(folder, name, variation):
    other = "again" if variation != "again" else "hash-seed"
    found = probed(name, variation, other)
    states = {}
    for outcome in found.outcomes:
        states.setdefault(outcome.name, set()).add(outcome.state)
    assert "unstable" in states[variation]
    assert states[other] == ({"stable"} if other == "again" else {"unstable"})
    assert (found.state, found.exit_code) == ("unstable", 1)
    change = next(o for o in found.outcomes if o.state == "unstable").shown.changes[0]
    assert (change.op, change.detail) == ("stablehlo.constant", "value")
    # A copy's lines are told as the user's.
    assert Path(change.where_b.file).name == "probe_cases.py"
    line = CASES.read_text().splitlines()[change.where_b.line - 1]
    assert "float(factor)" in line


def test_the_offset_is_what_it_says(folder):
    found = probed("lined", "offset").outcomes[0].shown.changes[0]
    numbers = [float(text.split("<")[1].split(">")[0]) for text in (found.a, found.b)]
    assert numbers[1] - numbers[0] == OFFSET


def test_levels_apart(folder):
    found = probed("ordered", "hash-seed", levels=("exact", "dataflow"), jobs=2)
    assert found.exit_code == 1
    assert not found.stable("exact")
    assert found.stable("dataflow")
    assert all(o.shown is None or o.shown.level == "exact" for o in found.outcomes)


def test_nothing_stays_in_the_folder(folder):
    before = sorted(p.name for p in folder.rglob("*"))
    assert probed("steady", "offset").state == "stable"
    after = {p.name for p in folder.rglob("*")} - set(before)
    assert not {name for name in after if "relower_probe" in name}


def test_a_folder_that_is_read_only(folder):
    folder.chmod(0o555)
    try:
        found = probed("steady", "offset", "again")
    finally:
        folder.chmod(0o755)
    again, offset = found.outcomes
    assert (again.state, offset.state) == ("stable", "undecided")
    assert offset.failure.startswith("not tried: the folder")
    assert "read-only" in offset.failure
    assert found.exit_code == 2


def test_a_file_in_another_encoding(folder):
    text = CASES.read_text().replace('"""One', '"""Één', 1)
    (folder / "probe_cases.py").write_bytes(f"# coding: latin-1\n{text}".encode("latin-1"))
    assert probed("steady", "offset").state == "stable"


def test_a_condition_that_it_can_not_be_lowered_under(folder):
    found = probed("reads", "cwd", "again")
    assert [o.state for o in found.outcomes] == ["stable", "undecided"]
    assert "can't be lowered so" in found.outcomes[1].failure
    assert "FileNotFoundError" in found.outcomes[1].failure
    assert found.exit_code == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty", "it has no operations: nothing was compared"),
        ("demanding", "it has 0 kernels; its case expects at least 1"),
    ],
)
def test_stable_digests_that_show_nothing(folder, name, reason):
    found = probed(name, "again")
    assert found.outcomes[0].state == "stable"
    assert (found.state, found.exit_code, found.reasons) == ("undecided", 2, (reason,))


def test_bad_input(folder):
    with pytest.raises(InputError, match="--without 'seed': wanted one of again, hash-seed"):
        variations(["seed"])
    with pytest.raises(InputError, match="nothing would be compared"):
        variations(list(VARIATIONS))
    with pytest.raises(InputError, match=r"wanted FILE\.py:NAME"):
        probe(Job("lower", spec="base.program"))
    with pytest.raises(ChildFailed, match="no 'stedy'"):
        probed("stedy")
