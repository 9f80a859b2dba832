"""The compiling child: how each of its ends reads."""

import importlib.util
import json
import sys

import pytest

from relower.lowering import compile as compiling
from relower.lowering.compile import CompileFailed, StagedModule, compile_staged, fatal_line
from relower.lowering.process import Limits

STAGED = StagedModule(b"ML\xefR", {"partitions": 1}, "TPU7x:2x2x1", "step")


@pytest.fixture
def child(monkeypatch):
    """Puts a program in the place of the child; it gets the folder as its argument."""

    def install(code):
        monkeypatch.setattr(
            compiling, "child_command", lambda folder: [sys.executable, "-c", code, folder]
        )

    return install


def failure(**limits):
    with pytest.raises(CompileFailed) as caught:
        compile_staged(STAGED, limits=Limits(**limits))
    assert "\n" not in str(caught.value)
    return caught.value.kind, str(caught.value)


def test_a_check_that_fails_is_quoted(child):
    child(
        "import sys, os; print('WARNING: noise'); "
        "print('F0000 00:00:1795976409.425686   12126 llo.cc:412] Check failed: a == b (1 vs. 2)',"
        " flush=True); print('*** stack ***', flush=True); os.abort()"
    )
    assert failure() == (
        "crash", "step: the TPU compiler died (SIGABRT): a == b (1 vs. 2) (llo.cc:412)"
    )  # fmt: skip


def test_a_silent_death(child):
    child("import sys; sys.exit(1)")
    assert failure() == (
        "crash", "step: the process around the compiler failed (exit code 1): it said nothing"
    )  # fmt: skip


@pytest.mark.parametrize(("end", "accident"), [("os.abort()", False), ("sys.exit(1)", True)])
def test_what_another_try_may_end_otherwise(child, end, accident):
    child(f"import sys, os; {end}")
    with pytest.raises(CompileFailed) as caught:
        compile_staged(STAGED)
    assert caught.value.accident is accident


def test_a_hang(child):
    child("import time; time.sleep(600)")
    kind, message = failure(seconds=0.5)
    assert kind == "time"
    assert message == "step: the TPU compiler was stopped after 0.5 s; raise the limit"


def test_memory(child):
    child("held = []\nwhile True: held.append(bytearray(b'x') * 10_000_000)")
    kind, message = failure(memory=200 * 2**20)
    assert kind == "memory"
    assert "raise the limit of 0.2 GiB" in message


@pytest.mark.parametrize("kind", ["missing", "target", "rejected"])
def test_what_the_child_answers(child, kind):
    answer = json.dumps({"error": "what it said", "kind": kind})
    child(f"import sys; open(sys.argv[1] + '/answer.json', 'w').write({answer!r})")
    assert failure() == (kind, "step: what it said")


def test_an_answer_is_read_and_nothing_is_printed(child, capfd):
    child(
        "import sys, json; f = sys.argv[1]; print('noise', flush=True); "
        "assert open(f + '/module.bc', 'rb').read() == b'ML\\xefR'; "
        "open(f + '/hlo.txt', 'w').write('HloModule m'); "
        "open(f + '/answer.json', 'w').write(json.dumps({'memory': {'temp': 3}, 'cost': {}}))"
    )
    found = compile_staged(STAGED)
    assert (found.hlo, dict(found.memory)) == ("HloModule m", {"temp": 3})
    assert capfd.readouterr() == ("", "")


def test_flags_come_after_the_users_own(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--own=1")
    made = compiling.child_environment(["--more=2"], "folder")
    assert made["LIBTPU_INIT_ARGS"] == "--own=1 --more=2"
    assert made["TPU_SKIP_MDS_QUERY"] == made["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_the_last_line_stands_for_a_death_without_a_check():
    assert fatal_line("one\n\ntwo\n") == "two"
    assert fatal_line("") == ""


def test_a_staged_module_survives_its_folder(tmp_path):
    STAGED.save(tmp_path)
    assert StagedModule.load(tmp_path) == STAGED


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed: nothing is missing"
)
def test_without_libtpu_one_line_says_so():
    kind, message = failure()
    assert kind == "missing"
    assert "install relower[tpu]" in message


def test_the_compiler_writes_no_logs_unless_asked(monkeypatch):
    monkeypatch.delenv("TPU_LOG_DIR", raising=False)
    made = compiling.child_environment([], "/folder")
    assert (made["TPU_LOG_DIR"], made["TMPDIR"]) == ("disabled", "/folder")
    assert made["TPU_MIN_LOG_LEVEL"] == "3"
    monkeypatch.setenv("TPU_LOG_DIR", "/logs")
    monkeypatch.delenv("TPU_MIN_LOG_LEVEL", raising=False)
    made = compiling.child_environment([], "/folder")
    assert made["TPU_LOG_DIR"] == "/logs"
    assert "TPU_MIN_LOG_LEVEL" not in made


@pytest.mark.parametrize(("mesh", "partitions"), [({"data": 4}, 4), (None, 1)])
def test_a_program_is_compiled_for_its_mesh_though_no_argument_is_sharded(mesh, partitions):
    """Jax takes it for one of a single device: the mesh that it is lowered under has none."""
    import jax
    from jax.sharding import PartitionSpec as P

    from relower.lowering.case import Case
    from relower.lowering.compile import stage_module

    def build(mesh):
        names = mesh.axis_names

        def summed(x):
            return jax.lax.psum(x, names)

        fn = jax.shard_map(summed, mesh=mesh, in_specs=P(names), out_specs=P())
        return fn, (jax.ShapeDtypeStruct((8,), "float32"),)

    assert stage_module(Case(build=build, mesh=mesh), "TPU7x:2x2x1").settings[
        "partitions"
    ] == partitions  # fmt: skip
