"""Level ``dataflow`` on random programs with effects, loops and branches: it is never wrong.

A program's *meaning* is computed beside, from its definition alone: which effects happen in which
order, each with what it reads as a nested expression, and the results. Placing pure operations
elsewhere never changes a digest; a change of the meaning always does.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

T = "tensor<4xf32>"
BINARY = ("add", "subtract", "multiply", "maximum")
UNARY = ("sine", "negate", "tanh")
EXAMPLES = int(os.environ.get("RELOWER_EXAMPLES", "60"))


@dataclass
class Stmt:
    """One statement that defines value ``out``."""

    kind: str  # op, effect, loop, branch
    name: str
    reads: list[int]
    out: int
    bodies: list[Body] = field(default_factory=list)


@dataclass
class Body:
    """Statements and the value they give; ``carry`` is the value of the round before, in a loop."""

    stmts: list[Stmt]
    result: int
    carry: int = -1
    twins: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of loops, or of branches, that differ in one operation inside."""


class Maker:
    """Draws programs; values 0 and 1 are the arguments."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.last = 1

    def fresh(self) -> int:
        self.last += 1
        return self.last

    def body(self, known: list[int], depth: int, carry: int = -1) -> Body:
        known = list(known) + ([carry] if carry >= 0 else [])
        stmts, twins = [], []
        for _ in range(self.draw(st.integers(1, 4 if depth else 6))):
            stmts.append(self.stmt(known, depth))
            known.append(stmts[-1].out)
            if stmts[-1].bodies and self.draw(st.booleans()):
                stmts.append(self.twin(stmts[-1]))
                known.append(stmts[-1].out)
                twins.append((stmts[-2].out, stmts[-1].out))
        result = self.draw(st.sampled_from(known))
        if carry >= 0:  # what a round gives depends on the round before, so nothing is invariant
            stmts.append(Stmt("op", "add", [carry, result], self.fresh()))
            result = stmts[-1].out
        return Body(stmts, result, carry, twins)

    def twin(self, stmt: Stmt) -> Stmt:
        """A copy with values of its own, and one operation another."""
        new = copy.deepcopy(stmt)
        inside = [b for body in new.bodies for b in bodies(body)]
        names = {s.out: self.fresh() for s in all_stmts(Body([new], new.out))}
        names |= {b.carry: self.fresh() for b in inside if b.carry >= 0}
        for s in all_stmts(Body([new], new.out)):
            s.out, s.reads = names[s.out], [names.get(r, r) for r in s.reads]
        for body in inside:
            body.result = names.get(body.result, body.result)
            body.carry = names.get(body.carry, body.carry)
            body.twins = [(names[a], names[b]) for a, b in body.twins]
        found = [s for body in new.bodies for s in all_stmts(body) if s.kind == "op"]
        if found:
            chosen = self.draw(st.sampled_from(found))
            chosen.name = self.draw(st.sampled_from(UNARY if len(chosen.reads) == 1 else BINARY))
        return new

    def stmt(self, known: list[int], depth: int) -> Stmt:
        pick = lambda: self.draw(st.sampled_from(known))
        kinds = ["op", "op", "op", "effect"] + (["loop", "branch"] if depth < 2 else [])
        kind = self.draw(st.sampled_from(kinds))
        if kind == "op":
            name = self.draw(st.sampled_from(BINARY + UNARY))
            count = 1 if name in UNARY else 2
            return Stmt("op", name, [pick() for _ in range(count)], self.fresh())
        if kind == "effect":
            return Stmt("effect", self.draw(st.sampled_from("abc")), [pick()], self.fresh())
        if kind == "loop":
            start = pick()
            inner = self.body(known, depth + 1, self.fresh())
            return Stmt("loop", "", [start], self.fresh(), [inner])
        bodies = [self.body(known, depth + 1) for _ in range(2)]
        return Stmt("branch", "", [], self.fresh(), bodies)


@st.composite
def programs(draw):
    return Maker(draw).body([0, 1], 0)


# What a program is


def has_effect(stmt: Stmt) -> bool:
    inner = [s for body in stmt.bodies for s in body.stmts]
    return stmt.kind == "effect" or any(has_effect(s) for s in inner)


def meaning(body: Body):
    """Effects in order, with what they read, and the result, as nested tuples."""
    return _meaning(body, {0: "x", 1: "y"}, 0)


def _meaning(body, known, depth):
    known = dict(known)
    if body.carry >= 0:
        known[body.carry] = ("carry", depth)
    effects = []
    for stmt in body.stmts:
        reads = tuple(known[r] for r in stmt.reads)
        inner = tuple(_meaning(b, known, depth + 1) for b in stmt.bodies)
        what = (stmt.kind, stmt.name, reads, inner)
        if has_effect(stmt):
            known[stmt.out] = ("result", depth, len(effects))
            effects.append(what)
        else:
            known[stmt.out] = what
    return tuple(effects), known[body.result]


# The same as text


def text(body: Body) -> str:
    lines = [
        f"module {{ func.func public @main(%v0: {T}, %v1: {T}, %n: tensor<i32>) -> {T} {{",
        *_lines(body),
        f"return %v{body.result} : {T}",
        "} }",
    ]
    return "\n".join(lines)


def _lines(body: Body):
    for s in body.stmts:
        reads = ", ".join(f"%v{r}" for r in s.reads)
        if s.kind == "op":
            yield f"%v{s.out} = stablehlo.{s.name} {reads} : {T}"
        elif s.kind == "effect":
            yield (
                f"%v{s.out} = stablehlo.custom_call @{s.name}({reads}) "
                f"{{has_side_effect = true}} : ({T}) -> {T}"
            )
        elif s.kind == "branch":
            parts = [
                "\n".join([*_lines(b), f"stablehlo.return %v{b.result} : {T}"]) for b in s.bodies
            ]
            yield f'%v{s.out} = "stablehlo.case"(%n) ({{\n{parts[0]}\n}}, {{\n{parts[1]}\n}})'
            yield f": (tensor<i32>) -> {T}"
        else:
            yield from _loop(s)


def _loop(s: Stmt):
    [body] = s.bodies
    k = f"k{s.out}"
    yield f"%zero{s.out} = stablehlo.constant dense<0> : tensor<i32>"
    yield f"%i{s.out}, %v{s.out} = stablehlo.while(%{k} = %zero{s.out}, %v{body.carry} = "
    yield f"%v{s.reads[0]}) : tensor<i32>, {T} cond {{"
    yield f"%end{k} = stablehlo.constant dense<9> : tensor<i32>"
    yield f"%p{k} = stablehlo.compare LT, %{k}, %end{k}, SIGNED"
    yield ": (tensor<i32>, tensor<i32>) -> tensor<i1>"
    yield f"stablehlo.return %p{k} : tensor<i1>\n}} do {{"
    yield from _lines(body)
    yield f"%one{k} = stablehlo.constant dense<1> : tensor<i32>"
    yield f"%next{k} = stablehlo.add %{k}, %one{k} : tensor<i32>"
    yield f"stablehlo.return %next{k}, %v{body.result} : tensor<i32>, {T}\n}}"


# Noise: pure operations permuted, duplicated, hoisted


def needed(stmt: Stmt) -> set[int]:
    """Values a statement reads, those its bodies capture among them."""
    found = set(stmt.reads)
    for body in stmt.bodies:
        inside = {s.out for s in body.stmts} | {body.carry}
        for s in body.stmts:
            found |= needed(s)
        found |= {body.result}
        found -= inside
    return found


def bodies(body: Body):
    yield body
    for stmt in body.stmts:
        for inner in stmt.bodies:
            yield from bodies(inner)


def permuted(draw, body: Body) -> None:
    """Any order in which values come before their readers, and effects as they were."""
    left, done, order = list(body.stmts), set(), []
    own = {s.out for s in body.stmts}
    while left:
        first = next((s for s in left if has_effect(s)), None)
        ready = [s for s in left if (needed(s) & own) <= done and (not has_effect(s) or s is first)]
        chosen = draw(st.sampled_from(ready))
        left.remove(chosen)
        done.add(chosen.out)
        order.append(chosen)
    body.stmts = order


def duplicated(draw, body: Body, fresh: int) -> None:
    """A pure operation done again, and some of its readers reading the copy."""
    pure = [i for i, s in enumerate(body.stmts) if s.kind == "op"]
    if not pure:
        return
    index = draw(st.sampled_from(pure))
    twin = copy.deepcopy(body.stmts[index])
    old, twin.out = twin.out, fresh
    body.stmts.insert(index + 1, twin)
    for stmt in body.stmts[index + 2 :]:
        if draw(st.booleans()):
            _redirect(stmt, old, fresh)


def _redirect(stmt: Stmt, old: int, new: int) -> None:
    stmt.reads = [new if r == old else r for r in stmt.reads]
    for body in stmt.bodies:
        body.result = new if body.result == old else body.result
        for inner in body.stmts:
            _redirect(inner, old, new)


def hoisted(draw, body: Body) -> None:
    """A pure operation moved out of a loop or branch that it needs nothing of."""
    found = []
    for index, stmt in enumerate(body.stmts):
        for inner in stmt.bodies:
            inside = {s.out for s in inner.stmts} | {inner.carry}
            found += [
                (index, inner, s) for s in inner.stmts if s.kind == "op" and not needed(s) & inside
            ]
    if found:
        index, inner, stmt = draw(st.sampled_from(found))
        inner.stmts.remove(stmt)
        body.stmts.insert(index, stmt)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_where_pure_operations_stand_is_noise(data, digests):
    program = data.draw(programs())
    other = copy.deepcopy(program)
    for number in range(data.draw(st.integers(1, 4))):
        how = data.draw(st.sampled_from(("permute", "duplicate", "hoist")))
        where = data.draw(st.sampled_from(list(bodies(other))))
        if how == "permute":
            permuted(data.draw, where)
        elif how == "duplicate":
            duplicated(data.draw, where, 1000 + number)
        else:
            hoisted(data.draw, where)
    assert meaning(program) == meaning(other)
    assert digests(text(program))["dataflow"] == digests(text(other))["dataflow"]


# Changes of meaning


def all_stmts(body: Body):
    for stmt in body.stmts:
        yield stmt
        for inner in stmt.bodies:
            yield from all_stmts(inner)


def visible(body: Body, target: Stmt, known: tuple[int, ...] = (0, 1)):
    """Values that ``target`` may read, or None if it isn't below ``body``."""
    here = list(known) + ([body.carry] if body.carry >= 0 else [])
    for stmt in body.stmts:
        if stmt is target:
            return here
        for inner in stmt.bodies:
            found = visible(inner, target, tuple(here))
            if found is not None:
                return found
        here.append(stmt.out)
    return None


def changed(draw, program: Body) -> None:
    """One change of an operation, an operand, an effect's order or a region's input."""
    stmts = list(all_stmts(program))
    how = draw(st.sampled_from(("read", "swap", "name", "result", "branches", "twins")))
    if how == "twins":
        found = [(body, pair) for body in bodies(program) for pair in body.twins]
        assume(found)
        body, (old, new) = draw(st.sampled_from(found))
        place = next(i for i, s in enumerate(body.stmts) if s.out == new)
        for stmt in body.stmts[place + 1 :]:
            _redirect(stmt, old, new)
        body.result = new if body.result == old else body.result
        return
    if how == "swap":
        pairs = [
            (b, i)
            for b in bodies(program)
            for i in range(len(b.stmts) - 1)
            if b.stmts[i].out not in needed(b.stmts[i + 1])
        ]
        assume(pairs)
        body, i = draw(st.sampled_from(pairs))
        body.stmts[i : i + 2] = body.stmts[i : i + 2][::-1]
        return
    if how == "branches":
        found = [s for s in stmts if s.kind == "branch"]
        assume(found)
        draw(st.sampled_from(found)).bodies.reverse()
        return
    if how == "result":
        body = draw(st.sampled_from([b for b in bodies(program) if b.carry < 0]))
        body.result = draw(st.sampled_from([s.out for s in body.stmts]))
        return
    found = [s for s in stmts if s.reads] if how == "read" else [s for s in stmts if s.name]
    assume(found)
    stmt = draw(st.sampled_from(found))
    if how == "read":
        index = draw(st.integers(0, len(stmt.reads) - 1))
        stmt.reads[index] = draw(st.sampled_from(visible(program, stmt)))
    else:
        names = {"effect": "abc"}.get(stmt.kind, UNARY if len(stmt.reads) == 1 else BINARY)
        stmt.name = draw(st.sampled_from(names))


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_change_of_meaning_is_a_change_of_digest(data, digests):
    program = data.draw(programs())
    other = copy.deepcopy(program)
    changed(data.draw, other)
    assume(meaning(program) != meaning(other))
    assert digests(text(program))["dataflow"] != digests(text(other))["dataflow"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(one=programs(), other=programs())
def test_programs_of_one_digest_mean_the_same(one, other, digests):
    if digests(text(one))["dataflow"] == digests(text(other))["dataflow"]:
        assert meaning(one) == meaning(other)
