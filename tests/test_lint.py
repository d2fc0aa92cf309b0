"""What `make lint` checks: it is work for the queue of `make test` like any other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_house import PACKAGES

ROOT = Path(__file__).parents[1]
TOOLS = ("ruff check", "ruff format --check", "mypy", "lint-imports")


@pytest.mark.long
@pytest.mark.timeout(600)  # of mypy without a cache
@pytest.mark.parametrize("tool", TOOLS)
def test_lint(tool: str) -> None:
    name, *flags = tool.split()
    done = subprocess.run([Path(sys.executable).parent / name, *flags], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


def test_make_lint_runs_the_same() -> None:
    rule = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert [line.removeprefix("\t$(BIN)/") for line in rule.splitlines()[1:]] == list(TOOLS)


def unread() -> list[str]:
    """Modules that mypy does not read."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    return [
        name.removesuffix(".*")
        for override in settings["overrides"]
        if override.get("follow_imports") == "skip" and not override.get("ignore_missing_imports")
        for name in override["module"]
    ]


def naming(modules: list[str]) -> re.Pattern[str]:
    """A line that imports one of the modules, or uses it as an attribute of its package."""
    whole = "|".join(map(re.escape, modules))
    within = "|".join(
        rf"{re.escape(package)} import .*\b{part}" for package, _, part in (m.rpartition(".") for m in modules)
    )
    return re.compile(
        rf"^ *(?:(?:import|from) (?:{whole})|from (?:{within}))\b|(?<![\w.])(?:{whole})\.\w", re.MULTILINE
    )


def test_no_file_names_what_mypy_leaves_unread() -> None:
    """Where a file used it, mypy would take whatever it does for right."""
    found = naming(unread())
    for line in ("import torch.fx as fx", "from torch import cuda, fx", "    x = torch.fx.Graph()", "import redis"):
        assert found.search(line), line
    for line in ("import torch", "from torch import cuda", "x = torch.zeros(1)", "from redistribution import fx"):
        assert not found.search(line), line
    files = [path for root in (*PACKAGES, "docs/generate", "tests") for path in (ROOT / root).rglob("*.py")]
    assert [path for path in files if path != Path(__file__) and found.search(path.read_text())] == []
