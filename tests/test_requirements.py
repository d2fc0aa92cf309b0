"""What the tests import comes with the extra `dev`: `make test` installs that and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
OWN = {"tests", "benchmarks", "docs", "deploy", "pd_cluster", "pd_router", "pd_http", "pd_connectors", "pd_kernels"}
# ruff lets one statement be on a line, and one module be in an `import`
IMPORTS = re.compile(r"^(?:import|from) +(\w+)", re.MULTILINE)
ELSEWHERE = TESTS / "integration" / "tool_clients"  # run in environments of their own


def packages_at_import(path: Path) -> set[str]:
    """Those without which pytest cannot load the file. What a function or a `try` imports may be absent."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - OWN - set(sys.stdlib_module_names)


def packages_by_lines(path: Path) -> set[str]:
    """Those of `packages_at_import`, and perhaps more: of lines in a text. To parse the file takes 20 times as long."""
    return set(IMPORTS.findall(path.read_text())) - OWN - set(sys.stdlib_module_names)


def installed_by(requirements: list[str]) -> set[str]:
    """Distributions that pip installs for these lines, by the metadata of the installed ones."""
    waiting = [(Requirement(line), "") for line in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted, extra = waiting.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(wanted.name)
        for chosen in {"", *wanted.extras}:
            if (name, chosen) not in seen:
                seen.add((name, chosen))
                waiting += [(Requirement(line), chosen) for line in requires(name)]
    return {name for name, _ in seen}


def requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


@pytest.mark.long
def test_the_extra_brings_what_test_files_import() -> None:
    """An environment often holds more: LMCache brings `cryptography`, which certificates of the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = installed_by(project["dependencies"] + project["optional-dependencies"]["dev"])
    owners = metadata.packages_distributions()
    missing: dict[str, list[str]] = {}

    def is_brought(package: str) -> bool:
        return bool(brought & {canonicalize_name(owner) for owner in owners.get(package, ())})

    for path in sorted(TESTS.rglob("*.py")):
        if ELSEWHERE not in path.parents and not all(map(is_brought, packages_by_lines(path))):
            for package in packages_at_import(path):
                if not is_brought(package):
                    missing.setdefault(package, []).append(str(path.relative_to(ROOT)))
    assert missing == {}
