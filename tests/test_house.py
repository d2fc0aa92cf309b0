"""Rules of the repository that no linter checks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "pd_cluster", "router/pd_router", "router/pd_http", "connectors/pd_connectors", "kernels/pd_kernels", "benchmarks",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the packages, by its dotted name."""
    found = {}
    for package in PACKAGES:
        folder = ROOT / package
        for path in folder.rglob("*.py"):
            name = ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


# ruff keeps each import statement on lines of its own. To parse every file takes two seconds
IMPORT = re.compile(r"^[ \t]*(?:from +([\w.]+) +import +(\([^)]*\)|[^\n]+)|import +([^\n]+))", re.MULTILINE)


def imports(path: Path, names: set[str]) -> set[str]:
    """Modules among `names` that a file imports: at its top, inside functions, and for type checking."""
    found = set()
    for module, members, whole in IMPORT.findall(re.sub(r"#[^\n]*", "", path.read_text())):
        parts = [part.split(" as ")[0].strip() for part in (members or whole).strip("()").split(",")]
        found |= {module, *(f"{module}.{part}" for part in parts)} if module else set(parts)
    return found & names


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Modules that `start` imports, directly or through others."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_no_files_import_each_other_in_a_circle() -> None:
    """A file can be read, and moved, after those that it imports, those for annotations included."""
    files = modules()
    graph = {name: imports(path, set(files) - {name}) for name, path in files.items()}
    reached = {name: reachable(name, graph) for name in graph}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    assert circles == set()


def test_public_class_names_are_unique() -> None:
    """A name means one thing wherever it is read, and a search for it finds one definition."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for name in re.findall(r"^class ([^\W_]\w*)", path.read_text(), re.MULTILINE):
            places[name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


TREES = {"pd_connectors": "protocol/errors.py"}  # of errors; else a package's `errors.py`


@pytest.mark.parametrize("package", [Path(name).name for name in PACKAGES if not name.endswith(("kernels", "marks"))])
def test_each_error_stands_in_the_tree_of_its_package(package: str) -> None:
    folder = next(ROOT / name for name in PACKAGES if Path(name).name == package)
    bases = {"PdError", "HandoffError"}
    texts = [path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    while (
        more := {
            name
            for text in texts
            for name, base in re.findall(r"^class (\w+)\((\w+)", text, re.MULTILINE)
            if base in bases
        }
        - bases
    ):
        bases |= more
    own = set(re.findall(r"^class (\w+)", "\n".join(path.read_text() for path in folder.rglob("*.py")), re.MULTILINE))
    tree = (folder / TREES.get(package, "errors.py")).read_text().split('"""')[1]
    assert {name for name in own & bases if not re.search(rf"\b{name}\b", tree)} == set()


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
PERSONS = re.compile(r"\b(who|whoever|whose|whom|nobodys?|somebody|anybody|everybody|lest|amid)\b")
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
            text = path.read_text()
            if not PERSONS.search(text.replace("_", " ").lower()):
                continue
            for number, line in enumerate(text.splitlines(), 1):
                for quotation in QUOTATIONS:
                    line = line.replace(quotation, "")
                line = line.replace("_", " ").lower()  # identifiers, too
                found += [f"{name}:{number}: {word}" for word in PERSONS.findall(line)]
    assert found == []
