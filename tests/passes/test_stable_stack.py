"""Rows stacked in a kernel against the same rows stacked as whole tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relower import diff, explain, lower, optimize
from relower.gates.containment import strays
from relower.lowering.case import case
from relower.passes import registry, stable_stack

NAME = "stable_stack"
ONE = {NAME: 1}
X = jnp.asarray(
    np.random.RandomState(0).randint(0, 2**32, (16, 2048), np.uint64).astype(np.uint32)
).view(np.float32)
"""Bits of every kind: NaNs with payloads, infinities, subnormals, zeros of both signs."""


def rows_of(ref, n=4):
    return [ref[i : i + 1, :] for i in range(n)]


def kernel(make, x=X, block=4, shape=None, scratch=(), interpret=True):
    """A kernel over blocks of rows that writes ``make(ref, *scratch)`` of each."""

    def body(x_ref, out_ref, *scratch):
        out_ref[...] = make(x_ref, *scratch).reshape(out_ref.shape)

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec if shape is None else pl.BlockSpec(*shape[1:]),
        out_shape=jax.ShapeDtypeStruct(x.shape if shape is None else shape[0], x.dtype),
        scratch_shapes=scratch,
        name="rows",
        interpret=interpret,
    )


STACKS = {
    "stack": lambda ref: jnp.stack(rows_of(ref)),
    "broadcast and concatenate": lambda ref: jnp.concatenate([r[None] for r in rows_of(ref)]),
    "more dimensions": lambda ref: jnp.stack([r[None, None] for r in rows_of(ref)]),
    "along the second": lambda ref: jnp.stack([r[None] for r in rows_of(ref)], axis=1),
    "a row twice": lambda ref: jnp.stack([ref[0:1, :], ref[1:2, :], ref[0:1, :], ref[3:4, :]]),
}


@pytest.mark.parametrize("spelling", STACKS)
def test_every_bit_of_any_stack(same, spelling):
    same(kernel(STACKS[spelling]), X, passes=[NAME], applied=ONE)


def test_in_branches_and_loops_of_a_kernel(same):
    def make(ref):
        def branch():
            return jnp.stack(rows_of(ref))

        return lax.cond(pl.program_id(0) > 1, branch, lambda: jnp.stack(rows_of(ref)[::-1]))

    same(kernel(make), X, passes=[NAME], applied={NAME: 2})
    loop = lambda ref: lax.fori_loop(0, 2, lambda i, c: c[::-1] + jnp.stack(rows_of(ref)),
                                     jnp.zeros((4, 1, 2048)))  # fmt: skip
    finite = jnp.nan_to_num(X, posinf=0, neginf=0)
    same(kernel(loop), finite, passes=[NAME], applied=ONE)


def test_reads_stay_before_the_writes_that_follow_them(same):
    """The stacked rows are read, then overwritten, and only then stacked."""

    def make(ref, held):
        held[...] = ref[...]
        rows = rows_of(held)
        held[...] = jnp.zeros_like(held)
        first = jnp.stack(rows)
        held[0:1, :] = first[3]
        return first + jnp.stack(rows_of(held))

    fn = kernel(make, jnp.nan_to_num(X), scratch=[pltpu.VMEM((4, 2048), jnp.float32)])
    same(fn, jnp.nan_to_num(X), passes=[NAME], applied={NAME: 2})


def test_runs_only_where_it_is_asked_for():
    fn = kernel(STACKS["stack"])
    assert not explain(fn, X).sites
    assert not explain(fn, X, contract="rounding").sites
    assert explain(fn, X, passes=[NAME]).counts() == ONE


# --- near misses --------------------------------------------------------------------------------

wide = lambda n, dtype=np.float32: jax.ShapeDtypeStruct((16, n), dtype)
MISSES = {
    "dtype": (STACKS["stack"], wide(2048, jnp.bfloat16), "bfloat16"),
    "width": (STACKS["stack"], wide(1536), "rows of (1536,) elements"),
    # One token of each of two sequences: a decode kernel stacks [batch, dim].
    "batched": (lambda ref: jnp.stack([ref[0:2, :], ref[2:4, :]]), wide(2048),
                "rows of shape (2, 2048)"),
    "token-minor": (lambda ref: jnp.stack(rows_of(ref), axis=-1), wide(2048), "the last axis"),
    "dense": (lambda ref: jnp.stack(rows_of(ref), axis=1), wide(2048), "(1, 4, 2048)"),
}  # fmt: skip


@pytest.mark.parametrize("code", MISSES)
def test_declined_as(why, code):
    make, x, found = MISSES[code]
    ((reason,),) = why(explain(kernel(make, x), x, passes=[NAME]), NAME)
    assert reason.startswith(f"{code}: ")
    assert found in reason


def test_what_is_no_stack_in_a_kernel_is_no_candidate():
    outside = lambda x: jnp.stack([x[0:1], x[1:2]])
    joined = kernel(lambda ref: jnp.concatenate(rows_of(ref)))
    for fn in (outside, joined):
        assert not explain(fn, X, passes=[NAME]).sites


def test_of_a_function_shared_with_the_outside_only_the_kernel_s_call(same, eqns_of):
    stack = jax.jit(lambda a, b: jnp.stack([a, b]))

    def fn(x):
        inside = kernel(lambda ref: stack(ref[0:1, :], ref[1:2, :]), x, block=2)(x)
        return inside, stack(x[0:1], x[1:2])

    same(fn, X, passes=[NAME], applied=ONE)
    assert len(eqns_of(fn, X, name="stack")) == 2
    assert len(eqns_of(optimize(fn, passes=[NAME]), X, name="stack")) == 1


# --- the program around it ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs():
    eight = lambda ref: jnp.stack(rows_of(ref, 8))
    fn = jax.jit(lambda x: 2 * kernel(eight, block=8, interpret=False)(x + 1))
    made = case(fn, X)
    rewritten = dataclasses.replace(made, fn=optimize(fn, passes=[NAME]))
    return [lower(c, levels=("inlined",)) for c in (made, rewritten)]


def test_nothing_outside_the_body_changes(programs):
    before, after = programs
    assert not before.unknowns
    assert not after.unknowns
    found = diff(before, after, level="inlined")
    assert found.changes
    assert not strays(found, ["kernel:rows"])
    assert sorted(before.kernel_calls.values()) == sorted(after.kernel_calls.values())
    names = [{n for k in p.kernels.values() for n in k.names} for p in programs]
    assert names == [{"rows"}, {"rows"}]


def test_the_stack_is_of_whole_tiles(programs):
    before, after = ("".join(k.text for k in p.kernels.values()) for p in programs)
    assert "8x1x2048" in before
    assert "2x8x128" not in before
    assert "2x8x128" in after
    assert "16x8x128" in after


# --- mutants ------------------------------------------------------------------------------------


def changed(change):
    def replace(match):
        r = stable_stack.PASS.replace(match)
        out = match.eqn.outvars[0].aval.shape
        return dataclasses.replace(r, fn=lambda *rows: [change(r.fn, rows, out)])

    return lambda m: m.setattr(
        registry, "all_passes", lambda: (dataclasses.replace(stable_stack.PASS, replace=replace),)
    )


MUTANTS = {
    "token-minor": changed(lambda fn, rows, out: jnp.stack(
        [r.reshape(-1, 8, 128) for r in rows], axis=1).reshape(out)),
    "rows in another order": changed(lambda fn, rows, out: fn(*rows[::-1])[0]),
    "tiles exchanged": changed(lambda fn, rows, out: fn(
        *(r.reshape(2, -1)[::-1].reshape(r.shape) for r in rows))[0]),
    "NaN payloads lost": changed(lambda fn, rows, out: jnp.where(
        fn(*rows)[0] != fn(*rows)[0], jnp.nan, fn(*rows)[0])),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs in its bits"):
        same(kernel(STACKS["stack"]), X, passes=[NAME])
