"""A sample of programs, how many seeds add up, how a violation becomes small, and the command."""

import dataclasses
import json
import subprocess
import sys
import warnings

import jax
import pytest

from relower.gates.fuzz import run, worker
from relower.gates.fuzz.check import check, given_to
from relower.gates.fuzz.plan import Node, Plan, draw, known
from relower.gates.fuzz.program import function, mesh_of, transformed, values
from relower.gates.fuzz.run import Asked, Found, save
from relower.gates.fuzz.shrink import fewest_passes, shrunk
from relower.passes import registry

SAMPLE = 80
"""Seeds from 0 on; together some 20 s."""


@pytest.fixture(scope="module")
def sample():
    found = Found(tuple(p.name for p in registry.all_passes()))
    for seed in range(SAMPLE):
        found.add(worker.one(seed))
    return found


def test_a_sample_of_programs(sample):
    assert not sample.violations, sample.violations
    assert sample.checked > 0.85 * SAMPLE, sample.refusals


def test_the_sample_is_not_empty_talk(sample):
    assert len(sample.applied) >= 15, sample.applied
    assert len({name for name, _ in sample.declined}) >= 15, sample.declined


def jaxpr(plan):
    with mesh_of(plan):
        fn = transformed(plan, function(plan), outside=False)
        return str(jax.make_jaxpr(fn)(*given_to(plan, values(plan, "exact").args)))


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_gives_one_program(seed):
    plan = draw(seed)
    assert plan == draw(seed)
    assert plan != draw(seed + 1)
    assert known(plan.nodes)
    assert jaxpr(plan) == jaxpr(plan)
    assert eval(repr(plan), {"Plan": Plan, "Node": Node}) == plan


# --- adding up --------------------------------------------------------------------------------


def counted(n=1000, names=("affine_gather",), **one):
    found = Found(names)
    for seed in range(n):
        found.add({"seed": seed, "state": "held", "detail": "", **one})
    return found


def test_a_pass_that_is_never_hit_says_nothing():
    assert counted().vacuous() == [
        "affine_gather was applied nowhere", "affine_gather was declined nowhere",
    ]  # fmt: skip
    hit = {"applied": {"affine_gather": 1}, "declined": [["affine_gather", "not-affine", 2]]}
    assert not counted(**hit).vacuous()
    assert not counted(n=999).vacuous()


def test_seeds_that_are_no_programs_say_nothing():
    assert Found(()).vacuous() == ["of 0 seeds, none was a program that could be checked"]
    found = counted(n=100)
    for seed in range(20):
        found.add({"seed": seed, "state": "not a program", "detail": "ValueError: no"})
    assert found.vacuous() == [
        "20 of 120 seeds were no programs, undefined, or decided by rounding"
    ]


def test_the_first_program_of_so_many_is_lowered(monkeypatch, capsys):
    """So is one of a run as short as may be; a seed that is no program passes it on."""
    none = {5, 6, 15}

    def one(seed, names, lower):
        return {"seed": seed, **({"lowered": True} if lower and seed not in none else {})}

    monkeypatch.setattr(worker, "one", one)
    monkeypatch.setattr(worker.gc, "disable", lambda: None)
    request = {"first": 5, "count": 20, "until": float("inf"), "passes": [], "origin": 5,
               "lower_every": 10}  # fmt: skip
    monkeypatch.setattr(worker.sys, "argv", ["", json.dumps(request)])
    with warnings.catch_warnings():
        worker.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [t["seed"] for t in told if t.get("lowered")] == [7, 16]
    assert sum("begin" in t for t in told) == 20


def test_a_process_that_dies_is_a_violation(monkeypatch):
    dies = "import sys; print('{\"begin\": 7}', flush=True); sys.exit('gone')"
    plain = subprocess.Popen
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda command, **kw: plain([sys.executable, "-c", dies], **kw)
    )
    found = run.fuzz(Asked(seed=7, count=1, passes=("affine_gather",)))
    (violation,) = found.violations
    assert violation["property"] == "stays up"
    assert violation["detail"] == "the process ended with 1: gone"
    assert found.vacuous() == []


# --- a violation ------------------------------------------------------------------------------

CULPRIT = Node("elementwise", 5)


def test_what_has_no_part_in_a_violation_goes():
    inside = Node("scan", 1, (Node("jit", 2, (Node("moved", 3), CULPRIT)), Node("mixed", 4)))
    plan = Plan(t=6, d=8, dtype="bfloat16", transform="grad", contract="value", eager=True,
                mesh=("Auto", 4), some=3, nodes=(Node("chosen", 9), inside), seed=1)  # fmt: skip
    has = lambda nodes: any(n == CULPRIT or has(n.body) for n in nodes)
    small, tries = shrunk(plan, lambda p: has(p.nodes) and p.dtype == "bfloat16")
    assert small.nodes == (CULPRIT,)
    assert (small.dtype, small.d, small.t, small.mesh) == ("bfloat16", 4, 4, None)
    assert tries < 40


def test_passes_that_have_no_part_in_it_go():
    assert fewest_passes(("a", "b", "c", "d"), lambda some: {"b", "d"} <= set(some)) == ("b", "d")


def test_a_violation_is_shrunk_and_saved(monkeypatch, tmp_path):
    name = "nonnegative_index"
    plain = registry.by_name(name).replace
    wrong = lambda m: dataclasses.replace(plain(m), fn=lambda i: [i * 0], key="wrong")
    mutated = tuple(
        dataclasses.replace(p, replace=wrong) if p.name == name else p
        for p in registry.all_passes()
    )
    monkeypatch.setattr(worker, "SHRINK_SECONDS", 5.0)
    nodes = (Node("moved", 1), Node("jit", 2, (Node("layer", 3),)), Node("mixed", 4))
    plan = Plan(t=6, d=4, dtype="float32", transform="none", contract="bitwise", eager=False,
                mesh=None, some=None, nodes=nodes, seed=5)  # fmt: skip
    monkeypatch.setattr(worker, "draw", lambda seed: plan)
    with monkeypatch.context() as m:
        m.setattr(registry, "all_passes", lambda: mutated)
        found = worker.one(0)
    violation = {"seed": 0, **found["violation"]}
    assert violation["property"] == "contract"
    assert violation["passes"] == [name]
    assert violation["text"].endswith("\n  layer 3")
    assert "gather" in violation["jaxpr"]
    script = save(violation, tmp_path)
    text = script.read_text()
    assert repr(violation["plan"])[1:-1] in text
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "every property holds\n", done.stderr  # the pass is whole there
    assert done.returncode == 0


def test_what_the_smallest_plan_shows_is_checked_again():
    plan = Plan(t=4, d=4, dtype="float32", transform="none", contract="bitwise", eager=False,
                mesh=None, some=None, nodes=(CULPRIT,), seed=1)  # fmt: skip
    outcome = check(plan)
    assert (outcome.state, outcome.violation) == ("held", None)
    assert not outcome.report.applied
