"""Several children at once: order, and no child left when something goes wrong."""

import os
import tempfile
import threading
import time

import pytest

from relower.gates import worker
from relower.gates.child import ChildFailed, Job, run
from relower.gates.parallel import in_order


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_results_stand_in_the_order_asked_for(jobs):
    turn = threading.Event()
    seen = []

    def first():
        if jobs > 1:
            assert turn.wait(20)  # ends after the second
        return "first"

    def second():
        turn.set()
        return "second"

    assert in_order([first, second, lambda: "third"], jobs, seen.append) == [
        "first",
        "second",
        "third",
    ]
    assert sorted(seen) == [0, 1, 2]


def test_as_many_at_once_as_asked_for():
    both = threading.Barrier(2, timeout=20)
    in_order([both.wait, both.wait], 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_ends_the_children(cases, error):
    begun = cases / "begun"
    begun.unlink(missing_ok=True)
    caught = []

    def sleeps():
        try:
            run(Job("lower", spec="cases.py:sleeps", output="x.program"), cwd=cases)
        except ChildFailed as failed:
            caught.append(failed)
            raise

    def fails():
        while not begun.exists():
            time.sleep(0.02)
        raise error("enough")

    with pytest.raises(error, match="enough"):
        in_order([sleeps, fails, sleeps], 2)
    # The third may have begun when the second ended.
    assert {failed.kind for failed in caught} == {"crash"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_what_a_compilation_puts_down_lies_in_the_requests_folder(tmp_path, monkeypatch):
    """Which is removed also where the process that measures is killed."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    request = {"options": {"measure": {"limit": 3.0}}, "target": None}
    found = worker._choice({**request, "answer": str(tmp_path / "answer.json")})
    assert found.limit == 3.0
    assert tempfile.gettempdir() == str(tmp_path)
