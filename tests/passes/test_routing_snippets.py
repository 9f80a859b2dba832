"""argsort_packed_key fires on routing as people write it, with no thought of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import explain, optimize

N, E, K = 64, 16, 2


def ids_of(scores, k=K):
    return lax.top_k(scores, k)[1].reshape(-1)


def mesh():
    return jax.make_mesh((4,), ("e",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))


def sharded(body):
    return jax.shard_map(body, mesh=mesh(), in_specs=P("e"), out_specs=P("e"), check_vma=False)


# Keys made of integers of any value.
OF_IDS = {
    "mod": lambda i: i % E,
    "jnp_mod": lambda i: jnp.mod(i, jnp.int32(E)),
    "divmod": lambda i: divmod(i, E)[1],
    "abs_mod": lambda i: jnp.abs(i) % E,
    "floor_divide": lambda i: jnp.floor_divide(i % 64, 4),
    "clip": lambda i: jnp.clip(i, 0, E - 1),
    "minimum_of_maximum": lambda i: jnp.minimum(jnp.maximum(i, -1), E),
    "where_below_and_above": lambda i: jnp.where(i < 0, 0, jnp.where(i >= E, E - 1, i)),
    "where_inside": lambda i: jnp.where((i >= 0) & (i < E), i, E),
    "where_inside_padding": lambda i: jnp.where(jnp.logical_and(i >= 0, i < E), i, -1),
    "where_outside": lambda i: jnp.where((i < 0) | (i > E), E, i),
    "local_expert": lambda i: (lambda a: jnp.where((a >= 0) & (a < 4), a, 4))(i - 4),
    "product_with_a_mask": lambda i: i * ((i >= 0) & (i < E)),
    "jnp_select": lambda i: jnp.select([i < 0, i < 8], [0, i], 8),
    "lax_select": lambda i: lax.select(i < 0, jnp.zeros_like(i), i) & 15,
    "buckets": lambda i: jnp.maximum(
        jnp.minimum(jnp.where(i < 16, i, 16 + jnp.floor_divide(i - 16, 8)), 31), 0
    ),
    "comparisons_added": lambda i: (i > 3).astype(jnp.int32) + (i > 9),
    "padding_renamed": lambda i: (lambda a: jnp.where(a == -1, E, a).astype(jnp.uint8))(
        jnp.clip(i, -1, E)
    ),
    "table": lambda i: jnp.asarray(np.arange(E, dtype=np.int32)[::-1]).at[i].get(mode="clip"),
    "hash": lambda i: (i.astype(jnp.uint32) * jnp.uint32(2654435761) >> 16) % E,
    "offsets": lambda i: (lambda c: jnp.searchsorted(
        jnp.cumsum(c) - c, jnp.arange(N), side="right") - 1)(jnp.bincount(i, length=E)),
    "segments": lambda i: jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), i[1:] != i[:-1]])),
    "remainder_and_fix": lambda i: (lambda r: jnp.where(r < 0, r + E, r))(lax.rem(i, E)),
    "of_either_branch": lambda i: lax.cond(
        i[0] > 3, lambda a: a % E, lambda a: jnp.clip(a, 0, 3), i
    ),
    "while": lambda i: lax.while_loop(
        lambda c: c[1] < 3, lambda c: (jnp.where(c[0] < E - 1, c[0] + 1, c[0]), c[1] + 1),
        (i % E, 0))[0],
}  # fmt: skip

# Keys made of routing scores.
OF_SCORES = {
    "top_k": ids_of,
    "padding_by_a_mask": lambda s: jnp.where(s.sum(-1) > 0, ids_of(s, 1), -1),
    "padding_appended": lambda s: jnp.concatenate([ids_of(s), jnp.full((8,), E, jnp.int32)]),
    "local": lambda s: (lambda a: jnp.where((a >= 0) & (a < 4), a, 4))(ids_of(s) - 4),
    "group": lambda s: ids_of(s) // 4,
    "int8": lambda s: ids_of(s).astype(jnp.int8),
    "uint8": lambda s: ids_of(s).astype(jnp.uint8),
    "through_float32": lambda s: ids_of(s).astype(jnp.float32).astype(jnp.int32),
    "through_bfloat16": lambda s: ids_of(s).astype(jnp.bfloat16).astype(jnp.int32),
    "one_hot_argmax": lambda s: jax.nn.one_hot(jnp.argmax(s, -1), E).argmax(-1),
    "one_hot_matmul": lambda s: (
        jax.nn.one_hot(jnp.argmax(s, -1), E) @ jnp.arange(E, dtype=jnp.float32)
    ).astype(jnp.int32),
    "place_in_the_buffer": lambda s: (lambda h: (jnp.cumsum(h, 0) * h).sum(-1) - 1)(
        jax.nn.one_hot(jnp.argmax(s, -1), E, dtype=jnp.int32)
    ),
    "place_in_the_buffer_by_floats": lambda s: (
        lambda h: ((jnp.cumsum(h, 0) * h).sum(-1) - 1).astype(jnp.int32)
    )(jax.nn.one_hot(jnp.argmax(s, -1), E)),
    "dropped": lambda s: (lambda i, h: (lambda p: jnp.where(p < 8, i * 8 + p, E * 8))(
        ((jnp.cumsum(h, 0) - 1) * h).sum(-1)))(
            jnp.argmax(s, -1), jax.nn.one_hot(jnp.argmax(s, -1), E, dtype=jnp.int32)),
    "limited_to_groups": lambda s: ids_of(jnp.where(
        jnp.repeat(jax.nn.one_hot(lax.top_k(s.reshape(N, 4, 4).max(-1), 2)[1], 4).sum(1), 4,
                   axis=1) > 0, s, -jnp.inf)),
    "approx_max_k": lambda s: lax.approx_max_k(s, K)[1].reshape(-1),
    "digitize": lambda s: jnp.digitize(s[:, 0], jnp.linspace(0.0, 1, 9)),
    "searchsorted": lambda s: jnp.searchsorted(jnp.linspace(0.0, 1, 9), s[:, 0]),
    "nonzero": lambda s: jnp.nonzero(s[:, 0] > 0, size=N, fill_value=N)[0],
    "valid": lambda s: ~(s[:, 0] > 0),
    "any": lambda s: jnp.any(s > 0, axis=-1),
    "randint": lambda s: jax.random.randint(jax.random.key(0), (N,), 0, E),
    "categorical": lambda s: jax.random.categorical(jax.random.key(0), s),
    "token": lambda s: ids_of(s) * 0 + jnp.repeat(jnp.arange(N), K),
    "remat": lambda s: jax.checkpoint(lambda s: jnp.where(ids_of(s) < 0, 0, ids_of(s)))(s),
    "scan": lambda s: lax.scan(
        lambda c, r: (c, jnp.where(ids_of(r) < 8, ids_of(r), 8)), 0, s.reshape(4, -1, E)
    )[1].reshape(-1),
    "scanned_offset": lambda s: lax.scan(
        lambda c, r: ((jnp.where(c >= E, 0, c) + 1) % E, (ids_of(r) + c) % E),
        jnp.int32(0), s.reshape(4, -1, E))[1].reshape(-1),
    "local_of_a_shard": sharded(lambda s: (lambda a: jnp.where((a >= 0) & (a < 4), a, 4))(
        ids_of(s) - lax.axis_index("e") * 4)),
    "rolled_in_a_shard": sharded(lambda s: (ids_of(s) - lax.axis_index("e") * 4) % E),
    "gathered_in_a_shard": sharded(lambda s: (lambda i: jnp.where(
        i // 4 == lax.axis_index("e"), i % 4, 4))(lax.all_gather(ids_of(s), "e", tiled=True))),
}  # fmt: skip

NAME = "argsort_packed_key"


def ids():
    return np.random.RandomState(0).randint(-40, 40, N).astype(np.int32)


def scores():
    return np.random.RandomState(0).randn(N, E).astype(np.float32)


SNIPPETS = [(k, f, ids) for k, f in OF_IDS.items()] + [(k, f, scores) for k, f in OF_SCORES.items()]


@pytest.mark.parametrize(("make", "args"), [s[1:] for s in SNIPPETS], ids=[s[0] for s in SNIPPETS])
def test_packs(make, args):
    fn = lambda x: jnp.argsort(make(x))
    report = explain(fn, args(), passes=[NAME])
    assert not report.declined, report
    assert report.applied
    found, plain = jax.jit(lambda x: (optimize(fn, passes=[NAME])(x), fn(x)))(args())
    np.testing.assert_array_equal(found, plain)


UNPROVABLE = {
    "any_integer": (lambda i: i, ids),
    "usually_in_range": (lambda i: i + 40, ids),
    "one_side": (lambda i: jnp.maximum(i, 0), ids),
    "wrong_mask": (lambda i: jnp.where((i >= 0) & (i[::-1] < E), i, E), ids),
    "random_bits": (lambda s: jax.random.bits(jax.random.key(0), (N,)), scores),
    "half": (lambda s: (ids_of(s).astype(jnp.float32) * 0.5).astype(jnp.int32), scores),
    "repeated_by_counts": (
        lambda i: jnp.repeat(jnp.arange(E), i[:E] & 7, total_repeat_length=N), ids),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNPROVABLE))
def test_declines(name):
    make, args = UNPROVABLE[name]
    report = explain(lambda x: jnp.argsort(make(x)), args(), passes=[NAME])
    (site,) = report.declined
    assert [r.code for r in site.reasons] == ["unknown-range"]
