"""Properties of level ``dataflow`` on random programs: placing is noise, computing isn't."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

OPS = ("add", "subtract", "multiply", "maximum", "sine", "negate")
UNARY = frozenset({"sine", "negate"})
T = "tensor<4xf32>"


@st.composite
def programs(draw):
    """Operations as ``(name, operands)``; operand 0 and 1 are arguments, n + 2 is operation n."""
    ops = []
    for index in range(draw(st.integers(1, 10))):
        name = draw(st.sampled_from(OPS))
        count = 1 if name in UNARY else 2
        ops.append((name, tuple(draw(st.integers(0, index + 1)) for _ in range(count))))
    results = tuple(draw(st.integers(0, len(ops) + 1)) for _ in range(2))
    return ops, results


def value(number):
    return f"%arg{number}" if number < 2 else f"%v{number}"


def text(ops, results, order=None, extra=""):
    lines = []
    for index in order if order is not None else range(len(ops)):
        name, operands = ops[index]
        operands = ", ".join(value(o) for o in operands)
        lines.append(f"%v{index + 2} = stablehlo.{name} {operands} : {T}")
    returned = ", ".join(value(r) for r in results)
    return (
        f"module {{ func.func public @main(%arg0: {T}, %arg1: {T}) -> ({T}, {T}) {{\n"
        + "\n".join(lines)
        + f"\n{extra}return {returned} : {T}, {T}\n}} }}"
    )


def meaning(ops, results):
    """The results as nested expressions: equal exactly if equal operations give them."""
    known = ["x", "y"]
    for name, operands in ops:
        known.append((name, *(known[o] for o in operands)))
    return tuple(known[r] for r in results)


@st.composite
def orders(draw, ops):
    left, order = set(range(len(ops))), []
    while left:
        ready = [i for i in sorted(left) if all(o < 2 or o - 2 in order for o in ops[i][1])]
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    return order


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_with_any_dead_or_repeated_operation_is_equal(data, digests):
    ops, results = data.draw(programs())
    order = data.draw(orders(ops))
    again = data.draw(st.integers(0, len(ops) - 1))
    name, operands = ops[again]
    repeated = [*ops, (name, operands), ("sine", (again + 2,))]
    swapped = tuple(len(ops) + 2 if r == again + 2 else r for r in results)
    order = [*order, len(ops), len(ops) + 1]
    plain = digests(text(ops, results))["dataflow"]
    assert digests(text(repeated, swapped, order))["dataflow"] == plain


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_two_programs_are_equal_exactly_if_they_mean_the_same(data, digests):
    ops, results = data.draw(programs())
    other, others = data.draw(programs()), data.draw(st.booleans())
    if others:  # a neighbour: one operation changed
        index = data.draw(st.integers(0, len(ops) - 1))
        name, operands = ops[index]
        same_arity = [n for n in OPS if (n in UNARY) == (name in UNARY)]
        changed = (data.draw(st.sampled_from(same_arity)), operands[::-1])
        other = ([*ops[:index], changed, *ops[index + 1 :]], results)
    same = digests(text(ops, results))["dataflow"] == digests(text(*other))["dataflow"]
    assert same == (meaning(ops, results) == meaning(*other))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_effects_keep_their_order(data, digests):
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=2, max_size=4))
    seen = {}
    for order in set(itertools.permutations(names)):
        calls = "".join(
            f"%e{i} = stablehlo.custom_call @{name}(%arg0) {{has_side_effect = true}} "
            f": ({T}) -> {T}\n"
            for i, name in enumerate(order)
        )
        digest = digests(text([], (0, 1), extra=calls))["dataflow"]
        assert seen.setdefault(digest, order) == order
