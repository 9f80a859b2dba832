"""Passes that exist for the tests of the engine only, and helpers to run them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import bodies, jaxprs, tracing
from relower.compat.primitives import primitive
from relower.passes import check
from relower.passes.base import Contract, Match, Pass, Replacement
from relower.passes.optimize import rewrite


def make_pass(name, root, find, replace, requirements=(), profitable=lambda m: None):
    """A pass made of two functions."""
    return Pass(
        name=name,
        contract=Contract.ROUNDING,
        summary=name,
        measure=name,
        roots=lambda: frozenset({primitive(root)}),
        find=find,
        requirements=requirements,
        profitable=profitable,
        replace=replace,
        before=lambda x: x,
        after=lambda x: x,
        examples=lambda: (),
    )


def every(scope, index):
    return Match(scope, index, {})


def whole(fn, key=()):
    """Replace all results by ``fn`` of all operands."""

    def replace(match):
        return Replacement(tuple(match.eqn.invars), tuple(match.eqn.outvars), fn, key)

    return replace


def _shifted_cosine(x, accuracy=None):
    return [lax.cos(lax.sub(x, np.asarray(np.pi / 2, x.dtype)))]


SIN = make_pass("sin_to_cos", "sin_p", every, whole(_shifted_cosine))


def _find_times_one(scope, index):
    for position, atom in enumerate(scope.eqns[index].invars):
        if jaxprs.is_literal(atom) and np.all(np.asarray(atom.val) == 1):
            return Match(scope, index, {"other": 1 - position})
        known = scope.fact(atom).constant
        if known is not None and known.value == 1:
            return Match(scope, index, {"other": 1 - position})
    return None


def _keep_operand(match):
    operand = match.eqn.invars[match.captures["other"]]
    return Replacement((operand,), tuple(match.eqn.outvars), lambda x: [x], match.captures["other"])


ONE = make_pass("times_one", "mul_p", _find_times_one, _keep_operand)


def trace(fn, *args, **kwargs):
    """A closed jaxpr, as `optimize` traces it."""
    leaves = jax.tree.leaves((args, kwargs))
    avals = [tracing.type_of(leaf) for leaf in leaves if tracing.is_dynamic(leaf)]
    return tracing.trace(fn, args, kwargs, avals).closed


def run(fn, passes, *args):
    """Rewrite ``fn`` and check every body of the result; the closed jaxpr and the report."""
    done = rewrite(trace(fn, *args), passes)
    check.check_closed(done.closed)
    return done


def function(closed, out_tree=None):
    """A closed jaxpr as a function of flat arguments."""

    def call(*args):
        outs = tracing.evaluate(closed, *jax.tree.leaves(args))
        return outs if out_tree is None else jax.tree.unflatten(out_tree, outs)

    return call


def walk(body, path=()):
    """Every equation of every entered body, with its path."""
    for index, eqn in enumerate(jaxprs.opened(body).eqns):
        yield (*path, index), eqn
        for e in bodies.carried(eqn).entered:
            yield from walk(e.body, (*path, index, e.key))


def names(body):
    """The primitives' names in every body, in order."""
    return [eqn.primitive.name for _, eqn in walk(body)]


@pytest.fixture(scope="session")
def engine():
    return SimpleNamespace(
        SIN=SIN,
        ONE=ONE,
        make_pass=make_pass,
        every=every,
        whole=whole,
        trace=trace,
        run=run,
        function=function,
        walk=walk,
        names=names,
        rewrite=rewrite,
        primitive=primitive,
        jnp=jnp,
    )
