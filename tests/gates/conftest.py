"""Cases that are lowered for real: a small Pallas kernel in a scan, and five edits of it."""

import shutil
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases.py"


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """A folder with ``cases.py``."""
    folder = tmp_path_factory.mktemp("cases")
    shutil.copy(CASES, folder)
    return folder
