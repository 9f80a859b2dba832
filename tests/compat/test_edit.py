"""Adding and dropping operands and results: what goes with them in each primitive's params."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import bodies, edit, jaxprs, tracing

X = jnp.linspace(0.1, 1, 4)


def program(fn, name, *args):
    closed = jax.make_jaxpr(fn)(*args)
    eqns = jaxprs.opened(closed).eqns
    return closed, next(i for i, e in enumerate(eqns) if e.primitive.name == name)


def narrow(body, dropped):
    kept = [v for i, v in enumerate(jaxprs.invars(body)) if i not in dropped]
    return jaxprs.rebuild(body, invars=kept)


def drop(closed, index):
    """Drop whatever operands no body of an equation reads."""
    eqns = list(jaxprs.opened(closed).eqns)
    eqn = eqns[index]
    unread = {
        e.key: frozenset(i for i, p in enumerate(e.inputs) if p.outer is not None)
        for e in bodies.carried(eqn).entered
    }
    eqns[index] = edit.drop_unread(eqn, unread, narrow)
    return jaxprs.rebuild(closed, eqns=eqns), eqn, eqns[index]


PROGRAMS = {
    "jit": lambda x, u: jax.jit(lambda a, b: a * 2)(x, u),
    "scan": lambda x, u: lax.scan(
        lambda c, v: (c + x * v[0], c), x, (jnp.stack([x, x]), jnp.stack([u, u]))
    ),
    "cond": lambda x, u: lax.cond(x[0] > 0, lambda a, b: a, lambda a, b: a * 2, x, u),
    "remat2": lambda x, u: jax.checkpoint(lambda a, b: a * 2)(x, u),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_drop_unread(name):
    closed, index = program(PROGRAMS[name], name, X, X)
    changed, old, new = drop(closed, index)
    assert len(new.invars) == len(old.invars) - 1
    from relower.passes.engine.check import check_closed

    check_closed(changed)
    got = tracing.evaluate(changed, X, X)
    for g, w in zip(got, jax.tree.leaves(PROGRAMS[name](X, X)), strict=True):
        np.testing.assert_array_equal(g, w)


def test_a_carry_is_never_dropped():
    f = lambda x, u: lax.scan(lambda c, v: ((c[0] + v, c[1]), ()), (x, u), jnp.stack([x, x]))[0][0]
    closed, index = program(f, "scan", X, X)
    _, old, new = drop(closed, index)
    carries = bodies.scan_counts(old)[1]
    assert bodies.scan_counts(new)[1] == carries


def test_primitives_without_a_rule_keep_their_operands():
    @jax.custom_jvp
    def f(x, u):
        return x * 2

    f.defjvp(lambda p, t: (f(*p), t[0]))
    closed, index = program(f, "custom_jvp_call", X, X)
    _, old, new = drop(closed, index)
    assert new is old


def test_only_what_the_rewrite_left_unread_goes():
    closed, index = program(PROGRAMS["jit"], "jit", X, X)
    eqn = jaxprs.opened(closed).eqns[index]
    assert edit.drop_unread(eqn, {("jaxpr", None): frozenset()}, narrow) is eqn


def test_cannot_edit_says_why():
    closed, index = program(PROGRAMS["cond"], "cond", X, X)
    eqn = jaxprs.opened(closed).eqns[index]
    inner = jaxprs.invars(eqn.params["branches"][0])[0]
    with pytest.raises(edit.CannotEdit, match="no rule adds an output to cond"):
        edit.add_output(eqn, ("branches", 0), inner)
    with pytest.raises(edit.CannotEdit, match="no rule adds an operand to cond"):
        edit.add_input(eqn, ("branches", 0), eqn.invars[-1], sliced=False)


def test_a_scan_slices_only_what_has_its_length():
    closed, index = program(PROGRAMS["scan"], "scan", X, X)
    eqn = jaxprs.opened(closed).eqns[index]
    with pytest.raises(edit.CannotEdit, match=r"length 2 can't slice a value of shape \(4,\)"):
        edit.add_input(eqn, ("jaxpr", None), eqn.invars[0], sliced=True)
