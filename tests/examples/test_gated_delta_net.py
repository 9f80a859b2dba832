"""The example computes the gated delta rule, trains, and lowers at the real size."""

import importlib.util
from dataclasses import replace
from functools import partial

import gated_delta_net as gdn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower import cost, diff, optimize
from relower.compat import bodies, jaxprs
from relower.gates.containment import strays
from relower.lowering import lower
from relower.passes.parts import block_inverse


def rule_inputs(tokens, dims=(2, 3), key_dim=8, value_dim=16, seed=0):
    r = np.random.RandomState(seed)
    q, k = (r.randn(*dims, tokens, key_dim).astype(np.float32) for _ in range(2))
    v = r.randn(*dims, tokens, value_dim).astype(np.float32)
    log_decay = -np.abs(r.randn(*dims, tokens)).astype(np.float32) * r.choice([0.01, 1.0, 9.0])
    beta = r.rand(*dims, tokens).astype(np.float32)
    return np.asarray(gdn.unit(q)), np.asarray(gdn.unit(k)), v, log_decay, beta


def sequential(q, k, v, log_decay, beta):
    """The recurrence, token by token."""

    def step(state, xs):
        q, k, v, log_decay, beta = xs
        state = state * jnp.exp(log_decay)[..., None, None]
        found = jnp.einsum("bhk,bhkv->bhv", k, state)
        state = state + jnp.einsum("bhk,bhv->bhkv", k * beta[..., None], v - found)
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    xs = [jnp.moveaxis(a, 2, 0) for a in (q, k, v, log_decay, beta)]
    first = jnp.zeros((*q.shape[:2], q.shape[-1], v.shape[-1]))
    return jnp.moveaxis(jax.lax.scan(step, first, xs)[1], 0, 2)


@pytest.mark.parametrize("chunk", [64, 128])
def test_the_chunked_rule_is_the_recurrence_and_so_are_its_gradients(chunk):
    args = rule_inputs(256, seed=chunk)
    weights = np.cos(np.arange(args[2].size, dtype=np.float32)).reshape(args[2].shape)
    rules = sequential, partial(gdn.delta_rule, chunk=chunk)
    (want, want_grads), (got, got_grads) = (
        jax.jit(
            lambda *args, rule=rule: (
                rule(*args),
                jax.grad(lambda *a: (rule(*a) * weights).sum(), argnums=range(5))(*args),
            )
        )(*args)
        for rule in rules
    )
    # Sums over 256 tokens in another order, in float32.
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())
    for g, w in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-4 * np.abs(w).max())


def test_a_wrong_rule_is_seen():
    q, k, v, log_decay, beta = rule_inputs(128)
    rule = jax.jit(partial(gdn.delta_rule, chunk=64))
    want = np.asarray(sequential(q, k, v, log_decay, beta))
    for wrong in (
        (q, k, v, log_decay * 1.01, beta),
        (q, k, v, log_decay, beta * 1.001),
        (np.roll(q, 1, axis=2), k, v, log_decay, beta),
    ):
        assert np.abs(rule(*wrong) - want).max() > 3e-5 * np.abs(want).max()


def conv_inputs(tokens, channels, dtype, batch=2):
    r = np.random.RandomState(0)
    qkv = jnp.asarray(r.randn(batch, tokens, channels), dtype)
    state = jnp.asarray(r.randn(batch, gdn.TAPS - 1, channels), dtype)
    return qkv, state, jnp.asarray(r.randn(gdn.TAPS, channels), jnp.float32)


def test_the_convolution_looks_back_three_tokens():
    qkv, state, taps = conv_inputs(10, 4, jnp.float32)
    x = np.concatenate([state, qkv], axis=1)
    want = np.zeros(qkv.shape, np.float32)
    for token in range(10):
        want[:, token] = (x[:, token : token + 4] * np.asarray(taps)).sum(1)
    want = want / (1 + np.exp(-want))
    np.testing.assert_allclose(gdn.conv_reference(qkv, state, taps), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_is_the_convolution(dtype):
    args = conv_inputs(192, 128, dtype)  # three blocks of tokens, four stacks in each
    want = gdn.conv_reference(*args)
    got = gdn.conv_kernel_call(*args, interpret=True)
    assert got.dtype == dtype
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        *(np.asarray(a, np.float32) for a in (got, want)), rtol=4 * unit, atol=4 * unit
    )


def test_a_sequence_in_two_parts_goes_on_where_it_stopped():
    qkv, state, taps = conv_inputs(64, 8, jnp.float32)
    whole = gdn.causal_conv(qkv, state, taps)
    first = gdn.causal_conv(qkv[:, :32], state, taps)
    second = gdn.causal_conv(qkv[:, 32:], qkv[:, 29:32], taps)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)


def test_trains():
    config = replace(gdn.TINY, batch=2, layers=1)
    losses = gdn.train(config, jax.jit(gdn.make_step(config), donate_argnums=0), 16)
    assert losses[0] > 3
    assert np.mean(losses[-4:]) < 0.6 * losses[0]


# --- by products of blocks, against float64 -------------------------------------------------------

DRAWS = 24


class InFloat64:
    """`jax.numpy` to a module that then computes in float64 what it would in float32."""

    float32 = jnp.float64

    def __getattr__(self, name):
        return getattr(jnp, name)


def rule_gradients(*args):
    *operands, weights = args
    weighted = lambda *a: (gdn.delta_rule(*a, chunk=64) * weights).sum()
    return jax.grad(weighted, argnums=range(5))(*operands)


@pytest.fixture(scope="module")
def drawn():
    """Inputs, cotangents, and the gradients in float64 of independent draws side by side."""
    args = rule_inputs(128, dims=(DRAWS, 2))
    args = (*args, np.random.RandomState(1).randn(*args[2].shape).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(gdn, "jnp", InFloat64())
        exact = jax.jit(lambda *a: rule_gradients(*a))(*(np.asarray(a, np.float64) for a in args))
    assert {a.dtype for a in exact} == {np.dtype(np.float64)}
    return args, [np.asarray(a) for a in exact]


def errors(fn, drawn):
    """How far off each gradient is in each draw, as a part of its size: ``[gradients, draws]``."""
    args, exact = drawn
    norm = lambda a: np.linalg.norm(a.reshape(DRAWS, -1), axis=1)
    found = jax.jit(lambda *a: fn(*a))(*args)
    return np.array([norm(np.asarray(a, np.float64) - want) / norm(want)
                     for a, want in zip(found, exact, strict=True)])  # fmt: skip


@pytest.fixture(scope="module")
def by_solving(drawn):
    return errors(rule_gradients, drawn)


def ratios(by_blocks, by_solving):
    """Of each gradient, over all draws: a single one is chance, whichever inverse is better."""
    return np.exp(np.log(by_blocks / by_solving).mean(1))


def optimized_inside(*args):
    *operands, weights = args
    rule = optimize(partial(gdn.delta_rule, chunk=64), passes=["triangular_inverse"])
    return jax.grad(lambda *a: (rule(*a) * weights).sum(), argnums=range(5))(*operands)


@pytest.mark.parametrize("way", ["optimize(grad)", "grad(optimize)"])
def test_over_many_draws_the_rule_by_blocks_is_as_exact_as_by_solving(drawn, by_solving, way):
    fn = optimized_inside
    if way == "optimize(grad)":
        fn = optimize(rule_gradients, passes=["triangular_inverse"])
    found = ratios(errors(fn, drawn), by_solving)
    assert (found <= 1.10).all(), found


def test_products_of_fewer_bits_are_seen_in_every_gradient(monkeypatch, drawn, by_solving):
    """Sixteen bits of each factor, between the default's eight and float32's 24."""
    exact = block_inverse.matmul
    rounded = lambda x: lax.reduce_precision(x, 8, 15)
    monkeypatch.setattr(block_inverse, "matmul", lambda a, b: exact(rounded(a), rounded(b)))
    found = ratios(errors(optimized_inside, drawn), by_solving)
    assert (found > 1.10).all(), found


@pytest.mark.parametrize("name", ["real", "real_128_grad"])
def test_the_real_size_lowers_for_the_tpu_with_its_kernel(name):
    program = lower(getattr(gdn, name)(), levels=("inlined",))
    assert program.unknowns == ()
    # Forward, and once more where the backward pass recomputes the layer.
    ((digest, calls),) = program.kernel_calls.items()
    assert calls == 2
    assert "causal_conv" in program.kernels[digest].names


# --- what the passes do to it -------------------------------------------------------------------


def equations(body):
    """Every equation of a jaxpr and of the bodies that relower enters."""
    for eqn in jaxprs.opened(body).eqns:
        yield eqn
        for entered in bodies.carried(eqn).entered:
            yield from equations(entered.body)


def traced(case, passes):
    fn = optimize(case.fn, passes=passes) if passes else case.fn
    return list(equations(jax.make_jaxpr(fn)(*case.args)))


@pytest.mark.parametrize(("name", "before"), [("conv", 1), ("real_grad", 3)])
def test_no_wide_copy_of_the_convolution_s_input_is_left(name, before):
    """Forward and recomputed off a TPU, and in the backward pass."""

    def copies(passes):
        return [
            e
            for e in traced(getattr(gdn, name)(), passes)
            if e.primitive.name == "convert_element_type"
            and e.outvars[0].aval.dtype == np.float32
            and e.outvars[0].aval.shape[1:2] == (gdn.REAL.sequence + gdn.TAPS - 1,)
        ]

    assert len(copies(None)) == before
    assert not copies(["late_cast"])


@pytest.mark.parametrize("name", ["real_grad", "real_128_grad"])
def test_no_triangular_solve_is_left(name):
    """Forward, recomputed, and the backward pass's own, which reuses the inverse."""
    solves = lambda passes: [
        e for e in traced(getattr(gdn, name)(), passes) if e.primitive.name == "triangular_solve"
    ]
    assert len(solves(None)) == 3
    assert not solves(["triangular_inverse"])


def test_every_stack_of_tokens_in_the_kernel_is_dense_and_nothing_else_changes():
    case = gdn.conv_kernel()
    stacks = lambda passes: [
        e.outvars[0].aval.shape
        for e in traced(case, passes)
        if e.primitive.name in ("stack", "concatenate")
    ]
    assert stacks(None) == 4 * [(gdn.STACKED, 1, 4096)]
    assert stacks(["stable_stack"]) == 4 * [(gdn.STACKED * 4, 8, 128)]
    dense = replace(case, fn=optimize(case.fn, passes=["stable_stack"]))
    found = diff(*(lower(c, levels=("inlined",)) for c in (case, dense)), level="inlined")
    assert found.changes
    assert not strays(found, ["kernel:causal_conv"])


# --- compiled for the TPU, where its compiler is installed --------------------------------------

compiled = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu isn't installed, so nothing is compiled: install relower[tpu]",
)


def costs(case, name):
    return [cost(c) for c in (case, replace(case, fn=optimize(case.fn, passes=[name])))]


@pytest.mark.libtpu
@compiled
def test_a_late_cast_saves_the_copy_and_a_fifth_of_the_cycles():
    before, after = costs(gdn.conv(), "late_cast")
    copy = 4 * 16_384 * 4096
    assert before.memory.temp >= copy
    assert after.memory.temp == 0
    if {before.rung, after.rung} == {"profile"}:  # an older compiler's analysis may die
        assert before.total().cycles >= 1.25 * after.total().cycles


@pytest.mark.libtpu
@compiled
def test_the_kernel_compiles_with_dense_stacks():
    for found in costs(gdn.conv_kernel(), "stable_stack"):
        assert [op.name.partition(".")[0] for op in found.kernels] == ["causal_conv"]
