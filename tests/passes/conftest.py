"""Passes that exist for the tests of the engine only, helpers to run them, and bitwise comparison
of functions with their optimized forms."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower import PassNotApplicable, explain, optimize
from relower.compat import bodies, jaxprs, tracing
from relower.compat.primitives import primitive
from relower.passes.base import Contract, Match, Pass, Replacement
from relower.passes.engine import check
from relower.passes.engine.rewrite import rewrite


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


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """Type, shape and bytes of every leaf; NaN payloads and the signs of zeros count."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(a.dtype, a.shape, a.tobytes()) for a in arrays]


def assert_bits(got: Any, want: Any, what: str = "") -> None:
    """Equal to the bit, with a short message where not."""
    left, right = bits(got), bits(want)
    assert len(left) == len(right), what
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a[:2] == b[:2], f"{what}: output {i} is {a[:2]}, wanted {b[:2]}"
        same = a[2] == b[2]  # not inside the assert: pytest would print both
        assert same, f"{what}: output {i} differs in its bits"


def assert_same(
    fn: Callable[..., Any],
    *args: Any,
    passes: list[str] | None = None,
    applied: dict[str, int] | None = None,
    eager: bool = False,
) -> Any:
    """``optimize(fn)`` returns the bits of ``fn``, jitted and, if asked, eager; gives the report.

    ``applied`` counts the sites that must have been rewritten.
    """
    report = explain(fn, *args, passes=passes)
    if applied is not None:
        assert report.counts() == applied, str(report)
    try:
        optimized = optimize(fn, passes=passes)
        got = jax.jit(optimized)(*args)
    except PassNotApplicable:
        assert applied == {}, str(report)
        return report
    assert_bits(got, jax.jit(fn)(*args), "jitted")
    if eager:
        assert_bits(optimized(*args), fn(*args), "eager")
    return report


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of bodies included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                    yield from equations(part)


def count(fn: Callable[..., Any], *args: Any, name: str) -> list[Any]:
    """The equations of one primitive in ``fn``."""
    return [e for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive.name == name]


def reasons(report: Any, pass_name: str) -> list[list[str]]:
    """The reasons for each declined site of a pass, as ``code: sentence (…)``."""
    return [
        [f"{r.code}: {r}" for r in s.reasons] for s in report.declined if s.pass_name == pass_name
    ]


@pytest.fixture(scope="session")
def same() -> Callable[..., Any]:
    return assert_same


@pytest.fixture(scope="session")
def equal_bits() -> Callable[..., None]:
    return assert_bits


@pytest.fixture(scope="session")
def eqns_of() -> Callable[..., list[Any]]:
    return count


@pytest.fixture(scope="session")
def why() -> Callable[..., list[list[str]]]:
    return reasons


@pytest.fixture
def x64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
