"""The ladder, with the compiler's part played by recorded text."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from relower.lowering.compile import Compiled, CompileFailed, StagedModule
from relower.lowering.cost import ladder
from relower.lowering.cost.cache import CostCache
from relower.lowering.process import Limits

STAGED = StagedModule(b"", {}, "TPU7x:2x2x1", "step")
MEMORY = {"arguments": 8, "outputs": 4, "alias": 0, "temp": 2, "code": 3, "peak": 20}
ENTRY = 'hlo_op_estimate {\n  hlo_op_name: "sort.8"\n  estimated_cycles: 6873\n}\n'
SCHEDULE = "Schedule analysis:\n\ttotal scheduled bundles:    907\n\t907.00 x: %sort.8 = (s32[4])"


@pytest.fixture
def compiler(monkeypatch, scan_text):
    """Plays the compiler: what each call does, in order; returns the flags of each call."""
    calls = []

    def install(*plays, text=scan_text):
        def compile_staged(staged, *, flags=(), limits=None):
            calls.append((list(flags), limits))
            plays[len(calls) - 1]({f.partition("=")[0]: f.partition("=")[2] for f in flags})
            return Compiled(text, MEMORY, {}, 1.0)

        monkeypatch.setattr(ladder, "compile_staged", compile_staged)
        return calls

    return install


def fine(flags):
    """Compiles, and dumps nothing."""


def dies(flags):
    raise CompileFailed("the TPU compiler died (SIGABRT): a check (x.cc:1)", "crash", "step")


def dies_late(flags):
    folder = flags["--xla_jf_dump_static_llo_profile_to"]
    with open(f"{folder}/sort.8_TPU7x_static_llo_profile.textproto", "w") as file:
        file.write(ENTRY)
    dies(flags)


def dumps(flags):
    folder = flags["--xla_jf_dump_to"]
    with open(f"{folder}/12-sort.8-00-schedule-analysis_final_bundles.txt", "w") as file:
        file.write(SCHEDULE)
    with open(f"{folder}/12-TLP-00-schedule-analysis_final_bundles.txt", "w") as file:
        file.write(SCHEDULE)


def test_profile(compiler, sparse_text):
    calls = compiler(fine, text=sparse_text)
    cost = ladder.measure(STAGED, limits=Limits(5.0))
    assert cost.rung == "profile"
    assert cost.total().estimate == 50
    assert cost.total().coverage.startswith("1 of 2 operations")
    assert [limits for _, limits in calls] == [Limits(5.0)]
    assert "1 call of the SparseCore has no cycles" in " ".join(cost.notes)


def test_salvaged(compiler):
    compiler(dies_late, dumps)
    cost = ladder.measure(STAGED)
    assert cost.rung == "salvaged"
    assert cost.total().estimate == 7 * 6873
    assert cost.notes[0] == (
        "no profile of the whole program: the TPU compiler died (SIGABRT): a check (x.cc:1)"
    )
    assert {op.name: op.bundles for op in cost.ops}["sort.8"] == 907


@pytest.mark.parametrize(
    "broken",
    [
        ENTRY[: ENTRY.index("73\n")],  # 68 of 6873
        ENTRY[:30],
        "",
        "\0\xff garbage",
        None,
    ],
)
def test_half_a_file_of_the_analysis_gives_no_figure(compiler, broken):
    def dies_writing(flags):
        folder = Path(flags["--xla_jf_dump_static_llo_profile_to"])
        path = folder / "sort.8_TPU7x_static_llo_profile.textproto"
        path.mkdir() if broken is None else path.write_text(broken)
        dies(flags)

    def dumps_half(flags):
        folder = Path(flags["--xla_jf_dump_to"])
        name = "12-sort.8-00-schedule-analysis_final_bundles.txt"
        (folder / name).write_text(SCHEDULE[: SCHEDULE.index("07\n")])

    compiler(dies_writing, dumps_half)
    cost = ladder.measure(STAGED)
    assert cost.rung == "counts"
    assert cost.total().ops == 0
    assert cost.notes[1] == "1 file of the analysis is cut short: left out"
    assert not any(op.bundles for op in cost.ops)


def test_bundles(compiler):
    compiler(dies, dumps)
    cost = ladder.measure(STAGED)
    assert (cost.rung, cost.has_cycles, cost.total().ops) == ("bundles", False, 0)


def test_counts_where_dumping_fails_too(compiler):
    calls = compiler(dies, dies, fine)
    cost = ladder.measure(STAGED)
    assert cost.rung == "counts"
    assert cost.sorts == {2: 1}
    assert calls[2][0] == []


def test_without_analysis_a_program_is_compiled_once(compiler, tmp_path):
    calls = compiler(fine, fine)
    cost = ladder.measure(STAGED, analysis=False, cache=CostCache(tmp_path))
    assert cost.rung == "counts"
    assert cost.sorts == {2: 1}
    assert cost.notes[0] == "no cycles: the static analysis wasn't asked for"
    assert [flags for flags, _ in calls] == [[]]
    ladder.measure(STAGED, analysis=False, cache=CostCache(tmp_path))
    assert len(calls) == 1
    # It is no answer to who asks for cycles.
    ladder.measure(STAGED, cache=CostCache(tmp_path))
    assert len(calls) == 2


def test_window_estimates_are_shown_and_never_summed(compiler):
    compiler(dies, fine)
    cost = ladder.measure(STAGED)
    assert any(op.window for op in cost.ops)
    assert cost.total().cycles == 0


@pytest.mark.parametrize("kind", ["missing", "target", "rejected"])
def test_what_no_rung_can_help_ends_at_once(compiler, kind):
    def refuses(flags):
        raise CompileFailed("no", kind, "step")

    calls = compiler(refuses)
    with pytest.raises(CompileFailed, match=r"^step: no$"):
        ladder.measure(STAGED)
    assert len(calls) == 1


def test_a_limit_that_the_plain_compilation_exceeds_ends_it(compiler):
    def slow(flags):
        raise CompileFailed("stopped", "time", "step")

    compiler(slow, slow)
    with pytest.raises(CompileFailed, match="stopped"):
        ladder.measure(STAGED)


def test_what_runs_aside_is_named_by_kind():
    def aside(*kinds):
        return ladder._named([SimpleNamespace(kind=kind) for kind in kinds])

    assert aside("copy-start") == "1 copy"
    assert aside("copy-start", "copy-start", "all-gather-start") == "2 copies and 1 collective"
    assert aside("copy-start", "all-reduce-start", "async-start") == (
        "1 copy, 1 collective and 1 other operation"
    )
