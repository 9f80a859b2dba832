"""The pytest plugin: a fixture ``program`` that compares TPU programs, and a mark for the target.

Installed with the package. Nothing but pytest itself is imported before a test asks for the
fixture, so that test runs which don't use it pay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .assertions import ProgramAssertions
    from .pytest_snapshots import Ledger

MARK = "relower"
_MARK_HELP = (
    "relower(target, route): as in target='TPU7x:2x2x1', route='abstract': what the `program` "
    "fixture lowers for; marks of a class or module hold where a test's own mark says nothing"
)
_KEYS = ("target", "route")
_PLUGIN = "relower-snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--relower-accept`` and ``--relower-strict``."""
    group = parser.getgroup("relower")
    group.addoption(
        "--relower-accept",
        action="store_true",
        help="write the snapshots of assert_snapshot as those to compare with; not in CI",
    )
    group.addoption(
        "--relower-strict",
        action="store_true",
        help="fail the run where a snapshot belongs to no test",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark, so that ``--strict-markers`` knows it, and keeps account of snapshots."""
    config.addinivalue_line("markers", _MARK_HELP)
    if config.getoption("--relower-accept") and _in_ci():
        raise pytest.UsageError(
            "--relower-accept: CI is set, and snapshots are never written there: accept them where "
            "you can look at them, and commit them"
        )
    config.pluginmanager.register(_Account(config), _PLUGIN)


def _in_ci() -> bool:
    from .snapshot_files import in_ci

    return in_ci()


@pytest.fixture
def program(request: pytest.FixtureRequest) -> ProgramAssertions:
    """Compares programs: ``assert_identical(a, b)``, ``assert_differs(a, b, only_in=…)`` and
    ``assert_snapshot(a)``.
    """  # noqa: D205 -- pytest --fixtures prints it as it stands
    from .assertions import ProgramAssertions
    from .pytest_snapshots import Snapshots
    from .snapshot_files import mode

    config = request.config
    account: Any = config.pluginmanager.get_plugin(_PLUGIN)
    test = request.node.nodeid.partition("::")[2].replace("::", ".")
    how = mode(config.getoption("--relower-accept"), "--relower-accept")
    snapshots = Snapshots(request.path, test, how, account.ledger)
    return ProgramAssertions(config.rootpath, **marked(request.node), snapshots=snapshots)


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


class _Account:
    """Which snapshots a run used, and which it could have."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ledger: Ledger | None = None
        self._partial: set[str] = set()
        self._passed: set[str] = set()

    @property
    def ledger(self) -> Ledger:
        """What has been seen so far; made when a test or a folder asks for it."""
        if self._ledger is None:
            from .pytest_snapshots import Ledger

            self._ledger = Ledger()
        return self._ledger

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """A file of which tests were left out says nothing of what they don't use."""
        self._partial.update(str(item.path) for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Notes the tests of files that have snapshots beside them."""
        has = {parent: (parent / "relower.snapshots").is_dir()
               for parent in {item.path.parent for item in session.items}}  # fmt: skip
        chosen = any("::" in str(argument) for argument in self._config.args)
        for item in session.items:
            if has[item.path.parent]:
                file = str(item.path)
                self.ledger.tests.setdefault(file, set()).add(item.nodeid)
                if chosen or file in self._partial:
                    self.ledger.partial.add(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that passed has used all its snapshots; the controller hears of all tests."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Takes in what a worker of pytest-xdist saw."""
        told = getattr(node, "workeroutput", {}).get(_PLUGIN)
        if told is not None:
            self.ledger.add(told)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker tells the controller; with ``--relower-strict``, what is unused is a failure."""
        if self._ledger is None:
            return
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_PLUGIN] = self._ledger.to_json()
            return
        strict = self._config.getoption("--relower-strict")
        if strict and self._ledger.unused(self._passed) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says what was accepted, and what is unused."""
        if self._ledger is None:
            return
        from .pytest_snapshots import report

        for line in report(self._ledger, self._passed, self._config.rootpath):
            terminalreporter.write_line(line)
