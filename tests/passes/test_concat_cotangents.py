"""Sums of padded arrays against their concatenation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import PassNotApplicable, explain, optimize
from relower.passes import concat_cotangents as module
from relower.passes import registry

NAME = "concat_cotangents"
ONE = {NAME: 1}
ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -3.5, 2.0], np.float32)


def padded(x, start, total, axis=1, value=0):
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (start, total - start - x.shape[axis], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def arrays(sizes, axis=1, dtype=np.float32):
    """Parts full of values that arithmetic could change."""
    r = np.random.RandomState(len(sizes))
    shapes = [(3, n) if axis == 1 else (n, 3) for n in sizes]
    whole = [r.choice(ODD, s) for s in shapes]
    if np.issubdtype(np.dtype(dtype), np.integer):
        whole = [r.randint(-99, 99, s) for s in shapes]
    return [jnp.asarray(w, dtype) for w in whole]


def summed(order, sizes, axis=1):
    """A sum of pads, the parts taken in some order."""
    starts = np.cumsum([0, *sizes])

    def fn(*parts):
        terms = [padded(parts[i], int(starts[i]), int(starts[-1]), axis) for i in order]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    return fn


def equal_numbers(got, want):
    """Equal as numbers; a zero may have another sign, and a subnormal may be flushed or not."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        a, b = (np.where(np.abs(v) < 1e-37, 0, v) for v in (a, b))
        np.testing.assert_array_equal(a, b)


def check(fn, *args, applied=ONE):
    assert explain(fn, *args, passes=[NAME]).counts() == applied
    done = optimize(fn, passes=[NAME])
    equal_numbers(jax.jit(done)(*args), jax.jit(fn)(*args))
    return done


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_order_size_and_axis(eqns_of, dtype, axis):
    sizes = (2, 5, 0, 1, 4, 3)
    args = arrays(sizes, axis, dtype)
    done = check(summed((3, 0, 5, 4, 2, 1), sizes, axis), *args)
    for name in ("add", "pad"):
        assert not eqns_of(done, *args, name=name)


def test_a_tree_of_sums():
    sizes = (1, 2, 3, 4, 5)
    starts = np.cumsum([0, *sizes])

    def fn(*parts):
        a, b, c, d, e = (padded(p, int(s), 15) for p, s in zip(parts, starts, strict=False))
        return (d + (b + a)) + (c + e)

    check(fn, *arrays(sizes))


def test_one_further_term_stays_one():
    sizes = (1, 2, 3, 4, 5)
    whole = arrays((15,))[0]
    check(lambda w, *parts: w + summed(range(5), sizes)(*parts), whole, *arrays(sizes))


def test_of_two_further_terms_the_order_stays():
    """Each would have to be added before some part and after others."""
    sizes = (3, 3, 3, 3, 3)
    args = [*arrays((15, 15)), *arrays(sizes)]
    fn = lambda v, w, *parts: (w + summed(range(5), sizes)(*parts)) * 2 + v
    check(fn, *args)

    def between(v, w, a, *parts):
        rest = summed((1, 2, 3, 4), sizes)
        return ((padded(a, 0, 15) + v) + w) + rest(a, *parts)

    report = explain(between, *args, passes=[NAME])
    assert not report.applied


def test_the_sign_of_a_zero_is_what_may_differ():
    sizes = (1,) * 5
    args = [jnp.full((1, 1), -0.0)] * 5
    fn = summed(range(5), sizes)
    assert not np.signbit(fn(*args)).any()
    assert np.signbit(optimize(fn, passes=[NAME])(*args)).all()


# --- where they come from -------------------------------------------------------------------------


def read_in_parts(x):
    return sum(jnp.sum(jnp.sin(x[:, 3 * i : 3 * i + 3]) * (i + 1)) for i in range(5))


X = np.random.RandomState(0).randn(4, 15).astype(np.float32)


def scanned(x):
    step = lambda c, _: (c + 0.5 * jnp.tanh(read_in_parts(x * c)), None)
    return lax.scan(jax.checkpoint(step), jnp.float32(1), None, length=2)[0]


def mesh_of(kind):
    return jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, kind),)))


def sharded(x):
    local = lambda x: read_in_parts(x)[None]
    return jax.shard_map(local, in_specs=P("d"), out_specs=P("d"))(x).sum()


@pytest.mark.parametrize("fn", [
    read_in_parts, jax.jit(read_in_parts), jax.checkpoint(read_in_parts), scanned,
], ids=["plain", "jit", "remat", "scan"])  # fmt: skip
def test_in_the_gradient_of(fn):
    gradient = jax.grad(fn)
    assert explain(gradient, X, passes=[NAME]).counts() == ONE
    equal_numbers(jax.jit(optimize(gradient, passes=[NAME]))(X), jax.jit(gradient)(X))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_in_the_gradient_of_a_shard_map(kind):
    gradient = jax.grad(sharded)
    with mesh_of(kind):
        x = jax.device_put(X, P("d"))
        assert explain(gradient, x, passes=[NAME]).counts() == ONE
        equal_numbers(jax.jit(optimize(gradient, passes=[NAME]))(x), jax.jit(gradient)(x))


def test_differentiated_and_mapped_after():
    sizes = (2, 3, 1, 4, 5)
    args = [jnp.nan_to_num(a, posinf=2, neginf=3) for a in arrays(sizes)]
    fn = summed((4, 1, 0, 3, 2), sizes)
    loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)) * jnp.arange(15.0))
    want = jax.grad(loss(fn), argnums=(0, 1, 2, 3, 4))(*args)
    equal_numbers(jax.grad(loss(optimize(fn, passes=[NAME])), argnums=(0, 1, 2, 3, 4))(*args), want)
    batch = [jnp.stack([a, 2 * a]) for a in args]
    equal_numbers(jax.vmap(optimize(fn, passes=[NAME]))(*batch), jax.vmap(fn)(*batch))
    equal_numbers(optimize(jax.vmap(fn), passes=[NAME])(*batch), jax.vmap(fn)(*batch))


def test_two_halves_are_joined_where_a_chain_then_works_on_the_whole():
    def halves(w):
        return [jnp.tanh(h) for h in jnp.split(w, 2, axis=1)]

    def fn(w):
        return padded(halves(w)[0], 0, 6) + padded(halves(w)[1], 3, 6)

    w = X[:, :6]
    assert explain(fn, w, contract="value").counts() == {NAME: 1, "split_fused_wi": 1}
    equal_numbers(optimize(fn, contract="value")(w), fn(w))


# --- near misses ----------------------------------------------------------------------------------

A, B, C, D, E = (jnp.asarray(X[:, 3 * i : 3 * i + 3]) for i in range(5))


def five(a, b, c, d, last):
    return padded(a, 0, 15) + padded(b, 3, 15) + padded(c, 6, 15) + padded(d, 9, 15) + last


def interior(e):
    return lax.pad(e[:, :2], jnp.float32(0), [(0, 0, 0), (12, 0, 1)])


def negative(e):
    return lax.pad(jnp.concatenate([e, e], 1), jnp.float32(0), [(0, 0, 0), (12, -3, 0)])


def several(e):
    return lax.pad(e[:3], jnp.float32(0), [(1, 0, 0), (12, 0, 0)])


def read_elsewhere(a, b, c, d, e):
    last = padded(e, 12, 15)
    return five(a, b, c, d, last), jnp.sin(last)


MISSES = {
    "not-zeros": lambda a, b, c, d, e: five(a, b, c, d, padded(e, 12, 15, value=1)),
    "interior": lambda a, b, c, d, e: five(a, b, c, d, interior(e)),
    "cut-off": lambda a, b, c, d, e: five(a, b, c, d, negative(e)),
    "several-axes": lambda a, b, c, d, e: five(a, b, c, d, several(e)),
    "overlap": lambda a, b, c, d, e: five(a, b, c, d, padded(e, 11, 15)),
    "gaps": lambda a, b, c, d, e: five(a, b, c, d, padded(e[:, :2], 12, 15)),
    "few-parts": lambda a, b, c, d, e: summed(range(4), (3, 3, 3, 3))(a, b, c, d),
    "read-elsewhere": read_elsewhere,
}
CODES = {"cut-off": "interior"}


@pytest.mark.parametrize("miss", MISSES)
def test_declined(why, miss):
    report = explain(MISSES[miss], A, B, C, D, E, passes=[NAME])
    assert not report.applied
    (found,) = why(report, NAME)
    codes = [r.split(":")[0] for r in found]
    assert codes == [CODES.get(miss, miss)] or (miss == "overlap" and "overlap" in codes), found


def test_declined_where_types_say_that_devices_hold_parts(why):
    with mesh_of("Explicit"):
        parts = [jax.device_put(x, P("d")) for x in (A, B, C, D, E)]
        report = explain(summed(range(5), (3,) * 5), *parts, passes=[NAME])
        assert [r[0].split(":")[0] for r in why(report, NAME)] == ["sharding"]


def test_other_sums_are_no_candidates():
    for fn in (lambda a, b: a + b, lambda a, b: padded(a, 0, 6) + jnp.concatenate([b, b], 1),
               lambda a, b: padded(a, 0, 6) * padded(b, 3, 6)):  # fmt: skip
        assert not explain(fn, A, B, passes=[NAME]).sites
        with pytest.raises(PassNotApplicable, match=NAME):
            optimize(fn, passes=[NAME])(A, B)


# --- mutants --------------------------------------------------------------------------------------


def reversed_order(laid):
    return dataclasses.replace(laid, order=laid.order[::-1])


def as_written(laid):
    return dataclasses.replace(laid, order=tuple(range(len(laid.order))))


def another_axis(laid):
    return dataclasses.replace(laid, axis=1 - laid.axis)


@pytest.mark.parametrize("mutant", [reversed_order, as_written, another_axis])
def test_mutants_of_the_layout_are_caught(monkeypatch, mutant):
    lay = module.lay
    sizes = (3,) * 3 + (2, 4)
    monkeypatch.setattr(module, "lay", lambda p, a: mutant(lay(p, a)) if lay(p, a) else None)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        check(summed((3, 0, 4, 2, 1), sizes), *arrays(sizes))


@pytest.mark.parametrize("start", [0, 4, 6, 15])
def test_a_part_of_no_width_is_nothing_wherever_it_lies(start):
    """At a border, or in the midst of another."""
    empty = padded(A[:, :0], start, 15)
    whole = summed(range(5), (3,) * 5)
    check(lambda *parts: empty + whole(*parts), A, B, C, D, E)
    check(lambda *parts: whole(*parts) + empty, A, B, C, D, E)


def test_parts_of_no_width_count_for_none(why):
    fn = lambda a, b: sum((padded(a[:, :0], i, 6) for i in range(4)),
                          padded(a, 0, 6) + padded(b, 3, 6))  # fmt: skip
    (found,) = why(explain(fn, A, B, passes=[NAME]), NAME)
    assert [r.split(":")[0] for r in found] == ["few-parts"]
    assert "found 2 parts" in found[0]


def test_slices_of_which_one_has_no_width():
    def loss(x):
        parts = (x[:, :3], x[:, 3:6], x[:, 4:4], x[:, 6:9], x[:, 9:12], x[:, 12:])
        return sum(jnp.sum(p * (i + 1.5)) for i, p in enumerate(parts))

    x = jnp.concatenate([A, B, C, D, E], 1)
    assert explain(jax.grad(loss), x, passes=[NAME]).counts() == ONE
    equal_numbers(jax.jit(optimize(jax.grad(loss), passes=[NAME]))(x), jax.jit(jax.grad(loss))(x))


@pytest.mark.parametrize("dropped", ["overlap", "not-zeros", "interior"])
def test_mutants_without_a_requirement_are_caught(monkeypatch, dropped):
    kept = tuple(r for r in module.PASS.requirements if r.code != dropped)
    mutated = dataclasses.replace(module.PASS, requirements=kept)
    others = tuple(p for p in registry.all_passes() if p.name != NAME)
    monkeypatch.setattr(registry, "all_passes", lambda: (*others, mutated))
    if dropped in ("overlap", "interior"):  # the layout itself says no then
        lay = module.lay
        monkeypatch.setattr(module, "_laid", lambda m: _careless(m, lay))
    with pytest.raises((AssertionError, ValueError, TypeError)):
        check(MISSES[dropped], A, B, C, D, E)


def _careless(match, lay):
    parts = match.captures["sum"].parts
    return module.Laid(1, tuple(range(len(parts))), (0,) * (len(parts) + 1))
