"""The workflow and the hooks that pages show: they parse, and what they run is run there."""

from __future__ import annotations

import re
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
    assert not files.search("README.md")
