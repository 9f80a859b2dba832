"""The pytest plugin: a fixture ``program`` that compares TPU programs, and a mark for the target.

Installed with the package. Nothing but pytest itself is imported before a test asks for the
fixture, so that test runs which don't use it pay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .assertions import ProgramAssertions

MARK = "relower"
_MARK_HELP = (
    "relower(target, route): as in target='TPU7x:2x2x1', route='abstract': what the `program` "
    "fixture lowers for; marks of a class or module hold where a test's own mark says nothing"
)
_KEYS = ("target", "route")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark, so that ``--strict-markers`` knows it."""
    config.addinivalue_line("markers", _MARK_HELP)


@pytest.fixture
def program(request: pytest.FixtureRequest) -> ProgramAssertions:
    """Compares programs: ``assert_identical(a, b)`` and ``assert_differs(a, b, only_in=…)``."""
    from .assertions import ProgramAssertions

    return ProgramAssertions(request.config.rootpath, **marked(request.node))


def marked(node: Any) -> Mapping[str, str]:
    """What the marks of a test say, the closest first."""
    found: dict[str, str] = {}
    for mark in node.iter_markers(MARK):
        wrong = [key for key in mark.kwargs if key not in _KEYS]
        if mark.args or wrong:
            what = repr(wrong[0]) if wrong else "an argument without a name"
            pytest.fail(f"@pytest.mark.{MARK}: {what}; wanted {' or '.join(_KEYS)}", pytrace=False)
        for key, value in mark.kwargs.items():
            if not isinstance(value, str):
                pytest.fail(
                    f"@pytest.mark.{MARK}: {key} is {value!r}; wanted a string", pytrace=False
                )
            found.setdefault(key, value)
    return found
