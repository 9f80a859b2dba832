"""Which cases a file has: those that its text says it makes, and nothing else is called."""

from pathlib import Path

import pytest

from relower.lowering.load import load_case, loaded
from relower.lowering.siblings import siblings

FILE = """
import functools
import relower
from relower import case as a_case
from relower.lowering.case import Case
import jax

x = jax.ShapeDtypeStruct((4,), "float32")
CALLED = []

plain = relower.case(abs, x)
held = {"a": relower.case(abs, x), 2: a_case(abs, x), "no": 3}
_private = relower.case(abs, x)

def made(n): return relower.case(abs, *[x] * n)
def one(): return made(1)
def early(flag=False):
    if flag:
        return 3
    def inner(): return made(1)
    return a_case(abs, x)
def several():
    return {f"n{n}": made(n) for n in (1,)} if x else {}
def nested():
    from relower.lowering.case import case
    return case(abs, x)
partial = functools.partial(made, 1)
def fails() -> Case: return made(1 / 0)

def train(): CALLED.append("train")
def only_inside():
    def inner(): return made(1)
    CALLED.append("only_inside")
class Trainer:
    def __init__(self): CALLED.append("Trainer")
def recursive(): return recursive()
def needs(n): return made(n)
"""


@pytest.fixture
def spec(tmp_path):
    path = Path(tmp_path, "model.py")
    path.write_text(FILE)
    load_case(f"{path}:one")
    return f"{path}:one"


def test_what_makes_a_case(spec):
    assert [s.rpartition(":")[2] for s in siblings(spec)] == [
        "plain", "held[a]", "held[2]", "early", "several[n1]", "nested", "partial", "fails",
    ]  # fmt: skip


def test_nothing_else_is_called(spec):
    siblings(spec)
    assert loaded(spec.rpartition(":")[0]).CALLED == []


def test_a_file_that_was_not_loaded(tmp_path):
    assert siblings(f"{tmp_path}/other.py:one") == []
