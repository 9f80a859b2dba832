"""The lines that a rewrite takes equations from."""

import jax.numpy as jnp
import numpy as np

import relower
from relower import explain


def take(p):
    table = jnp.repeat(jnp.arange(8), 4)  # table
    return table[relower.assume_range(p, 0, 31)]  # taken


def test_what_only_the_site_needed_is_its_own():
    lines = open(__file__).read().split("\n")
    numbers = [
        next(n for n, text in enumerate(lines, 1) if text.endswith(f"# {word}"))
        for word in ("table", "taken")
    ]
    p = np.arange(32, dtype=np.int32)
    report = explain(take, p, lines=True)
    own = next(s for s in report.applied if s.pass_name == "affine_gather").lines
    assert set(own) == {f"{__file__}:{n}" for n in numbers}
    assert all("lines" not in site for site in explain(take, p).to_json()["sites"])
    assert report.counts() == explain(take, p).counts()
