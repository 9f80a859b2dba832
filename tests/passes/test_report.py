"""What a report says of a site that two passes looked at."""

import jax
import jax.numpy as jnp

from relower import assume_range, explain

BOTH = ["argsort_packed_key", "argsort_unique_pairs"]
IDS = jax.ShapeDtypeStruct((1 << 17,), jnp.int32)


def declined(report):
    return {s.pass_name: report.taken_by(s) for s in report.declined}


def test_a_pass_that_gave_way_is_told_from_one_that_nobody_followed():
    wide = lambda ids: jnp.argsort(assume_range(ids, 0, 1 << 20))
    report = explain(wide, IDS, passes=BOTH)
    assert declined(report) == {"argsort_packed_key": "argsort_unique_pairs"}
    assert "which argsort_unique_pairs rewrote" in str(report)
    (entry,) = [s for s in report.to_json()["sites"] if s["status"] == "declined"]
    assert entry["taken_by"] == "argsort_unique_pairs"
    data = report.to_json()
    assert [data[n] for n in ("applied", "declined", "taken")] == [1, 0, 1]
    head = str(report).splitlines()[0]
    assert head.endswith("1 applied, 0 declined, 1 declined by one pass and rewritten by another")
    alone = explain(wide, IDS, passes=BOTH[:1])
    assert declined(alone) == {"argsort_packed_key": None}
    assert alone.tally() == {"applied": 0, "declined": 1, "taken": 0}


def test_another_equation_at_the_same_place_is_nobodys():
    """Two sorts on one line, of which one was rewritten."""

    def fn(ids, data):
        a, b = jnp.argsort(assume_range(ids, 0, 1 << 20)), jax.lax.sort((ids, data), num_keys=1)[1]
        return a, b

    report = explain(fn, IDS, IDS, passes=BOTH)
    places = [report.taken_by(s) for s in report.declined if s.reasons[0].code != "too-many-bits"]
    assert places
    assert set(places) == {None}
    assert not any(report.taken_by(s) for s in report.applied)
