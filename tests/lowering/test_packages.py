"""A case in a package: its relative imports, and what is said where there is no package."""

import subprocess
import sys

import pytest

from relower.lowering import InputError, load_case
from relower.lowering.load import load_module
from relower.lowering.packages import imports_relatively

MODEL = """
import jax
import jax.numpy as jnp
from relower.lowering import case
from ..parts import scale

def f(x):
    from .other import shift
    return shift(scale * x)

ready = case(f, jax.ShapeDtypeStruct((4,), jnp.float32))
"""


def package(folder, scale, top="walrus", inits=("", "sub")):
    """A package of two levels; its `__init__.py` files are those asked for."""
    files = {"parts.py": f"scale = {scale}", "sub/model.py": MODEL,
             "sub/other.py": "def shift(x):\n    return x + 1"}  # fmt: skip
    files.update({f"{init}/__init__.py".lstrip("/"): "" for init in inits})
    for name, text in files.items():
        file = folder / top / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / top / "sub" / "model.py"


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("walrus", "otter")]:
        del sys.modules[name]


def test_relative_imports_are_those_of_the_package(tmp_path):
    made = load_case(f"{package(tmp_path, 3)}:ready")
    assert made.fn(2.0) == 7.0


def test_each_file_sees_the_package_around_it(tmp_path):
    first = load_case(f"{package(tmp_path / 'one', 3)}:ready")
    second = load_case(f"{package(tmp_path / 'two', 5)}:ready")
    assert (first.fn(2.0), second.fn(2.0)) == (7.0, 11.0)


def test_a_file_without_relative_imports_is_no_part_of_a_package(tmp_path):
    path = package(tmp_path, 3).with_name("other.py")
    assert not imports_relatively(path)
    assert "." not in load_module(path).__name__
    assert "walrus" not in sys.modules


def test_a_package_imported_from_elsewhere_is_not_taken_for_the_files_own(tmp_path, monkeypatch):
    package(tmp_path / "installed", 3, top="otter")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    import otter  # noqa: F401

    path = package(tmp_path / "here", 5, top="otter")
    with pytest.raises(
        InputError, match=r"the package otter is already imported, from .*installed"
    ):
        load_case(f"{path}:ready")


@pytest.mark.parametrize(
    ("inits", "said", "wanted"),
    [
        ((), "goes 2 up, and the file is in no packages", "walrus/sub/__init__.py"),
        (("sub",), "goes 2 up, and the file is in 1 package:", "walrus/__init__.py"),
    ],
    ids=["no package", "not deep enough"],
)
def test_what_to_do_where_there_is_no_package(tmp_path, inits, said, wanted):
    path = package(tmp_path, 3, inits=inits)
    with pytest.raises(InputError) as caught:
        load_case(f"{path}:ready")
    assert f"{path}:5: `from ..parts import ...` {said}" in str(caught.value)
    assert f"Write {tmp_path / wanted}, an empty file will do, or import absolutely" in str(
        caught.value
    )


def test_a_module_given_by_its_dotted_name(tmp_path, monkeypatch):
    package(tmp_path / "src", 3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"named by its file: write src/walrus/sub/model.py:ready"):
        load_case("walrus.sub.model:ready")
    with pytest.raises(InputError, match=r"not its module: write the path of no/such.py"):
        load_case("no.such:ready")
    with pytest.raises(InputError, match=r"^cases.py: no such file$"):
        load_case("cases.py:ready")


def test_the_command_line_explains_a_case_of_a_package(tmp_path):
    package(tmp_path, 3)
    argv = [sys.executable, "-m", "relower.cli.main", "explain"]

    def explained(spec):
        return subprocess.run([*argv, spec], cwd=tmp_path, capture_output=True, text=True)

    done = explained("walrus/sub/model.py:ready")
    assert (done.returncode, "0 applied" in done.stdout) == (0, True), done.stderr
    wrong = explained("walrus.sub.model:ready")
    assert wrong.returncode == 2
    assert "write walrus/sub/model.py:ready" in " ".join(wrong.stderr.split())
