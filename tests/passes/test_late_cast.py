"""Arrays widened part by part against the same arrays widened whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.passes import late_cast, registry
from relower.passes.parts import moved

NAME = "late_cast"
ONE = {NAME: 1}
BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def _small_arrays(monkeypatch):
    monkeypatch.setattr(late_cast, "LEAST_BYTES", 0)


def awkward(shape, dtype=BF16, seed=0, payloads=False):
    """NaNs, zeros of both signs, infinities, subnormals, the greatest numbers.

    NaNs have no payloads unless asked for: on jax 0.10.2, XLA:CPU pads and joins 16-bit floats as
    float32, and rounds them back without.
    """
    r = np.random.RandomState(seed)
    word = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    bits = r.randint(0, np.iinfo(word).max, shape, dtype=word)
    one, info = np.ones((), dtype).view(word), jnp.finfo(dtype)
    specials = [0, 1, one, 1 << (info.bits - 1), *np.asarray([info.max, np.nan], dtype).view(word)]
    bits.flat[: len(specials)] = specials
    bits.flat[len(specials)] = specials[-1] ^ 1  # another NaN, where there are several
    if not payloads:
        bits[np.isnan(bits.view(dtype))] = specials[-1]
    return jnp.asarray(bits.view(dtype))


def plain(shape, dtype=BF16, seed=0):
    """Small integers: sums and products are exact, however a compiler orders them."""
    return jnp.asarray(np.random.RandomState(seed).randint(-4, 5, shape), dtype)


X, TAPS = plain((2, 11, 6)), plain((4, 6), np.float32)


def windows(x, n=8, at=range(4)):
    return [x[:, i : i + n] for i in at]


def conv(x, taps):
    return sum(w * t for w, t in zip(windows(x.astype(np.float32)), taps, strict=True))


@pytest.mark.parametrize(("narrow", "wide"), [
    (BF16, np.float32), (np.float16, np.float32), (jnp.float8_e4m3fn, BF16),
    (jnp.float8_e5m2, np.float16),
])  # fmt: skip
def test_every_bit_of_every_window(same, narrow, wide):
    x = awkward((2, 11, 6), narrow, payloads=True)
    same(lambda x: windows(x.astype(wide)), x, passes=[NAME], applied=ONE, eager=True)


@pytest.mark.parametrize("name", ["e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz"])
def test_a_negative_zero_is_none_of_a_type_that_has_one_zero(name):
    narrow = getattr(jnp, f"float8_{name}")
    pad = lambda x, by: windows(
        lax.pad(x.astype(np.float32), by, ((0, 0, 0), (3, 0, 0), (0, 0, 0)))
    )
    x = jax.ShapeDtypeStruct((2, 11, 6), narrow)
    assert explain(lambda x: pad(x, np.float32(0.0)), x, passes=[NAME]).counts() == ONE
    (site,) = explain(lambda x: pad(x, np.float32(-0.0)), x, passes=[NAME]).declined
    assert [r.code for r in site.reasons][:1] == ["pad-constant"]


def test_double_precision(same, x64):
    same(lambda x: windows(x.astype(np.float64)), awkward((2, 11, 6), np.float32),
         passes=[NAME], applied=ONE)  # fmt: skip


LAYOUTS = {
    "pad": lambda x: windows(jnp.pad(x, ((0, 0), (3, 0), (0, 0)))),
    "lax pad, negative and interior": lambda x: windows(
        lax.pad(x, np.float32(-0.0), ((0, 0, 0), (-1, 6, 1), (0, 0, 0)))
    ),
    "pad by another number": lambda x: windows(
        jnp.pad(x, ((0, 0), (3, 0), (0, 0)), constant_values=1.5)
    ),
    "pad by infinity": lambda x: windows(
        jnp.pad(x, ((0, 0), (3, 0), (0, 0)), constant_values=-np.inf)
    ),
    "concat with zeros": lambda x: windows(
        jnp.concatenate([jnp.zeros((2, 3, 6), np.float32), x], axis=1)
    ),
    "split": lambda x: jnp.split(x, (2, 5), axis=1)[:2],
    "rolled": lambda x: (jnp.roll(x, 1, axis=1), jnp.roll(x, 2, axis=1)),
    "stacked": lambda x: (jnp.stack(windows(x)), x[:, ::2]),
    "transposed and reversed": lambda x: windows(jnp.flip(x.transpose(2, 1, 0), 1)),
    "reshaped windows": lambda x: [w.reshape(-1) for w in windows(x)],
    "rotary halves": lambda x: (x[..., :3] * 2, x[..., 3:] * 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_may_stand_in_between(same, layout):
    fn = lambda x: LAYOUTS[layout](x.astype(np.float32))
    same(fn, awkward((2, 11, 6)), passes=[NAME], applied=ONE)
    assert not explain(optimize(fn, passes=[NAME]), X, passes=[NAME]).applied


def test_arrays_that_are_joined_are_one_site(same):
    def fn(state, x):
        state, x = state.astype(np.float32), x.astype(np.float32)
        return windows(jnp.concatenate([state, x], axis=1))

    same(fn, awkward((2, 3, 6), seed=1), awkward((2, 8, 6)), passes=[NAME], applied=ONE)


def test_sites_that_differ_inside_a_call_only_are_told_apart(same):
    """Replacements that are alike are traced once: these two aren't."""
    front, back = (
        jax.jit(lambda x, p=p: windows(jnp.pad(x.astype(np.float32), ((0, 0), p, (0, 0)))))
        for p in ((3, 0), (0, 3))
    )
    same(lambda x, y: (front(x), back(y)), X, X, passes=[NAME], applied={NAME: 2})


def moved_wide(eqns_of, fn, *args):
    """Slices, pads and joins of float32."""
    found = [
        e for n in ("slice", "pad", "concatenate", "split") for e in eqns_of(fn, *args, name=n)
    ]
    return [e for e in found if e.outvars[0].aval.dtype == np.float32]


def test_nothing_wide_is_moved_any_more(eqns_of):
    fn = lambda x: windows(jnp.pad(x.astype(np.float32), ((0, 0), (3, 0), (0, 0))))
    assert len(moved_wide(eqns_of, fn, X)) == 5
    assert not moved_wide(eqns_of, optimize(fn, passes=[NAME]), X)


# --- gradients and transforms -------------------------------------------------------------------

WEIGHTS = plain((2, 8, 6), np.float32, seed=3)


def scalar(fn):
    return lambda x, taps: (fn(x, taps) * WEIGHTS).sum()


def both_orders(equal_bits, wrap, *args):
    plain = jax.grad(wrap(conv), argnums=(0, 1))
    want = jax.jit(plain)(*args)
    assert all(np.any(np.asarray(w, np.float32)) for w in want)
    assert explain(plain, *args, passes=[NAME]).counts() == ONE
    opt = lambda fn: optimize(fn, passes=[NAME])
    equal_bits(jax.jit(jax.grad(wrap(opt(conv)), argnums=(0, 1)))(*args), want, "inside")
    equal_bits(jax.jit(jax.grad(opt(wrap(conv)), argnums=(0, 1)))(*args), want, "grad(opt)")
    equal_bits(jax.jit(opt(plain))(*args), want, "opt(grad)")


def test_gradients(equal_bits):
    both_orders(equal_bits, scalar, X, TAPS)


def rounding(fn):
    taps = jnp.full((4, 6), 1.0035, np.float32).at[0].set(0)
    return lambda x: fn(x, taps).sum()


def test_cotangents_are_added_in_the_wide_type(equal_bits):
    """Each rounds to 1 in bfloat16, but their sum doesn't round to 3."""
    want = jax.grad(rounding(conv))(X)
    assert want[0, 5, 0] == BF16(3.0105) != 3
    equal_bits(jax.grad(rounding(optimize(conv, passes=[NAME])))(X), want)


@pytest.mark.parametrize("how", ["vmap", "scan", "remat", "jit"])
def test_gradients_under(equal_bits, how):
    def wrap(fn):
        if how == "vmap":
            return lambda x, t: (
                jax.vmap(fn, (0, None))(jnp.stack([x, x[::-1]]), t) * WEIGHTS
            ).sum()
        if how == "scan":
            step = lambda t: lambda c, x: (c + (fn(x, t) * WEIGHTS).sum(), None)
            return lambda x, t: lax.scan(step(t), jnp.float32(0), jnp.stack([x, x[::-1]]))[0]
        return scalar(jax.checkpoint(fn) if how == "remat" else jax.jit(fn))

    both_orders(equal_bits, wrap, X, TAPS)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_under_shard_map(equal_bits, kind):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, kind),))
    wrap = lambda fn: scalar(jax.shard_map(fn, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        both_orders(equal_bits, wrap, x, TAPS)


@pytest.mark.parametrize("layout", ["pad", "concat with zeros"])
def test_constants_in_a_shard_map(same, layout):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    if layout == "pad":
        fn = lambda x: windows(jnp.pad(x.astype(np.float32), ((0, 0), (3, 0), (0, 0))))
    else:
        fn = lambda x: windows(
            jnp.concatenate([jnp.zeros((1, 3, 6), np.float32), x.astype(np.float32)], axis=1)
        )
    part = jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    same(part, X, passes=[NAME], applied=ONE)


# --- near misses --------------------------------------------------------------------------------


def test_a_weak_type_made_strong_is_no_site():
    strengthened = lambda x: windows(lax.convert_element_type(jnp.full(x.shape, 2.0), np.float32))
    report = explain(strengthened, X, passes=[NAME])
    assert not report.sites
    integers = lambda x: windows(x.astype(np.float32))  # floats only: so says the page
    assert not explain(integers, X.astype(np.int8), passes=[NAME]).sites


MISSES = {
    "narrowing": (lambda x: windows(x.astype(np.float32).astype(BF16)), np.float32,
                  "float32 to bfloat16"),
    "other-reader": (lambda x: (lambda wide: (windows(wide), wide.sum()))(x.astype(np.float32)),
                     BF16, "reduce_sum"),
    "pad-constant": (
        lambda x: windows(lax.pad(x.astype(np.float32), np.float32(0.1),
                                  ((0, 0, 0), (3, 0, 0), (0, 0, 0)))),
        BF16, "the constant 0.1"),
    "joined": (
        lambda x: windows(jnp.concatenate([x.astype(np.float32), jnp.cos(x.astype(np.float32))],
                                          axis=1)),
        BF16, "a result of cos"),
    "one-window": (lambda x: x.astype(np.float32)[:, 1:4], BF16, "1"),
}  # fmt: skip


@pytest.mark.parametrize("code", MISSES)
def test_declined_as(why, code):
    fn, dtype, found = MISSES[code]
    report = explain(fn, jnp.zeros((2, 11, 6), dtype), passes=[NAME])
    assert not report.applied
    said = [line for site in why(report, NAME) for line in site]
    assert any(line.startswith(f"{code}: ") and f"found {found}" in line for line in said), said


def test_a_pad_by_nan_or_by_an_argument_is_declined(why):
    pads = ((0, 0, 0), (3, 0, 0), (0, 0, 0))
    nan = lambda x: windows(lax.pad(x.astype(np.float32), np.float32(np.nan), pads))
    given = lambda x, c: windows(lax.pad(x.astype(np.float32), c, pads))
    for report in (explain(nan, X, passes=[NAME]),
                   explain(given, X, np.float32(0), passes=[NAME])):  # fmt: skip
        ((reason,),) = why(report, NAME)
        assert reason.startswith("pad-constant: ")


def test_a_constant_in_a_stack_is_declined(why):
    fn = lambda x: (lambda w: (jnp.stack([w[:, 1:], jnp.zeros((2, 10, 6))]), w[:, :3]))(
        x.astype(np.float32)
    )
    ((reason,),) = why(explain(fn, X, passes=[NAME]), NAME)
    assert reason.startswith("joined: ")


def test_an_output_is_a_reader(why):
    def fn(x):
        wide = x.astype(np.float32)
        return wide, windows(wide)

    ((reason,),) = why(explain(fn, X, passes=[NAME]), NAME)
    assert reason.startswith("other-reader: ")
    assert "found an output" in reason


def test_a_call_that_hands_on_another_array_is_a_reader(why):
    """It moves elements only, but none of the array's, which it reads all the same."""
    other = np.ones((2, 3), np.float32)
    handed = jax.jit(lambda x, y: y.T)

    def fn(x):
        wide = x.astype(np.float32)
        return windows(wide), handed(wide, other)

    ((reason,),) = why(explain(fn, X, passes=[NAME]), NAME)
    assert reason.startswith("other-reader: ")


def test_small_arrays_are_declined(why, monkeypatch):
    monkeypatch.setattr(late_cast, "LEAST_BYTES", 1 << 20)
    ((reason,),) = why(explain(conv, X, TAPS, passes=[NAME]), NAME)
    assert reason == ("small: the wide copy is small "
                      "(found 528 bytes; wanted 1,048,576 bytes or more)")  # fmt: skip


def test_what_no_part_is_cut_out_of_is_no_candidate():
    fns = [
        lambda x: x.astype(np.float32).sum(),
        lambda x: jnp.pad(x.astype(np.float32), 1),
        lambda x: windows(x.astype(np.int32)),
        lambda x: windows(x),
    ]
    for fn in fns:
        assert not explain(fn, X, passes=[NAME]).sites


# --- mutants ------------------------------------------------------------------------------------


def battery(same, equal_bits):
    x = awkward((2, 11, 6))
    same(lambda x: windows(x.astype(np.float32)), awkward((2, 11, 6), payloads=True))
    padded = lambda x: jnp.pad(x.astype(np.float32), ((0, 0), (3, 0), (0, 0)), constant_values=1)
    same(lambda x: windows(padded(x)), x)
    same(lambda x: windows(padded(x[:, ::-1])), x)
    equal_bits(jax.grad(rounding(optimize(conv)))(X), jax.grad(rounding(conv))(X))


def test_the_battery_passes_unmutated(same, equal_bits):
    battery(same, equal_bits)


def changed(change):
    """The pass with ``change(outputs)`` of its replacement."""

    def replace(match):
        r = late_cast.PASS.replace(match)
        return dataclasses.replace(r, fn=lambda *xs: change(r.fn(*xs)))

    return lambda m: m.setattr(
        registry, "all_passes", lambda: (dataclasses.replace(late_cast.PASS, replace=replace),)
    )


def no_rule(monkeypatch):
    """Derived through the narrow slices: cotangents would be rounded before they are added."""
    bare = lambda fn: type("Bare", (), {"__call__": lambda self, *a: fn(*a),
                                        "defjvp": lambda self, f: f})()  # fmt: skip
    monkeypatch.setattr(late_cast.jax, "custom_jvp", bare)


MUTANTS = {
    "windows in another order": changed(lambda ws: ws[::-1]),
    "a window shifted": changed(lambda ws: [jnp.roll(ws[0], 1, 1), *ws[1:]]),
    "NaN payloads lost": changed(lambda ws: [jnp.where(w != w, jnp.nan, w) for w in ws]),
    "another padding": lambda m: m.setattr(
        moved, "_filled", lambda step, i, value, dtype: lax.full((), 0, dtype)
    ),
    "cotangents added in the narrow type": no_rule,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, equal_bits, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs in its bits"):
        battery(same, equal_bits)
