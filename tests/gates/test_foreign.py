"""Files of StableHLO on the command line: read in a process of its own, whatever they hold."""

import subprocess
import sys
import textwrap

import pytest

from relower.cli.main import main
from relower.gates.foreign import is_foreign, read_foreign
from relower.lowering.errors import InputError

MODULE = """
module @m {{
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.{op} %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}
"""
WRITER = """
import io, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
text, folder = sys.argv[1:]
with mlir.make_ir_context():
    module = ir.Module.parse(text)
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    open(folder + "/sine.mlirbc", "wb").write(buffer.getvalue())
    found = stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
    open(folder + "/sine.vhlo", "wb").write(found)
"""
CASES = """
import jax, jax.numpy as jnp
from relower.lowering import case
def sine():
    return case(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    for op in ("sine", "cosine"):
        (folder / f"{op}.mlir").write_text(MODULE.format(op=op))
    command = [sys.executable, "-c", WRITER, MODULE.format(op="sine"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "cases.py").write_text(CASES)
    return folder


def test_text_bytecode_and_portable_artifacts_are_one_program(files, capsys):
    for name in ("sine.mlirbc", "sine.vhlo"):
        assert main(["diff", str(files / "sine.mlir"), str(files / name)]) == 0, name
    assert main(["diff", str(files / "sine.mlir"), str(files / "cosine.mlir")]) == 1
    assert "stablehlo.sine" in capsys.readouterr().out


def test_against_a_lowered_program_the_missing_stamp_must_be_allowed(files, capsys):
    artifact = str(files / "sine.program")
    assert main(["lower", f"{files / 'cases.py'}:sine", "-o", artifact]) == 0
    pair = [str(files / "sine.vhlo"), artifact]
    capsys.readouterr()
    assert main(["diff", *pair]) == 2
    assert "states no environment" in capsys.readouterr().out
    code = main(["diff", *pair, "--allow", "origin"])
    said = capsys.readouterr().out
    assert "how it is called isn't stated in a and wasn't compared" in said
    # jax states how many partitions and replicas there are; the file doesn't.
    assert code == 1
    assert "num_partitions" in said


def test_the_lower_command_shows_and_stores_it(files, capsys):
    output = str(files / "stored.program")
    assert main(["lower", str(files / "sine.mlirbc"), "-o", output]) == 0
    assert "stablehlo.sine" in capsys.readouterr().out
    assert main(["diff", output, str(files / "sine.mlir")]) == 0


BAD = {
    "words.mlir": b"hello",
    "cut.mlirbc": b"ML\xefR\x0dStableHLO",
    "portable.mlirbc": b"ML\xefR\x0dStableHLO_v9.9.9\x00",
    "no_entry.mlir": b"module {}",
    "other.mlir": b"func.func @main() { llvm.nonsense }",
    "bytes.mlir": bytes(range(256)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_and_exit_code_2(name, files, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(BAD[name])
    assert main(["diff", str(path), str(files / "sine.mlir")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("relower: ")
    assert "\n" not in error
    assert str(path) in error


def test_a_parser_that_dies_is_one_line(tmp_path):
    path = tmp_path / "deep.mlir"
    path.write_text("module {" * 200_000)  # runs out of stack
    with pytest.raises(InputError, match=r"deep\.mlir") as caught:
        read_foreign(str(path))
    assert "\n" not in str(caught.value)
    assert any(word in str(caught.value) for word in ("died", "not StableHLO"))


def test_a_parser_that_takes_too_much_memory_is_one_line(tmp_path):
    count = 1 << 30
    path = tmp_path / "large.mlir"
    path.write_text(
        "func.func @main() -> tensor<1xf32> {\n"
        f'  %0 = stablehlo.constant dense<"0x{"00" * 4}"> : tensor<{count}xf32>\n'
        "  %1 = stablehlo.slice %0 [0:1] : (tensor<1073741824xf32>) -> tensor<1xf32>\n"
        "  return %1 : tensor<1xf32>\n}\n"
    )
    message = ""
    try:
        read_foreign(str(path))
    except InputError as error:
        message = str(error)
    assert "\n" not in message


def test_a_parser_that_does_not_end_is_ended(files):
    with pytest.raises(InputError, match=r"sine\.mlir: not done after 0.05 s"):
        read_foreign(str(files / "sine.mlir"), timeout=0.05)


def test_the_limits_are_those_of_the_child(tmp_path):
    code = textwrap.dedent(
        """
        import resource
        from relower.lowering.foreign import limit
        limit(1000)
        try:
            bytearray(3 << 30)
        except MemoryError:
            print("bounded", resource.getrlimit(resource.RLIMIT_CORE)[0])
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["bounded", "0"], done.stderr


def test_what_is_taken_for_mlir(files, tmp_path):
    assert is_foreign(str(files / "sine.mlir"))
    assert is_foreign(str(files / "sine.vhlo"))
    assert not is_foreign(str(files / "cases.py"))
    assert not is_foreign(str(files / "none.mlir"))
    assert not is_foreign("\0")
    unnamed = tmp_path / "unnamed"
    unnamed.write_bytes((files / "sine.mlirbc").read_bytes())
    assert is_foreign(str(unnamed))
    archive = tmp_path / "program.mlir"
    archive.write_bytes(b"PK\x03\x04")
    assert not is_foreign(str(archive))
