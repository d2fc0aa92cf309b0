"""Rules of the repository that no linter checks."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.races.sources import statements

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "pd_cluster", "router/pd_router", "router/pd_http", "connectors/pd_connectors", "kernels/pd_kernels", "benchmarks",
)  # fmt: skip


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the packages, by its dotted name."""
    found = {}
    for package in PACKAGES:
        folder = ROOT / package
        for path in folder.rglob("*.py"):
            name = ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, names: set[str]) -> set[str]:
    """Modules among `names` that a file imports: at its top, inside functions, and for type checking."""
    found = set()
    for node in statements(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names


def test_no_files_import_each_other_in_a_circle() -> None:
    """A file can be read, and moved, after those that it imports, those for annotations included."""
    files = modules()
    graph = {name: imports(path, set(files) - {name}) for name, path in files.items()}
    assert circle_in(graph) == []


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Names of which each stands for the next one, in a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_public_class_names_are_unique() -> None:
    """A name means one thing wherever it is read, and a search for it finds one definition."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for statement in parsed(path).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                places[statement.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_of_test_files_are_unique() -> None:
    """Else pytest can collect only one of them, and `make test-slow` none."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name, count in names.items() if count > 1} == set()


def test_documents_name_files_that_exist() -> None:
    named = {
        (document, path)
        for document in ("ARCHITECTURE.md", "README.md", "SECURITY.md")
        for path in re.findall(r"`([a-z_/0-9]+\.py)`", (ROOT / document).read_text())
    }
    files = [
        f"/{path.relative_to(ROOT)}" for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py")
    ]
    assert {
        (document, path) for document, path in named if not any(file.endswith(f"/{path}") for file in files)
    } == set()


@pytest.mark.parametrize(
    ("document", "most"), [("ARCHITECTURE.md", 150), ("CONTRIBUTING.md", 150), ("CHANGELOG.md", 1000)]
)
def test_documents_are_short_and_narrow(document: str, most: int) -> None:
    lines = (ROOT / document).read_text().splitlines()
    assert len(lines) <= most
    assert [line for line in lines if len(line) > 120] == []


# A thing is named, not spoken of as a person. Quotations, data and names that are not ours are left out.
PERSONS = re.compile(r"\b(who|whoever|whose|whom|nobodys?|somebody|anybody|everybody|lest|amid)\b", re.IGNORECASE)
QUOTATIONS = {"Who are you?"}
PROSE = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".json", ".tpl", ".cfg"}
MODELS = ("deploy/demo_model", "deploy/tool_model", "pd_cluster/demo_model", "pd_cluster/tool_model")
NOT_PROSE = (*MODELS, "benchmarks/results", "tests/server/foreign_exchanges", "tests/test_house.py")


def test_prose_names_things() -> None:
    found = []
    for folder in ("pd_cluster", "router", "connectors", "kernels", "benchmarks", "tests", "helm", "deploy", "."):
        paths = (ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*")
        for path in paths:
            name = str(path.relative_to(ROOT))
            if path.suffix not in PROSE or not path.is_file() or name.startswith(NOT_PROSE):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for quotation in QUOTATIONS:
                    line = line.replace(quotation, "")
                line = line.replace("_", " ")  # identifiers, too
                found += [f"{name}:{number}: {word}" for word in PERSONS.findall(line)]
    assert found == []
