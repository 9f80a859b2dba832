"""A small step with a gated layer whose backward is written by hand, as it should be and broken."""

import jax
import jax.numpy as jnp

import relower

KEEP = {"tokens_kept": "1/kept", "loss": "1/loss", "mean_log_prob": "1/log_prob"}
KEEP |= {"last_log_prob": "1/last", "entropy": "1/entropy", "grad_norm": None}


def swiglu(x, broken):
    """``silu(gate) * up`` of ``[gate | up]``; the backward's halves can be the wrong way round."""

    @jax.custom_vjp
    def act(x):
        gate, up = jnp.split(x, 2, -1)
        return jax.nn.silu(gate) * up

    def bwd(x, g):
        gate, up = jnp.split(x, 2, -1)
        s = jax.nn.sigmoid(gate)
        halves = [g * up * s * (1 + gate * (1 - s)), g * gate * s]
        return (jnp.concatenate(halves[::-1] if broken == "layout" else halves, -1),)

    act.defvjp(lambda x: (act(x), x), bwd)
    return act(x)


def make_step(broken=None):
    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        h = x @ params["wi"]
        if broken == "halves":
            h = jnp.roll(h, h.shape[-1] // 2, -1)
        x = x + swiglu(h, broken) @ params["wo"]
        logits = x @ params["embedding"].T + 0.0 * jnp.sum(params["unused"])
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1).mean()
        figures = {"log_prob": chosen.mean(), "last": chosen[-1].mean(), "entropy": entropy}
        best = jnp.argmax(logits, -1).reshape(-1)
        figures["best"] = params["embedding"][best].sum()  # a site: best is never negative
        return -chosen.mean(), figures

    def step(params, tokens):
        (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        if broken == "sign":
            grads = {**grads, "wo": -grads["wo"]}
        if broken == "shrunk":
            grads = {**grads, "wi": grads["wi"] * 0.995}
        if broken == "nan":
            grads = {**grads, "wi": grads["wi"].at[0, 0].set(jnp.nan)}
        kept = tokens[:, 1:].size - (broken == "tokens")
        params = jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads)
        out = {"loss": value, "kept": jnp.int32(kept), "grads": grads, **figures}
        return params, out

    return step


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5
    params = {
        "embedding": normal(keys[0], 17, 12),
        "wi": normal(keys[1], 12, 16),
        "wo": normal(keys[2], 8, 12),
        "unused": jnp.zeros(3),
    }
    return params, jax.random.randint(keys[3], (4, 9), 0, 17)


def case(broken=None, **options):
    said = {"grads": "1/grads", "params": "0", "metrics": KEEP}
    said |= {"advance": lambda out, args: (out[0], args[1]), "args": arguments}
    return relower.case(
        make_step(broken), *jax.eval_shape(arguments), numerics=relower.Numerics(**said | options)
    )


def right():
    return case()


def broken():
    return {name: case(name) for name in
            ("layout", "halves", "sign", "shrunk", "nan", "tokens")}  # fmt: skip


def others():
    return {
        "silent": relower.case(make_step(), *jax.eval_shape(arguments)),
        "shapes": case(args=None),
        "nowhere": case(grads="1/gradients"),
        "stuck": case(advance=None),
        "is_nan": case("nan"),
        "unmoved": case(replicate=lambda args, seed: args),
    }
