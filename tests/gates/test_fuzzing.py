"""A few hundred damaged inputs of each kind; ``fuzzing.py`` runs thousands."""

import importlib.util
from pathlib import Path

import pytest

from relower.gates.child import Job, run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def fuzzing():
    spec = importlib.util.spec_from_file_location("relower_fuzzing", HERE / "fuzzing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shouting(seen):
    return [outcome for outcome in seen if outcome.split(",")[0].isupper()]


def test_artifacts(fuzzing, cases, tmp_path):
    output = tmp_path / "a.program"
    run(Job("lower", spec=f"{cases / 'cases.py'}:greedy", output=str(output), levels=("exact",)))
    seen = fuzzing.artifacts(output.read_bytes(), 400)
    assert seen["refused"] > 100
    assert seen["loaded, DIFFERENT"] > 50
    assert not shouting(seen)


def test_matrices(fuzzing, tmp_path):
    seen = fuzzing.matrices((ROOT / "relower.toml").read_text(), 400, tmp_path)
    assert seen["refused"] > 200
    assert sum(seen.values()) == 400
    assert not shouting(seen)


def test_modules(fuzzing, tmp_path):
    for data in fuzzing.written_modules(tmp_path).values():
        seen = fuzzing.modules(data, 80, tmp_path)
        assert sum(seen.values()) == 80
        assert seen["refused"] > 20
        assert not shouting(seen), seen
