"""What every pass of the registry must show, and all of them together on one routed layer."""

import contextlib
import dataclasses
import importlib
import itertools
import pathlib
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import PassNotApplicable, assume_range, explain, optimize
from relower.compat import tracing
from relower.lowering.case import case
from relower.lowering.lower import lower
from relower.matchers import key_range
from relower.matchers.fact import Fact
from relower.passes import (
    argsort_packed_key,
    argsort_unique_pairs,
    nonnegative_index,
    registry,
)
from relower.passes.base import Contract
from relower.passes.engine.rewrite import rewrite

PASSES = registry.all_passes()
# Those that run unasked.
DEFAULT = [p for p in PASSES if p.contract is Contract.BITWISE and not p.by_name]
# Those that find nothing in the routed layer below: it has no 16-bit floats.
ELSEWHERE = {"late_cast"}
# Those that find something in a layer on one device, all of whose gradients are used.
ALONE = {
    p.name for p in DEFAULT if not p.program and not any(e.mesh for e in p.examples())
} - ELSEWHERE
EXAMPLES = [pytest.param(p, e, id=f"{p.name}-{e.label}") for p in PASSES for e in p.examples()]
WHERE = pathlib.Path(__file__).name
# Those of which a zero may have another sign: a weight of zero multiplies a sum, not its terms; and
# a row of no group is zero, not zero times something.
OTHER_ZEROS = {"router_grad_from_wo_input", "gmm_dswiglu"}


def values(example, seed=0):
    """Arrays of an example's types, with many ties and exact sums; or what it gives."""
    r, most = np.random.RandomState(seed), example.most
    return tuple(
        a if isinstance(a, np.ndarray) else r.randint(-most, most + 1, a.shape).astype(a.dtype)
        for a in example.args
    )


# --- the pair of functions that documents a pass ---------------------------------------------


def lowered(fn, example):
    made = case(lambda mesh: (fn, example.args), mesh=example.mesh) if example.mesh else (
        case(fn, *example.args)
    )  # fmt: skip
    return lower(made, levels=("inlined",))


DIGESTS = {}


def digest(fn, example):
    key = fn, example.label
    if key not in DIGESTS:
        DIGESTS[key] = lowered(fn, example).forms["inlined"].digest
    return DIGESTS[key]


def within(example):
    """The example's mesh, on real devices."""
    if not example.mesh:
        return contextlib.nullcontext()
    names, sizes = tuple(example.mesh), tuple(example.mesh.values())
    return jax.set_mesh(jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names)))


@pytest.mark.parametrize(("p", "example"), EXAMPLES)
def test_before_becomes_what_a_person_would_have_written(p, example):
    got = lowered(optimize(p.before, passes=[p.name]), example)
    assert not got.unknowns
    assert got.forms["inlined"].digest == digest(p.after, example)
    assert got.forms["inlined"].digest != digest(p.before, example)


@pytest.mark.parametrize(("p", "example"), EXAMPLES)
def test_before_and_after_agree_to_the_bit(same, equal_bits, p, example):
    args = values(example)
    with within(example):
        if p.name in OTHER_ZEROS:
            assert explain(p.before, *example.args, passes=[p.name]).counts() == {p.name: 1}
            positive = lambda tree: [np.asarray(leaf) + 0 for leaf in jax.tree.leaves(tree)]
            want = positive(jax.jit(p.before)(*args))
            equal_bits(positive(jax.jit(optimize(p.before, passes=[p.name]))(*args)), want)
            equal_bits(positive(jax.jit(p.after)(*args)), want)
            return
        same(p.before, *args, passes=[p.name], applied={p.name: 1})
        equal_bits(jax.jit(p.after)(*args), jax.jit(p.before)(*args))


@pytest.mark.parametrize(("p", "example"), EXAMPLES)
def test_nothing_is_left_to_do_in_after(p, example):
    with within(example):
        assert not explain(p.after, *example.args, passes=[p.name]).applied


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_the_file_says_what_the_catalogue_needs(p):
    module = importlib.import_module(f"relower.passes.{p.name}")
    assert module.__doc__.startswith(f"{p.name}: ")
    assert "before:" in module.__doc__
    assert "after:" in module.__doc__
    assert all((p.summary, p.measure, p.examples()))
    codes = [r.code for r in p.requirements]
    assert len(codes) == len(set(codes))
    assert all(r.sentence.endswith(".") for r in p.requirements)


# --- it ends, and order doesn't matter --------------------------------------------------------

MEASURES = {
    "argsort_unique_pairs": lambda eqns: sum(
        1 for e in eqns("sort") if e.params["is_stable"] and len(e.invars) > 1
    ),
    "argsort_packed_key": lambda eqns: sum(len(e.invars) for e in eqns("sort")),
    "inverse_permutation": lambda eqns: sum(
        1
        for e in eqns("sort")
        if len(e.invars) > 1 and (e.params["is_stable"] or e.params["num_keys"] > 1)
    ),
    "nonnegative_index": lambda eqns: len(eqns("select_n")),
    "affine_gather": lambda eqns: len(eqns("gather")),
    "permutation_scatter": lambda eqns: len(eqns("scatter-add")),
    "top_k_by_argmax": lambda eqns: len(eqns("top_k")),
    "packed_all_gather": lambda eqns: len(eqns("all_gather")) + len(eqns("reduce_scatter")),
    "packed_psum_scatter": lambda eqns: len(eqns("reduce_scatter")),
    "sorted_scatter": lambda eqns: len(eqns("scatter-add")),
    "concat_cotangents": lambda eqns: len(eqns("add_any")) + len(eqns("add")),
    "split_fused_wi": lambda eqns: len(eqns("concatenate")),
    "router_grad_from_wo_input": lambda eqns: len(eqns("ragged_dot_general")),
    "counting_scatter": lambda eqns: len(eqns("scatter-add")),
    "top_k_scatter": lambda eqns: len(eqns("scatter-add")),
    "shared_lhs_dot": lambda eqns: len(eqns("ragged_dot_general")),
    "frozen_gradient": lambda eqns: len(eqns("dot_general")),
    # Those of the kernels' references state the type they add up in.
    "gmm_swiglu": lambda eqns: sum(
        1 for e in eqns("ragged_dot_general") if e.params["preferred_element_type"] is None
    ),
    "gmm_dswiglu": lambda eqns: sum(
        1 for e in eqns("ragged_dot_general") if e.params["preferred_element_type"] is None
    ),
    "stable_stack": lambda eqns: sum(
        e.outvars[0].aval.shape[-2:-1] == (1,) for n in ("stack", "concatenate") for e in eqns(n)
    ),
    "triangular_inverse": lambda eqns: len(eqns("triangular_solve")),
    "late_cast": lambda eqns: sum(
        e.outvars[0].aval.size for e in eqns("slice") if e.outvars[0].aval.dtype == np.float32
    ),
}


def test_every_pass_has_a_measure():
    assert set(MEASURES) == {p.name for p in PASSES}


@pytest.mark.parametrize(("p", "example"), EXAMPLES)
def test_each_pass_lowers_its_measure(eqns_of, p, example):
    measure = MEASURES[p.name]
    done = optimize(p.before, passes=[p.name])
    with within(example):
        before = measure(lambda name: eqns_of(p.before, *example.args, name=name))
        assert measure(lambda name: eqns_of(done, *example.args, name=name)) < before


def routed(scores, x, weights):
    """A routed layer with ties: argsorts, an inverse in two forms, gathers, an argmax."""
    top, ids = lax.top_k(scores, 2)
    order = jnp.argsort(ids.reshape(-1))
    token = jnp.repeat(jnp.arange(scores.shape[0]), 2)[order]
    rows = x[token] * jnp.take(top.reshape(-1), order)[:, None]
    rows = rows * weights[ids.reshape(-1)[order]]
    out = rows[jnp.argsort(order)].reshape(-1, 2, x.shape[-1]).sum(1)
    _, back = lax.sort((order, jnp.take(top.reshape(-1), order)), num_keys=1)
    out = out + back.reshape(-1, 2).sum(1, keepdims=True)
    out = out + x[jnp.argsort(scores[:, 0], descending=True)]
    out = out * (1 + jnp.minimum(jnp.bincount(ids.reshape(-1), length=x.shape[-1]), 1))
    first, others = jnp.split(x, [1], axis=-1)
    out = out + jnp.concatenate([jnp.abs(first), jnp.abs(others)], axis=-1)
    best = weights[jnp.argmax(scores, axis=-1)]
    steps = jnp.arange(scores.shape[0], dtype=scores.dtype)[:, None]
    return out + best + (jnp.sort(scores, axis=0) * steps).sum(1, keepdims=True)


def loss(scores, x, weights):
    return (routed(scores, x, weights) * jnp.arange(1.0, x.shape[-1] + 1)).sum()


def data(tokens=8, seed=0):
    """Small integers in f32: every sum and product is exact, however a compiler orders them."""
    r = np.random.RandomState(seed)
    shapes = ((tokens, 6), (tokens, 3), (6, 3))
    return tuple(r.randint(-4, 5, s).astype(np.float32) for s in shapes)


GRAD = jax.grad(loss, argnums=(0, 1, 2))


def test_every_pair_of_passes_ends_on_the_layers_gradient():
    """On every pass's own example: test_pairs.py."""
    args = data()
    closed = tracing.trace(GRAD, args, {}, [tracing.type_of(a) for a in args]).closed
    applied = set()
    for pair in itertools.combinations(PASSES, 2):
        done = rewrite(closed, pair)
        assert done.report.ended
        assert not done.report.notes
        if done.closed is not closed:
            applied.add(frozenset(done.report.counts()))
            again = rewrite(done.closed, pair)
            assert not again.report.applied, str(again.report)
    assert ALONE <= frozenset().union(*applied)
    assert sum(len(names) == 2 for names in applied) > len(ALONE)


def orders():
    """Every order of the passes that compete for a root, before and after all the others."""
    local = [p for p in DEFAULT if not p.program]
    rivals = [p for p in local if any(p.roots() & q.roots() for q in local if q is not p)]
    others = [p for p in DEFAULT if p not in rivals]
    for order in itertools.permutations(rivals):
        yield (*order, *others)
        yield (*reversed(others), *order)


def test_the_order_of_passes_only_decides_who_takes_a_site(monkeypatch, eqns_of, equal_bits):
    sorts, seen = set(), set()
    want = jax.jit(GRAD)(*data())
    for order in orders():
        monkeypatch.setattr(registry, "all_passes", lambda order=order: order)
        done = optimize(GRAD)
        program = str(jax.make_jaxpr(done)(*data()))
        if program not in seen:  # to compile it takes the most time
            equal_bits(jax.jit(done)(*data()), want)
        seen.add(program)
        found = eqns_of(done, *data(), name="sort")
        sorts.add(tuple(sorted((len(e.invars), e.params["is_stable"], e.params["num_keys"])
                        for e in found)))  # fmt: skip
        # Of what compares, only the searches of top_k are left, which know no zero.
        with_zero = [e for e in eqns_of(done, *data(), name="lt")
                     if getattr(e.invars[1], "val", None) == 0]  # fmt: skip
        assert not with_zero
    # Three operands: differentiating a descending argsort adds a rising iota to the falling one.
    # Differentiating the sort back adds an iota too, beside the data that it carries.
    assert sorts == {((1, False, 1), (1, False, 1), (2, False, 2), (3, False, 1), (3, False, 2))}
    assert not eqns_of(done, *data(), name="top_k")


# --- gradients, in either order, under every transform ------------------------------------------


def test_all_passes_apply_to_the_layer_and_its_gradient():
    assert explain(routed, *data()).counts().keys() == ALONE
    counts = explain(GRAD, *data()).counts()
    assert counts["argsort_packed_key"] == 1
    assert counts["argsort_unique_pairs"] == 2
    assert counts["inverse_permutation"] == 2
    assert counts["top_k_by_argmax"] == 1
    assert counts["nonnegative_index"] >= 4


def both_orders(equal_bits, fn, wrap, args, inside=True):
    """``wrap`` turns an array function into one of a scalar; gradients agree and aren't zero."""
    argnums = (0, 1, 2)
    plain = jax.grad(wrap(fn), argnums=argnums)
    want = jax.jit(plain)(*args)
    for leaf in jax.tree.leaves(want):
        assert np.any(leaf)
    if inside:
        equal_bits(jax.jit(jax.grad(wrap(optimize(fn)), argnums=argnums))(*args), want, "inside")
    equal_bits(jax.jit(jax.grad(optimize(wrap(fn)), argnums=argnums))(*args), want, "grad(opt)")
    equal_bits(jax.jit(optimize(plain))(*args), want, "opt(grad)")
    # With the value: of a gradient alone, parts of the forward pass are dead.
    whole = jax.value_and_grad(wrap(fn), argnums=argnums)
    assert explain(whole, *args).counts().keys() == ALONE


def scalar(fn):
    return lambda *args: (fn(*args) * jnp.arange(1.0, 4.0)).sum()


def test_gradients(equal_bits):
    both_orders(equal_bits, routed, scalar, data())


def test_gradients_eager(equal_bits):
    want = GRAD(*data())
    equal_bits(optimize(GRAD)(*data()), want)
    equal_bits(jax.grad(optimize(loss), argnums=(0, 1, 2))(*data()), want)


def test_gradients_under_vmap(equal_bits):
    args = tuple(map(np.stack, zip(data(seed=1), data(seed=2), data(seed=3), strict=True)))
    both_orders(equal_bits, routed, lambda fn: scalar(jax.vmap(fn)), args)


def test_gradients_under_scan_and_remat(equal_bits):
    scores, x, weights = data()
    layers = np.stack([weights, weights[::-1]])

    def wrap(fn):
        def stacked(scores, x, layers):
            # Values are kept small: sums stay exact.
            step = lambda h, w: (jnp.clip(fn(scores, h, w), -64, 64), None)
            return lax.scan(jax.checkpoint(step), x, layers)[0]

        return scalar(stacked)

    both_orders(equal_bits, routed, wrap, (scores, x, layers))


@pytest.mark.parametrize("varying", [True, False], ids=["varying", "invariant"])
@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_under_shard_map(equal_bits, kind, n, varying):
    mesh = jax.make_mesh((n,), ("d",), axis_types=(getattr(AxisType, kind),))
    spec = P("d") if varying else P()
    args = data(2 * n)

    def wrap(fn):
        part = jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec, P()), out_specs=spec)
        return scalar(part)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, s))
                  for a, s in zip(args, (spec, spec, P()), strict=True)]  # fmt: skip
        both_orders(equal_bits, routed, wrap, placed, inside=n == 4)


def test_a_shard_map_that_gathers_by_a_varying_order(equal_bits):
    """The order varies with the keys, though jax types a sorted iota as invariant."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def local(scores, table):
        order = jnp.argsort(lax.top_k(scores, 1)[1].reshape(-1))
        return table[order] * scores[order, :1]

    part = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    scores, table, _ = data(16)
    wrap = lambda fn: lambda s, t: (fn(s, t) * jnp.arange(1.0, 4.0)).sum()
    want = jax.jit(jax.grad(wrap(part), argnums=(0, 1)))(scores, table[:4])
    assert all(np.any(w) for w in want)
    for done in (
        jax.grad(wrap(optimize(part)), argnums=(0, 1)),
        optimize(jax.grad(wrap(part), argnums=(0, 1))),
    ):
        equal_bits(jax.jit(done)(scores, table[:4]), want)


# --- with the rest of jax -----------------------------------------------------------------------


def test_under_export(equal_bits):
    args = data()
    exported = jax.export.export(jax.jit(optimize(GRAD)))(*args)
    equal_bits(exported.call(*args), jax.jit(GRAD)(*args))
    attributes = re.findall(r'"stablehlo.sort"\(.*?<{(.*?)}>', exported.mlir_module())
    # jax spells top_k as a stable sort along dimension 1 on CPU: none is left.
    ours = [a for a in attributes if "dimension = 0" in a]
    assert len(ours) == len(attributes) == 5
    assert not [a for a in ours if "is_stable = true" in a]


@pytest.mark.parametrize("policy", [
    None, "everything_saveable", "nothing_saveable", "dots_saveable", "names",
])  # fmt: skip
def test_under_remat_policies(equal_bits, policy):
    policies = jax.checkpoint_policies
    chosen = policies.save_only_these_names("order") if policy == "names" else (
        getattr(policies, policy) if policy else None
    )  # fmt: skip

    def named(scores, x, weights):
        ids = lax.top_k(scores, 2)[1].reshape(-1)
        order = checkpoint_name(jnp.argsort(ids), "order")
        return routed(scores, x, weights) + x[order // 2].reshape(-1, 2, 3).sum(1)

    wrap = lambda fn: scalar(jax.checkpoint(fn, policy=chosen))
    both_orders(equal_bits, named, wrap, data(), inside=False)


def test_donation(equal_bits):
    def step(x, scores, weights):
        return x + routed(scores, x, weights)

    scores, x, weights = data()
    want = jax.jit(step)(x, scores, weights)
    done = optimize(jax.jit(step, donate_argnums=0))
    assert "tf.aliasing_output" in done.lower(x, scores, weights).as_text()
    donated = jnp.array(x)
    equal_bits(done(donated, scores, weights), want)
    assert donated.is_deleted()


def test_reports_name_the_line_of_the_user():
    report = explain(routed, *data())
    lines = pathlib.Path(__file__).read_text().splitlines()
    assert len(report.applied) >= 5
    for site in report.sites:
        file, number = site.source.rsplit(":", 1)
        assert pathlib.Path(file).name == WHERE
        text = lines[int(number) - 1]
        words = ("argsort", "sort(", "[", "take", "top_k", "bincount")
        assert any(word in text for word in words), text


def test_a_pass_asked_for_by_name_names_every_unmet_requirement():
    def fn(a, b, c, t, i):
        return lax.sort((a, b, c), num_keys=2), t[i]

    floats = np.zeros((3, 4), np.float32)
    with pytest.raises(PassNotApplicable) as caught:
        optimize(fn, passes=[p.name for p in PASSES])(*floats, floats, np.zeros(2, np.int32))
    message = str(caught.value)
    for code in ("num-keys", "no-positions", "carries-data", "key-dtype", "maybe-negative",
                 "not-a-permutation"):  # fmt: skip
        assert f" {code}: " in message
    for p in PASSES:
        assert f"{p.name} applies nowhere in fn:" in message


# --- mutants: the comparison must see each ------------------------------------------------------


def battery(same):
    """What every mutant has to get past: ties, ends of ranges, NaN, padding, negative indices."""
    r = np.random.RandomState(0)
    i = lambda k: lax.iota(np.int32, k.size)
    ids = r.choice([-1, 0, 5, 6], 33).astype(np.int32)
    same(lambda k: lax.sort_key_val(assume_range(k, -1, 6), i(k)), ids)
    wide = r.choice([0, 2**26 - 1, 1], 33).astype(np.int32)
    same(lambda k: lax.sort_key_val(assume_range(k, 0, 2**26 - 1), i(k)), wide)
    same(lambda k: lax.sort_key_val(assume_range(k, -1, 6), 3 * i(k) + 2), ids)
    floats = r.choice(np.array([0.0, -0.0, np.nan, -np.inf, 1.0], np.float32), 33)
    other = r.rand(2, 33).astype(np.float32)
    same(lambda k, a, b: lax.sort((k, a, i(k), b, i(k)), num_keys=1), floats, *other)
    same(lambda k: jnp.argsort(k, descending=True), floats)
    table = r.rand(4, 2).astype(np.float32)
    same(lambda t, j: t[j], table, np.array([-1, 3, 0, -4], np.int32))
    same(lambda t, s: t[jnp.argmax(s, -1)], table, r.rand(5, 4).astype(np.float32))


def test_the_battery_passes_unmutated(same):
    battery(same)


def caught(same):
    with pytest.raises(AssertionError, match="differs in its bits"):
        battery(same)


def swap(monkeypatch, name, **changes):
    """Put a changed pass in the place of one."""
    mutated = tuple(dataclasses.replace(p, **changes) if p.name == name else p for p in PASSES)
    monkeypatch.setattr(registry, "all_passes", lambda: mutated)


PACK, SLOT, KEY = (getattr(argsort_packed_key, n) for n in ("pack", "unpack_slot", "unpack_key"))


def reversed_slots(monkeypatch):
    sizes = []

    def pack(key, lo, b, axis):
        sizes.append(key.shape[axis])
        zero = PACK(key, lo, b, axis)
        slot = lax.broadcasted_iota(np.uint32, key.shape, axis)
        return zero - slot + (np.uint32(sizes[-1] - 1) - slot)

    monkeypatch.setattr(argsort_packed_key, "pack", pack)
    monkeypatch.setattr(argsort_packed_key, "unpack_slot",
                        lambda w, b, d: (sizes[-1] - 1) - SLOT(w, b, d))  # fmt: skip


PACKED_MUTANTS = {
    "reversed ties": reversed_slots,
    "a slot bit too few": lambda m: m.setattr(
        key_range, "slot_bits", lambda a: max(a.length - 1, 0).bit_length() - 1
    ),
    "a lower bound too high": lambda m: m.setattr(
        argsort_packed_key, "pack", lambda k, lo, b, a: PACK(k, lo + 1, b, a)
    ),
    "the lower bound dropped": lambda m: m.setattr(
        argsort_packed_key, "pack", lambda k, lo, b, a: PACK(k, 0, b, a)
    ),
    "the order shifted by one": lambda m: m.setattr(
        argsort_packed_key, "unpack_slot", lambda w, b, d: SLOT(w, b, d) + 1
    ),
    "keys not restored": lambda m: m.setattr(
        argsort_packed_key, "unpack_key", lambda w, lo, b, d: KEY(w, 0, b, d)
    ),
    "keys left packed": lambda m: m.setattr(
        argsort_packed_key, "unpack_key", lambda w, lo, b, d: KEY(w, lo, 0, d)
    ),
    "slots instead of positions": lambda m: m.setattr(
        Fact, "is_iota", lambda fact, axis, shape: True
    ),
    "33 bits": lambda m: m.setattr(argsort_packed_key, "fits", lambda *bits: True),
}


@pytest.mark.parametrize("mutant", PACKED_MUTANTS)
def test_mutants_of_the_packed_sort_are_caught(monkeypatch, same, mutant):
    PACKED_MUTANTS[mutant](monkeypatch)
    if mutant == "33 bits":
        keys = np.random.RandomState(0).choice([0, 2**27 - 1, 1, 3], 33).astype(np.int32)
        fn = lambda k: lax.sort_key_val(assume_range(k, 0, 2**27 - 1), lax.iota(np.int32, 33))
        with pytest.raises(AssertionError, match="differs in its bits"):
            same(fn, keys)
    else:
        caught(same)


def of_pairs(change):
    """A mutant of the unique pairs whose replacement is ``change(original, match)``."""
    original = argsort_unique_pairs.PASS.replace

    def replace(match):
        r = original(match)
        found = match.captures["argsort"]
        return dataclasses.replace(r, fn=lambda *ops: change(r.fn, found, ops))

    return lambda m: swap(m, "argsort_unique_pairs", replace=replace)


def _reversed_ties(fn, found, ops):
    ops = list(ops)
    at = [found.order, *found.repeats]
    for i in at:
        ops[i] = -ops[i]
    outs = list(fn(*ops))
    for i in at:
        outs[i] = -outs[i]
    return outs


def _shifted(fn, found, ops):
    outs = list(fn(*ops))
    outs[found.order] = outs[found.order] + 1
    return outs


def _unsorted(which):
    def change(fn, found, ops):
        outs = list(fn(*ops))
        for i in which(found):
            outs[i] = ops[i]
        return outs

    return change


def _swapped(fn, found, ops):
    outs = list(fn(*ops))
    if len(found.others) == 2:
        a, b = found.others
        outs[a], outs[b] = outs[b], outs[a]
    return outs


def _quieted(fn, found, ops):  # what a detour through arithmetic does to NaNs and zeros
    outs = list(fn(*ops))
    if ops[0].dtype == np.float32:
        outs[0] = jnp.abs(outs[0])
    return outs


PAIR_MUTANTS = {
    "reversed ties": of_pairs(_reversed_ties),
    "the order shifted by one": of_pairs(_shifted),
    "keys left unsorted": of_pairs(_unsorted(lambda a: (0,))),
    "repeats left unsorted": of_pairs(_unsorted(lambda a: a.repeats)),
    "data left unsorted": of_pairs(_unsorted(lambda a: a.others)),
    "data swapped": of_pairs(_swapped),
    "signs of zeros lost": of_pairs(_quieted),
}


@pytest.mark.parametrize("mutant", PAIR_MUTANTS)
def test_mutants_of_the_unique_pairs_are_caught(monkeypatch, same, mutant):
    PAIR_MUTANTS[mutant](monkeypatch)
    caught(same)


def test_an_unstable_sort_without_its_tie_break_is_caught_by_identity(monkeypatch):
    """A CPU may sort stably all the same, so values don't tell; the lowered program does."""

    def one_key(fn, found, ops):
        return lax.sort(ops, num_keys=1, is_stable=False)

    of_pairs(one_key)(monkeypatch)
    p = argsort_unique_pairs.PASS
    example = p.examples()[0]
    got = lowered(optimize(p.before), example)
    assert got.forms["inlined"].digest != digest(p.after, example)


def of_index(change):
    def replace(match):
        r = nonnegative_index.PASS.replace(match)
        return dataclasses.replace(r, fn=lambda i: [change(r.fn(i)[0] if r.fn else i)])

    return lambda m: swap(m, "nonnegative_index", replace=replace)


INDEX_MUTANTS = {
    "the wrap dropped where it is needed": lambda m: swap(m, "nonnegative_index", requirements=()),
    "shifted by one": of_index(lambda i: i + 1),
    "clipped too early": of_index(lambda i: jnp.minimum(i, 2)),
    "wrapped always": of_index(lambda i: i + 4),
}


@pytest.mark.parametrize("mutant", INDEX_MUTANTS)
def test_mutants_of_the_index_are_caught(monkeypatch, same, mutant):
    INDEX_MUTANTS[mutant](monkeypatch)
    caught(same)


# --- anything -----------------------------------------------------------------------------------

DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


@st.composite
def sorts(draw):
    dtype = draw(st.sampled_from(DTYPES))
    info = np.iinfo(dtype)
    lo = draw(st.integers(int(info.min), int(info.max)))
    hi = draw(st.integers(lo, min(int(info.max), lo + draw(st.sampled_from([3, 300, 2**30])))))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    size = int(np.prod(shape))
    pool = draw(st.lists(st.integers(lo, hi), min_size=1, max_size=4))
    picks = draw(st.lists(st.sampled_from([lo, hi, *pool]), min_size=size, max_size=size))
    keys = np.array(picks, dtype).reshape(shape)
    offset, stride = draw(st.integers(-50, 50)), draw(st.sampled_from([1, 1, 2, -1, -3]))
    return keys, lo, hi, axis, offset, stride, draw(st.booleans()), draw(st.booleans())


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(sorts())
def test_any_sort_of_keys_in_any_range(drawn):
    keys, lo, hi, axis, offset, stride, know, with_data = drawn

    def fn(k):
        k = assume_range(k, lo, hi) if know else k
        positions = lax.broadcasted_iota(np.int32, k.shape, axis % k.ndim) * stride + offset
        extra = (k.astype(np.float32),) if with_data else ()
        return lax.sort((k, positions, *extra), dimension=axis, num_keys=1)

    done = optimize(fn)
    # Op by op: compiling whole programs would take most of the test's time.
    for got, want in zip(done(keys), fn(keys), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert explain(fn, keys).applied
