"""Trains the tiny model on eight devices of the CPU, or lowers the real size.

- ``python examples/qwen_hybrid`` trains the tiny model and prints the losses
- ``python examples/qwen_hybrid --optimize`` does it with `relower.optimize` around the trainer
- ``python examples/qwen_hybrid --real`` traces and lowers the real size; allocates nothing
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import relower
from qwen_hybrid import cases, trainer
from qwen_hybrid.config import REAL, TINY


def describe() -> None:
    """Lower forward and backward at the real size from shapes alone; print their size."""
    state = jax.eval_shape(lambda: trainer.init_state(jax.random.key(0), REAL))
    program = relower.lower(cases.real())
    print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}")
    print(f"operations  {sum(program.ops.values()):,}, nothing allocated")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="train steps (default: 30)")
    parser.add_argument("--optimize", action="store_true", help="wrap relower.optimize round it")
    parser.add_argument("--real", action="store_true", help="lower the real size only")
    options = parser.parse_args()
    if options.real:
        describe()
        return
    mesh = trainer.make_mesh()
    forward_backward = trainer.make_forward_backward(TINY, mesh)
    if options.optimize:
        frozen = relower.Frozen(trainer.FROZEN, grads=lambda out: out[1])
        forward_backward = relower.optimize(forward_backward, frozen=frozen)
    losses, _ = trainer.train(TINY, forward_backward, mesh, options.steps)
    for i, loss in enumerate(losses):
        if i % 5 == 0 or i == len(losses) - 1:
            print(f"step {i:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
