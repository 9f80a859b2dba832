"""The compiler's answers on disk: a second run compiles nothing, and nothing stale is used."""

import gzip
from dataclasses import replace

import pytest

from relower.lowering.compile import Compiled, CompileFailed, StagedModule
from relower.lowering.cost import cache as caches
from relower.lowering.cost import ladder
from relower.lowering.cost.cache import CostCache, key_of, user_cache
from relower.lowering.process import Limits

STAGED = StagedModule(b"module", {"partitions": 1}, "TPU7x:2x2x1", "step")
MEMORY = {"arguments": 8, "outputs": 4, "alias": 0, "temp": 2, "code": 3, "peak": 20}


@pytest.fixture
def compiles(monkeypatch, scan_text):
    """Counts compilations; each gives the text, or raises what is put in ``raises``."""

    class Counter:
        count = 0

    def compile_staged(staged, *, flags=(), limits=None):
        Counter.count += 1
        if Counter.raises:
            raise Counter.raises.pop(0)
        return Compiled(scan_text, MEMORY, {}, 1.0)

    Counter.raises = []
    monkeypatch.setattr(ladder, "compile_staged", compile_staged)
    return Counter


def cached(folder):
    return CostCache(folder)


def test_a_second_run_compiles_nothing_and_says_the_same(compiles, tmp_path):
    first = ladder.measure(STAGED, cache=cached(tmp_path))
    assert compiles.count == 1
    cache = cached(tmp_path)
    again = ladder.measure(replace(STAGED, name="other"), cache=cache)
    assert (compiles.count, cache.reused) == (1, 1)
    assert replace(again, name="step") == first


def test_a_lower_rung_is_kept_with_its_reason(compiles, tmp_path):
    compiles.raises = [CompileFailed("it died", "crash")]
    first = ladder.measure(STAGED, cache=cached(tmp_path))
    assert compiles.count == 2
    assert ladder.measure(STAGED, cache=cached(tmp_path)) == first
    assert compiles.count == 2
    assert first.notes[0] == "no profile of the whole program: it died"


@pytest.mark.parametrize("kind", ["rejected", "crash"])
def test_a_failure_that_lasts_is_kept(compiles, tmp_path, kind):
    for _ in range(2):
        compiles.raises = [CompileFailed("no", kind)] * 3
        with pytest.raises(CompileFailed, match=r"^step: no$") as caught:
            ladder.measure(STAGED, cache=cached(tmp_path))
        assert caught.value.kind == kind
    assert compiles.count == (1 if kind == "rejected" else 3)


@pytest.mark.parametrize(
    "accident",
    [
        CompileFailed("no libtpu", "missing"),
        CompileFailed("no such topology", "target"),
        CompileFailed("the TPU compiler died (SIGKILL)", "crash", accident=True),
    ],
)
def test_an_accident_is_not_kept(compiles, tmp_path, accident):
    compiles.raises = [accident] * 3
    with pytest.raises(CompileFailed):
        ladder.measure(STAGED, cache=cached(tmp_path))
    before = compiles.count
    compiles.raises = []
    assert ladder.measure(STAGED, cache=cached(tmp_path)).rung in ("profile", "counts")
    assert compiles.count == before + 1


def test_what_a_limit_cut_short_is_used_under_no_larger_limit(compiles, tmp_path):
    def run(seconds):
        compiles.raises = [CompileFailed("stopped", "time")]
        before = compiles.count
        ladder.measure(STAGED, limits=Limits(seconds, 1 << 30), cache=cached(tmp_path))
        return compiles.count - before

    assert [run(5.0), run(5.0), run(4.0), run(6.0), run(5.0), run(None)] == [2, 0, 0, 2, 0, 2]


@pytest.mark.parametrize(
    "other",
    [
        replace(STAGED, module=b"another"),
        replace(STAGED, settings={"partitions": 2}),
        replace(STAGED, target="TPU7x:2x2x2"),
    ],
)
def test_another_program_has_another_key(other):
    assert key_of(other, False) != key_of(STAGED, False)


def test_another_compiler_or_other_flags_have_another_key(monkeypatch, tmp_path):
    keys = {key_of(STAGED, False), key_of(STAGED, True)}
    for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "--xla_something=1")
        keys.add(key_of(STAGED, False))
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"1")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    keys.add(key_of(STAGED, False))
    library.write_bytes(b"12")
    keys.add(key_of(STAGED, False))
    monkeypatch.setattr(caches, "versions", lambda: {"libtpu": "9"})
    keys.add(key_of(STAGED, False))
    assert len(keys) == 7


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no gzip", "a folder"])
def test_a_damaged_entry_is_said_and_made_anew(compiles, tmp_path, damage):
    ladder.measure(STAGED, cache=cached(tmp_path))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    if damage == "changed":
        text = gzip.decompress(data)
        assert b"sort.8" in text
        data = gzip.compress(text.replace(b"sort.8", b"sort.9", 1))
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    else:
        path.write_bytes(
            {"truncated": data[:-20], "changed": data, "empty": b"", "no gzip": b"{}"}[damage]
        )
    cost = ladder.measure(STAGED, cache=cached(tmp_path))
    assert compiles.count == 2
    if damage == "a folder":
        assert any("the cache can't be written" in note for note in cost.notes)
    else:
        assert any("a damaged entry of the cache was ignored" in note for note in cost.notes)
        ladder.measure(STAGED, cache=cached(tmp_path))
        assert compiles.count == 2


def test_nothing_half_written_is_left(compiles, tmp_path, monkeypatch):
    def fails(source, target):
        raise OSError("no space")

    monkeypatch.setattr("relower.lowering.cache_folder.os.replace", fails)
    cost = ladder.measure(STAGED, cache=cached(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert "the cache can't be written: no space" in cost.notes


def test_the_longest_unused_goes_first(compiles, tmp_path):
    import os

    modules = [replace(STAGED, module=bytes([n])) for n in range(3)]
    for age, staged in zip((30, 20, 10), modules):
        ladder.measure(staged, cache=cached(tmp_path))
        path = tmp_path / f"{key_of(staged, False)}.json.gz"
        os.utime(path, (age * 1000, age * 1000))
    size = path.stat().st_size
    ladder.measure(replace(STAGED, module=b"new"), cache=replace(cached(tmp_path), limit=3 * size))
    kept = {path.name.partition(".")[0] for path in tmp_path.iterdir()}
    assert key_of(modules[2], False) not in kept
    assert len(kept) == 3


def test_where_it_is_and_how_to_turn_it_off(monkeypatch, tmp_path):
    monkeypatch.setenv("RELOWER_CACHE", str(tmp_path))
    found = user_cache()
    assert found is not None
    assert found.folder == tmp_path / "cost"
    monkeypatch.delenv("RELOWER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = user_cache()
    assert found is not None
    assert found.folder == tmp_path / "relower" / "cost"
    monkeypatch.setenv("RELOWER_COST_CACHE", "off")
    assert user_cache() is None
