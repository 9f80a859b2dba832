"""SwiGLU over grouped GEMMs: one kernel for two halves, in forwards and in backwards."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from swiglu_layers import (
    BF16,
    DROPPING,
    F32,
    FULL,
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
from relower.passes.parts import swiglu_site

NAME = "gmm_swiglu"
ours = functools.partial(optimize, passes=[NAME])


TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


def transposed(x, w, sizes):
    both = lax.ragged_dot_general(x, w.swapaxes(1, 2), sizes, TRANSPOSED)
    gate, up = jnp.split(both, 2, -1)
    return jax.nn.silu(gate) * up


FORMS = [split, sliced, up_first, widened, in_float32, apart, transposed]


def counts(fn, *args):
    return explain(fn, *args, passes=[NAME]).counts()


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_every_way_to_write_it(form):
    args = (*data(), FULL)
    grad = gradients(form)
    assert counts(form, *args[:2], FULL) == {NAME: 1}
    assert counts(grad, *args) == {NAME: 1}
    want = jax.jit(grad)(*args)
    close(jax.jit(ours(grad))(*args), want, "optimize(grad)")
    if form in (split, apart, up_first):
        inside = jax.value_and_grad(ours(functools.partial(loss, form)), (0, 1, 2))
        close(jax.jit(inside)(*args), want, "grad(optimize)")


# --- the contract ---------------------------------------------------------------------------------


def errors(run, args, want):
    """The root mean square error of output, and gradients, and the cosine to the right ones."""
    found = jax.tree.leaves(run(*args))
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, want)]
    cosines = [(a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    return [np.sqrt(((a - b) ** 2).mean()) for a, b in pairs], cosines


@functools.cache
def plain_parts(form):
    return jax.jit(parts(form))


def parts(form):
    def run(x, w, wo, ct, sizes):
        return layer(form, x, w, wo, sizes), *gradients(form)(x, w, wo, ct, sizes)[1]

    return run


def check_contract(form, seeds=range(6), sizes=(FULL, DROPPING)):
    before, after = plain_parts(form), jax.jit(ours(parts(form)))
    for seed in seeds:
        for buffer in sizes:
            args = (*data(seed), buffer)
            want = dense(*args)
            (old, _), (new, cosines) = errors(before, args, want), errors(after, args, want)
            for a, b in zip(new, old):
                assert a <= 1.10 * b, (seed, buffer, new, old)
            assert min(cosines) > 0.9999


@pytest.mark.parametrize("form", [split, apart], ids=lambda f: f.__name__)
def test_errors_are_at_most_1_10_of_the_originals(form):
    check_contract(form)


def test_exact_is_dense():
    args = (*data(0, F32), DROPPING)
    close([a.astype(np.float32) for a in exact(*args)], dense(*args), tolerance=1e-5)


@pytest.mark.parametrize("form", [split, apart], ids=lambda f: f.__name__)
def test_errors_in_float32_too_whichever_is_optimized(form):
    """Two GEMMs' derivatives stay two sums: one of twice the length would be less exact."""
    inside = lambda *args: ours(form)(*args)
    before = plain_parts(form)
    ways = {"optimize(grad)": jax.jit(ours(parts(form))), "grad(optimize)": jax.jit(parts(inside))}
    for seed, buffer in itertools.product(range(6), (FULL, DROPPING)):
        args = (*data(seed, F32), buffer)
        want = exact(*args)
        old, _ = errors(before, args, want)
        for name, after in ways.items():
            new, cosines = errors(after, args, want)
            assert all(a <= 1.10 * b for a, b in zip(new, old)), (name, seed, new, old)
            assert min(cosines) > 0.9999


def _with(**changed):
    """The kernel called with other arguments."""

    def mutate(original):
        return lambda *args, **given: original(*args, **{
            k: changed[k](v) if k in changed else v for k, v in given.items()
        })  # fmt: skip

    return mutate


def _results(change):
    return lambda original: lambda *args, **given: change(original(*args, **given))


MUTANTS = {
    "gate and up swapped": _with(gate_first=lambda first: not first),
    "gate and up swapped for the backward only": _results(lambda r: (r[0], *r[:0:-1])),
    "groups shifted by one": lambda f: lambda x, w, s, **kw: f(x, jnp.roll(w, 1, 0), s, **kw),
    "gate and up rounded to fewer bits": _results(
        lambda r: (r[0], *(lax.reduce_precision(v, 8, 5) for v in r[1:]))),
    "a result shrunk by 0.5 %": _results(
        lambda r: ((r[0].astype(F32) * 0.995).astype(r[0].dtype), *r[1:])),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    mutated = MUTANTS[mutant](swiglu_site.grouped_swiglu)
    monkeypatch.setattr(swiglu_site, "grouped_swiglu", mutated)
    with pytest.raises(AssertionError):
        check_contract(split, range(1), (FULL,))


def test_a_derivative_shrunk_by_half_a_percent_is_caught(monkeypatch):
    def shrunk(*args):
        right = original(*args)
        return lambda gate, up: right(gate, up) * jnp.asarray(0.995, F32).astype(gate.dtype)

    original = swiglu_site.activation_of
    inside = lambda *a: jax.grad(ours(functools.partial(loss, split)), (0, 1))(*a)
    args = (*data(), FULL)
    want = jax.jit(inside)(*args)
    monkeypatch.setattr(swiglu_site, "activation_of", shrunk)
    got = jax.jit(lambda *a: inside(*a))(*args)
    with pytest.raises(AssertionError):
        close(got, want, tolerance=0.002)


def test_the_product_is_activated_before_it_is_rounded():
    """Its error is that of one rounding, of at most half a unit in the last of eight bits."""
    x, w, _, _ = data()
    got = np.asarray(jax.jit(ours(split))(x, w, FULL), np.float32)
    both = np.concatenate([
        np.asarray(x, np.float32)[a:b] @ np.asarray(w, np.float32)[g]
        for g, (a, b) in enumerate(zip(np.cumsum([0, *FULL]), np.cumsum(FULL)))
    ])  # fmt: skip
    want = np.asarray(jax.nn.silu(both[:, :N])) * both[:, N:]
    assert np.all(np.abs(got - want) <= np.abs(want) * (2**-8 + 1e-5))
    assert np.any(np.asarray(split(x, w, FULL), np.float32) != got)


# --- what the rewritten program holds -------------------------------------------------------------


def kernels(eqns_of, fn, *args):
    """How many results each call of the kernel has."""
    return sorted(len(e.outvars) for e in eqns_of(fn, *args, name="pallas_call"))


def test_gate_and_up_are_written_only_where_they_are_read(eqns_of):
    args = (*data(), FULL)
    assert kernels(eqns_of, ours(split), *args[:2], FULL) == [1]
    assert kernels(eqns_of, ours(gradients(split)), *args) == [3]
    assert kernels(eqns_of, ours(gradients(apart)), *args) == [3]
    forgetful = jax.value_and_grad(jax.checkpoint(functools.partial(loss, split)), (0, 1, 2))
    assert kernels(eqns_of, ours(forgetful), *args) == [1, 3]
    read = lambda x, w, s: (split(x, w, s), lax.ragged_dot(x, w, s)[:, :N])
    assert kernels(eqns_of, ours(read), *args[:2], FULL) == [1]


def test_the_backward_is_that_of_the_plain_program(eqns_of):
    """No GEMM is added, and none of the backward is touched."""
    args = (*data(), FULL)

    def dots(fn):
        found = eqns_of(fn, *args, name="ragged_dot_general")
        return [e for e in found if e.params["preferred_element_type"] is None]

    assert len(dots(gradients(split))) - len(dots(ours(gradients(split)))) == 1
    assert len(dots(gradients(apart))) - len(dots(ours(gradients(apart)))) == 2


def test_lowered_for_a_tpu_the_kernel_is_taken():
    args = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*data()[:2], FULL))
    program = lower(ours(split), *args)
    assert [k.label for k in program.kernels.values()] == ["grouped_swiglu"]
    plain = lower(split, *args)
    held = [{name for name in ("ragged_dot", "stablehlo.dot_general", "tpu_custom_call")
             if any(name in s.text for s in p.forms["inlined"].sections)}
            for p in (plain, program)]  # fmt: skip
    assert held[0] == {"ragged_dot"}
    assert held[1] == {"tpu_custom_call"}  # of the reference nothing is left


@pytest.mark.parametrize("order", ["optimize(grad)", "grad(optimize)"])
@pytest.mark.parametrize("wrap", ["jit", "scan", "remat", "scan of remat", "custom_vjp", "vmap"])
def test_under_transforms(wrap, order):
    def block(x, w, sizes):
        return split(x, w, sizes)

    if wrap == "jit":
        block = jax.jit(block)
    if "remat" in wrap:
        block = jax.checkpoint(block)
    if wrap == "custom_vjp":
        plain = block
        block = jax.custom_vjp(plain)
        block.defvjp(lambda x, w, s: (plain(x, w, s), (x, w, s)),
                     lambda res, ct: (*jax.vjp(lambda x, w: plain(x, w, res[2]), *res[:2])[1](ct),
                                      None))  # fmt: skip

    def whole(x, w, wo, ct, sizes):
        step = lambda x, _: (layer(block, x, w, wo, sizes), None)
        run = lambda x: lax.scan(step, x, None, length=2)[0] if "scan" in wrap else step(x, 0)[0]
        return (run(x).astype(F32) * ct.astype(F32)).sum()

    args = (*data(), FULL)
    if wrap == "vmap":  # jax maps a ragged_dot only if all its operands are mapped
        args = tuple(jnp.stack([jnp.asarray(a)] * 2) for a in args)
        one = jax.vmap(ours(whole)) if order == "grad(optimize)" else jax.vmap(whole)
        if order == "optimize(grad)":
            grad = jax.grad(lambda *a: one(*a).sum(), (0, 1, 2))
            assert set(declined(grad, *args)) == {"dimensions"}
            return
        got = jax.jit(jax.grad(lambda *a: one(*a).sum(), (0, 1, 2)))(*args)
        close(got, jax.jit(jax.grad(lambda *a: jax.vmap(whole)(*a).sum(), (0, 1, 2)))(*args))
        return
    want = jax.jit(jax.grad(whole, (0, 1, 2)))(*args)
    outside = ours(jax.grad(whole, (0, 1, 2)))
    inside = jax.grad(ours(whole), (0, 1, 2))
    close(jax.jit(outside if order == "optimize(grad)" else inside)(*args), want)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind):
    """Rows split over devices, each with its own groups' sizes."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, kind),))
    x, w, wo, ct = data()
    sizes = np.stack([[3, 0, 20, 1], [9, 9, 0, 2]]).astype(np.int32)

    def local(x, w, wo, sizes):
        return layer(split, x, w, wo, sizes[0])

    def whole(x, w, wo):
        spread = jax.shard_map(local, in_specs=(P("d"), P(), P(), P("d")), out_specs=P("d"))
        return (spread(x, w, wo, sizes).astype(F32) * ct.astype(F32)).sum()

    with jax.set_mesh(mesh):
        x, ct, sizes = (jax.device_put(a, jax.NamedSharding(mesh, P("d"))) for a in (x, ct, sizes))
        grad = jax.grad(whole, (0, 1, 2))
        assert counts(grad, x, w, wo) == {NAME: 1}
        want = jax.jit(grad)(x, w, wo)
        close(jax.jit(ours(grad))(x, w, wo), want)
        if kind == "Auto":
            close(jax.jit(jax.grad(ours(whole), (0, 1, 2)))(x, w, wo), want)


# --- near misses ----------------------------------------------------------------------------------


def declined(fn, *args):
    report = explain(fn, *args, passes=[NAME])
    assert not report.applied, str(report)
    with pytest.raises(PassNotApplicable):
        ours(fn)(*args)
    return {r.code: r for s in report.declined for r in s.reasons}


def case(code):
    x, w, _, _ = data()
    dot = lambda x, w: lax.ragged_dot(x, w, FULL)
    swiglu = lambda y: jax.nn.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]
    grouped_second = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (0,), (1,))

    def read_as_a_whole(x, w):
        y = dot(x, w)
        return swiglu(y) + y.sum(-1, keepdims=True)

    def named(x, w):
        return swiglu(checkpoint_name(dot(x, w), "mlpwi"))

    def cast(x, w):
        gate, up = jnp.split(lax.ragged_dot(x, w, FULL, preferred_element_type=F32), 2, -1)
        return jax.nn.silu(gate.astype(BF16)) * up.astype(BF16)

    def cast_after(x, w):
        gate, up = jnp.split(dot(x, w), 2, -1)
        return jax.nn.silu(gate).astype(jnp.float8_e4m3fn).astype(BF16) * up

    return {
        "not-halves": (lambda x, w: jax.nn.silu(dot(x, w[..., :N])) * dot(x * 2, w[..., N:]), x, w),
        "dimensions": (lambda x, w: swiglu(lax.ragged_dot_general(
            x, w.swapaxes(0, 1), FULL, grouped_second)), x, w),
        "dtype": (lambda x, w: swiglu(dot(x, w)), x.astype("float16"), w.astype("float16")),
        "precision": (lambda x, w: swiglu(lax.ragged_dot(x, w, FULL, precision="high")), x, w),
        "narrowing-cast": (cast, x, w),
        "narrowing-cast ": (cast_after, x, w),
        "other-reader": (read_as_a_whole, x, w),
        "named": (named, x, w),
        "width": (lambda x, w: swiglu(dot(x, w)), x, w[..., :192]),
        "no-rows": (lambda x, w: swiglu(dot(x, w)), x[:0], w),
    }[code]  # fmt: skip


@pytest.mark.parametrize("code", ["not-halves", "dimensions", "dtype", "precision",
                                  "narrowing-cast", "narrowing-cast ", "other-reader", "named",
                                  "width", "no-rows"])  # fmt: skip
def test_declined_for(code):
    fn, *args = case(code)
    assert set(declined(fn, *args)) == {code.strip()}


def one_gemm(gate, up, then=lambda y: y):
    def fn(x, w):
        y = then(lax.ragged_dot(x, w, FULL))
        return jax.nn.silu(gate(y)) * up(y)

    return fn


LOW, HIGH = (lambda y: y[:, :N]), (lambda y: y[:, N:])
NEARLY = {
    "gate: slice(": one_gemm(lambda y: y[:, ::2], lambda y: y[:, 1::2]),
    "gate: squeeze": one_gemm(lambda y: y[..., 0], lambda y: y[..., 1],
                              lambda y: y.reshape(y.shape[0], -1, 2)),
    "gate: slice(start_indices=(0, 0), ": one_gemm(
        lambda y: y[:, : N // 2], lambda y: y[:, N // 2 : N]
    ),
    "gate: slice(start_indices=(0, 0), limit_indices=(": one_gemm(
        lambda y: y[:, :64], lambda y: y[:, 192:]
    ),
    "gate: min": one_gemm(lambda y: jnp.minimum(LOW(y), 7), HIGH),
    "up: add": one_gemm(LOW, lambda y: HIGH(y) + 1),
    "gate: add": one_gemm(LOW, HIGH, lambda y: y + jnp.arange(2 * N, dtype=BF16)),
}  # fmt: skip


@pytest.mark.parametrize("miss", NEARLY)
def test_what_stands_between_gemm_and_product_is_told(miss):
    """Gate and up interleaved, clipped or with a bias: near enough to say why it is none."""
    x, w, _, _ = data()
    reason = declined(NEARLY[miss], x, w)["near-miss"]
    factor, _, found = miss.partition(": ")
    assert f"ragged_dot_general → {factor}" in reason.sentence
    assert reason.found.startswith(found), reason.found
    assert "test_gmm_swiglu.py:" in reason.found


def test_what_it_puts_in_place_is_no_near_miss():
    x, w, _, _ = data()
    report = explain(lambda x, w: split(x, w, FULL), x, w, passes=[NAME])
    assert report.counts() == {NAME: 1}
    assert not report.declined


@pytest.mark.parametrize(
    "fn",
    [lambda x, w: jax.nn.silu(LOW(lax.ragged_dot(x, w, FULL))) * 2,
     lambda x, w: jax.nn.silu(LOW(lax.ragged_dot(x, w, FULL))) * x[:, :1],
     lambda x, w: LOW(lax.ragged_dot(x, w, FULL)) * HIGH(lax.ragged_dot(x, w, FULL)),
     lambda x, w: lax.ragged_dot(jax.nn.silu(x) * (x + 1), w, FULL)],
    ids=["one factor", "another array", "no activation", "before the GEMM"],
)  # fmt: skip
def test_what_is_not_even_near_is_not_told(fn):
    x, w, _, _ = data()
    assert not explain(fn, x, w, passes=[NAME]).sites


def test_declined_under_a_mesh_that_a_compiler_splits_arrays_over():
    x, w, _, _ = data()
    # Under an Explicit one, jax has no type for a ragged_dot.
    mesh = AbstractMesh((4, 1), ("data", "one"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        report = explain(lambda x, w: split(x, w, FULL), x, w, passes=[NAME])
    (site,) = report.declined
    assert [r.code for r in site.reasons] == ["mesh"]
    assert "data=4;" in str(site.reasons[0])


def test_a_name_that_lives_on_is_kept_and_one_that_would_vanish_is_not(eqns_of):
    def with_name(x, w, sizes):
        gate, up = jnp.split(lax.ragged_dot(x, w, sizes), 2, -1)
        return jax.nn.silu(checkpoint_name(gate, "gate")) * up

    args = (*data(), FULL)
    (reason,) = declined(with_name, *args[:2], FULL).values()
    assert "'gate'" in str(reason)
    policy = jax.checkpoint_policies.save_only_these_names("gate")
    saved = jax.checkpoint(with_name, policy=policy)
    assert set(declined(jax.jit(saved), *args[:2], FULL)) == {"named"}
    grad = gradients(with_name)
    assert counts(grad, *args) == {NAME: 1}
    assert len(eqns_of(ours(grad), *args, name="name")) == 1
    close(jax.jit(ours(grad))(*args), jax.jit(grad)(*args))


def test_other_products_are_no_candidates():
    x, w, _, _ = data()
    gelu = lambda x, w: (lambda g, u: jax.nn.gelu(g) * u)(*jnp.split(
        lax.ragged_dot(x, w, FULL), 2, -1))  # fmt: skip
    one_half = lambda x, w: jax.nn.silu(lax.ragged_dot(x, w, FULL)[:, :N]) * x
    dense_one = lambda x, w: jax.nn.silu(x @ w[0][:, :N]) * (x @ w[0][:, N:])
    for fn in (gelu, one_half, dense_one):
        assert not explain(fn, x, w, passes=[NAME]).sites


# --- megablox -------------------------------------------------------------------------------------


def gmm(x, w, sizes, offset=None, **options):
    from jax.experimental.pallas.ops.tpu.megablox import gmm as kernel

    return kernel(x, w, sizes, BF16, (32, 128, 128), offset, interpret=True, **options)


def megablox(x, w, sizes, offset=None):
    gate, up = jnp.split(gmm(x, w, sizes, offset), 2, -1)
    return jax.nn.silu(gate) * up


def megablox_apart(x, w, sizes, offset=None):
    dot = lambda w: gmm(x, w.swapaxes(1, 2), sizes, offset, transpose_rhs=True)
    return jax.nn.silu(dot(w[..., :N])) * dot(w[..., N:])


@pytest.mark.parametrize("form", [megablox, megablox_apart], ids=lambda f: f.__name__)
def test_the_grouped_gemm_of_megablox(form, eqns_of):
    """Of a shard: the second and third of four groups are here; others' rows are zero."""
    x, w, wo, ct = (a[:32] for a in data())
    w, wo, offset, sizes = w[1:3], wo[1:3], jnp.int32(1), np.array([4, 9, 13, 6], np.int32)

    def loss(x, w, offset):
        h = form(x, w, sizes, offset).astype(F32)
        return (h * h * ct.astype(F32)).sum()

    grad = jax.grad(loss, (0, 1))
    assert counts(loss, x, w, offset) == counts(grad, x, w, offset) == {NAME: 1}
    calls = [e.params["name"] for e in eqns_of(ours(grad), x, w, offset, name="jit")]
    plain = [e.params["name"] for e in eqns_of(grad, x, w, offset, name="jit")]
    assert plain.count("gmm") - calls.count("gmm") == (1 if form is megablox else 2)
    assert plain.count("tgmm") == calls.count("tgmm")
    want = jax.jit(grad)(x, w, offset)
    outside = jax.jit(ours(grad))
    close(outside(x, w, offset), want, "optimize(grad)")
    with pytest.raises(AssertionError):
        close(outside(x, w, jnp.int32(2)), want)
    if form is megablox:
        close(jax.jit(jax.grad(ours(loss), (0, 1)))(x, w, offset), want, "grad(optimize)")


def test_a_kernel_that_only_has_the_name_is_none():
    x, w, _, _ = data()

    @jax.jit
    def gmm(x, w, sizes):
        from jax.experimental.pallas.ops.tpu.megablox import gmm as kernel

        return kernel(x, w, sizes, BF16, (32, 128, 128), interpret=True) * 2

    fn = lambda x, w: (lambda y: jax.nn.silu(y[:, :N]) * y[:, N:])(gmm(x, w, FULL))
    assert not explain(fn, x[:32], w, passes=[NAME]).sites
