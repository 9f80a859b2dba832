"""Rewrite JAX programs, and prove what the rewrite did to the TPU program.

Names are loaded on first use, so that importing this package costs nothing and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gates.bisect import Bisection as Bisection
    from .gates.bisect import bisect as bisect
    from .gates.pass_checks import check_pass as check_pass
    from .gates.verify.api import verify as verify
    from .gates.verify.verdict import Evidence as Evidence
    from .lowering.case import Case as Case
    from .lowering.case import case as case
    from .lowering.change import Difference as Difference
    from .lowering.cost.api import cost as cost
    from .lowering.cost.model import Cost as Cost
    from .lowering.diff import diff as diff
    from .lowering.lower import lower as lower
    from .lowering.numerics import Numerics as Numerics
    from .lowering.program import Program as Program
    from .matchers.assume_range import assume_range as assume_range
    from .passes.base import Measured as Measured
    from .passes.base import PassNotApplicable as PassNotApplicable
    from .passes.frozen import Frozen as Frozen
    from .passes.keep import keep as keep
    from .passes.optimize import FactWarning as FactWarning
    from .passes.optimize import FrozenWarning as FrozenWarning
    from .passes.optimize import MeasureWarning as MeasureWarning
    from .passes.optimize import assert_applied as assert_applied
    from .passes.optimize import explain as explain
    from .passes.optimize import optimize as optimize
    from .passes.report import Report as Report

_HOME = {
    "Bisection": "gates.bisect",
    "bisect": "gates.bisect",
    "Case": "lowering.case",
    "Cost": "lowering.cost.model",
    "Difference": "lowering.change",
    "Evidence": "gates.verify.verdict",
    "FactWarning": "passes.optimize",
    "FrozenWarning": "passes.optimize",
    "MeasureWarning": "passes.optimize",
    "Measured": "passes.base",
    "Numerics": "lowering.numerics",
    "Frozen": "passes.frozen",
    "PassNotApplicable": "passes.base",
    "Program": "lowering.program",
    "Report": "passes.report",
    "assert_applied": "passes.optimize",
    "assume_range": "matchers.assume_range",
    "case": "lowering.case",
    "check_pass": "gates.pass_checks",
    "cost": "lowering.cost.api",
    "diff": "lowering.diff",
    "explain": "passes.optimize",
    "keep": "passes.keep",
    "lower": "lowering.lower",
    "optimize": "passes.optimize",
    "verify": "gates.verify.api",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'relower' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
