"""``--frozen``: what a command line declares, and the tree that `explain` prints."""

import pytest

from relower.cli.main import main

CASES = """
import jax
import jax.numpy as jnp
import relower

PARAMS = {"router": {"kernel": jnp.ones((4, 5))}, "wo": jnp.ones((5, 2))}


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["router"]["kernel"]) @ params["wo"])


def step():
    return relower.case(jax.jit(jax.value_and_grad(loss)), PARAMS, jnp.ones((3, 4)))
"""


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "train.py").write_text(CASES)


def test_explain_prints_the_tree_and_json_holds_it(capfd, parsed):
    arguments = ["explain", "train.py:step", "--frozen", "router"]
    assert main(arguments) == 0
    out = capfd.readouterr().out
    assert "\nfrozen\n  1\n    router\n      kernel  f32[5,4]  declared, saves 120 FLOPs\n" in out
    assert main([*arguments, "--json"]) == 0
    (leaf,) = parsed("report", capfd.readouterr().out)["frozen"]
    assert (leaf["path"], leaf["status"], leaf["flops"]) == ("1/router/kernel", "applied", 120)
    assert leaf["operations"]["dot_general"] == 1


def test_a_program_is_lowered_without_the_gradient(capfd):
    arguments = ["diff", "train.py:step", "train.py:step", "--frozen", "router"]
    assert main([*arguments, "--passes-b", "frozen_gradient"]) == 1
    assert "dot_general" in capfd.readouterr().out
