"""Every fact holds in every execution: random programs, run equation by equation.

Programs are lists of steps on arrays of one shape and any small integer type. Each is run on random
and on extreme inputs by an interpreter that enters every body that the analysis enters, and that
compares each value with each claim about it.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.compat import jaxprs
from relower.matchers import crossing, transfer, transfer_numeric
from relower.matchers.assume_range import assume_range
from relower.matchers.fact import Affine, Constant, Fact, integer
from relower.matchers.facts import Analysis

SHAPE = (3, 4)
DEVICES = 3
DTYPES = ("int8", "uint8", "int16", "int32", "uint32", "bool")


# Checking one claim against one value.


def holds(fact: Fact, value) -> bool:
    x = np.asarray(value)
    if x.size == 0 or fact == Fact():
        return True
    if fact.constant is not None and not (
        (x == fact.constant.value).all()
        and (np.signbit(x.astype(np.float64)) == fact.constant.negative).all()
    ):
        return False
    if x.dtype.kind not in "iub":
        if fact.affine is not None or fact.permutation is not None or fact.rising:
            return False
        if fact.lo is None or fact.hi is None:
            return fact.lo is fact.hi
        x = x.astype(np.float64)
        whole = np.isfinite(x).all() and (x == np.floor(x)).all()
        return bool(whole and x.min() >= fact.lo and x.max() <= fact.hi)
    x = x.astype(np.int64)
    if (fact.lo is not None and x.min() < fact.lo) or (fact.hi is not None and x.max() > fact.hi):
        return False
    if fact.affine is not None:
        steps = np.zeros((), np.int64)
        for d, (n, stride) in enumerate(zip(x.shape, fact.affine.strides)):
            steps = steps + (np.arange(n) * stride).reshape((-1,) + (1,) * (x.ndim - d - 1))
        offsets = x - steps
        if (offsets != offsets.flat[0]).any():
            return False
        if fact.affine.offset not in (None, offsets.flat[0]):
            return False
    if any((np.diff(x, axis=d) < 0).any() for d in fact.rising):
        return False
    if fact.permutation is not None:
        n = x.shape[fact.permutation]
        ordered = np.moveaxis(np.sort(x, axis=fact.permutation), fact.permutation, -1)
        if (ordered != np.arange(n)).any():
            return False
    return True


# Running a program beside its facts.


class Broken(AssertionError):
    """A value outside what was claimed of it."""


def run(facts, args):
    """Evaluates a body, checking every variable; returns its outputs."""
    jaxpr = jaxprs.opened(facts.body)
    env = {}

    def read(atom):
        return atom.val if jaxprs.is_literal(atom) else env[atom]

    def write(var, value, where):
        if not holds(facts.fact(var), value):
            raise Broken(f"{where}\n  claimed {facts.fact(var)}\n  found {np.asarray(value)}")
        env[var] = value

    for var, value in zip(jaxpr.constvars, jaxprs.consts(facts.body)):
        write(var, value, "constant")
    for var, value in zip(jaxpr.invars, args, strict=True):
        write(var, value, "input")
    for index, eqn in enumerate(jaxpr.eqns):
        values = [read(v) for v in eqn.invars]
        children = facts.children(index)
        step = STEPS.get(eqn.primitive.name)
        if children and step is not None:
            results = step(eqn, children, values)
        else:
            results = evaluate(eqn, values)
        for var, value in zip(eqn.outvars, results, strict=True):
            write(var, value, eqn.primitive.name)
    results = [read(v) for v in jaxpr.outvars]
    for fact, value in zip(facts.outputs, results, strict=True):
        assert holds(fact, value)
    return results


def evaluate(eqn, values):
    if eqn.primitive.name == "axis_index":
        return [jnp.int32(PLACE[-1])]
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def run_call(eqn, children, values):
    (child,) = children.values()
    return run(child, values)


def run_cond(eqn, children, values):
    index, *operands = values
    chosen = int(np.clip(int(index), 0, len(children) - 1))
    return run(children[("branches", chosen)], operands)


def run_while(eqn, children, values):
    test, body = children[("cond_jaxpr", None)], children[("body_jaxpr", None)]
    nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = values[nc + nb :]
    while run(test, [*values[:nc], *carry])[0]:
        carry = run(body, [*values[nc : nc + nb], *carry])
    return carry


def run_scan(eqn, children, values):
    from relower.compat.bodies import scan_counts

    (child,) = children.values()
    num_consts, num_carry, _, num_ys = scan_counts(eqn)
    consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
    xs = values[num_consts + num_carry :]
    order = range(eqn.params["length"])
    rows = {}
    for i in reversed(order) if eqn.params["reverse"] else order:
        results = run(child, [*consts, *carry, *(x[i] for x in xs)])
        carry, rows[i] = results[:num_carry], results[num_carry:]
    ys = [
        jnp.stack([rows[i][k] for i in order])
        if rows
        else jnp.zeros(eqn.outvars[num_carry + k].aval.shape, eqn.outvars[num_carry + k].aval.dtype)
        for k in range(num_ys)
    ]
    return [*carry, *ys]


PLACE = []
"""Along the one mesh axis, the device whose part is being run."""


def run_shard_map(eqn, children, values):
    (child,) = children.values()
    (devices,) = eqn.params["mesh"].shape.values()
    parts = []
    for device in range(devices):
        PLACE.append(device)
        try:
            cut = zip(values, eqn.params["in_specs"], strict=True)
            parts.append(
                run(child, [np.split(v, devices)[device] if any(s) else v for v, s in cut])
            )
        finally:
            PLACE.pop()
    return [jnp.concatenate(results) for results in zip(*parts, strict=True)]


STEPS = {
    "shard_map": run_shard_map,
    "jit": run_call,
    "closed_call": run_call,
    "checkpoint": run_call,
    "remat2": run_call,
    "custom_jvp_call": run_call,
    "custom_vjp_call": run_call,
    "custom_vjp_call_jaxpr": run_call,
    "cond": run_cond,
    "while": run_while,
    "scan": run_scan,
}


# Random programs.


def like(y, x):
    return y.astype(x.dtype)


def index_of(x):
    return x.astype(jnp.int32)


def two(f):
    return lambda x, y, k: f(x, like(y, x))


def no_bool(f):
    def step(x, y, k):
        x = x.astype(jnp.int8) if x.dtype == bool else x
        return f(x, like(y, x), k)

    return step


def literal(x, k):
    """``k`` as a number that ``x``'s dtype can hold."""
    limit = (0, 1) if x.dtype == bool else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
    return np.asarray(max(limit[0], min(limit[1], k)), x.dtype)


def converted(dtype):
    return lambda x, y, k: x.astype(dtype)


def gathered(mode):
    return lambda x, y, k: x.at[index_of(y)[0], index_of(y)[1] + k].get(mode=mode)[None] + x * 0


def scattered(method, mode):
    return lambda x, y, k: getattr(x.at[index_of(y)[:, 0]], method)(like(y, x), mode=mode)


def looped(x, y, k):
    def body(state):
        i, a = state
        return i + 1, jnp.maximum(a, like(y, x)) - like(i, a)

    return lax.while_loop(lambda s: s[0] < abs(k) % 5, body, (jnp.int32(0), x))[1]


def drifting(x, y, k):
    return lax.while_loop(
        lambda s: (s[0] < 3) & (s[1].sum() != 7),
        lambda s: (s[0] + 1, s[2], s[1] + literal(x, k)),
        (0, x, like(y, x)),
    )[1]


def scanned(reverse, length):
    def step(x, y, k):
        def body(carry, row):
            i, a = carry
            a = jnp.minimum(a, row) + literal(a, k)
            return (i + 2, a), (a, i, lax.broadcasted_iota(x.dtype, (4,), 0))

        (i, a), (rows, counts, _) = lax.scan(
            body, (jnp.int32(k), x[0]), jnp.tile(x, (2, 1))[:length], reverse=reverse
        )
        return x + a + like(i, x) + like(counts.sum(), x) + rows.sum(0, dtype=x.dtype)

    return step


def branched(x, y, k):
    return lax.switch(
        index_of(y)[0, 0],
        [
            lambda a: a,
            lambda a: jnp.zeros_like(a),
            lambda a: lax.broadcasted_iota(a.dtype, SHAPE, 0),
        ],
        x,
    )


def chosen_by(x, y, k):
    """Branches that know what they were chosen by."""
    i = x[0, 0]
    one = literal(x, 1)
    a = lax.cond(i < literal(x, k), lambda i, a: a - i, lambda i, a: a + i, i, x)
    b = lax.switch(
        index_of(i),
        [lambda i: i, lambda i: i + one, lambda i: i * literal(x, 3), lambda i: -i],
        i,
    )
    return a + b


def windowed(x, y, k):
    """Selections by masks about the selected value, in every spelling."""
    c, d = literal(x, k), literal(x, 7)
    inside = (x >= c) & (x < d)
    outside = jnp.logical_or(x < c, ~(x < d))
    flat = jnp.where(inside.reshape(-1), x.reshape(-1), d).reshape(SHAPE)
    both = jnp.where(outside, c, x), jnp.where(inside, x - c, literal(x, -1)), flat
    other = jnp.where(inside & (like(y, x) > x), x, jnp.where(x == c, d, x + c))
    return both[0] + both[1] * both[2] + other


def masked(x, y, k):
    valid = jnp.where(x > like(y, x), x <= literal(x, k), x >= literal(x, -k))
    known = valid.astype(jnp.int32) > 0
    twice = jax.jit(lambda m, a, b: jnp.where(m, a * b, b))(known, x, x + literal(x, 1))
    return x * valid + jnp.where(known ^ (x != literal(x, k)), x, twice)


def in_floats(dtype):
    """Arithmetic on integers in floats, exact or not as their sizes will have it."""

    def step(x, y, k):
        a, b, c = x.astype(dtype), y.astype(dtype), jnp.asarray(k, dtype)
        results = [
            -a + jnp.minimum(b, c),
            jnp.abs(a - c) * (b > c).astype(dtype),
            jnp.clip(jnp.floor(a * b), -100, 100),
            jnp.where(a == b, a, jnp.round(c)),
            jnp.cumsum(a * (b >= 0), axis=k % 2),
            jnp.broadcast_to(a.sum(k % 2, keepdims=True), SHAPE),
            jnp.broadcast_to(a.max(0), SHAPE) + lax.broadcasted_iota(dtype, SHAPE, 0),
            jnp.zeros(SHAPE, dtype).at[index_of(y)[:, 0]].add(a),
            jnp.asarray(np.arange(12).reshape(SHAPE), dtype) - a,
            a.at[index_of(y)[0], :3].get(mode="fill", fill_value=k % 7)[:3, :1] + a,
            lax.pad(a[:, 1:], c, ((0, 0, 0), (1, 0, 0))),
        ]
        return like(results[abs(k) % len(results)].astype(jnp.int32), x)

    return step


def by_matmul(dtype):
    def step(x, y, k):
        hot = jax.nn.one_hot(index_of(x) % 4, 4, dtype=dtype)
        table = jnp.asarray(np.arange(4) * abs(k), dtype) + (y[0] > 0).astype(dtype)
        return like((hot @ table).astype(jnp.int32), x)

    return step


def sorted_with_iota(x, y, k):
    axis = k % 2
    return lax.sort((x, lax.broadcasted_iota(jnp.int32, SHAPE, axis)), axis, num_keys=1 + k % 2)[1]


def inverse(x, y, k):
    order = jnp.argsort(x.reshape(-1))
    return jnp.zeros(12, jnp.int32).at[order].set(jnp.arange(12))[order].reshape(SHAPE)


OPERATIONS = {
    "add": no_bool(lambda x, y, k: x + y),
    "sub": no_bool(lambda x, y, k: x - y),
    "mul": no_bool(lambda x, y, k: x * y),
    "add_literal": no_bool(lambda x, y, k: x + literal(x, k)),
    "from_literal": no_bool(lambda x, y, k: literal(x, k) - x),
    "mul_literal": no_bool(lambda x, y, k: x * literal(x, k)),
    "neg": no_bool(lambda x, y, k: -x),
    "abs": no_bool(lambda x, y, k: jnp.abs(x)),
    "sign": no_bool(lambda x, y, k: lax.sign(x)),
    "div": no_bool(lambda x, y, k: lax.div(x, literal(x, k) | 1)),
    "div_or_one": no_bool(lambda x, y, k: lax.div(x, jnp.where(y == 0, literal(y, 1), y))),
    "rem": no_bool(lambda x, y, k: lax.rem(x, literal(x, k) | 1)),
    "floor_divide": no_bool(lambda x, y, k: x // (literal(x, k) | 1)),
    "mod": no_bool(lambda x, y, k: x % y),
    "pow": no_bool(lambda x, y, k: lax.integer_pow(x, k % 5)),
    "square": no_bool(lambda x, y, k: lax.square(x)),
    "maximum": two(jnp.maximum),
    "minimum": two(jnp.minimum),
    "at_least": lambda x, y, k: jnp.maximum(x, literal(x, k)),
    "clip": no_bool(lambda x, y, k: lax.clamp(literal(x, -k), x, literal(x, k))),
    "clip_by": no_bool(lambda x, y, k: lax.clamp(y, x, literal(x, k) + y * 0)),
    "and": two(operator.and_),
    "or": two(operator.or_),
    "xor": two(operator.xor),
    "mask": lambda x, y, k: x & literal(x, abs(k)),
    "not": lambda x, y, k: ~x,
    "shift_left": no_bool(lambda x, y, k: lax.shift_left(x, literal(x, abs(k) % 8))),
    "shift_right": no_bool(lambda x, y, k: lax.shift_right_arithmetic(x, literal(x, abs(k) % 8))),
    "shift_logical": no_bool(lambda x, y, k: lax.shift_right_logical(x, literal(x, abs(k) % 8))),
    "population_count": no_bool(lambda x, y, k: lax.population_count(x)),
    "clz": no_bool(lambda x, y, k: lax.clz(x)),
    "lt": lambda x, y, k: x < like(y, x),
    "le_literal": lambda x, y, k: x <= literal(x, k),
    "eq": lambda x, y, k: x == like(y, x),
    "ne_literal": lambda x, y, k: x != literal(x, k),
    "where": lambda x, y, k: jnp.where(x > literal(x, k), x, like(y, x)),
    "where_all": lambda x, y, k: jnp.where(x[0, 0] > literal(x, k), x, like(y, x)),
    "chosen_by": no_bool(chosen_by),
    "windowed": no_bool(windowed),
    "masked": no_bool(masked),
    "where_rounds_down": no_bool(
        lambda x, y, k: jnp.where(lax.rem(x, y | 1) < 0, lax.rem(x, y | 1) + (y | 1), y)
    ),
    "select": no_bool(
        lambda x, y, k: jnp.select([x < 0, x < literal(x, k), x == y], [-x, x, y], literal(x, k))
    ),
    "mod_literal": no_bool(lambda x, y, k: x % (literal(x, k) | 1)),
    "divmod": no_bool(lambda x, y, k: sum(jnp.divmod(x, jnp.maximum(y, literal(x, 1))))),
    "where_not": lambda x, y, k: jnp.where(~(x != literal(x, k)), x, like(y, x)),
    "where_scalar": lambda x, y, k: jnp.where(x[0, 0] < literal(x, k), x[0, 0], like(y, x)),
    "wrap_index": no_bool(lambda x, y, k: jnp.where(x < 0, x + literal(x, 4), x)),
    **{f"to_{d}": converted(d) for d in DTYPES},
    "through_float": lambda x, y, k: x.astype(jnp.float32).astype(jnp.int32),
    **{f"in_{d}": no_bool(in_floats(d)) for d in ("float32", "bfloat16", "float16")},
    **{f"matmul_{d}": no_bool(by_matmul(d)) for d in ("float32", "bfloat16", "int8", "int32")},
    "searchsorted": no_bool(
        lambda x, y, k: jnp.searchsorted(jnp.sort(x.reshape(-1)[: k % 12]), like(y, x))
    ),
    "digitize": no_bool(lambda x, y, k: jnp.digitize(x, jnp.sort(like(y, x)[0]))),
    "nonzero": lambda x, y, k: jnp.broadcast_to(
        jnp.nonzero(x[0] > 0, size=4, fill_value=k)[0], SHAPE
    ),
    "approx_max_k": no_bool(
        lambda x, y, k: jnp.tile(lax.approx_max_k(x.astype(jnp.float32), 2)[1], (1, 2))
    ),
    "bitcast": lambda x, y, k: lax.bitcast_convert_type(x.astype(jnp.int32), jnp.uint32),
    "iota": lambda x, y, k: lax.broadcasted_iota(x.dtype, SHAPE, k % 2) if x.dtype != bool else x,
    "constant": lambda x, y, k: jnp.full_like(x, literal(x, k)),
    "array": lambda x, y, k: like(jnp.asarray(np.arange(12).reshape(SHAPE) * (k % 3)), x),
    "flip": lambda x, y, k: jnp.flip(x, k % 2),
    "turn": lambda x, y, k: x.T.reshape(SHAPE),
    "flat": lambda x, y, k: x.reshape(2, 6).reshape(12, 1).reshape(1, 3, 4)[0],
    "turn_twice": lambda x, y, k: jnp.flip(x.T, 0).T,
    "first_row": lambda x, y, k: jnp.broadcast_to(x[:1], SHAPE),
    "one": lambda x, y, k: jnp.broadcast_to(x[k % 3, k % 4], SHAPE),
    "step_slice": lambda x, y, k: jnp.repeat(x[:, ::2], 2, axis=1),
    "tile": lambda x, y, k: jnp.tile(x[:, :2], (1, 2)),
    "pad": lambda x, y, k: lax.pad(x[:2, :3], literal(x, k), ((k % 2, 1 - k % 2, 0), (1, 0, 0))),
    "spread": lambda x, y, k: lax.pad(x[:2, :], literal(x, k), ((0, 0, 1), (0, 0, 0))),
    "join": lambda x, y, k: jnp.concatenate([x[:1], like(y, x)[1:]], 0),
    "stack": lambda x, y, k: jnp.stack([x[0], like(y, x)[0], x[k % 3]]),
    "split": lambda x, y, k: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
    "window": lambda x, y, k: lax.dynamic_slice(
        jnp.concatenate([x, like(y, x)]), (index_of(y)[0, 0], 0), SHAPE
    ),
    "update": lambda x, y, k: lax.dynamic_update_slice(
        x, like(y, x)[:2, :2], (k, index_of(y)[0, 0])
    ),
    "gather_fill": gathered("fill"),
    "gather_clip": gathered("clip"),
    "take": lambda x, y, k: jnp.take(x.reshape(-1), y.astype(jnp.int32)),
    "take_along": lambda x, y, k: jnp.take_along_axis(x, index_of(y) % 4, axis=1),
    "scatter": scattered("set", "drop"),
    "scatter_clip": scattered("set", "clip"),
    "scatter_add": no_bool(scattered("add", "drop")),
    "scatter_max": no_bool(scattered("max", "clip")),
    "inverse": inverse,
    "sort": lambda x, y, k: jnp.sort(x, axis=k % 2),
    "argsort": lambda x, y, k: jnp.argsort(x, axis=k % 2, descending=k % 3 == 0),
    "one_of_two_orders": lambda x, y, k: jnp.where(
        x > literal(x, k), jnp.argsort(x), jnp.argsort(y)
    ),
    "rank": lambda x, y, k: jnp.argsort(jnp.argsort(x, axis=k % 2), axis=k % 2),
    "flat_rank": lambda x, y, k: jnp.argsort(x.reshape(-1)).reshape(SHAPE),
    "sort_with_iota": sorted_with_iota,
    "sort_other_axis": lambda x, y, k: lax.sort((y, jnp.argsort(x, axis=0)), 1, num_keys=1)[1],
    "top_k": no_bool(lambda x, y, k: lax.top_k(x, 4)[k % 2]),
    "some_top_k": no_bool(lambda x, y, k: jnp.tile(lax.top_k(x, 2)[1], (1, 2))),
    "argmax": lambda x, y, k: jnp.broadcast_to(jnp.argmax(x, axis=0), SHAPE),
    "sum": no_bool(lambda x, y, k: jnp.broadcast_to(jnp.sum(x, axis=0, dtype=x.dtype), SHAPE)),
    "sum_bool": lambda x, y, k: jnp.broadcast_to(jnp.sum(x > 0, axis=1)[:, None], SHAPE),
    "max": lambda x, y, k: jnp.broadcast_to(x.max(axis=k % 2, keepdims=True), SHAPE),
    "any": lambda x, y, k: jnp.broadcast_to((x > 0).any(axis=0), SHAPE),
    "all": lambda x, y, k: jnp.broadcast_to((x > 0).all(axis=0), SHAPE),
    "cumsum": no_bool(lambda x, y, k: lax.cumsum(x, axis=k % 2, reverse=k % 3 == 0)),
    "cummax": no_bool(lambda x, y, k: lax.cummax(x, axis=k % 2)),
    "bincount": lambda x, y, k: jnp.broadcast_to(jnp.bincount(x.reshape(-1), length=4), SHAPE),
    "one_hot": no_bool(lambda x, y, k: jax.nn.one_hot(x[:, 0], 4, dtype=jnp.int32)),
    "while": no_bool(looped),
    "while_swap": no_bool(drifting),
    "scan": no_bool(scanned(False, 5)),
    "scan_reverse": no_bool(scanned(True, 3)),
    "scan_none": no_bool(scanned(False, 0)),
    "cond": no_bool(branched),
    "jit": no_bool(lambda x, y, k: jax.jit(lambda a, b: a + literal(a, k) * b)(x, y)),
    "remat": no_bool(lambda x, y, k: jax.checkpoint(lambda a: lax.sign(a) * literal(a, k))(x)),
    "assume": no_bool(lambda x, y, k: assume_range(x % literal(x, 5), 0, 4)),
}

LITERALS = st.sampled_from(
    [0, 1, 2, 3, 4, 5, 7, 8, 12, 100, 127, 200, 1 << 20, (1 << 31) - 1]
).flatmap(lambda k: st.sampled_from([k, -k, -k - 1]))
STEP = st.tuples(
    st.sampled_from(sorted(OPERATIONS)), st.integers(0, 3), st.integers(0, 3), LITERALS
)


def program(steps):
    def fn(*values):
        values = list(values)
        for name, i, j, k in steps:
            x, y = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append({**OPERATIONS, **PLACES, **RISING, **CROSSING}[name](x, y, k))
        return tuple(values)

    return fn


def inputs(dtypes, seed):
    """Extreme, small and random values of each dtype."""
    rng = np.random.default_rng(seed)
    for kind in range(3):
        arrays = []
        for d in dtypes:
            if d == "bool":
                arrays.append(rng.integers(0, 2, SHAPE).astype(bool))
                continue
            info = np.iinfo(d)
            extremes = [info.min, info.max, 0, 1, info.min + 1, info.max - 1]
            pool = [extremes, [-2, -1, 0, 1, 2, 3], None][kind]
            x = rng.choice(pool, SHAPE) if pool else rng.integers(info.min, info.max, SHAPE)
            arrays.append(x.astype(d))
        yield [jnp.asarray(a) for a in arrays]


def check(steps, dtypes, seed=0):
    fn = program(steps)
    batches = list(inputs(dtypes, seed))
    body = jax.make_jaxpr(fn)(*batches[0])
    facts = Analysis().enter(body)
    for arrays in batches:
        run(facts, arrays)
    return facts


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    steps=st.lists(STEP, min_size=1, max_size=7),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 1000),
)
def test_no_execution_leaves_a_fact(steps, dtypes, seed):
    check(steps, dtypes, seed)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation_on_each_type(name):
    for dtype, k in zip(DTYPES, (3, -1, 127, -128, 2, 5)):
        check([(name, 0, 1, k)], (dtype, "int8"))


# On devices: each has its rows and knows its place.

PLACES = {
    "place_minus_first": no_bool(lambda x, y, k: x - literal(x, 4) * place(x)),
    "place_place": lambda x, y, k: jnp.broadcast_to(place(x), SHAPE),
    "place_rows_of_all": lambda x, y, k: like(
        lax.axis_index("e") * 12 + jnp.arange(12).reshape(SHAPE), x
    ),
    "place_own": no_bool(
        lambda x, y, k: jnp.where(
            (x >= place(x) * literal(x, 4)) & (x < place(x) * literal(x, 4) + literal(x, 4)), x, y
        )
    ),
    "place_others_last": no_bool(
        lambda x, y, k: jnp.where((x >= place(x)) & (x < literal(x, 4)), x, literal(x, 4))
    ),
    "place_masked": no_bool(
        lambda x, y, k: jnp.where(lax.axis_index("e") > k, literal(x, 1), like(y, x))
    ),
}


def place(x):
    return like(lax.axis_index("e"), x)


def sharded(steps):
    """The steps on each device's rows; those of `PLACES` among them."""
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("e",), axis_types=(AxisType.Auto,))
    inner = program(steps)
    return jax.shard_map(inner, mesh=mesh, in_specs=P("e"), out_specs=P("e"), check_vma=False)


def check_sharded(steps, dtypes, seed=0):
    batches = [
        [jnp.concatenate(parts) for parts in zip(*of_devices, strict=True)]
        for of_devices in zip(*(inputs(dtypes, seed + d) for d in range(DEVICES)), strict=True)
    ]
    facts = Analysis().enter(jax.make_jaxpr(sharded(steps))(*batches[0]))
    for arrays in batches:
        run(facts, arrays)
    return facts


PLACED = st.one_of(
    STEP,
    st.tuples(st.sampled_from(sorted(PLACES)), st.integers(0, 3), st.integers(0, 3), LITERALS),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    steps=st.lists(PLACED, min_size=1, max_size=5),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 1000),
)
def test_no_device_leaves_a_fact(steps, dtypes, seed):
    check_sharded(steps, dtypes, seed)


@pytest.mark.parametrize("name", sorted(PLACES))
def test_each_operation_with_a_place(name):
    for dtype in DTYPES:
        check_sharded(
            [(name, 0, 1, 3), ("add_literal", 0, 0, 1), (name, 0, 1, -1)], (dtype, "int8")
        )


def test_a_wrong_claim_of_a_place_is_found(monkeypatch):
    """A rule that takes every device for the first is caught."""
    rule = lambda eqn, facts: Fact(0, 0)
    (primitive,) = [p for p in transfer.rules() if p.name == "axis_index"]
    check_sharded([("place_place", 0, 0, 0)], ("int32", "int8"))
    with monkeypatch.context() as broken:
        broken.setitem(transfer.rules(), primitive, (rule, True))
        with pytest.raises(Broken, match="axis_index"):
            check_sharded([("place_place", 0, 0, 0)], ("int32", "int8"))


# Order: steps that keep or lose it.

RISING = {
    "rising_sort": lambda x, y, k: jnp.sort(x, axis=k % 2),
    "rising_argsort": lambda x, y, k: like(jnp.argsort(x, axis=k % 2), x),
    "rising_sorted_by": lambda x, y, k: lax.sort((like(y, x), x), k % 2, num_keys=1)[1],
    "rising_running_sum": no_bool(lambda x, y, k: jnp.cumsum(x, axis=k % 2, dtype=x.dtype)),
    "rising_running_max": no_bool(lambda x, y, k: lax.cummax(x, k % 2)),
    "rising_max_from_the_end": no_bool(lambda x, y, k: lax.cummax(x, k % 2, reverse=True)),
    "rising_running_min": no_bool(lambda x, y, k: lax.cummin(x, k % 2, reverse=k % 3 == 0)),
    "rising_sum_from_the_end": no_bool(lambda x, y, k: lax.cumsum(x, k % 2, reverse=True)),
    "rising_sum_of_negatives": no_bool(
        lambda x, y, k: lax.cumsum(-jnp.clip(x, literal(x, 0), literal(x, 9)), 1, reverse=True)
    ),
    "rising_clipped": no_bool(lambda x, y, k: jnp.clip(x, literal(x, -1), literal(x, 3))),
    "rising_clipped_by": no_bool(lambda x, y, k: lax.clamp(like(y, x), x, x)),
    "rising_divided": no_bool(lambda x, y, k: x // literal(x, max(abs(k), 1))),
    "rising_quotient": no_bool(lambda x, y, k: lax.div(x, literal(x, k) | 1)),
    "rising_shifted": no_bool(lambda x, y, k: x >> literal(x, abs(k) % 4)),
    "rising_added": no_bool(lambda x, y, k: x + like(y, x)),
    "rising_less": no_bool(lambda x, y, k: jnp.clip(x, literal(x, 0), literal(x, 9)) - like(y, x)),
    "rising_less_rows": no_bool(
        lambda x, y, k: jnp.clip(x, literal(x, 0), literal(x, 9))
        - lax.broadcasted_iota(x.dtype, SHAPE, k % 2)[::-1]
    ),
    "rising_scaled": no_bool(lambda x, y, k: x * literal(x, k)),
    "rising_product": no_bool(lambda x, y, k: x * like(y, x)),
    "rising_narrowed": lambda x, y, k: x.astype(jnp.int8),
    "rising_unsigned": lambda x, y, k: x.astype(jnp.uint32),
    "rising_bits": lambda x, y, k: lax.bitcast_convert_type(x.astype(jnp.int32), jnp.uint32),
    "rising_greater": no_bool(lambda x, y, k: jnp.maximum(x, like(y, x))),
    "rising_turned": lambda x, y, k: x.T.reshape(SHAPE),
    "rising_backwards": lambda x, y, k: jnp.flip(x, k % 2),
    "rising_rows": lambda x, y, k: lax.broadcasted_iota(jnp.int32, SHAPE, k % 2),
    "rising_small": no_bool(lambda x, y, k: jnp.clip(x, literal(x, 0), literal(x, 9))),
    "rising_repeated": lambda x, y, k: jnp.tile(x[:, :2], (1, 2)) if k % 2 else jnp.tile(
        x[:1], (3, 1)),
    "rising_joined": lambda x, y, k: jnp.concatenate([x[:, :2], like(y, x)[:, 2:]], 1),
    "rising_stacked": lambda x, y, k: jnp.stack([x[0], like(y, x)[1], x[2]], k % 2).reshape(SHAPE),
    "rising_again": lambda x, y, k: lax.sort(
        (x, like(y, x)), k % 2, num_keys=1, is_stable=k % 3 > 0)[1],
    "rising_table": lambda x, y, k: x[0].at[index_of(y) + k % 3].get(
        mode=("clip", "fill")[k % 2]),
    "rising_in_bounds": lambda x, y, k: x[0][index_of(y) & 3],
    "rising_places": no_bool(lambda x, y, k: jnp.searchsorted(x[0], like(y, x))),
    "rising_chosen": lambda x, y, k: jnp.where(x > like(y, x), x, like(y, x)),
    "rising_either": lambda x, y, k: lax.cond(x[0, 0] > literal(x, k), lambda a, b: a,
                                             lambda a, b: b, x, like(y, x)),
}  # fmt: skip
RISE = st.tuples(st.sampled_from(sorted(RISING)), st.integers(0, 2), st.integers(0, 2), LITERALS)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    steps=st.lists(st.one_of(RISE, RISE, STEP), min_size=1, max_size=6),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 1000),
)
def test_what_is_called_sorted_is(steps, dtypes, seed):
    check(steps, dtypes, seed)


@pytest.mark.parametrize("name", sorted(RISING))
def test_each_operation_on_something_sorted(name):
    claims = 0
    for dtype in ("int8", "uint32"):
        for k in (0, 1, 3, 127, -1):
            sorted_first = [("rising_small", 0, 0, 0), ("rising_sort", 0, 0, k)]
            for first in (sorted_first[1:], sorted_first):
                found = check([*first, (name, 0, k % 2, k)], (dtype, "int8"))
                claims += sum(bool(f.rising) for f in found.outputs)
    assert claims  # at least of the sort itself


def test_a_wrong_claim_of_order_is_found(monkeypatch):
    """Sums of anything taken for rising are caught."""
    rule = lambda eqn, facts: Fact(rising=(eqn.params["axis"],))
    check([("rising_running_sum", 0, 0, 0)], ("int8", "int8"))
    monkeypatch.setitem(transfer.rules(), lax.cumsum_p, (rule, True))
    with pytest.raises(Broken, match="cumsum"):
        check([("rising_running_sum", 0, 0, 0)], ("int8", "int8"))


# Across the boundaries of bodies: order, masks and what they tell of a value's window.


def between(x, k):
    return (x >= literal(x, 0)) & (x < literal(x, abs(k)))


def own(x, m, k):
    """What a mask selects; nothing else of it is known inside the body that it came to."""
    return jnp.where(m, x, literal(x, 0))


def rows_of(x):
    return lax.cummax(x, 1)


def in_scan(x, y, k):
    m, up = between(x, k), rows_of(x)
    step = lambda c, row: (c, (own(x, m, k) + like(row, x) * literal(x, 0), up))
    (found, kept) = lax.scan(step, 0, like(y, x))[1]
    return found[0], kept[1]


def in_scan_slices(x, y, k):
    step = lambda c, xs: (c, (own(xs[0], xs[1], k), xs[2]))
    return lax.scan(step, 0, (x, between(x, k), rows_of(x)))[1]


def in_scan_backwards(x, y, k):
    """Sorted all the way: a carried value joins with what the body makes of it."""
    step = lambda c, row: (jnp.minimum(c, rows_of(row[None])), between(row, k))
    carried, masks = lax.scan(step, rows_of(x[:1]), x, reverse=True)
    return own(x, masks, k), jnp.broadcast_to(carried, SHAPE)


def out_of_scan(x, y, k):
    def step(c, row):
        more = row + literal(x, 1)
        return c, (more, between(more, k), row)

    rows, masks, same = lax.scan(step, 0, x)[1]
    return own(rows, masks, k), rows_of(same)


def in_while(x, y, k):
    m, up = between(x, k), rows_of(x)
    step = lambda s: (s[0] + 1, own(x, m, k), jnp.maximum(s[2], up))
    return lax.while_loop(lambda s: s[0] < 2, step, (0, x * literal(x, 0), up))[1:]


def in_cond(x, y, k):
    m, up = between(x, k), rows_of(x)
    yes = lambda x, m, up: (own(x, m, k), up)
    no = lambda x, m, up: (own(x, m, 2 * k), up + literal(up, 0))
    return lax.cond(index_of(y)[0, 0] > 0, yes, no, x, m, up)


def out_of_cond(x, y, k):
    yes = lambda x: (between(x, k), rows_of(x))
    no = lambda x: (between(x, k // 2), lax.sort(x, 1))
    m, up = lax.cond(index_of(y)[0, 0] > 0, yes, no, x)
    return own(x, m, k), up


def in_remat(x, y, k):
    inner = jax.checkpoint(lambda x, m, up: (own(x, m, k), up))
    return inner(x, between(x, k), rows_of(x))


def out_of_call(x, y, k):
    """The value is made where the mask is."""
    less = lambda x, up: (x, between(x, k), up)
    less, m, up = jax.jit(lambda x: less(x - literal(x, 1), rows_of(x)))(x)
    return own(less, m, k), up


def custom(kind):
    def step(x, y, k):
        def inner(x, m, up):
            return own(x, m, k), up

        fn = kind(inner)
        if kind is jax.custom_jvp:
            fn.defjvp(lambda primals, tangents: (fn(*primals), fn(*primals)))
        else:
            fn.defvjp(lambda *args: (inner(*args), None), lambda res, ct: (ct[0], None, ct[1]))
        return fn(x, between(x, k), rows_of(x))

    return step


def in_shard_map(x, y, k):
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("e",), axis_types=(AxisType.Auto,))
    inner = lambda x, m, up: (own(x, m, k), up)
    fn = jax.shard_map(inner, mesh=mesh, in_specs=P("e"), out_specs=P("e"), check_vma=False)
    return fn(x, between(x, k), rows_of(x))


def out_of_shard_map(x, y, k):
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("e",), axis_types=(AxisType.Auto,))
    inner = lambda x: (x, between(x, k), lax.sort(x, 1))
    fn = jax.shard_map(inner, mesh=mesh, in_specs=P("e"), out_specs=P("e"), check_vma=False)
    x, m, up = fn(x)
    return own(x, m, k), up


CROSSED = {
    "in_scan": in_scan,
    "in_scan_slices": in_scan_slices,
    "in_scan_backwards": in_scan_backwards,
    "out_of_scan": out_of_scan,
    "in_while": in_while,
    "in_cond": in_cond,
    "out_of_cond": out_of_cond,
    "in_remat": in_remat,
    "out_of_call": out_of_call,
    "in_custom_jvp": custom(jax.custom_jvp),
    "in_custom_vjp": custom(jax.custom_vjp),
    "in_shard_map": in_shard_map,
    "out_of_shard_map": out_of_shard_map,
    "assumed": lambda x, y, k: (
        (lambda x: own(x, between(x, k), k))(assume_range(x % literal(x, 126), 0, 127)),
        assume_range(rows_of(x & literal(x, 7)), 0, 7)),
}  # fmt: skip
CROSSING = {
    **{f"{n}_window": no_bool(lambda x, y, k, f=f: f(x, y, k)[0]) for n, f in CROSSED.items()},
    **{f"{n}_order": no_bool(lambda x, y, k, f=f: f(x, y, k)[1]) for n, f in CROSSED.items()},
}


@pytest.mark.parametrize("name", sorted(CROSSING))
def test_order_and_windows_cross(name):
    """What is known on one side is known on the other, and it holds there."""
    for dtype in ("int8", "int32"):
        facts = check([(name, 0, 1, 100)], (dtype, "int8"))
        found = facts.outputs[-1]
        if name.endswith("window"):
            wide = 199 if name.startswith("in_cond") and dtype == "int32" else 99
            assert found.within(0, wide if dtype == "int32" else 127), found
            assert found.hi in (99, 127, 199)
        else:
            assert found.rises(1, SHAPE[1])


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    steps=st.lists(
        st.one_of(
            RISE,
            STEP,
            st.tuples(st.sampled_from(sorted(CROSSING)), st.integers(0, 2), st.integers(0, 2),
                      LITERALS),
        ),
        min_size=1,
        max_size=5,
    ),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_what_crosses_a_boundary_holds_there(steps, dtypes, seed):
    check(steps, dtypes, seed)


def test_a_mask_of_other_places_is_found(monkeypatch):
    """Masks taken to tell of whichever array came along are caught."""
    names = crossing.Crossing._operands
    turned = lambda self, eqn, entered, like: [
        (outer, inner) for (outer, _), (_, inner) in
        zip(names(self, eqn, entered, like), names(self, eqn, entered, like)[::-1])
    ]  # fmt: skip
    monkeypatch.setitem(
        CROSSING, "in_remat_window",
        no_bool(lambda x, y, k: jax.checkpoint(lambda x, m, z: own(z, m, k))(
            x, between(x, k), jnp.flip(x, 0))),
    )  # fmt: skip
    steps = [("in_remat_window", 0, 0, 9)]
    check(steps, ("int8", "int8"))
    monkeypatch.setattr(crossing.Crossing, "_operands", turned)
    with pytest.raises(Broken):
        check(steps, ("int8", "int8"))


def test_a_wrong_rule_is_found(monkeypatch):
    """The harness can fail: sums that forget to wrap around are caught."""

    def wrapped(eqn, facts):
        out = eqn.outvars[0].aval
        lo, hi = facts[0].range(out.dtype)
        return Fact(lo, hi)

    steps = [("mask", 0, 0, 3), ("add_literal", 0, 0, 100)]
    with monkeypatch.context() as broken:
        broken.setitem(transfer.rules(), lax.add_p, (wrapped, False))
        with pytest.raises(Broken, match="add"):
            check(steps, ("int8", "int8"))
    check(steps, ("int8", "int8"))


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        (Fact(lo=1), [0, 2]),
        (Fact(hi=1), [0, 2]),
        (Fact(affine=Affine(0, (1,))), [0, 2]),
        (Fact(affine=Affine(None, (1,))), [3, 5]),
        (Fact(affine=Affine(1, (1,))), [0, 1]),
        (Fact(permutation=0), [0, 0]),
        (Fact(rising=(0,)), [0, 1, 0]),
        (Fact(constant=Constant.of(0.0)), np.array([0.0, -0.0])),
        (Fact(constant=Constant.of(1)), [1, 0]),
        (Fact(0, 2), [0.0, 2.5]),
        (Fact(0, 2), [0.0, np.nan]),
        (Fact(0, 2), [0.0, 3.0]),
        (Fact(lo=0), [0.0, 1.0]),
    ],
)
def test_the_check_of_a_claim_can_fail(fact, value):
    assert not holds(fact, value)


def test_facts_complete_each_other():
    aval = jax.ShapeDtypeStruct((4,), jnp.int8)
    assert integer(aval, 0, 100, Affine(0, (1,))) == Fact(0, 3, Affine(0, (1,)), 0)
    assert integer(aval, 5, 5).constant == Constant.of(5)
    assert integer(aval, 0, 200, Affine(0, (60,))) == Fact()


def test_exact_results_only():
    assert transfer_numeric.quotient_range((0, 7), (0, 2), operator.floordiv) is None
    assert transfer_numeric.quotient_range((-7, 7), (2, 3), operator.floordiv) == (-4, 3)
