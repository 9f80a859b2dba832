"""The hybrid decoder has what such a model is made of, and no hint for the passes."""

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from qwen_hybrid import cases, moe, trainer
from qwen_hybrid.config import BLOCK, REAL, SAVED, TINY

FOLDER = Path(cases.__file__).parent
EXPERTS = ("ragged_dot_general", "optimization_barrier", "top_k", "sort")


def equations(jaxpr):
    """Every equation, those of inner jaxprs where they stand."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.fixture(scope="module")
def traced():
    mesh = trainer.make_mesh()
    state, batch = cases.abstract_inputs(REAL, mesh)
    made = jax.make_jaxpr(trainer.make_forward_backward(REAL, mesh))(state.params, batch)
    return list(equations(made.jaxpr))


def test_only_its_cases_know_of_relower():
    texts = {p.name: p.read_text() for p in FOLDER.rglob("*.py")}
    knowing = {name for name, text in texts.items() if "import relower" in text}
    assert knowing == {"cases.py", "__main__.py"}  # what compares it, and what trains it
    assert not [name for name, text in texts.items() if "assume_range" in text]


def test_three_delta_nets_and_an_attention_in_each_block_under_a_scan(traced):
    """Micro-batches and blocks, and in a block the delta nets, forward and backward."""
    assert BLOCK == 4
    lengths = Counter(e.params["length"] for e in traced if e.primitive.name == "scan")
    assert REAL.micro_batches > 1
    assert {REAL.micro_batches, REAL.blocks, BLOCK - 1} <= set(lengths), lengths


def test_a_layer_s_backward_finds_what_is_saved_by_name(traced):
    remats = [e for e in traced if e.primitive.name.startswith(("remat", "checkpoint"))]
    assert remats
    named = {e.params["name"] for e in traced if e.primitive.name == "name"}
    assert named >= set(SAVED)


def test_the_experts_are_a_ring_of_chunks_over_ragged_groups_in_float8(traced):
    names = Counter(e.primitive.name for e in traced)
    assert all(names[name] for name in EXPERTS), names
    assert REAL.chunks > 1
    barriers = [e for e in traced if e.primitive.name == "optimization_barrier"]
    assert max(len(e.invars) for e in barriers) > 3  # one chunk with the next
    to = Counter(str(e.params["new_dtype"]) for e in traced if "new_dtype" in e.params)
    assert to["float8_e4m3fn"]
    over = [str(e.params.get("axis_name", "")) for e in traced]
    assert any("expert" in axes for axes in over)


def test_padding_is_no_part_of_the_routing():
    """No expert, no weight, and nothing of the balance's loss."""
    tokens, key = 16, jax.random.key(0)
    router = jax.random.normal(key, (TINY.hidden, TINY.experts))
    x = jax.random.normal(jax.random.fold_in(key, 1), (tokens, TINY.hidden), jnp.float32)
    mask = np.arange(tokens) % 3 > 0
    mesh = jax.make_mesh((1, 1, 1), trainer.make_mesh().axis_names)
    everywhere = (P(), P(), P())
    fn = jax.shard_map(
        lambda router, x, mask: moe.route(router, x, mask, TINY),
        mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False,
    )  # fmt: skip
    weights, ids, loss = jax.jit(fn)(router, x, mask)
    assert np.all((np.asarray(ids) == -1) == ~mask[:, None])
    assert not np.any(np.asarray(weights)[~mask])
    assert np.all(np.asarray(weights)[mask].sum(-1) > 0.9)
    other = jax.jit(fn)(router, jnp.where(mask[:, None], x, 7 * x[::-1]), mask)
    assert float(other[2]) == float(loss)


def test_a_balanced_choice_costs_one():
    experts, tokens = 4, 8
    chosen = jnp.full(experts, tokens * 2 // experts)
    likely = jnp.full((tokens, experts), 1 / experts)
    mesh = jax.make_mesh((1, 1, 1), trainer.make_mesh().axis_names)
    fn = jax.shard_map(moe.balance_loss, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P(),
                       check_vma=False)  # fmt: skip
    mask = jnp.ones(tokens, bool)
    assert float(jax.jit(fn)(chosen, likely, mask)) == pytest.approx(1)
    skewed = jnp.eye(experts)[jnp.zeros(tokens, int)]
    all_to_one = jnp.zeros(experts, int).at[0].set(tokens * 2)
    assert float(jax.jit(fn)(all_to_one, skewed, mask)) == pytest.approx(experts)
