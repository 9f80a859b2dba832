"""Every pass, and every pair of them, on every pass's example: the contract holds, and it ends."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from relower.compat import tracing
from relower.gates.verify.compare import difference
from relower.passes import registry
from relower.passes.base import Contract
from relower.passes.engine.rewrite import rewrite

PASSES = registry.all_passes()
EXAMPLES = {f"{p.name}: {e.label}": (p, e) for p in PASSES for e in p.examples()}
NEW_PAIRS = {
    "inverse_permutation: scores": 1,
    "argsort_packed_key: expert ids": 2,
    "affine_gather: sorted tokens": 8,
    "permutation_scatter: sorted rows": 9,
    "top_k_scatter: two experts a token": 1,
    "sorted_scatter: two rows a token": 9,
}
"""How many pairs make another program of an example than either pass alone; none of the others."""
ULPS = 8


def orders(pair):
    """Both, where the two may want one equation: the first is preferred."""
    rivals = len(pair) == 2 and pair[0].roots() & pair[1].roots()
    return (pair, pair[::-1]) if rivals else (pair,)


def loosest(applied):
    order = list(Contract)
    return max((p.contract for p in PASSES if p.name in applied), key=order.index)


class Programs:
    """What sets of passes make of one program, each distinct result once."""

    def __init__(self, fn, args):
        avals = [tracing.type_of(a) for a in args]
        self.closed = tracing.trace(fn, args, {}, avals).closed
        self.results = {}
        """Jaxpr and strictest contract that it was made by, by text."""
        self.made = {}
        """Texts that each set of passes comes to; None where it leaves the program as it is."""

    def rewrite_by(self, passes):
        done = rewrite(self.closed, passes)
        assert done.report.ended
        assert not done.report.notes
        assert done.report.rounds <= 3
        texts = self.made.setdefault(frozenset(p.name for p in passes), set())
        if not done.report.applied:
            assert done.closed is self.closed
            texts.add(None)
            return
        again = rewrite(done.closed, passes)
        assert not again.report.applied, str(again.report)
        assert again.closed is done.closed
        text, contract = str(done.closed), loosest(done.report.counts())
        known = self.results.get(text, (done.closed, contract))[1]
        self.results[text] = done.closed, contract if known.admits(contract) else known
        texts.add(text)

    def new_pairs(self):
        """Pairs that make what neither of the two makes alone."""
        return [
            pair for pair, texts in self.made.items()
            if len(pair) == 2 and texts - {None}.union(*(self.made[frozenset({p})] for p in pair))
        ]  # fmt: skip


def within(example):
    if not example.mesh:
        return contextlib.nullcontext()
    names, sizes = tuple(example.mesh), tuple(example.mesh.values())
    return jax.set_mesh(jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names)))


def values(example):
    """Arrays of an example's types, with many ties and exact sums; or what it gives."""
    r, most = np.random.RandomState(0), example.most
    return tuple(
        a if isinstance(a, np.ndarray) else r.randint(-most, most + 1, a.shape).astype(a.dtype)
        for a in example.args
    )


def evaluated(closed, args):
    found = jax.jit(lambda *args: tracing.evaluate(closed, *args))(*args)
    return [np.asarray(leaf) for leaf in found]


def check_contract(want, got, contract):
    """That a contract is kept on these values; one that moves a rounding, to some ulps."""
    place = difference(want, got, contract, arithmetic=False)
    assert place is None, f"{contract}: {place}"
    for w, g in zip(want, got, strict=True):
        if contract is Contract.ROUNDING and jnp.issubdtype(w.dtype, jnp.floating):
            wide, off = w.astype(np.float64), np.abs(w.astype(np.float64) - g.astype(np.float64))
            assert off.max() <= ULPS * float(jnp.finfo(w.dtype).eps) * np.abs(wide).max()
        elif contract is Contract.ROUNDING:
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pass_and_pair_keeps_the_looser_contract_and_ends(name):
    p, example = EXAMPLES[name]
    with within(example):
        programs = Programs(p.before, example.args)
        pairs = list(itertools.combinations(PASSES, 2))
        assert len(pairs) == len(PASSES) * (len(PASSES) - 1) // 2
        for one in (*((q,) for q in PASSES), *pairs):
            for order in orders(one):
                programs.rewrite_by(order)
        assert None not in programs.made[frozenset({p.name})]
        assert len(programs.new_pairs()) == NEW_PAIRS.get(name, 0), programs.new_pairs()
        want = evaluated(programs.closed, values(example))
        assert any(np.any(w) for w in want)
        for closed, contract in programs.results.values():
            check_contract(want, evaluated(closed, values(example)), contract)


def test_the_examples_counted_are_there():
    assert NEW_PAIRS.keys() <= EXAMPLES.keys()


@pytest.mark.parametrize(
    ("contract", "wrong"),
    [
        (Contract.BITWISE, lambda x: -x),  # zeros' signs
        (Contract.VALUE, lambda x: x.at[1].set(2)),
        (Contract.ROUNDING, lambda x: x.at[1].set(1 + 2e-6)),
    ],
    ids=["bitwise", "value", "rounding"],
)
def test_a_broken_contract_is_seen(contract, wrong):
    zeros = [np.zeros(3, np.float32)] if contract is Contract.BITWISE else [np.ones(3, np.float32)]
    check_contract(zeros, zeros, contract)
    with pytest.raises(AssertionError):
        check_contract(zeros, [np.asarray(wrong(jnp.asarray(zeros[0])))], contract)


def test_a_pair_that_makes_something_new_is_counted_once():
    """The two passes of an inverse permutation on a program that has a site for each."""
    by = {p.name: p for p in PASSES}
    pair = (by["nonnegative_index"], by["argsort_packed_key"])

    def f(table, scores):
        ids = jnp.argmax(scores, -1)
        return table[ids], jnp.argsort(lax.rem(ids, 3))

    programs = Programs(f, (jnp.ones((6, 2)), jnp.ones((8, 6))))
    for one in ((pair[0],), (pair[1],), pair):
        programs.rewrite_by(one)
    assert programs.new_pairs() == [frozenset(p.name for p in pair)]
    assert len(programs.results) == 3
