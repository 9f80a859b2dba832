"""A SwiGLU over grouped GEMMs as programs write it, its MLP and gradients, and what they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

M, K, N, G = 48, 128, 128, 4
BF16, F32 = jnp.bfloat16, jnp.float32
FULL, DROPPING = np.array([11, 0, 30, 7], np.int32), np.array([5, 17, 0, 9], np.int32)


def data(seed=0, dtype=BF16):
    """Rows, weights of gate and up side by side, the weights back, and a cotangent."""
    r = np.random.RandomState(seed)
    shapes = (M, K), (G, K, 2 * N), (G, N, K), (M, K)
    scales = 1, K**-0.5, N**-0.5, 1
    return tuple(jnp.asarray(r.randn(*s) * c, dtype) for s, c in zip(shapes, scales))


# --- how programs write it; each takes rows, both weights side by side, and sizes -----------------


def split(x, w, sizes):
    gate, up = jnp.split(lax.ragged_dot(x, w, sizes), 2, -1)
    return jax.nn.silu(gate) * up


def sliced(x, w, sizes):
    both = lax.ragged_dot(x, w, sizes)
    return both[:, N:] * jax.nn.silu(both[:, :N])


def up_first(x, w, sizes):
    up, gate = jnp.split(lax.ragged_dot(x, jnp.roll(w, N, -1), sizes), 2, -1)
    return up * (jax.nn.sigmoid(gate) * gate)


def widened(x, w, sizes):
    both = lax.ragged_dot(x, w, sizes).astype(F32)
    gate, up = both[:, :N], both[:, N:]
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def in_float32(x, w, sizes):
    gate, up = jnp.split(lax.ragged_dot(x, w, sizes, preferred_element_type=F32), 2, -1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def apart(x, w, sizes):
    dot = lambda w: lax.ragged_dot(x, w, sizes)
    return jax.nn.silu(dot(w[..., :N] * 1)) * dot(w[..., N:] * 1)


def layer(form, x, w, wo, sizes):
    """The whole MLP, whose backward reads the product too."""
    return lax.ragged_dot(form(x, w, sizes), wo, sizes)


def loss(form, x, w, wo, ct, sizes):
    return (layer(form, x, w, wo, sizes).astype(F32) * ct.astype(F32)).sum()


def gradients(form):
    return jax.value_and_grad(functools.partial(loss, form), (0, 1, 2))


@jax.jit
def dense(x, w, wo, ct, sizes):
    """The output, and the loss' gradients, in float32 and by each row's own matrices."""
    group = jnp.sum(jnp.cumsum(sizes) <= jnp.arange(M)[:, None], axis=1)
    mine = (group < G)[:, None]

    def run(x, w, wo):
        both = jnp.einsum("mk,mkn->mn", x, w[jnp.minimum(group, G - 1)])
        h = jax.nn.silu(both[:, :N]) * both[:, N:]
        out = jnp.where(mine, jnp.einsum("mn,mnk->mk", h, wo[jnp.minimum(group, G - 1)]), 0)
        return (out * ct.astype(F32)).sum(), out

    grads, out = jax.grad(run, (0, 1, 2), has_aux=True)(*(a.astype(F32) for a in (x, w, wo)))
    return [out, *grads]


def exact(x, w, wo, ct, sizes):
    """`dense` in float64, by hand: the output, and the loss' gradients."""
    x, w, wo, ct = (np.asarray(a, np.float64) for a in (x, w, wo, ct))
    out, dx, dw, dwo = np.zeros((M, K)), np.zeros_like(x), np.zeros_like(w), np.zeros_like(wo)
    ends = np.cumsum([0, *sizes])
    for i in range(G):
        rows = slice(ends[i], ends[i + 1])
        gate, up = np.split(x[rows] @ w[i], 2, -1)
        sigmoid = 1 / (1 + np.exp(-gate))
        h, dh = gate * sigmoid * up, ct[rows] @ wo[i].T
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        both = np.concatenate([dh * up * slope, dh * gate * sigmoid], -1)
        out[rows], dwo[i] = h @ wo[i], h.T @ ct[rows]
        dx[rows], dw[i] = both @ w[i].T, x[rows].T @ both
    return [out, dx, dw, dwo]


def close(got, want, what="", tolerance=0.03):
    """Within three percent of the largest element: some units of bfloat16 after two GEMMs."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, what
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(b).max() > 0, what
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), what
