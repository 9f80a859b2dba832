"""The facts that rewrites lean on, checked by the optimized program under checkify."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import assume_range, explain, optimize
from relower.matchers.fact import Affine, Constant, Fact
from relower.matchers.fact_check import Leaned
from relower.passes import registry
from relower.passes.engine import claims
from relower.passes.optimize import FactWarning

TABLE = jnp.arange(5.0)
GOOD = jnp.array([1, 2, 3, 0], jnp.int32)
BAD = jnp.array([1, 7, 3, 0], jnp.int32)
ONLY = ["nonnegative_index"]


def take(table, places):
    return table[assume_range(places, 0, 4)] * 2


def checked(fn, **options):
    return optimize(fn, passes=ONLY, check_facts=True, **options)


def error_of(fn, *args):
    error, out = checkify.checkify(fn)(*args)
    return error.get(), out


def scanned(table, places):
    return lax.scan(lambda c, i: (c + take(table, i[None])[0], c), 0.0, places)


def branched(table, places):
    return lax.cond(places[0] > 0, take, lambda t, i: t[:4], table, places)


def looped(table, places):
    return lax.fori_loop(0, places[0], lambda k, c: c + take(table, places), jnp.zeros(4))


def differentiated(table, places):
    return jax.grad(lambda t: jax.checkpoint(take)(t, places).sum())(table)


def wrapped_in_a_call(table, places):
    known = assume_range(places, 0, 4)
    return table.at[jnp.where(known < 0, known + 5, known)].get(mode="promise_in_bounds")


FUNCTIONS = {
    "a body of one equation": wrapped_in_a_call,
    "plain": take,
    "scan": scanned,
    "cond": branched,
    "while": looped,
    "jit": lambda t, i: jax.jit(take)(t, i) + 1,
    "remat": jax.checkpoint(take),
    "grad of remat": differentiated,
    "vmap": lambda t, i: jax.vmap(take, (None, 0))(t, i.reshape(2, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_false_statement_is_caught_and_a_true_one_is_not(name):
    fn = FUNCTIONS[name]
    run = jax.jit(checked(fn))
    said, _ = error_of(run, TABLE, BAD)
    if name in ("grad of remat", "a body of one equation"):
        # The statement, or the first copy of it, stands elsewhere than the site, and is first.
        assert "found 7, wanted a value in [0, 4]" in said
    else:
        assert "nonnegative_index at " in said
        assert "test_claims.py:" in said
        assert "in [0, 4]" in said
        assert ": found 7" in said
    said, out = error_of(run, TABLE, GOOD)
    assert said is None
    jax.tree.map(np.testing.assert_array_equal, out, jax.jit(fn)(TABLE, GOOD))


def test_the_index_is_named_and_not_a_mask_made_of_it():
    """Below zero the mask of what is wrapped around isn't what it was taken for either."""
    said, _ = error_of(jax.jit(checked(take)), TABLE, jnp.array([1, -3, 3, 0], jnp.int32))
    assert "leaned on i32[4] in [0, 4]: found -3" in said


@pytest.mark.parametrize("around", ["grad", "vmap", "remat", "scan"])
def test_transforms_of_the_optimized_function_keep_the_check(around):
    run = checked(take)
    fn = {
        "grad": jax.grad(lambda t, i: run(t, i).sum()),
        "vmap": lambda t, i: jax.vmap(run, (None, 1))(t, i.reshape(4, 1)),
        "remat": jax.grad(lambda t, i: jax.checkpoint(run)(t, i).sum()),
        "scan": lambda t, i: lax.scan(lambda c, j: (c, run(t, j)), 0, i.reshape(2, 2)),
    }[around]
    assert "nonnegative_index at " in error_of(fn, TABLE, BAD)[0]
    assert error_of(fn, TABLE, GOOD)[0] is None


def test_without_checkify_it_lowers_to_the_same_program():
    texts = [
        jax.jit(optimize(take, passes=ONLY, **options)).lower(TABLE, GOOD).compile().as_text()
        for options in ({}, {"check_facts": True})
    ]
    assert texts[0].count("gather(") == texts[1].count("gather(")
    np.testing.assert_array_equal(checked(take)(TABLE, GOOD), take(TABLE, GOOD))


def test_where_it_isnt_asked_for_nothing_is_added():
    jaxpr = str(jax.make_jaxpr(optimize(take, passes=ONLY))(TABLE, GOOD))
    assert "relower_" not in jaxpr
    assert "relower_checked" in str(jax.make_jaxpr(checked(take))(TABLE, GOOD))
    lowered = jax.jit(optimize(take, passes=ONLY)).lower(TABLE, GOOD).as_text()
    assert lowered == jax.jit(optimize(take, passes=ONLY, check_facts=False)).lower(
        TABLE, GOOD).as_text()  # fmt: skip


LOCAL = [p for p in registry.all_passes() if p.program is None and not p.examples()[0].mesh]


@pytest.mark.parametrize("p", LOCAL, ids=lambda p: p.name)
def test_no_pass_sees_the_marks(p):
    """As many sites, in as many rounds, with checks as without."""
    args = p.examples()[0].args
    reports = [explain(p.before, *args, passes=[p.name], check_facts=c) for c in (False, True)]
    assert reports[0].applied
    assert reports[0].sites == reports[1].sites
    assert reports[0].rounds == reports[1].rounds


def test_a_pass_that_judges_the_program_is_noted():
    def gradients(weight, x):
        return jax.grad(lambda w: (x @ w).sum())(weight)

    options = {"passes": ["frozen_gradient"], "frozen": ".*", "check_facts": True}
    (note,) = explain(gradients, jnp.ones((2, 3)), jnp.ones((4, 2)), **options).notes
    assert note.startswith(claims.NOT_CHECKED)
    assert "frozen_gradient" in note


def test_a_wrong_proof_is_caught(monkeypatch):
    """A permutation follows from the program; the check is what shows a wrong rule."""
    from relower.matchers import transfer

    rules = dict(transfer.rules())
    wrong = lambda eqn, operands: Fact(0, 3, permutation=0)
    rules[lax.rev_p] = (wrong, True)
    monkeypatch.setattr(transfer, "rules", lambda: rules)
    monkeypatch.setattr("relower.matchers.facts.rules", lambda: rules)

    def inverse(places):
        return jnp.argsort(lax.rev(places, (0,)))

    run = optimize(inverse, passes=["inverse_permutation"], check_facts=True)
    said, _ = error_of(run, jnp.array([1, 1, 3, 0], jnp.int32))
    assert "inverse_permutation at " in said
    assert "a permutation along axis 0: found values missing, or there twice" in said
    assert error_of(run, jnp.array([1, 2, 3, 0], jnp.int32))[0] is None


@pytest.mark.parametrize(
    ("fact", "good", "bad"),
    [
        (Fact(0, 4), [0, 4, 2], [0, 5, 2]),
        (Fact(0, 4), [0, 4, 2], [0, -1, 2]),
        (Fact(permutation=0), [2, 0, 1], [2, 0, 2]),
        (Fact(rising=(0,)), [2, 2, 9], [2, 1, 9]),
        (Fact(affine=Affine(3, (2,))), [3, 5, 7], [3, 5, 8]),
        (Fact(affine=Affine(3, (2,))), [3, 5, 7], [4, 6, 8]),
        (Fact(affine=Affine(None, (-1,))), [9, 8, 7], [9, 8, 8]),
        (Fact(3, 3, constant=Constant.of(3)), [3, 3, 3], [3, 4, 3]),
        (Fact(0, 4), [0.0, 4.0, 1.0], [0.0, 4.0, 1.5]),
        (Fact(0, 4), [0.0, 4.0, 1.0], [0.0, float("nan"), 1.0]),
        (Fact(constant=Constant.of(0.5)), [0.5, 0.5, 0.5], [0.5, 0.25, 0.5]),
    ],
)
@pytest.mark.parametrize("skip", [0, 1])
def test_each_kind_of_fact(fact, good, bad, skip):
    def fails(values):
        x = jnp.asarray(values)
        x = jnp.stack([jnp.asarray(good), x]) if skip else x
        return any(bool(failed) for failed, *_ in Leaned(fact, "it", "here").failures(x, skip))

    assert not fails(good)
    assert fails(bad)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("x")), "out_specs": P("x"), "check_vma": check_vma}
    run = jax.jit(checked(jax.shard_map(take, mesh=mesh, **specs)))
    assert "nonnegative_index at " in error_of(run, TABLE, BAD)[0]
    assert error_of(run, TABLE, GOOD)[0] is None


@pytest.mark.parametrize("kind", ["explicit", "set"])
def test_what_checkify_cant_enter_is_said(kind):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,))
    with jax.set_mesh(mesh):
        fn = jax.shard_map(take, in_specs=(P(), P("x")), out_specs=P("x"))
        place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        args = place(TABLE, P()), place(BAD, P("x"))
        notes = explain(fn, *args, passes=ONLY, check_facts=True).notes
        assert any(n.startswith(claims.NOT_CHECKED) and "shard_map" in n for n in notes)
        with pytest.warns(FactWarning, match="can't enter a shard_map"):
            jaxpr = jax.make_jaxpr(checked(fn))(*args)
    assert "relower_" not in str(jaxpr)


def test_what_is_checked_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(take)(TABLE, GOOD)
    assert not explain(take, TABLE, GOOD, passes=ONLY, check_facts=True).notes
