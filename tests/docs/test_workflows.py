"""The workflow and the hooks that pages show: they parse, and what they run is run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import literate
import pytest
import yaml

ROOT = literate.ROOT
NOT_RUN = re.compile(r"pip install ")
"""Environments are made before; CI makes them anew from the README."""


def shown(page: str, title: str) -> Any:
    found = literate.blocks((literate.DOCS / page).read_text(encoding="utf-8"))
    (text,) = (b.text for b in found if b.title == title)
    return yaml.safe_load(text)


def run_on(page: str) -> list[str]:
    """Commands that the tests run because the page shows them, without variables set for one."""
    found = literate.blocks((literate.DOCS / page).read_text(encoding="utf-8"))
    consoles = [b for b in found if b.language == "console" and "not run" not in b.notes]
    commands = [one.command for block in consoles for one in literate.commands(block)]
    return [re.sub(r"^(\w+=\S+ )+", "", command) for command in commands]


@pytest.mark.parametrize(
    ("page", "also"), [("recipes/github-actions.md", {}), ("getting-started.md", {"--jobs 2": ""})]
)
def test_a_workflow(page: str, also: dict[str, str]) -> None:
    workflow = shown(page, ".github/workflows/relower.yml")
    triggers = workflow[True]  # how YAML reads `on`
    assert "pull_request" in triggers
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
            elif not NOT_RUN.match(step["run"]):
                command = step["run"]
                for option, instead in also.items():
                    command = command.replace(option, instead).strip()
                assert command in run_on(page)


def test_the_workflow_keeps_what_the_gate_writes() -> None:
    job = shown("recipes/github-actions.md", ".github/workflows/relower.yml")["jobs"]["gate"]
    (gate,) = (step["run"] for step in job["steps"] if "relower gate" in step.get("run", ""))
    (upload,) = (s for s in job["steps"] if "upload-artifact" in s.get("uses", ""))
    assert upload["if"] == "always()"
    for file in upload["with"]["path"].split():
        assert f" {file}" in gate


def test_the_hook() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (repo,) = shown("recipes/pre-commit.md", ".pre-commit-config.yaml")["repos"]
    (local,) = repo["hooks"]
    assert {**hook, **local} == hook  # the page's own copy says nothing else
    assert hook["entry"] in run_on("recipes/pre-commit.md")
    files = re.compile(hook["files"])
    assert files.search("models/train.py")
    assert files.search("relower.toml")
    assert files.search("relower.lock")
    assert not files.search("README.md")


@pytest.mark.skipif(shutil.which("pre-commit") is None, reason="pre-commit isn't installed")
def test_the_hook_lets_a_commit_pass_and_stops_one(tmp_path: Path) -> None:
    blocks = literate.blocks((literate.DOCS / "recipes/pre-commit.md").read_text(encoding="utf-8"))
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER")
           for what in ("NAME", "EMAIL")}  # fmt: skip
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "PRE_COMMIT_HOME": str(tmp_path / ".git" / "hooked")}
    variables = {**os.environ, **who, **quiet, "PATH": path}

    def run(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    assert run("git", "init", "-q")[0] == 0
    assert run("pre-commit", "install")[0] == 0
    run("git", "add", "-A")
    code, said = run("git", "commit", "-m", "as the page has it")
    assert (code, "Passed" in said) == (0, True), said
    model = tmp_path / "train.py"
    model.write_text(model.read_text().replace("1 - jnp.sin(x)", "jnp.sin(x) - 1"))
    run("git", "add", "-A")
    code, said = run("git", "commit", "-m", "the control shows nothing")
    assert (code, "must differ, and is identical" in said) == (1, True), said
    (tmp_path / "notes.txt").write_text("no program")
    run("git", "restore", "--staged", "--worktree", "train.py")
    run("git", "add", "-A")
    code, said = run("git", "commit", "-m", "no program")
    assert (code, "no files to check" in said) == (0, True), said
