"""Several children at once: results in the order asked for, and none left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

from . import child

T = TypeVar("T")


def in_order(
    tasks: Sequence[Callable[[], T]], jobs: int, done: Callable[[int], None] | None = None
) -> list[T]:
    """Runs ``tasks``, each of which waits for a child, ``jobs`` at a time.

    Args:
        tasks: what to run; each in a thread, as the work is done in the child.
        jobs: how many at once; with 1 they run here, one after the other.
        done: called in this thread with a task's index when it has ended, in no fixed order.

    Returns:
        The results in the order of ``tasks``. An exception of a task, or one that interrupts this
        thread, ends the children that are running and is raised here.
    """
    note = done or (lambda index: None)
    if jobs == 1 or len(tasks) < 2:
        results = []
        for index, task in enumerate(tasks):
            results.append(task())
            note(index)
        return results
    with ThreadPoolExecutor(min(jobs, len(tasks))) as pool:
        futures = {pool.submit(task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                future.result()
                note(futures[future])
        except BaseException:
            _end(futures)
            raise
        return [future.result() for future in futures]


def _end(futures: dict[Future[T], int]) -> None:
    """Cancels what hasn't begun, and ends children until every task has noticed."""
    for future in futures:
        future.cancel()
    while wait(futures, timeout=0.05).not_done:
        child.end_all()
