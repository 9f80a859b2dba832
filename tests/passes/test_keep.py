"""A region that the user keeps: no pass replaces or removes anything of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import relower

IDS = jax.ShapeDtypeStruct((64,), jnp.int32)
ROWS = jax.ShapeDtypeStruct((64, 4), jnp.float32)


def order(ids):
    return jnp.argsort(ids & 7)


def taken(ids, rows):
    return rows[order(ids)].sum()


def verdicts(fn, *args, **options):
    report = relower.explain(fn, *args, **options)
    kept = [s for s in report.declined if any(r.code == "kept" for r in s.reasons)]
    return len(report.applied), len(kept)


def plain(fn, *args):
    return verdicts(fn, *args, passes=["argsort_packed_key"])


KEPT = relower.keep(order)


def test_without_it_the_site_applies():
    assert plain(order, IDS) == (1, 0)


def batched(ids):
    return jax.vmap(KEPT)(ids.reshape(4, 16))


def looped(ids):
    return lax.scan(lambda c, _: (KEPT(c), None), ids, None, length=2)[0]


def branched(ids):
    return lax.cond(ids[0] > 0, KEPT, lambda x: x, ids)


def sharded(ids):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(KEPT, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(ids)


@pytest.mark.parametrize(
    "fn", [KEPT, jax.jit(KEPT), relower.keep(jax.jit(order)), batched, looped, branched, sharded,
           jax.checkpoint(KEPT)],
    ids=["bare", "jit", "of a jit", "vmap", "scan", "cond", "shard_map", "remat"],
)  # fmt: skip
def test_a_site_in_it_is_declined(fn):
    assert plain(fn, IDS) == (0, 1)


def test_its_backward_is_kept_too():
    def loss(keep):
        return lambda rows, ids: keep(lambda r: r[order(ids)].sum())(rows)

    options = {"passes": ["permutation_scatter"]}
    grad = lambda keep: jax.grad(loss(keep))
    assert verdicts(grad(lambda f: f), ROWS, IDS, **options) == (1, 0)
    assert verdicts(grad(relower.keep), ROWS, IDS, **options) == (0, 1)


def test_one_body_called_in_it_and_outside():
    def both(ids):
        return KEPT(ids) + order(ids + 1)

    report = relower.explain(both, IDS, passes=["argsort_packed_key"])
    assert report.counts() == {"argsort_packed_key": 1}
    assert [r.code for s in report.declined for r in s.reasons] == ["kept"]


def test_a_call_whose_body_is_kept_is_not_replaced():
    back = jax.jit(relower.keep(jnp.argsort))

    def there_and_back(ids):
        order = jnp.argsort(ids)
        return order, back(jnp.argsort(order))

    report = relower.explain(there_and_back, IDS, passes=["inverse_permutation"])
    assert report.counts() == {"inverse_permutation": 1}
    codes = {s.primitive: r.code for s in report.declined for r in s.reasons}
    assert codes["jit"] == "kept"


def test_what_is_not_read_any_more_stays():
    def wrapped(keep):
        def index(ids):
            low = ids & 7
            negative, after = keep(lambda i: (i < 0, i + 8))(low)
            return lax.select_n(negative, low, after)

        return relower.optimize(index, passes=["nonnegative_index"])

    def made(keep):
        return [e.primitive.name for e in jax.make_jaxpr(wrapped(keep))(IDS).jaxpr.eqns]

    assert made(lambda f: f) == ["and"]
    assert made(relower.keep) == ["and", "lt", "add"]


def test_several_collectives_of_which_one_is_kept():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    gather = lambda x: lax.all_gather(x, "x", tiled=True)

    def pair(first):
        def both(a, b):
            return first(a), gather(b)

        specs = P("x"), P("x")
        return jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)

    options = {"passes": ["packed_all_gather"]}
    args = (jax.ShapeDtypeStruct((64, 4), jnp.float32),) * 2
    assert verdicts(pair(gather), *args, **options)[0] == 1
    assert verdicts(pair(relower.keep(gather)), *args, **options)[0] == 0


def test_the_values_and_the_lowered_program_stay():
    ids = jnp.arange(64, dtype=jnp.int32)[::-1]
    assert (relower.optimize(KEPT)(ids) == order(ids)).all()
    a, b = (relower.lower(f, IDS) for f in (order, relower.keep(order)))
    assert relower.diff(a, b, level="exact").verdict.name == "IDENTICAL"


def test_what_is_no_function():
    with pytest.raises(TypeError, match="keep: found 3 of type int, wanted a function"):
        relower.keep(3)
