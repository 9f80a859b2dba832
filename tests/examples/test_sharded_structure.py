"""What the routing of the example with sharded experts lowers to for a TPU, all passes run.

The train step is the example's own, forward and backward, its grouped matrix products by the
megablox kernels; every call is inlined, so that each operation has the line it is called from.
"""

import inspect
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import routed_moe as moe

from relower.lowering import lower
from relower.lowering.case import case
from relower.passes.optimize import optimize

TINY = replace(moe.TINY, chunks=2)
REAL = replace(moe.REAL, batch=16, chunks=2)
"""The size of the example's case ``real_sharded_experts``."""
CONFIGS = {
    "tiny": TINY,
    "tiny_drops": replace(TINY, buffer=16),
    "tiny_padding": replace(TINY, padding=True),
    "tiny_unrolled": replace(TINY, scan_layers=False),
    "tiny_bf16_router": replace(TINY, dtype=jnp.bfloat16, router_dtype=jnp.bfloat16),
    "real": REAL,
    "real_drops_padding": replace(REAL, buffer=40_960, padding=True),
}
LINES = inspect.getsource(moe).splitlines()
DEFINES = re.compile(r'\s*((?:%\d+, )*%\d+) = "([\w.]+)"\(([^)]*)\)')


class Form:
    """One form of a program: its operations and where they are called from."""

    def __init__(self, program, level):
        self.defined = {}
        self.ops = []
        for section in program.forms[level].sections:
            for text, index in zip(section.text.splitlines(), section.locations, strict=True):
                found = DEFINES.match(text)
                if found is None:
                    continue
                operands = re.findall(r"%\w+", found[3])
                op = (section.name, found[2], operands, text, program.locations[index])
                for result in found[1].split(", "):
                    assert (section.name, result) not in self.defined
                    self.defined[section.name, result] = op
                self.ops.append(op)

    def of(self, name):
        return [op for op in self.ops if op[1] == name]

    def constant(self, section, value):
        """Whether a value is computed from constants alone."""
        found = self.defined.get((section, value))
        if found is None:
            return False
        _, name, operands, _, _ = found
        if name in ("stablehlo.constant", "stablehlo.iota"):
            return True
        return bool(operands) and all(self.constant(section, operand) for operand in operands)

    def scatters_by_values(self):
        """Those whose indices aren't constants, by the line that they are called from."""
        found = []
        for section, _, operands, _, where in self.of("stablehlo.scatter"):
            if not self.constant(section, operands[(len(operands) - 1) // 2]):
                found.append(called_from(where))
        return found


class Lowered(Form):
    """A program with every call inlined."""

    def __init__(self, config, transform):
        def build(mesh):
            return jax.jit(transform(moe.make_step(config, mesh))), moe.abstract_inputs(config)

        levels = ("inlined", "dataflow")
        program = lower(case(build, mesh={"data": 2, "expert": 4}), levels=levels)
        super().__init__(program, "inlined")
        for name, count in program.ops.items():  # none has escaped the pattern
            if re.search("sort|scatter|all_gather|top_k", name):
                assert len(self.of(name)) == count, name
        self.layers = 1 if config.scan_layers else config.layers
        # Here what a loop carries unchanged comes from outside; equal values are one.
        self.scatters_by_values = Form(program, "dataflow").scatters_by_values

    def sorts(self):
        """Line, stable, number of operands of each sort."""
        return [
            (called_from(where), "is_stable = true" in text, len(operands))
            for _, _, operands, text, where in self.of("stablehlo.sort")
        ]

    def routing_gathers(self):
        """The all_gathers of integers: every one that ids of experts come by."""
        gathers = self.of("stablehlo.all_gather")
        return [op for op in gathers if re.search(r"-> tensor<[\dx]+u?i\d+>", op[3])]

    def top_ks(self):
        named = [op for op in self.ops if "top_k" in op[1].lower()]
        return [*named, *(op for op in self.of("stablehlo.custom_call") if "TopK" in op[3])]


def called_from(where):
    """A line of the example as it stands there, or the name of another file."""
    if where.file.endswith("routed_moe.py"):
        return LINES[where.line - 1].strip()
    return where.file.rpartition("/")[2]


ORDER, INVERSE = "order = jnp.argsort(ids)", "return order, jnp.argsort(order)"
EMBEDDING = 'x = params["embedding"].astype(config.dtype)[batch["tokens"]]'


def optimized(fn):
    return optimize(fn, contract="rounding")


@pytest.fixture(scope="module", params=CONFIGS)
def found(request):
    return request.param, Lowered(CONFIGS[request.param], optimized)


def test_the_example_has_what_is_to_go():
    plain = Lowered(TINY, lambda fn: fn)
    # Two chunks, forward and recomputed.
    assert len(plain.top_ks()) == 4
    assert sorted(plain.sorts()) == [(ORDER, True, 2)] * 4 + [(INVERSE, True, 2)] * 4
    assert len(plain.routing_gathers()) == 4
    scatters = plain.scatters_by_values()
    for line in (
        "weights, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)",
        "sizes = jnp.bincount(ids, length=experts + 1)[:experts]",
        "rows = x[order // config.experts_per_token]",
        "y = jnp.where(inverse[:, None] < held, rows[inverse], 0)",
        EMBEDDING,
    ):
        assert line in scatters


def test_no_top_k_is_left(found):
    assert not found[1].top_ks()


def test_no_sort_is_stable_or_of_more_than_one_operand(found):
    """The inverse is counted, also where two of 163,840 rows don't fit a word of 32 bits."""
    _, program = found
    passes = 2 * 2 * program.layers  # two chunks, forward and recomputed
    assert sorted(program.sorts()) == [(ORDER, False, 1)] * passes


def test_no_scatter_has_its_indices_from_the_routing(found):
    """Left are those of embedding and labels."""
    left = found[1].scatters_by_values()
    assert set(left) <= {EMBEDDING, "_classification.py"}
    assert left.count(EMBEDDING) == 1


def test_the_routing_of_a_layer_is_gathered_once(found):
    """Weights and ids of both chunks together; once more where the backward recomputes."""
    _, program = found
    gathers = program.routing_gathers()
    assert len(gathers) == 2 * program.layers
    recomputed = ["rematted_computation" in where.scope for *_, where in gathers]
    assert sorted(recomputed) == [False] * program.layers + [True] * program.layers
    for _, _, _, _, where in gathers:
        assert called_from(where).startswith("y = own_experts(")
