"""``relower.lock``: what was rewritten is written down, and what is lost is said, then and now."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relower.cli.main import main
from relower.gates import lock
from relower.gates.lock import Locked, described, gained, locked, lost, read, written
from relower.lowering.errors import InputError

FILE = """
import jax, jax.numpy as jnp, relower

def step(x, ids):
    ids = {range}
    order = jnp.argsort(ids)
    return x[order], jnp.bincount(ids, length=8)

def case():
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    return relower.case(step, jax.ShapeDtypeStruct((64, 2), jnp.float32), ids)
"""
KNOWN = "relower.assume_range(ids, 0, 7)"
TOML = """
[gate]
controls = false
[[program]]
name = "toy"
variants.step = "step.py:case"
[[program.cell]]
variant = "step"
passes = "default"
locked = true
"""
ADDRESS = "argsort_packed_key@jit(argsort):step#1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "step.py").write_text(FILE.format(range=KNOWN))
    (tmp_path / "relower.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_written_checked_lost_and_accepted_again(folder, capfd):
    assert main(["gate"]) == 1
    assert "relower.lock doesn't have it; run `relower lock`" in capfd.readouterr().out
    assert main(["lock", "--json"]) == 0
    made = json.loads(capfd.readouterr().out)
    assert ADDRESS in made["programs"][0]["new"]
    text = Path("relower.lock").read_text()
    assert f'address = "{ADDRESS}"' in text
    assert main(["gate"]) == 0
    assert "1 of 1 keep their sites" in capfd.readouterr().out

    (folder / "step.py").write_text(FILE.format(range="ids"))  # the range is known no more
    assert main(["gate"]) == 1
    out = capfd.readouterr().out
    assert "argsort_packed_key: 1 site → 0" in out
    assert f"lost: {ADDRESS}" in out
    then, now = out.split(f"lost: {ADDRESS}")[1].split("now, at the nearest place:")
    assert "> sort(i32[64], i32[64])" in then
    assert "> sort(i32[64], i32[64])" in now
    assert "declined: unknown-range: " in now
    assert Path("relower.lock").read_text() == text

    last = text.rindex("[[program.site]]")
    twice = text + text.partition("format = 1")[2]
    another = text.replace("format = 1", "format = 2")
    for broken in ("", text[:-40], text[:last], another, text + "x = [", twice):
        Path("relower.lock").write_text(broken)
        assert main(["lock"]) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert "not a whole lock file" in err
        if broken == "":
            assert main(["gate"]) == 2
            assert "not a whole lock file" in " ".join(capfd.readouterr().out.split())


def test_never_written_in_ci(folder, capfd, monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert main(["lock"]) == 2
    assert "CI is set, and the sites to keep are never written there" in capfd.readouterr().err
    assert not Path("relower.lock").exists()


def test_what_the_gate_would_refuse_is_not_written(folder, capfd):
    Path("relower.toml").write_text(TOML.replace("controls = false", ""))
    assert main(["lock"]) == 2
    err = capfd.readouterr().err
    assert main(["gate"]) == 1
    out = " ".join(capfd.readouterr().out.split())
    control = "there is no control: add a cell with differs-from"
    assert err.startswith(f"relower: relower.toml: {control}")
    assert control in out
    late = 'passes.late = { names = ["late_cast"], quiet = true }\n[[program.cell]]'
    text = TOML.replace('"default"', '"late"').replace("[[program.cell]]", late)
    Path("relower.toml").write_text(text)
    assert main(["lock"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("relower: toy: step+late: no pass rewrites anything, and where no site")
    assert not Path("relower.lock").exists()


@pytest.mark.parametrize(
    ("was", "wanted", "said"),
    [
        ("locked = true", "locked = 1", "wanted true"),
        ("locked = true", 'locked = true\nlevel = "exact"', "unknown key 'level'"),
        ('passes = "default"\n', "", "no passes run, so there are no sites to lock"),
    ],
)
def test_mistakes_in_the_file(folder, capfd, was, wanted, said):
    (folder / "relower.toml").write_text(TOML.replace(was, wanted))
    assert main(["gate"]) == 2
    assert said in capfd.readouterr().err


def site(address, status="applied", code="near-miss"):
    return {
        "pass": address.partition("@")[0],
        "status": status,
        "addresses": [address],
        "around": [f"> sort at {address}"],
        "calls": 1,
        "reasons": [] if status == "applied" else [{"code": code, "sentence": "it isn't"}],
    }


def test_the_nearest_place_is_the_same_function_before_another():
    was = locked("p", "0.12", {"sites": [site("a@x/scan:f#1"), site("a@x:g#1"), site("b@x:h#1")]})
    report = {
        "sites": [
            site("a@x:f#4", "declined", "other-scope"),
            site("a@x/scan:f#2", "declined", "same-scope"),
            site("b@x:h#1"),
            site("c@x:g#1"),
        ]
    }
    first, second = sorted(lost(was, report), key=lambda c: -len(c.now))
    assert first.address == "a@x/scan:f#1"
    assert first.reasons == ("same-scope: it isn't",)
    assert second.address == "a@x:g#1"
    assert "its pass finds nothing there" in described(second)[-1]
    assert gained(was, report) == ["c@x:g#1"]


def test_reads_what_it_writes(tmp_path):
    entries = (
        Locked("p", "0.10.2", {'a@"quoted"\\\x7f é:f#1': ("> sort", "  a\tb")}),
        Locked("p", "0.12", {}),
    )
    path = tmp_path / "relower.lock"
    path.write_text(written(entries), encoding="utf-8")
    assert read(path) == entries
    assert read(tmp_path / "none.lock") == ()
    path.write_text(written([entries[0], replace(entries[0])]), encoding="utf-8")
    with pytest.raises(InputError, match="a program twice"):
        read(path)


def test_another_version_of_jax_is_undecided(tmp_path, monkeypatch):
    path = tmp_path / "relower.lock"
    path.write_text(written([Locked("p", "0.1", {ADDRESS: ("> sort",)})]))
    broken, unclear, _ = lock.compared("p", None, path, tmp_path, 1.0)
    assert broken == []
    assert "knows it of jax 0.1, and not of" in unclear[0]


def test_a_lock_without_sites_shows_nothing(tmp_path, monkeypatch):
    path = tmp_path / "relower.lock"
    path.write_text(written([Locked("p", lock.jax_version(), {})]))
    monkeypatch.setattr(lock, "report_of", lambda *_: {"sites": [site("a@x:f#1")]})
    broken, unclear, notes = lock.compared("p", None, path, tmp_path, 1.0)
    assert (broken, len(unclear), len(notes)) == ([], 1, 1)


LOOP = """
import jax, jax.numpy as jnp, relower

@jax.jit
def layer(table, ids):
    return table[ids]

def step(table, all_ids):
    found = 0.0
    for i, ids in enumerate(all_ids):
        found += layer(table, relower.assume_range(ids, 0, 7) if i < {known} else ids)
    return found

def case():
    ids = [jax.ShapeDtypeStruct((256,), jnp.int32)] * 4
    return relower.case(step, jax.ShapeDtypeStruct((16,), jnp.float32), ids)
"""


def test_equations_of_one_address_are_counted(folder, capfd):
    """Three of four layers that one line calls: the address is there as before."""
    Path("step.py").write_text(LOOP.format(known=4))
    assert main(["lock"]) == 0
    assert "calls = 4" in Path("relower.lock").read_text()
    assert main(["gate"]) == 0
    Path("step.py").write_text(LOOP.format(known=1))
    capfd.readouterr()
    assert main(["gate"]) == 1
    printed = " ".join(capfd.readouterr().out.split())
    assert "nonnegative_index: 4 sites → 1" in printed
    assert "lost in 3 of 4 equations that run it: nonnegative_index@jit(layer):layer#1" in printed
    assert "declined: maybe-negative" in printed
