"""``FILE.py:NAME@REV`` in repositories that are made here."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from relower.gates.child import ChildFailed, Job, run
from relower.gates.revision import at, is_case, kept, locate, split_revision
from relower.lowering.artifact import load
from relower.lowering.errors import InputError

TRAIN = """
import jax, jax.numpy as jnp
from helper import factor
import package.parts
import relower

def step():
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    return relower.case(lambda x: package.parts.act(x) * factor(), x)
"""
HELPER = "from pathlib import Path\ndef factor(): return float(Path('factor.txt').read_text())\n"
PARTS = "import jax.numpy as jnp\nact = jnp.sin\n"
# As an editable install with an import hook does it: a package's folder by name.
HOOK = """
import importlib.util, sys
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "package":
            return importlib.util.spec_from_file_location(
                name, FOLDER + "/__init__.py", submodule_search_locations=[FOLDER])
sys.meta_path.append(Editable)
"""


def git(folder, *arguments):
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL"), "a@b"),
        **dict.fromkeys(("GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"), "a@b"),
    }
    command = ["git", "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def write(folder, **texts):
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def repo(tmp_path):
    """``my repo/jobs/train.py`` and a package elsewhere; the work tree has moved on since HEAD."""
    top = tmp_path / "my repo"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    write(
        top,
        jobs__train_py=TRAIN,
        jobs__helper_py=HELPER,
        jobs__factor_txt="2",
        src__package__parts_py=PARTS,
    )
    (top / "src/package/__init__.py").write_text("")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "one")
    write(top, jobs__helper_py=HELPER + "#\n", src__package__parts_py=PARTS.replace("sin", "cos"))
    write(top, jobs__factor_txt="3")
    return top


@pytest.fixture
def hook(tmp_path, repo):
    folder = tmp_path / "hook"
    folder.mkdir()
    code = f"FOLDER = {str(repo / 'src/package')!r}\n{HOOK}"
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def state(top):
    """All that must not change: index, refs, worktrees, the files of the repository itself."""
    inside = {str(p): p.read_bytes() for p in (top / ".git").rglob("*") if p.is_file()}
    tree = {str(p): p.read_bytes() for p in top.rglob("*") if p.is_file() and ".git" not in p.parts}
    return inside, tree


def lowered(repo, spec, output, variables):
    job = Job("lower", spec=spec, levels=("exact",), output=str(output))
    answer = run(job, cwd=repo / "jobs", variables=variables)
    return load(output), answer["notes"]


def test_a_revision_beside_the_work_tree(repo, hook, tmp_path, monkeypatch):
    git(repo, "config", "core.splitIndex", "true")
    hooks = repo / ".git/hooks"
    for name in ("post-checkout", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (hooks / name).chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name in ("GIT_DIR", "GIT_INDEX_FILE"):  # as inside a hook of another repository
        monkeypatch.setenv(name, str(tmp_path / "of-another"))
    before = state(repo)
    then, notes = lowered(repo, "train.py:step@main", tmp_path / "a.program", hook)
    assert state(repo) == before
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "ran").exists()
    assert notes == []
    assert then.ops["stablehlo.sine"] == 1, "the package was taken from the work tree"
    assert "dense<2.0" in then.forms["exact"].sections[-1].text, "a file was read from elsewhere"
    files = {w.file for w in then.locations if w.file and not w.file.startswith("<")}
    assert files == {"main:jobs/train.py"}
    now, _ = lowered(repo, "train.py:step", tmp_path / "b.program", hook)
    assert now.ops["stablehlo.cosine"] == 1
    assert "dense<3.0" in now.forms["exact"].sections[-1].text


def test_what_comes_from_the_work_tree_all_the_same(repo, hook, tmp_path):
    """Loaded by path, past every import hook, or read as a file that the revision has too."""
    sneaky = (
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('late', {str(repo / 'jobs/helper.py')!r})\n"
        "import sys; late = importlib.util.module_from_spec(spec); spec.loader.exec_module(late)\n"
    )
    write(repo, jobs__train_py=TRAIN + sneaky + "sys.modules['late'] = late\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "two")
    with pytest.raises(ChildFailed, match=r"module late from jobs/helper\.py") as caught:
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)
    assert "nothing can be said of HEAD" in str(caught.value)
    read = f"\nopen({str(repo / 'jobs/factor.txt')!r}).read()\n"
    write(repo, jobs__train_py=TRAIN + read)
    git(repo, "commit", "-qam", "three")
    with pytest.raises(ChildFailed, match=r"work tree.*: file jobs/factor\.txt"):
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)
    traced = f"\nexec(compile(open({str(repo / 'jobs/other.py')!r}).read(), {str(repo / 'jobs/other.py')!r}, 'exec'))\n"  # noqa: E501
    write(repo, jobs__train_py=TRAIN.replace("package.parts.act", "act") + traced)
    write(repo, jobs__other_py="def act(x): return jnp.tan(x)\n")
    git(repo, "commit", "-qam", "four")
    with pytest.raises(ChildFailed, match=r"operations of jobs/other\.py"):
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)


LOADED = {
    "runpy": "import runpy; runpy.run_path({path!r})",
    "exec": "exec(open({path!r}).read())",
    "spec": (
        "import importlib.util as u; s = u.spec_from_file_location('zz', {path!r})\n"
        "s.loader.exec_module(u.module_from_spec(s))"
    ),
}


@pytest.mark.parametrize("how", LOADED.values(), ids=LOADED)
def test_a_source_that_leaves_no_module(repo, hook, tmp_path, how):
    more = f"\n{how.format(path=str(repo / 'jobs/helper.py'))}\n"
    write(repo, jobs__train_py=TRAIN + more)
    git(repo, "commit", "-qam", "two")
    for _ in range(2):  # the second from byte code
        with pytest.raises(ChildFailed, match=r"work tree.*: file jobs/helper\.py"):
            lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)


LISTED = {
    "glob": "import glob; glob.glob({path!r} + '/*.txt')",
    "listdir": "import os; os.listdir({path!r})",
    "iterdir": "import pathlib; list(pathlib.Path({path!r}).iterdir())",
}


@pytest.mark.parametrize("how", LISTED.values(), ids=LISTED)
def test_the_names_in_a_folder_of_the_work_tree(repo, hook, tmp_path, how):
    write(repo, jobs__train_py=f"{TRAIN}\n{how.format(path=str(repo / 'jobs'))}\n")
    git(repo, "commit", "-qam", "two")
    with pytest.raises(ChildFailed, match=r"work tree.*: the names in folder jobs$"):
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)


def test_a_folder_that_the_path_holds_is_no_listing(repo, hook, tmp_path):
    """Which packages are installed is asked of every folder of the path."""
    more = "\nimport importlib.metadata as m, os; m.entry_points(group='none'); os.listdir('.')\n"
    write(repo, jobs__train_py=TRAIN + more)
    git(repo, "commit", "-qam", "two")
    path = os.pathsep.join((hook["PYTHONPATH"], str(repo / "src")))
    _, notes = lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", {"PYTHONPATH": path})
    assert notes == []


USED = {
    "subprocess.Popen": (
        "import subprocess, threading; t = threading.Thread(target=subprocess.run, "
        "args=(['true'],)); t.start(); t.join()"
    ),
    "os.system": "import os; os.system('true')",
    "os.posix_spawn": "import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
}


@pytest.mark.parametrize("event", USED)
def test_another_program_leaves_it_undecided(repo, hook, tmp_path, event):
    traced = USED[event].replace("import ", "\n    import ", 1).replace("; ", "\n    ", 1)
    write(repo, jobs__train_py=TRAIN.replace("step():", f"step():{traced}"))
    git(repo, "commit", "-qam", "two")
    with pytest.raises(ChildFailed, match=rf"the case used {event}: what.*said of HEAD"):
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)


def test_questions_about_the_host_are_a_note(repo, hook, tmp_path):
    asks = "\nimport platform; platform.uname().processor\n"
    write(repo, jobs__train_py=TRAIN + asks)
    git(repo, "commit", "-qam", "two")
    _, notes = lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)
    assert notes == [
        "HEAD: installed packages used subprocess.Popen: what came that way isn't seen"
    ]


def test_an_installed_package_for_itself_and_for_the_case(repo, hook, tmp_path):
    folder = tmp_path / "site-packages"
    write(folder, starts_py="import os\nos.system('true')\ndef go(): os.system('true')\n")
    path = {"PYTHONPATH": os.pathsep.join((hook["PYTHONPATH"], str(folder)))}
    write(repo, jobs__train_py=f"{TRAIN}\nimport starts\n")
    git(repo, "commit", "-qam", "two")
    _, notes = lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", path)
    assert notes == ["HEAD: installed packages used os.system: what came that way isn't seen"]
    write(repo, jobs__train_py=f"{TRAIN}\nimport starts; starts.go()\n")
    git(repo, "commit", "-qam", "three")
    with pytest.raises(ChildFailed, match=r"the case used os\.system"):
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", path)


def test_what_no_revision_has(repo, hook, tmp_path):
    write(repo, src__package__generated_py="", jobs__data_txt="4")
    more = f"\nopen({str(repo / 'jobs/data.txt')!r}).read()\n"
    write(repo, jobs__train_py=TRAIN + more)
    git(repo, "commit", "-qam", "two")
    _, notes = lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)
    assert notes == ["HEAD: read from the work tree, untracked: jobs/data.txt"]
    write(repo, jobs__train_py=TRAIN + "\nimport package.generated\n")
    git(repo, "commit", "-qam", "three")
    with pytest.raises(ChildFailed, match=r"HEAD:jobs/train\.py: can't be imported.*generated"):
        lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)
    shutil.move(repo / "src", repo / "source")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "four")
    (repo / "src").symlink_to("source")  # installed at a folder that the revision lacks
    write(repo, jobs__train_py=TRAIN)
    git(repo, "commit", "-qam", "five")
    _, notes = lowered(repo, "train.py:step@HEAD", tmp_path / "a.program", hook)
    with pytest.raises(ChildFailed, match=r"main~2 has no source/package/__init__\.py, from which"):
        lowered(repo, "train.py:step@main~2", tmp_path / "a.program", hook)


def where(repo, spec):
    return locate(spec, repo / "jobs")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train.py:step@nope", "'nope' names no commit of"),
        ("train.py:step@--all", "'--all' names no commit of"),
        ("train.py:step@", "wanted a git revision after @"),
        ("train.py:step@HEAD:train.py", "names no commit of"),
        ("tran.py:step@HEAD", "has no file jobs/tran.py"),
        ("../jobs.py:step@HEAD", "has no file jobs.py"),
        ("../../train.py:step@HEAD", "train.py is in no git work tree"),
    ],
)
def test_mistakes_are_one_line(repo, spec, message):
    with pytest.raises(InputError, match=message) as caught:
        where(repo, spec)
    assert "\n" not in str(caught.value)


def test_a_shallow_clone_says_so(repo, tmp_path):
    git(repo, "commit", "-qam", "two")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", "shallow")
    with pytest.raises(InputError, match="this clone is shallow"):
        locate("jobs/train.py:step@HEAD~1", tmp_path / "shallow")
    assert locate("jobs/train.py:step@HEAD", tmp_path / "shallow") is not None


def test_no_git(repo, monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(InputError, match="git isn't installed"):
        where(repo, "train.py:step@HEAD")


def test_submodules_and_pointers_are_reported(repo, tmp_path):
    part = tmp_path / "part"
    part.mkdir()
    git(part, "init", "-q")
    write(part, x_txt="x")
    git(part, "add", "-A")
    git(part, "commit", "-qm", "part")
    git(repo, "submodule", "--quiet", "add", str(part), "third party")
    (repo / ".gitattributes").write_text("*.bin filter=lfs\n")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (repo / "weights.bin").write_text(pointer)
    git(repo, "-c", "filter.lfs.clean=cat", "add", "-A")
    git(repo, "commit", "-qm", "two")
    with at(where(repo, "train.py:step@HEAD")) as there:
        assert there.checkout.notes == (
            "HEAD: 1 submodule not checked out: third party",
            "HEAD: 1 Git LFS file a pointer, not its content: weights.bin",
        )
    with at(where(repo, "train.py:step@main~1")) as there:
        assert there.checkout.notes == ()


def test_the_folder_may_be_gone_and_the_case_elsewhere(repo, tmp_path):
    git(repo, "commit", "-qam", "two")
    shutil.rmtree(repo / "jobs")
    place = locate("jobs/train.py:step@HEAD", repo)
    assert (place.file, place.folder) == ("jobs/train.py", ".")
    outside = locate(f"{repo / 'jobs/train.py'}:step@HEAD~1", tmp_path)
    assert (outside.file, outside.folder) == ("jobs/train.py", ".")
    linked = tmp_path / "link"
    linked.symlink_to(repo)
    assert locate("link/jobs/train.py:step@HEAD", tmp_path).toplevel == repo.resolve()


def test_kept_checks_out_once(repo):
    git(repo, "branch", "other")
    with kept():
        with at(where(repo, "train.py:step@main")) as first:
            pass
        assert first.checkout.root.is_dir()
        with at(where(repo, "helper.py:x@other")) as second:
            assert second.checkout is first.checkout
    assert not first.checkout.root.exists()


def test_forms_of_a_case():
    assert split_revision("a.py:b") == ("a.py:b", None)
    assert split_revision("d@1/a.py:b[x@y]@origin/f:z") == ("d@1/a.py:b[x@y]", "origin/f:z")
    assert split_revision("a.py:b@HEAD@{1 day ago}") == ("a.py:b", "HEAD@{1 day ago}")
    assert is_case("a.py:b@feature/x")
    assert not is_case("base.program")
    assert not is_case("a.py")
    assert not is_case("a.py:@HEAD")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_leaves_nothing(repo, tmp_path, number):
    sleeps = "import time\nfrom pathlib import Path\nPath(BEGUN).touch()\ntime.sleep(60)\n"
    write(repo, jobs__slow_py=f"BEGUN = {str(tmp_path / 'begun')!r}\n{sleeps}")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "slow")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = state(repo)
    command = [sys.executable, "-m", "relower.cli.main", "lower", "slow.py:step@HEAD"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=repo / "jobs", env=environment, stderr=-1) as running:
        while not (tmp_path / "begun").exists():
            assert running.poll() is None
            time.sleep(0.05)
        assert any(p.name.startswith("relower-") for p in temporary.iterdir())
        running.send_signal(number)
        _, err = running.communicate()
    assert err == b""
    assert [p.name for p in temporary.iterdir()] == []
    assert state(repo) == before
