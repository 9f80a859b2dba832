"""Commands under limits: each way to end, and no process left."""

import os
import sys
import time

import pytest

from relower.lowering.process import Limits, run_limited


def run(tmp_path, code, **limits):
    return run_limited(
        [sys.executable, "-c", code],
        env=os.environ,
        output=tmp_path / "out",
        limits=Limits(**limits),
    )


def gone(pid):
    """Whether a process has ended; one that waits to be collected has."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_an_exit_code_and_the_output(tmp_path):
    ended = run(tmp_path, "import sys; print('said'); sys.exit(3)")
    assert (ended.why, ended.code) == ("exit", 3)
    assert (tmp_path / "out").read_text() == "said\n"


def test_a_crash(tmp_path):
    ended = run(tmp_path, "import os; os.abort()")
    assert (ended.why, ended.code) == ("signal", -6)


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print(child.pid, flush=True)
{}
"""


def test_one_that_hangs_is_ended_with_what_it_started(tmp_path):
    ended = run(tmp_path, FAMILY.format("time.sleep(600)"), seconds=2.0)
    assert ended.why == "time"
    assert gone(int((tmp_path / "out").read_text()))


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def own_session():
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(600)
if os.fork() == 0:
    own_session()
if os.fork() == 0:  # its child's parent is gone before the limit is reached
    if os.fork() == 0:
        own_session()
    time.sleep(0.5)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_none_that_left_the_group_lost_its_parent_or_ignores_sigterm_is_left(tmp_path):
    assert run(tmp_path, DEAF, seconds=1.5).why == "time"
    pids = [int(line) for line in (tmp_path / "out").read_text().split()]
    assert len(pids) == 3
    assert all(map(gone, pids))


def test_what_a_command_leaves_behind_is_ended(tmp_path):
    assert run(tmp_path, FAMILY.format("")).why == "exit"
    assert gone(int((tmp_path / "out").read_text()))


def test_one_that_eats_memory(tmp_path):
    eat = "held = []\nwhile True: held.append(bytearray(b'x') * 10_000_000)"
    ended = run(tmp_path, eat, memory=200 * 2**20, seconds=120.0)
    assert ended.why == "memory"
    assert ended.peak > 200 * 2**20


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    def interrupted(_):
        if (tmp_path / "out").read_text().strip():
            raise KeyboardInterrupt

    monkeypatch.setattr("relower.lowering.process.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FAMILY.format("time.sleep(600)"))
    monkeypatch.undo()
    assert gone(int((tmp_path / "out").read_text()))
