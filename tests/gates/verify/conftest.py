"""Passes put in the place of others for one test, wrong ones, and small limits."""

import dataclasses

import pytest

from relower.gates.verify.check import Limits
from relower.passes import registry
from relower.passes.base import Contract, Match, Pass, Replacement


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


@pytest.fixture(scope="session")
def wrong():
    """A pass that puts something else in an equation's place, right or wrong."""
    return _wrong


@pytest.fixture(scope="session")
def other():
    """A pass that changes params of every equation that has others."""
    return _other


def _wrong(root, changed, pred=lambda eqn: True, contract=Contract.BITWISE):
    """A pass: an equation of the primitive ``root`` becomes ``changed(params)(*operands)``."""

    def find(scope, index):
        return Match(scope, index, {}) if pred(scope.eqns[index]) else None

    def replace(match):
        eqn = match.eqn
        fn = lambda *operands: list(changed(eqn.params, *operands))
        return Replacement(tuple(eqn.invars), tuple(eqn.outvars), fn, ())

    return Pass(
        name="wrong", contract=contract, summary="x", measure="sites",
        roots=lambda: frozenset({root}), find=find, requirements=(),
        profitable=lambda m: None, replace=replace, before=lambda x: x, after=lambda x: x,
        examples=lambda: (),
    )  # fmt: skip


def _other(primitive, **params):
    """A pass that changes params of every equation that has others."""
    return _wrong(
        primitive,
        lambda given, *operands: _bound(primitive, {**given, **params}, operands),
        lambda eqn: any(eqn.params[k] != v for k, v in params.items()),
    )


def _bound(primitive, params, operands):
    found = primitive.bind(*operands, **params)
    return found if primitive.multiple_results else [found]
