"""The backward of SwiGLU: one kernel for it and for the grouped GEMM that makes its cotangent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from swiglu_layers import (
    BF16,
    DROPPING,
    F32,
    FULL,
    M,
    N,
    apart,
    close,
    data,
    dense,
    exact,
    gradients,
    in_float32,
    layer,
    loss,
    sliced,
    split,
    up_first,
    widened,
)

from relower import PassNotApplicable, explain, lower, optimize
from relower.passes.parts import dswiglu_site

NAME, FORWARD = "gmm_dswiglu", "gmm_swiglu"
ALONE, BOTH = (NAME,), (FORWARD, NAME)


def ours(fn, names=ALONE):
    return optimize(fn, passes=list(names))


def by_hand(x, w, sizes):
    """A derivative of its own, spelled in another way than jax's."""

    @jax.custom_vjp
    def swiglu(both):
        return jax.nn.silu(both[:, :N]) * both[:, N:]

    def backward(both, dh):
        gate, up = both[:, :N], both[:, N:]
        s = jax.nn.sigmoid(gate)
        return (jnp.concatenate([dh * (up * (s * (1 + gate * (1 - s)))), gate * (s * dh)], 1),)

    swiglu.defvjp(lambda both: (swiglu(both), both), backward)
    return swiglu(lax.ragged_dot(x, w, sizes))


FORMS = [split, sliced, up_first, widened, in_float32, apart, by_hand]
REPEATED = [split, apart]


def counts(fn, *args, names=ALONE):
    return explain(fn, *args, passes=list(names)).counts()


def calls(eqns_of, fn, *args):
    """The names of the kernels called, in order."""
    return sorted(e.params["name"] for e in eqns_of(fn, *args, name="pallas_call"))


def dots(eqns_of, fn, *args):
    """Of the program; those of the kernels' references state the type they add up in."""
    found = eqns_of(fn, *args, name="ragged_dot_general")
    return sum(e.params["preferred_element_type"] is None for e in found)


@pytest.mark.parametrize("names", [ALONE, BOTH], ids=["alone", "with the forward"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_every_way_to_write_it(form, names):
    args = (*data(), FULL)
    grad = gradients(form)
    report = explain(grad, *args, passes=list(names))
    assert not report.declined
    # An activation in a call of its own is no candidate of the forward's pass.
    assert report.counts() == dict.fromkeys(ALONE if form is by_hand else names, 1)
    if names is ALONE or form in (up_first, widened):
        close(jax.jit(ours(grad, names))(*args), plain_gradients(form)(*args))


@pytest.mark.parametrize("form", [split, apart, sliced], ids=lambda f: f.__name__)
def test_one_kernel_call_and_one_product_fewer(eqns_of, form):
    args = (*data(), FULL)
    grad = gradients(form)
    before, alone, both = (dots(eqns_of, f, *args) for f in (grad, ours(grad), ours(grad, BOTH)))
    assert before - alone == 1
    assert alone - both == (2 if form is apart else 1)
    assert calls(eqns_of, ours(grad), *args) == ["grouped_dswiglu"]
    assert calls(eqns_of, ours(grad, BOTH), *args) == ["grouped_dswiglu", "grouped_swiglu"]


def test_gate_and_up_are_read_where_the_forward_wrote_them(eqns_of):
    """Of a plain GEMM, its one result; of the forward kernel, its two; and no copy of either."""
    args = (*data(), FULL)

    def operands(fn):
        (call,) = (e for e in eqns_of(fn, *args, name="pallas_call")
                   if e.params["name"] == "grouped_dswiglu")  # fmt: skip
        return [v.aval.shape for v in call.invars[-2:]], call.invars[-1] is call.invars[-2]

    grad = gradients(split)
    assert operands(ours(grad)) == ([(M, 2 * N)] * 2, True)
    assert operands(ours(grad, BOTH)) == ([(M, N)] * 2, False)
    splits = eqns_of(ours(grad, BOTH), *args, name="split")
    assert not [e for e in splits if e.outvars[0].aval.dtype == BF16]  # the reference's alone


# --- the contract ---------------------------------------------------------------------------------


def errors(run, args, want):
    """The root mean square error of each gradient, and the cosine to the right one."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64))
             for a, b in zip(run(*args)[1], want)]  # fmt: skip
    cosines = [(a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    return [np.sqrt(((a - b) ** 2).mean()) for a, b in pairs], cosines


@functools.cache
def plain_gradients(form):
    return jax.jit(gradients(form))


def check_contract(form, names=ALONE, dtype=BF16, seeds=range(6), sizes=(FULL, DROPPING)):
    after = jax.jit(ours(gradients(form), names))
    for buffer in sizes:
        before, done = [], []
        for seed in seeds:
            args = (*data(seed, dtype), buffer)
            _, *want = (dense if dtype == BF16 else exact)(*args)
            (old, _), (new, cosines) = (
                errors(f, args, want) for f in (plain_gradients(form), after)
            )
            assert min(cosines) > 0.9999
            before.append(old)
            done.append(new)
        ratios = np.sqrt((np.array(done) ** 2).sum(0) / (np.array(before) ** 2).sum(0))
        assert (ratios <= 1.10).all(), (buffer, ratios)


@pytest.mark.parametrize("names", [ALONE, BOTH], ids=["alone", "with the forward"])
@pytest.mark.parametrize("form", REPEATED, ids=lambda f: f.__name__)
def test_errors_are_at_most_1_10_of_the_originals(form, names):
    check_contract(form, names)


def test_errors_in_float32():
    check_contract(split, dtype=F32)


def _with(**changed):
    """The kernel called with other arguments."""

    def mutate(original):
        return lambda *args, **given: original(*args, **{
            k: changed[k](v) if k in changed else v for k, v in given.items()
        })  # fmt: skip

    return mutate


def _results(change):
    return lambda f: lambda *args, **given: tuple(map(change, f(*args, **given)))


def _saved(change):
    return lambda f: lambda g, wo, saved, *args, **given: f(g, wo, change(saved), *args, **given)


def _tiled(both):
    """As a forward of narrower tiles writes it, `[g0 | u0 | g1 | u1]`."""
    return both.reshape(M, 2, 2, N // 2).swapaxes(1, 2).reshape(M, 2 * N)


MUTANTS = {
    "gate and up swapped": _with(gate_first=lambda first: not first),
    "gate and up swapped as read": _saved(lambda both: jnp.roll(both, N, 1)),
    "gate and up read tile by tile": _saved(_tiled),
    "the gradients' halves swapped": _results(lambda r: jnp.roll(r, N, 1)),
    "the gradients laid tile by tile": _results(_tiled),
    "the wrong direction": _results(lambda r: -r),
    "groups shifted by one": lambda f: lambda g, wo, *a, **kw: f(g, jnp.roll(wo, 1, 0), *a, **kw),
    "a result shrunk by 0.5 %": _results(lambda r: (r.astype(F32) * 0.995).astype(r.dtype)),
    "results rounded to fewer bits": _results(lambda r: lax.reduce_precision(r, 8, 5)),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    dtype = F32 if "0.5" in mutant else BF16
    mutated = MUTANTS[mutant](dswiglu_site.grouped_dswiglu)
    monkeypatch.setattr(dswiglu_site, "grouped_dswiglu", mutated)
    with pytest.raises(AssertionError):
        check_contract(split, dtype=dtype, seeds=range(1), sizes=(FULL,))


# --- under transforms -----------------------------------------------------------------------------


def test_lowered_for_a_tpu_the_kernels_are_taken():
    args = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*data(), FULL))
    program = lower(ours(gradients(split), BOTH), *args)
    labels = sorted(k.label for k in program.kernels.values())
    assert labels == ["grouped_dswiglu", "grouped_swiglu"]


def wrapped(wrap, form=split):
    def block(x, w, wo, sizes):
        return layer(form, x, w, wo, sizes)

    if wrap == "jit":
        block = jax.jit(block)
    if "remat" in wrap:
        block = jax.checkpoint(block)
    if wrap == "custom_vjp":
        plain = block
        block = jax.custom_vjp(plain)
        block.defvjp(
            lambda x, w, wo, s: (plain(x, w, wo, s), (x, w, wo, s)),
            lambda res, ct: (*jax.vjp(lambda *a: plain(*a, res[3]), *res[:3])[1](ct), None),
        )

    def whole(x, w, wo, ct, sizes):
        step = lambda x, _: (block(x, w, wo, sizes), None)
        run = lambda x: lax.scan(step, x, None, length=2)[0] if "scan" in wrap else step(x, 0)[0]
        return (run(x).astype(F32) * ct.astype(F32)).sum()

    return whole


WRAPS = ["jit", "scan", "remat", "scan of remat", "custom_vjp"]


@pytest.mark.parametrize("wrap", WRAPS)
def test_under_transforms(eqns_of, wrap):
    """One kernel backward; and forward one, or one more where remat computes it again."""
    args = (*data(), FULL)
    grad = jax.value_and_grad(wrapped(wrap), (0, 1, 2))
    want = jax.jit(grad)(*args)
    close(jax.jit(ours(grad))(*args), want, "alone")
    both = ours(grad, BOTH)
    close(jax.jit(both)(*args), want, "both")
    again = wrap not in ("jit", "scan")
    found = calls(eqns_of, both, *args)
    assert found == ["grouped_dswiglu", *["grouped_swiglu"] * (2 if again else 1)]


def test_derivatives_of_the_rewritten_gradient():
    """As of a norm of the gradients; jax itself has none of the weights' products."""
    x, _, wo, g = data(dtype=F32)
    args = g, wo, jnp.concatenate([x, g], 1)
    norm = lambda fn: lambda *a: (fn(*a) ** 2).sum()
    of_both = lambda *a: backward(*a)[0]
    want = jax.jit(jax.value_and_grad(norm(of_both), (0, 1, 2)))(*args)
    close(jax.jit(jax.value_and_grad(norm(ours(of_both)), (0, 1, 2)))(*args), want, tolerance=1e-5)
    want = jax.jit(lambda *a: jax.jvp(norm(of_both), a, a))(*args)
    close(jax.jit(lambda *a: jax.jvp(norm(ours(of_both)), a, a))(*args), want, tolerance=1e-5)


def test_forward_pass_rewritten_inside_and_the_backward_outside():
    args = (*data(), FULL)
    inside = jax.value_and_grad(ours(functools.partial(loss, split), (FORWARD,)), (0, 1, 2))
    assert counts(inside, *args) == {NAME: 1}
    close(jax.jit(ours(inside))(*args), jax.jit(gradients(split))(*args))


def test_mapped_by_vmap():
    args = tuple(jnp.stack([jnp.asarray(a)] * 2) for a in (*data(), FULL))
    got = jax.jit(jax.vmap(ours(gradients(split))))(*args)
    close(got, jax.jit(jax.vmap(gradients(split)))(*args))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind):
    """Rows split over devices, each with its own groups' sizes."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, kind),))
    x, w, wo, ct = data()
    sizes = np.stack([[3, 0, 20, 1], [9, 9, 0, 2]]).astype(np.int32)

    def local(x, w, wo, sizes):
        return layer(split, x, w, wo, sizes[0])

    def whole(x, w, wo):
        spread = jax.shard_map(
            jax.checkpoint(local), in_specs=(P("d"), P(), P(), P("d")), out_specs=P("d")
        )
        return (spread(x, w, wo, sizes).astype(F32) * ct.astype(F32)).sum()

    with jax.set_mesh(mesh):
        x, ct, sizes = (jax.device_put(a, jax.NamedSharding(mesh, P("d"))) for a in (x, ct, sizes))
        grad = jax.grad(whole, (0, 1, 2))
        assert counts(grad, x, w, wo, names=BOTH)[NAME] == 1
        close(jax.jit(ours(grad, BOTH))(x, w, wo), jax.jit(grad)(x, w, wo))


# --- near misses ----------------------------------------------------------------------------------


def declined(fn, *args):
    report = explain(fn, *args, passes=[NAME])
    assert not report.applied, str(report)
    with pytest.raises(PassNotApplicable):
        ours(fn)(*args)
    return {r.code: r for s in report.declined for r in s.reasons}


def backward(g, wo, both, dot=None, silu=jax.nn.silu):
    """The gradients of both halves, and the cotangent of their product."""
    n = both.shape[-1] // 2
    dot = dot or (lambda h, wo: lax.ragged_dot(h, wo, FULL))
    h, back = jax.vjp(lambda both: silu(both[:, :n]) * both[:, n:], both)
    (dh,) = jax.vjp(lambda h: dot(h, wo), h)[1](g)
    return back(dh)[0], dh


def case(code):
    x, w, wo, g = data()
    both = jnp.concatenate([x, g], 1)
    grouped_second = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (1,))

    def of_another_layout(g, wo, both):
        dh = lax.ragged_dot_general(g, wo.swapaxes(0, 1), FULL, grouped_second)
        return jax.vjp(lambda b: jax.nn.silu(b[:, :N]) * b[:, N:], both)[1](dh)[0]

    def in_fewer_bits(g, wo, both):
        silu = lambda x: jax.nn.silu(x).astype(jnp.float8_e4m3fn).astype(BF16)
        return backward(g, wo, both, silu=silu)[0]

    def only_what_is_made_of_gate(g, wo, both):
        """The logistic and the product were kept by hand, and gate was not."""
        gate, up = both[:, :N], both[:, N:]

        @jax.jit
        def forward(gate, up):
            hidden = gate * 2
            s = jax.nn.sigmoid(hidden)
            return hidden * s, s + hidden * s * (1 - s)

        silu, slope = forward(gate, up)
        dh = lax.ragged_dot(g, wo.swapaxes(1, 2), FULL)
        return jnp.concatenate([dh * up * slope, dh * silu], 1)

    return {
        "another-body": (
            lambda x, w, wo, ct: jax.grad(functools.partial(loss, jax.checkpoint(split)))(
                x, w, wo, ct, FULL), x, w, wo, g),
        "dimensions": (of_another_layout, g, wo, both),
        "not-at-hand": (only_what_is_made_of_gate, g, wo, both),
        "dtype": (lambda *a: backward(*a)[0], *(a.astype("float16") for a in (g, wo, both))),
        "precision": (lambda *a: backward(*a, dot=lambda h, wo: lax.ragged_dot(
            h, wo, FULL, precision="high"))[0], g, wo, both),
        "narrowing-cast": (in_fewer_bits, g, wo, both),
        "weighted": (
            lambda g, wo, both: backward(g, wo, both, dot=lambda h, wo: lax.ragged_dot(
                h * g[:, :1], wo, FULL))[0], g, wo, both),
        "other-reader": (backward, g, wo, both),
        "width": (lambda *a: backward(*a)[0], g, wo[:, :96], both[:, :192]),
        "no-rows": (lambda *a: backward(*a)[0], g[:0], wo, both[:0]),
    }[code]  # fmt: skip


@pytest.mark.parametrize("code", [
    "another-body", "dimensions", "not-at-hand", "dtype", "precision", "narrowing-cast",
    "weighted", "other-reader", "width", "no-rows",
])  # fmt: skip
def test_declined_for(code):
    fn, *args = case(code)
    assert set(declined(fn, *args)) == {code}


def test_declined_under_a_mesh_that_a_compiler_splits_arrays_over():
    x, _, wo, g = data()
    both = jnp.concatenate([x, g], 1)
    mesh = AbstractMesh((4, 1), ("data", "one"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        report = explain(lambda *a: backward(*a)[0], g, wo, both, passes=[NAME])
    (site,) = report.declined
    assert [r.code for r in site.reasons] == ["mesh"]


def test_other_gradients_are_no_candidates():
    """Of another activation, of other factors, and of a GEMM whose result is a factor."""
    x, _, wo, g = data()
    both = jnp.concatenate([x, g], 1)
    gelu = lambda *a: backward(*a, silu=jax.nn.gelu)[0]
    scaled = lambda *a: backward(*a, silu=lambda v: v * jax.nn.sigmoid(1.5 * v))[0]

    def half_a_slope(g, wo, both):
        dh = lax.ragged_dot(g, wo.swapaxes(1, 2), FULL)
        gate, up = both[:, :N], both[:, N:]
        s = jax.nn.sigmoid(gate)
        return jnp.concatenate([dh * up * (s + 0.5 * gate * s * (1 - s)), dh * gate * s], 1)

    for fn in (gelu, scaled, half_a_slope):
        assert not explain(fn, g, wo, both, passes=[NAME]).sites


def test_what_router_grad_from_wo_input_took_is_declined_by_name():
    """Either takes the site alone; weights' gradients read what the one would no longer write."""
    router = "router_grad_from_wo_input"

    def weighted(p, *args):
        *operands, ct, sizes = args
        rows = layer(split, *operands, sizes) * p[:, None]
        return (rows.astype(F32) * ct.astype(F32)).sum()

    args = jnp.ones(M, BF16), *data(), FULL
    found = {names: explain(jax.grad(weighted, (0, 1, 2, 3)), *args, passes=list(names))
             for names in ((router,), ALONE, (router, NAME))}  # fmt: skip
    assert found[router,].counts() == found[router, NAME].counts() == {router: 1}
    assert found[ALONE].counts() == {NAME: 1}
    (site,) = found[router, NAME].declined
    assert site.pass_name == NAME
    assert {"weighted", "other-reader"} <= {r.code for r in site.reasons}
    assert NAME in str(found[router, NAME])


# --- megablox -------------------------------------------------------------------------------------


def test_the_grouped_gemm_of_megablox(eqns_of):
    """Of a shard: the second and third of four groups are here; others' rows are zero."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    x, w, wo, ct = (a[:32] for a in data())
    w, wo, offset, sizes = w[1:3], wo[1:3], jnp.int32(1), np.array([4, 9, 13, 6], np.int32)
    dot = lambda a, b, o: gmm(a, b, sizes, BF16, (32, 128, 128), o, interpret=True)

    def loss(x, w, wo, offset):
        gate, up = jnp.split(dot(x, w, offset), 2, -1)
        out = dot(jax.nn.silu(gate) * up, wo, offset)
        return (out.astype(F32) * ct.astype(F32)).sum()

    grad = jax.grad(loss, (0, 1, 2))
    assert counts(grad, x, w, wo, offset, names=BOTH) == dict.fromkeys(BOTH, 1)
    kernels = [[e.params["name"] for e in eqns_of(f, x, w, wo, offset, name="jit")]
               for f in (grad, ours(grad))]  # fmt: skip
    assert kernels[0].count("gmm") - kernels[1].count("gmm") == 1
    assert kernels[0].count("tgmm") == kernels[1].count("tgmm")
    want = jax.jit(grad)(x, w, wo, offset)
    outside = jax.jit(ours(grad, BOTH))
    close(outside(x, w, wo, offset), want)
    with pytest.raises(AssertionError):
        close(outside(x, w, wo, jnp.int32(2)), want)
