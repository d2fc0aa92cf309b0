"""The CI workflow, issue forms, hooks and compose file: by their schemas, and by what this repository has."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from tests.cluster import CLI
from tests.deploy.chart import ROOT
from tests.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launcher

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.compose-spec": "deploy/compose.yaml",
}


def refusal(schema: str, *files: Path) -> str:
    """What check-jsonschema, which has the schemas with it, finds wrong; "" for valid files."""
    result = CliRunner().invoke(check_jsonschema, ["--builtin-schema", schema, *map(str, files)])
    return result.output if result.exit_code else ""


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_valid(schema: str) -> None:
    files = sorted(ROOT.glob(SCHEMAS[schema]))
    assert files
    assert refusal(schema, *files) == ""


def test_a_wrong_workflow_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "ci.yml"
    wrong.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in refusal("vendor.github-workflows", wrong)


def test_the_workflow_runs_the_two_commands_with_the_least_rights() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert runs["up"] == [".ci/smoke make up"]
    assert runs["test"][0].startswith("make test")
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert "permissions" not in job, name
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step.get("uses", "actions/x@" + 40 * "0")), step
    for name in ("up", "test"):
        assert workflow["jobs"][name]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]


def targets() -> set[str]:
    """Of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_what_workflow_and_hooks_run_exists() -> None:
    hooks: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [hook["entry"] for hook in hooks]
    text = "\n".join([WORKFLOW.read_text(), *entries])
    assert set(re.findall(r"\bmake ([a-z-]+)\b(?! \()", text)) <= targets()
    for script in re.findall(r"\.ci/[a-z]+", text):
        assert os.access(ROOT / script, os.X_OK), script
    assert {hook["language"] for hook in hooks} == {"system"}, "no tool is downloaded"
    assert set(re.findall(r"\.venv/bin/([a-z-]+)", "\n".join(entries))) == {"ruff", "lint-imports", "python", "mypy"}


@pytest.mark.slow
@pytest.mark.integration
def test_the_smoke_script_starts_asks_and_stops(launcher: Launcher) -> None:
    port = free_port()
    flags = (f"--port={port}", "--device=cpu", "--num-threads=1", "--kv-cache-gb=0.05", "--quiet")
    environment = {"URL": f"http://127.0.0.1:{port}", "DEADLINE_S": "100"}
    smoke = launcher.start("smoke", [".ci/smoke", *CLI, "up", *flags], environment)
    smoke.wait_line("smoke: started, asked and stopped in ")
    assert smoke.wait() == 0
    assert smoke.leftovers() == []
