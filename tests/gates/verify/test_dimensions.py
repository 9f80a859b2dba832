"""Which dimensions shrink together, and sites that fit once single ones have."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular

from relower.gates.verify.check import Limits
from relower.gates.verify.dimensions import Dimensions, groups, keys
from relower.gates.verify.divided import ByDimension
from relower.gates.verify.record import Recorder
from relower.gates.verify.shrunk import CannotShrink, check_shrunk, shrunk
from relower.gates.verify.verdict import Checked, Verdict
from relower.passes import registry
from relower.passes.engine.fragments import Cut
from relower.passes.engine.rewrite import rewrite


def part(fn, *shapes, dtype=jnp.float32):
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).jaxpr
    return Cut(tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(jaxpr.outvars))


def smaller(fn, *shapes, of=(0, 0), by=8, dtype=jnp.float32):
    """Shapes of the inputs and outputs once one dimension of an input is divided; or None."""
    made = part(fn, *shapes, dtype=dtype)
    dims = Dimensions(made)
    found = dims.divided({dims.root((made.inputs[of[0]], of[1])): by})
    if found is None:
        return None
    closed, _ = shrunk(made, {}, ByDimension(dims, found))
    return [v.aval.shape for v in (*closed.jaxpr.invars, *closed.jaxpr.outvars)]


FOUR = (64, 64, 64, 64)


@pytest.mark.parametrize(
    ("fn", "shapes", "of", "wanted"),
    [
        (lambda x: x.transpose(1, 3, 0, 2), [FOUR], (0, 0), [(8, 64, 64, 64), (64, 64, 8, 64)]),
        (lambda x: x.sum(1), [FOUR], (0, 2), [(64, 64, 8, 64), (64, 8, 64)]),
        (lambda x, y: jnp.einsum("abc,adc->abd", x, y), [(64,) * 3] * 2, (0, 2),
         [(64, 64, 8), (64, 64, 8), (64, 64, 64)]),
        (lambda x, y: jnp.einsum("abc,adc->abd", x, y), [(64,) * 3] * 2, (1, 1),
         [(64, 64, 64), (64, 8, 64), (64, 64, 8)]),
        (lambda x: x.reshape(64, 4096), [(64,) * 3], (0, 0), [(8, 64, 64), (8, 4096)]),
        (lambda x: x.reshape(64, 4096), [(64,) * 3], (0, 2), [(64, 64, 8), (64, 512)]),
        (lambda x: x.reshape(64, 64, 64), [(4096, 64)], (0, 0), [(512, 64), (8, 64, 64)]),
        (lambda x: jnp.concatenate([x, x], 1), [(64, 64)], (0, 1), [(64, 8), (64, 16)]),
        (lambda x: x[:, 64:], [(64, 128)], (0, 1), [(64, 16), (64, 8)]),
        (lambda x: lax.pad(x, 0.0, ((64, 0, 0), (0, 0, 0))), [(64, 64)], (0, 0),
         [(8, 64), (16, 64)]),
        (lambda x: jnp.split(x, 2, 1)[0], [(64, 128)], (0, 1), [(64, 16), (64, 8)]),
        (lambda x: lax.dynamic_slice(x, (3, 0), (64, 64)), [(64, 128)], (0, 0),
         [(8, 128), (8, 64)]),
        (lambda x: x[None, :, None] + lax.broadcasted_iota(x.dtype, (64, 64, 64), 0), [(64,)],
         (0, 0), [(8,), (64, 8, 64)]),
        (lambda x: lax.top_k(x, 4)[0], [(64, 64)], (0, 0), [(8, 64), (8, 4)]),
        (lambda x: jax.jit(jnp.tanh)(x).squeeze(1), [(64, 1, 64)], (0, 2), [(64, 1, 8), (64, 8)]),
    ],
)  # fmt: skip
def test_sizes_that_are_the_same_number_stay_apart(fn, shapes, of, wanted):
    assert smaller(fn, *shapes, of=of) == wanted


def test_what_can_not_be_divided():
    assert smaller(lambda x: x + 1, (60, 64)) is None  # not by eight
    with pytest.raises(CannotShrink, match=r"top_k makes \(64, 8\) .* wanted \(64, 64\)"):
        smaller(lambda x: lax.top_k(x, 64)[0], (64, 64), of=(0, 1))
    loop = lambda x: lax.fori_loop(0, 3, lambda i, c: c + 1, x)
    assert smaller(loop, (64, 64)) is None


def test_values_of_one_size_of_no_known_rule_shrink_together():
    made = part(lambda x: lax.linalg.cholesky(x) @ x, (64, 64))
    dims = Dimensions(made)
    rows, columns = (dims.root(k) for k in keys(made.inputs[0]))
    assert rows == columns


def test_groups_of_a_reshape():
    assert list(groups((2, 3, 4), (6, 4))) == [([0, 1], [0]), ([2], [1])]
    assert list(groups((6, 1, 4), (2, 3, 4))) == [([0], [0, 1]), ([2], [2])]
    assert list(groups((4, 6), (6, 4))) == [([0, 1], [0, 1])]


def inverses(lower):
    eye = jnp.broadcast_to(jnp.eye(64), lower.shape)
    return solve_triangular(eye + lower, eye, lower=True, unit_diagonal=True)


def test_as_many_matrices_as_rows_are_divided_and_the_rows_stay():
    """At fewer rows than 32 the pass doesn't apply, which divides all of a number."""
    many = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)
    recorder = Recorder()
    p = registry.by_name("triangular_inverse")
    body = jax.make_jaxpr(jax.vmap(inverses))(many)
    rewrite(body, recorder.recording([p]))
    ((kept,),) = recorder.kept.values()
    asked = []

    def check(piece, contract, limits):
        (var,) = piece.before.inputs
        asked.append(var.aval.shape)
        return Checked(Verdict.VERIFIED if var.aval.shape[-1] == 64 else Verdict.UNKNOWN), None

    found = check_shrunk(kept.piece, p, p.contract, Limits(bytes=1 << 24), check)
    assert found[0].shrunk
    assert found[0].notes == ("at shrunk shapes: 64 → 8",)
    assert asked[-1] == (8, 64, 64)
