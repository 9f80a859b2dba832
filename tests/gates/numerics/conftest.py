"""The examples' steps can be imported; what ``--json`` prints is held against its schema."""

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS.parent / "examples"))

_spec = importlib.util.spec_from_file_location("cli_conftest", TESTS / "cli" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
parsed = _module.parsed
