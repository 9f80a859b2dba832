"""A promise that a rewrite makes of values is held on them: a CPU computes the same without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from relower import assume_range, verify
from relower.gates.promises import INSIDE, SORTED, UNIQUE, broken
from relower.gates.verify.verdict import Verdict

PLACES, UPDATES, TABLE = np.array([1, 1, 3], np.int32), np.ones(3, np.float32), np.arange(16.0)
PROMISED = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def scattered(places, updates):
    return jnp.zeros(16).at[places].add(updates, mode="drop", wrap_negative_indices=False)


def gathered(table, places):
    return table.at[places].get(mode="clip", wrap_negative_indices=False)


@pytest.mark.parametrize(
    ("said", "params"),
    [
        ("unique_indices, and [", {"unique_indices": True}),
        ("indices_are_sorted, and [", {"indices_are_sorted": True}),
        ("promised in bounds, and [", {"mode": PROMISED}),
    ],
    ids=["unique", "sorted", "in bounds"],
)
@pytest.mark.parametrize(
    ("fn", "args", "root"),
    [
        (scattered, (PLACES, UPDATES), primitives.scatter_add_p),
        (gathered, (np.float32(TABLE), PLACES), primitives.gather_p),
    ],
    ids=["scatter", "gather"],
)
def test_a_promise_that_does_not_hold_is_a_violation(quick, fn, args, root, said, params, other):
    found = verify(fn, *args, passes=[other(root, **params)], limits=quick)
    (site,) = found.sites
    assert site.checked.verdict is Verdict.VIOLATION
    assert "the rewrite breaks a promise that it makes" in site.checked.reason
    assert f"{root.name}: {said}" in site.checked.reason
    assert site.checked.counterexample.of == "promise"


def test_indices_are_tried_that_meet_in_bounds(quick, other):
    """Of all int32 hardly two do, and what is dropped doesn't collide."""
    p = other(primitives.scatter_p, unique_indices=True)
    replaced = lambda table, places: table.at[places].set(1, mode="drop")
    assert verify(replaced, np.arange(16), PLACES, passes=[p], limits=quick).exit_code == 1


def test_a_promise_that_holds_is_none(quick, other):
    known = lambda table, places: gathered(table, assume_range(places, 0, 15))
    p = other(primitives.gather_p, mode=PROMISED)
    assert verify(known, np.float32(TABLE), PLACES, passes=[p], limits=quick).exit_code == 0
    ordered = lambda table, places: gathered(table, jnp.sort(places))
    p = other(primitives.gather_p, indices_are_sorted=True)
    assert verify(ordered, np.float32(TABLE), PLACES, passes=[p], limits=quick).exit_code == 0


def test_what_the_original_promises_itself_is_not_the_rewrites(quick, other):
    def unique(places, updates):
        places = assume_range(places, 0, 3)
        return jnp.zeros(16).at[places].add(updates, unique_indices=True, mode="drop",
                                            wrap_negative_indices=False)  # fmt: skip

    p = other(primitives.scatter_add_p, mode=PROMISED)
    assert verify(unique, PLACES, UPDATES, passes=[p], limits=quick).exit_code == 0


def test_where_the_original_keeps_no_promise_nothing_is_said(quick, other):
    def never(places, updates):
        return jnp.zeros(16).at[places * 0].add(updates, unique_indices=True,
                                                wrap_negative_indices=False)  # fmt: skip

    p = other(primitives.scatter_add_p, indices_are_sorted=True, mode=PROMISED)
    found = verify(never, PLACES, UPDATES, passes=[p], limits=quick)
    (site,) = found.sites
    assert site.checked.verdict is Verdict.UNKNOWN
    assert "on every input the original breaks a promise" in site.checked.reason


def test_an_order_that_a_sort_leaves_open_must_not_show(quick, other):
    def order(keys):
        return lax.sort((keys, lax.iota(jnp.int32, 8)), num_keys=1, is_stable=True)[1]

    keys = np.arange(8, dtype=np.int32) % 3
    found = verify(order, keys, passes=[other(primitives.sort_p, is_stable=False)], limits=quick)
    assert found.exit_code == 1
    alone = lambda keys: lax.sort(keys, is_stable=True)
    found = verify(alone, keys, passes=[other(primitives.sort_p, is_stable=False)], limits=quick)
    assert found.exit_code == 0


def test_promises_in_a_loop_are_said_not_to_be_held(quick, wrong):
    def looped(params, table, places):
        del params
        step = lambda c, p: (c, primitives.gather_p.bind(table, places + p * 0, **GATHER))
        return [lax.scan(step, 0, jnp.zeros(1, jnp.int32))[1][0]]

    (eqn,) = (
        e for e in jax.make_jaxpr(gathered)(np.float32(TABLE), PLACES).eqns
        if e.primitive is primitives.gather_p
    )  # fmt: skip
    indices = lambda table, places: gathered(table, places)
    GATHER = {**eqn.params, "indices_are_sorted": True}
    p = wrong(primitives.gather_p, looped, lambda e: not e.params["indices_are_sorted"])
    (site,) = verify(indices, np.float32(TABLE), PLACES, passes=[p], limits=quick).sites
    assert any("in a loop or a kernel weren't held: indices_are_sorted" in n
               for n in site.checked.notes)  # fmt: skip


def of(fn, *args):
    """The kinds of promises that the one gather or scatter of a function breaks."""
    kinds = primitives.gather_p, primitives.scatter_p
    (eqn,) = (e for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive in kinds)
    where = args[-1].reshape(*np.shape(eqn.invars[1].aval))
    operands = [args[0], where, *(np.zeros(a.aval.shape) for a in eqn.invars[2:])]
    return set(broken(eqn, operands))


@pytest.mark.parametrize(
    ("mode", "places", "kinds"),
    [
        ("drop", [20, 20, 1], {SORTED}),
        ("clip", [15, 20, 21], {UNIQUE}),
        ("promise_in_bounds", [2, 3, 16], {INSIDE}),
        ("drop", [0, 1, 2], set()),
    ],
)
def test_as_a_mode_has_them(mode, places, kinds):
    """What is dropped doesn't collide, and what is clipped may."""
    put = lambda x, i: x.at[i].set(
        1.0, mode=mode, unique_indices=True, indices_are_sorted=True, wrap_negative_indices=False
    )
    assert of(put, np.float32(TABLE), np.array(places, np.int32)) == kinds
