"""Where scripts can't be saved, that is said first, and takes no verdict away."""

import numpy as np
import pytest

from relower import verify
from relower.lowering.errors import InputError

TABLE, PLACES = np.arange(5, dtype=np.float32), np.array([1, 2, 3], np.int32)


def test_a_folder_that_cant_be_written_to_is_told_before_anything_is_run(quick, tmp_path):
    (tmp_path / "file").touch()

    def never(x):
        raise AssertionError("it was traced")

    with pytest.raises(InputError, match=r"file isn't a folder; wanted a folder to write to"):
        verify(never, TABLE, limits=quick, repro=str(tmp_path / "file" / "repro"))


def test_a_script_that_cant_be_saved_leaves_the_verdict(swap, quick, tmp_path, monkeypatch):
    swap("nonnegative_index", requirements=())
    full = lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    monkeypatch.setattr(np, "savez", full)
    found = verify(lambda table, places: table[places], TABLE, PLACES,
                   passes=["nonnegative_index"], limits=quick, repro=str(tmp_path))  # fmt: skip
    assert found.exit_code == 1
    assert any("can't be written: No space left on device" in note for note in found.notes)
