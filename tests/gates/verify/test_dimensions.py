"""Which dimensions shrink together, and sites that fit once single ones have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.gates.verify import shrunk as shrinking
from relower.gates.verify.check import Limits
from relower.gates.verify.dimensions import Dimensions, groups, keys
from relower.gates.verify.divided import ByDimension
from relower.gates.verify.problem import cost
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


def tried(fn, name, *types, size, inputs=1, fits=lambda shape: True):
    """The verdict on a site of a pass at smaller shapes, where those that fit are VERIFIED."""
    recorder = Recorder()
    p = registry.by_name(name)
    rewrite(jax.make_jaxpr(fn)(*types), recorder.recording([p]))
    pieces = [one.piece for several in recorder.kept.values() for one in several]
    (piece,) = [one for one in pieces if len(one.before.inputs) == inputs]
    asked = []

    def check(piece, contract, limits):
        asked.append([v.aval.shape for v in piece.before.inputs])
        return Checked(Verdict.VERIFIED if fits(asked[-1][0]) else Verdict.UNKNOWN), None

    found = check_shrunk(piece, p, p.contract, Limits(bytes=size), check)
    return found, asked, piece


def test_a_part_that_holds_all_of_a_pattern_is_made_smaller_first():
    """A sum of rows by an order, whose inverse stands after much else that the rows are made of."""
    p = registry.by_name("sorted_scatter")

    def fn(keys, h, g):
        for _ in range(3):
            g = jnp.sin(g)
        return p.before(keys, h, g)

    types = [jax.ShapeDtypeStruct(s, t) for s, t in (
        ((4096,), jnp.int32), ((2048, 512), jnp.float32), ((4096, 512), jnp.float32))]  # fmt: skip
    recorder = Recorder()
    rewrite(jax.make_jaxpr(fn)(*types), recorder.recording([p]))
    ((kept,),) = recorder.kept.values()
    reasons = {}
    parts = list(shrinking._whole_first(kept.piece, p, reasons))
    assert not reasons
    sizes = [len(part.eqns) for _, part in parts]
    alone = min(sizes)
    assert sizes[0] > alone  # of which the site alone is less than its pattern
    assert alone in sizes[1:]
    found = check_shrunk(kept.piece, p, p.contract, Limits(bytes=1 << 24), lambda *a: (
        Checked(Verdict.VERIFIED), None))  # fmt: skip
    assert found[0].shrunk


MANY = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)


def test_as_many_matrices_as_rows_are_divided_and_the_rows_stay():
    """At fewer rows than 32 the pass doesn't apply, which divides all of a number."""
    found, asked, _ = tried(jax.vmap(inverses), "triangular_inverse", MANY, size=1 << 27,
                            fits=lambda shape: shape[-1] == 64)  # fmt: skip
    assert found[0].shrunk
    assert found[0].notes == ("at shrunk shapes: 64 → 8",)
    assert asked[-1] == [(8, 64, 64)]


def test_a_constant_of_another_body_is_made_in_the_smaller_program():
    def looped(x):
        eye = jnp.eye(64)
        solve = lambda x: solve_triangular(x, eye, lower=True, unit_diagonal=True)
        return lax.scan(lambda carry, x: (carry, jax.vmap(solve)(x)), 0, x)[1]

    types = jax.ShapeDtypeStruct((3, 64, 64, 64), jnp.float32)
    found, asked, piece = tried(looped, "triangular_inverse", types, size=1 << 24, inputs=2)
    assert "iota" not in {e.primitive.name for e in piece.before.eqns}
    assert not isinstance(found, str), found
    assert found[0].shrunk
    assert asked[-1][0][-1] >= 32


def test_a_grouped_product_counts_its_operands_for_each_group():
    """A CPU has them whole, once for each: 23 GB of a product whose operands are 1.2."""
    product = lambda x, w: lax.ragged_dot(x, w, jnp.full(64, 8, jnp.int32))
    x, w = (512, 16), (64, 16, 8)
    assert cost(part(product, x, w).eqns)[1] > 64 * 512 * 16 * 4
    weights = lambda x, w: jax.vjp(lambda w: product(x, w), w)[1](jnp.ones((512, 8)))[0]
    assert cost(part(weights, x, w).eqns)[1] > 64 * 512 * (16 + 8) * 4


def test_what_makes_a_constant_is_no_part_of_a_rewrites_kind():
    """Zeros to add to may be made in another body, where another equation is as well."""
    kinds = shrinking._kinds
    with_zeros = lambda x: jnp.eye(64, dtype=x.dtype).at[0].set(0) + jnp.sin(x)
    without = lambda x, zeros: zeros + jnp.sin(x)
    alike = kinds(part(with_zeros, (64, 64))), kinds(part(without, (64, 64), (64, 64)))
    assert alike[0] == alike[1]
    assert kinds(part(lambda x, zeros: zeros + jnp.cos(x), (64, 64), (64, 64))) != alike[0]


def test_what_the_rewrite_alone_reads_stands_in_the_smaller_program():
    """An inverse at hand: without it, the second solve is no site."""

    def both(x, g):
        inverse, back = jax.vjp(inverses, x)
        return inverse, back(g)

    found, _, piece = tried(jax.vmap(both), "triangular_inverse", MANY, MANY, size=1 << 24,
                            inputs=2)  # fmt: skip
    assert set(piece.after.inputs) > set(piece.before.inputs)
    assert not isinstance(found, str), found
    assert found[0].shrunk


def test_a_value_that_comes_back_to_its_site_is_made_once():
    """The gate is read elsewhere, so that its activation stays, and is read by the site."""

    def gated(x, w, sizes):
        gate, up = jnp.split(lax.ragged_dot(x, w, sizes), 2, axis=-1)
        act = jax.nn.silu(gate)
        return act * up, act

    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 256), (2, 256, 512))]
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    found, asked, piece = tried(gated, "gmm_swiglu", *types, sizes, size=1 << 20, inputs=4)
    kinds = {e.primitive.name for e in piece.before.eqns}
    assert "mul" in kinds
    assert "logistic" not in str(kinds)
    assert not isinstance(found, str), found
    assert found[0].shrunk
    assert asked[-1][0][1] >= 128  # which the kernel's tiles must divide


def test_where_devices_talk_in_a_pattern_the_smaller_program_is_one_of_all():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def layer(w):
        gather = lambda part: lax.all_gather(jnp.abs(part), "d", axis=0, tiled=True)
        return jnp.concatenate(list(map(gather, jnp.split(w, 2, -1))), -1)

    fn = jax.shard_map(layer, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    types = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    found, _, piece = tried(fn, "split_fused_wi", types, size=1 << 20, inputs=2)
    assert [e.primitive.name for e in piece.before.eqns] == ["concatenate"]
    assert not isinstance(found, str), found
    assert found[0].shrunk
    small = found[2]
    assert small.region.manual == ("d",)
    assert any(e.primitive.name == "all_gather" for e in small.after.eqns)


def test_constants_whose_texts_are_alike_are_told_apart():
    """What numpy prints of a large array leaves its middle out."""
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    assert repr(one) == repr(other)
    assert shrinking._named(one) != shrinking._named(other)
    assert shrinking._named(np.float32(3)) == shrinking._named(np.float32(3))
