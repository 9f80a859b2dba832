"""Whose a saving is."""

from types import SimpleNamespace

import pytest

from relower.lowering.cost.attribute import RewriteSite, attribute
from relower.lowering.cost.compare import Group


def group(place, before, after, alike=False):
    return Group(place, before, after, ("sort",), ("sort",), alike)


def whose(groups, *sites):
    return attribute(SimpleNamespace(groups=groups), sites)


def test_each_place_goes_to_the_rewrite_that_took_from_its_line():
    groups = [group("a.py:1", 100.0, 20.0), group("a.py:2", 50.0, 40.0), group("a.py:9", 5.0, 7.0)]
    packed = RewriteSite("packed", "a.py:1", ("a.py:1",))
    gather = RewriteSite("gather", "a.py:3", ("a.py:2", "a.py:3"))
    found = whose(groups, gather, packed)
    assert [(s.label, s.saving, s.places) for s in found.savings] == [
        ("packed", 80.0, ("a.py:1",)),
        ("gather", 10.0, ("a.py:2",)),
    ]
    assert (found.saving, found.elsewhere) == (90.0, -2.0)
    assert found.share == pytest.approx(90 / 88)


def test_rewrites_that_share_a_line_with_operations_are_together():
    sites = [
        RewriteSite("one", "a.py:1", ("a.py:1", "a.py:2")),
        RewriteSite("two", "a.py:2", ("a.py:2",)),
        RewriteSite("three", "a.py:3", ("a.py:3", "a.py:7")),
        RewriteSite("four", "a.py:4", ("a.py:4", "a.py:7")),
    ]
    found = whose([group(f"a.py:{n}", 10.0, 10.0 - n) for n in range(1, 5)], *sites)
    assert [(s.label, s.saving) for s in found.savings] == [
        ("four", 4.0),
        ("one + two", 3.0),
        ("three", 3.0),
    ]
    assert found.elsewhere == 0


def test_what_has_no_figure_is_said_and_not_counted():
    site = RewriteSite("one", "a.py:1")
    (saving,) = whose([group("a.py:1", None, 3.0)], site).savings
    assert (saving.saving, saving.before, saving.undecided) == (0.0, 0, True)
    (saving,) = whose([group("a.py:1", None, None, alike=True)], site).savings
    assert not saving.undecided
    assert whose([], site).share is None


def test_only_sites_that_applied_are_read_from_a_report():
    site = {"pass": "p", "source": "a.py:1", "calls": 2}
    report = {"sites": [{**site, "status": "applied"}, {**site, "status": "declined"}]}
    assert RewriteSite.of_report(report) == (RewriteSite("p", "a.py:1", (), 2),)
