"""Folders of processes: which are taken away, and which never."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relower.lowering import scratch as scratches
from relower.lowering.scratch import scratch


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def ended():
    """What names a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = scratches._mark(child.pid)
    child.communicate(b"\n")
    return mark


def test_a_folder_that_goes_with_its_block(place):
    with scratch() as folder:
        assert Path(folder).parent == place
        assert scratches._mark(os.getpid()) in folder
        Path(folder, "file").write_text("x")
    assert list(place.iterdir()) == []


def test_what_is_taken_away(place, ended):
    host, pid, started = ended.split("-")
    own = scratches._mark(os.getpid())
    gone = [f"relower-{ended}-abc_1", f"relower-{host}-{os.getpid()}-{int(started) + 1}-x"]
    kept = [
        f"relower-{own}-x",
        f"relower-{'0' * 8}-{pid}-{started}-x",  # of another host, or another container
        f"relower-{ended}",
        "relower-abc",
        f"other-{ended}-x",
    ]
    for name in gone + kept:
        (place / name).mkdir()
        (place / name / "file").write_text("x")
    (place / f"relower-{ended}-link").symlink_to(place / "relower-abc")
    (place / f"relower-{ended}-file").write_text("x")
    with scratch() as folder:
        left = {p.name for p in place.iterdir()} - {Path(folder).name}
    assert left == {*kept, f"relower-{ended}-link", f"relower-{ended}-file"}
    assert (place / "relower-abc" / "file").exists()


def test_another_user_s_is_left(place, ended, monkeypatch):
    (place / f"relower-{ended}-x").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.stat(place).st_uid)
    with scratch():
        assert (place / f"relower-{ended}-x").is_dir()


def test_where_nothing_names_a_process_nothing_is_taken_away(place, ended, monkeypatch):
    (place / f"relower-{ended}-x").mkdir()
    monkeypatch.setattr(scratches, "_host", lambda: None)
    with scratch() as folder:
        assert Path(folder).name.startswith("relower-")
        assert (place / f"relower-{ended}-x").is_dir()
