"""The documentation's own scripts, importable as running one of them makes them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
