"""Passes put in the place of others for one test, and small limits."""

import dataclasses

import pytest

from relower.gates.verify.check import Limits
from relower.passes import registry


@pytest.fixture
def swap(monkeypatch):
    """``swap(name, field=…)``: the registry with one pass changed."""
    every = registry.all_passes()

    def changed(name, **fields):
        altered = tuple(dataclasses.replace(p, **fields) if p.name == name else p for p in every)
        monkeypatch.setattr(registry, "all_passes", lambda: altered)

    return changed


@pytest.fixture(scope="session")
def quick():
    """One filling of each theme."""
    return Limits(seconds=60.0, seeds=1)
