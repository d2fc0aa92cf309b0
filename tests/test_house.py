"""Rules of the repository that no linter checks."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pd_cluster", "router/pd_router", "router/pd_http", "connectors/pd_connectors", "kernels/pd_kernels")
# Both have two meanings inside pd_cluster/bench, where no other package sees them.
BENCH_ONLY = {"Row", "Ceilings"}


def test_public_class_names_are_unique() -> None:
    """A name means one thing wherever it is read, and a search for it finds one definition."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                places[statement.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in BENCH_ONLY} == {}
