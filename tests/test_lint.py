"""What mypy leaves unread is named by no file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.test_house import PACKAGES

ROOT = Path(__file__).parents[1]


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
