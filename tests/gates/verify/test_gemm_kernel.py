"""Sites with jax's grouped GEMM kernel: run here, exactly, and at smaller shapes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

from relower.compat.megablox import at_other_shapes, megablox
from relower.gates.verify.api import check_guarded
from relower.gates.verify.check import Limits
from relower.gates.verify.dimensions import Dimensions
from relower.gates.verify.divided import ByDimension
from relower.gates.verify.evaluate import evaluate, in_float64
from relower.gates.verify.gemm_kernel import kernel_gemm
from relower.gates.verify.problem import build
from relower.gates.verify.record import Recorder
from relower.gates.verify.shrunk import check_shrunk, shrunk
from relower.gates.verify.verdict import Verdict
from relower.passes import registry
from relower.passes.engine.fragments import Cut
from relower.passes.engine.rewrite import rewrite

BF16 = jnp.bfloat16


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(fn, *types):
    jaxpr = jax.make_jaxpr(fn)(*types).jaxpr
    return Cut(tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(jaxpr.outvars))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_the_kernel_runs_here_and_its_exact_values_are_those_of_a_loop_over_the_groups(
    transposed, offset
):
    m, k, n, groups = 64, 40, 24, 3
    rng = np.random.default_rng(0)
    sizes = np.array([9, 0, 30, 20, 5] if offset else [20, 0, 44], np.int32)
    lhs = jnp.asarray(rng.standard_normal((m, k)), BF16)
    rhs = jnp.asarray(rng.standard_normal((groups, n, k) if transposed else (groups, k, n)), BF16)
    first = (jnp.int32(1),) if offset else ()

    def fn(lhs, rhs, sizes, *first):
        return gmm(lhs, rhs, sizes, BF16, (16, 16, 16), *first, transpose_rhs=transposed)

    values = (lhs, rhs, jnp.asarray(sizes), *first)
    part = traced(fn, *values)
    parts = part.eqns, part.inputs, part.outputs, values
    wanted, at = np.zeros((m, n)), 0
    for group, size in enumerate(sizes):
        own = group - (1 if offset else 0)
        if 0 <= own < groups:
            matrix = np.asarray(rhs[own], np.float64)
            rows = np.asarray(lhs[at : at + size], np.float64)
            wanted[at : at + size] = rows @ (matrix.T if transposed else matrix)
        at += size
    with jax.enable_x64(True):
        (exact,) = in_float64(*parts)
    np.testing.assert_allclose(exact, wanted, atol=1e-12)
    (found,) = evaluate(*parts)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-7, atol=0.1)


def test_it_is_known_where_types_are_wide_and_products_precise():
    part = traced(lambda *v: gmm(*v, BF16, (16, 16, 16)), struct(64, 32), struct(4, 32, 32),
                  struct(4, dtype=jnp.int32))  # fmt: skip
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        assert kernel_gemm(part.eqns[0]) is not None


def counted(ids, lhs, rhs):
    sizes = jnp.zeros(64, jnp.int32).at[ids].add(1)
    return gmm(lhs, rhs, sizes, BF16, (512, 256, 256))


SMALL = (struct(4096, dtype=jnp.int32), struct(4096, 512), struct(64, 512, 256))


@pytest.mark.parametrize(
    ("of", "wanted"),
    [
        ((1, 0), [(512,), (512, 512), (64, 512, 256), (512, 256)]),  # the ids with the rows
        ((1, 1), [(4096,), (4096, 64), (64, 64, 256), (4096, 256)]),
        ((2, 2), [(4096,), (4096, 512), (64, 512, 32), (4096, 32)]),
        ((2, 0), [(4096,), (4096, 512), (8, 512, 256), (4096, 256)]),
    ],
)
def test_its_dimensions_shrink_together_and_its_rows_with_what_counts_them(of, wanted):
    part = traced(counted, *SMALL)
    dims = Dimensions(part)
    found = dims.divided({dims.root((part.inputs[of[0]], of[1])): 8})
    closed, _ = shrunk(part, {}, ByDimension(dims, found))
    jaxpr = closed.jaxpr
    assert [v.aval.shape for v in (*jaxpr.invars, *jaxpr.outvars)] == wanted
    again = [e for e in jaxpr.eqns if kernel_gemm(e) is not None]
    assert [e.outvars[0].aval.dtype for e in again] == [BF16]


def test_a_call_that_gmm_doesnt_make_itself_is_not_made_again():
    part = traced(counted, *SMALL)
    (eqn,) = (e for e in part.eqns if megablox(e) is not None)
    body = eqn.params["jaxpr"]
    changed = body.replace(jaxpr=body.jaxpr.replace(eqns=body.jaxpr.eqns[::-1]))
    other = eqn.replace(params={**eqn.params, "jaxpr": changed})
    with pytest.raises(ValueError, match="made otherwise here than in the program"):
        at_other_shapes(other, [struct(512, 512)])


def backward(ids, g, wo, gate, up):
    """As the backward of a layer with megablox' GEMM: 2,048 rows of 64 experts."""
    sizes = jnp.zeros(64, jnp.int32).at[ids].add(1)
    sigmoid = lax.logistic(gate)
    silu, slope = gate * sigmoid, sigmoid * (1 - sigmoid)
    dh = gmm(g, wo, sizes, BF16, (512, 256, 256), transpose_rhs=True)
    of_silu = dh * up
    return of_silu * sigmoid + gate * of_silu * slope, silu * dh


LARGE = (struct(2048, dtype=jnp.int32), struct(2048, 1024), struct(64, 256, 1024),
         struct(2048, 256), struct(2048, 256))  # fmt: skip


def recorded(fn, p, *types):
    recorder = Recorder()
    rewrite(jax.make_jaxpr(fn)(*types), recorder.recording([p]))
    ((kept,),) = recorder.kept.values()
    return kept.piece


def shrinking(p):
    """The pass with a rewrite whose last gradient is too small by an eighth."""

    def wrong(match):
        way = p.replace(match)

        def run(*operands):
            *others, last = way.fn(*operands)
            return [*others, last * jnp.asarray(0.875, last.dtype)]

        return replace(way, fn=run)

    return replace(p, replace=wrong)


def test_a_site_with_it_is_verified_at_smaller_shapes_and_a_wrong_rewrite_is_seen_there():
    p = registry.by_name("gmm_dswiglu")
    limits = Limits(seconds=20.0, bytes=1 << 26, seeds=1)
    for one, verdict in ((p, Verdict.VERIFIED), (shrinking(p), Verdict.VIOLATION)):
        piece = recorded(backward, one, *LARGE)
        checked, _ = check_guarded(piece, one.contract, limits)
        assert checked.verdict is Verdict.UNKNOWN
        assert "above the limit" in checked.reason
        found = check_shrunk(piece, one, one.contract, limits, check_guarded)
        assert not isinstance(found, str), found
        assert found[0].verdict is verdict, found[0]
        assert found[0].shrunk


def test_groups_of_more_rows_than_there_are_are_no_input():
    def fn(sizes, g, wo, gate, up):
        sigmoid = lax.logistic(gate)
        dh = gmm(g, wo, sizes + 1, BF16, (128, 128, 128), transpose_rhs=True)
        of_silu = dh * up
        slope = sigmoid * (1 - sigmoid)
        return of_silu * sigmoid + gate * of_silu * slope, gate * sigmoid * dh

    types = (struct(4, dtype=jnp.int32), struct(128, 128), struct(4, 128, 128),
             struct(128, 128), struct(128, 128))  # fmt: skip
    piece = recorded(fn, registry.by_name("gmm_dswiglu"), *types)
    problem = build(piece, piece.ancestry.depth)
    arrays = [np.zeros(i.shape, i.dtype) for i in problem.inputs]
    (at,) = (n for n, i in enumerate(problem.inputs) if i.shape == (4,))
    tried = ([30, 30, 30, 34], False), ([30, 30, 30, 35], True), ([-2, 9, 9, 9], True)
    for sizes, breaks in tried:
        arrays[at] = np.array(sizes, np.int32)
        assert problem.breaks_a_promise(arrays) is breaks
