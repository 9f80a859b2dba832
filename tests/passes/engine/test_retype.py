"""Bodies that are typed again, with inputs that vary over more axes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from relower.compat import jaxprs, tracing, vma
from relower.passes.engine.check import IllFormed
from relower.passes.engine.retype import retype_body

AXES = frozenset({"d"})


@pytest.fixture
def unread():
    """``_ _ = sort a b`` beside an output: what is bound to ``_`` has a type all the same."""

    def fn(a, b):
        lax.sort((a, b), num_keys=1)
        return a + 1

    mesh = jax.make_mesh((2,), ("d",))
    whole = jax.shard_map(jax.jit(fn), mesh=mesh, in_specs=P(), out_specs=P())
    ids = jnp.arange(12)
    (mapped,) = jax.make_jaxpr(whole)(ids, ids).jaxpr.eqns
    (call,) = mapped.params["jaxpr"].eqns
    closed = call.params["jaxpr"]
    sort, add = jaxprs.opened(closed).eqns
    sort = sort.replace(outvars=[jaxprs.dropped(v.aval) for v in sort.outvars])
    with tracing.inside(mapped):
        yield jaxprs.rebuild(closed, eqns=[sort, add])


def test_results_bound_to_nothing_are_typed_again(unread):
    typed, outs = retype_body(unread, [AXES, frozenset()])
    (sort,) = [e for e in jaxprs.opened(typed).eqns if e.primitive.name == "sort"]
    assert [vma.varying(v.aval) for v in sort.outvars] == [AXES, frozenset()]
    assert [vma.varying(a) for a in outs] == [AXES]


def test_a_body_that_is_typed_wrongly_is_refused(monkeypatch, unread):
    invariant = lambda aval: jaxprs.DropVar(vma.with_varying(aval, frozenset()))
    monkeypatch.setattr(jaxprs, "dropped", invariant)
    with pytest.raises(IllFormed, match="inconsistently typed"):
        retype_body(unread, [AXES, frozenset()])
