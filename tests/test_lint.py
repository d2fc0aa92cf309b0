"""What `make lint` checks: it is work for the queue of `make test` like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
