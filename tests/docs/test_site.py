"""The documentation builds without a warning, loads nothing from elsewhere, and says what the tree says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
import yaml

from benchmarks.__main__ import BENCHMARKS
from docs.generate.configuration import COMMANDS, parsers
from docs.generate.metrics import ENGINE
from docs.generate.repository_links import replaced
from pd_cluster.launch.cli import build_parser
from tests.deploy import metric_names
from tests.docs.pages import PAGES, ROOT, blocks, commands, name_of, prose

if TYPE_CHECKING:
    from pathlib import Path

MAX_CHARS = 120
TEXTS = {name_of(page): page.read_text() for page in PAGES}
# Commits are labels of measurements. They have no place elsewhere.
WITH_COMMITS = ("docs/benchmarks.md", "docs/decisions/")
OTHERS_FLAGS = {
    "--address", "--all-containers", "--build", "--build-arg", "--create-namespace", "--dry-run", "--force-conflicts",
    "--generate", "--harness", "--head", "--logs", "--namespace", "--reset-then-reuse-values", "--reuse-values",
    "--set", "--stop", "--target", "--timeout",
}  # fmt: skip
SUFFIXES = r"py|md|sh|toml|ya?ml|jsonl?|txt"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_builds_without_a_warning(site: Path) -> None:
    """Links, anchors and the navigation are checked by the build."""
    for name in TEXTS:
        path = re.sub(r"(README|index)?\.md$", "", name.removeprefix("docs/"))
        assert (site / path / "index.html").is_file(), name
    assert not (site / "generate").exists()


def test_places_that_other_documents_link_to_exist(site: Path) -> None:
    """MkDocs checks the links within `docs/`. README and its neighbours link to places in pages, too."""
    links = [
        link for path in ROOT.glob("*.md") for link in re.findall(r"\]\(docs/([^)#]+)\.md#([^)]+)\)", path.read_text())
    ]
    assert links
    for page, place in links:
        assert f'id="{place}"' in (site / page / "index.html").read_text(), (page, place)


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href|srcset)=[\"']?(?:https?:)?//[^>]+")
    found = {match[0] for page in site.rglob("*.html") for match in loaded.finditer(page.read_text())}
    assert found == set()


def test_lines_of_prose_are_short() -> None:
    for name, text in TEXTS.items():
        lines = [line for line in text.splitlines() if not line.startswith("|")]
        assert [line for line in lines if len(line) > MAX_CHARS] == [], name


def test_commits_are_named_with_measurements_alone() -> None:
    for name, text in TEXTS.items():
        words = re.findall(r"\b[0-9a-f]{7,40}\b", text) if not name.startswith(WITH_COMMITS) else []
        assert [word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)] == [], name


def test_files_that_are_named_exist() -> None:
    for name, text in TEXTS.items():
        named = re.findall(rf"`((?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES}))`", prose(text))
        assert [path for path in named if not (ROOT / path).is_file()] == [], name


def test_commands_are_accepted() -> None:
    """Every call of pd-cluster in a code block parses."""
    parser = build_parser()
    found = [arguments for text in TEXTS.values() for arguments in commands(text, "pd-cluster")]
    assert len(found) >= 25
    for arguments in found:
        parser.parse_args(arguments)
    drain = ["nodes", "drain", "demo-pd-cluster-decode-1", "--wait-s", "300"]
    assert [*drain, "--cluster-key-file", "/etc/pd-cluster/cluster-key"] in found
    with pytest.raises(SystemExit):
        parser.parse_args(["up", "--prefil", "2"])


def test_flags_that_are_named_exist() -> None:
    known = {flag for _, parser in parsers() for action in parser._actions for flag in action.option_strings}
    for name, text in TEXTS.items():
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", prose(text)))
        assert named - known - OTHERS_FLAGS == set(), name


def test_every_command_has_its_flags_on_the_page() -> None:
    listed = {name for names in COMMANDS.values() for name in names}
    listed |= {"up", "prefill", "decode", "mixed", "check", "step-table"}
    assert listed == {name for name, _ in parsers()}


def test_targets_extras_and_benchmarks_exist() -> None:
    text = "\n".join(TEXTS.values())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[0] for page in TEXTS.values() for words in commands(page, "make") if words} <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = set(",".join(re.findall(r"'\.\[([a-z,]+)\]'", text)).split(","))
    assert {"lmcache", "ray"} <= installed <= extras.keys()
    modules = re.findall(r"python -m benchmarks (\w+)", text)
    assert {"tables", "disagg"} <= set(modules) <= BENCHMARKS.keys()


def test_metrics_and_alerts_that_are_named_exist() -> None:
    exported = metric_names.exported() | {f"pd_{name}" for name in ENGINE}
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    packages = {path.name for path in ROOT.glob("*/pd_*")} | {"pd_cluster"}
    named = {word for text in TEXTS.values() for word in re.findall(r"\bpd_[a-z0-9_]*[a-z0-9]\b", text)}
    assert named - exported - histograms - packages == set()
    alerts = {word for text in TEXTS.values() for word in re.findall(r"\bPd[A-Z][A-Za-z]+\b", text)}
    assert alerts <= metric_names.alert_expressions().keys()


def test_values_of_the_chart_exist() -> None:
    values = yaml.safe_load((ROOT / "helm" / "pd-cluster" / "values.yaml").read_text())
    named = re.findall(r"`((?:[a-z]\w*\.)+[a-zA-Z]+)(?:: [^`]*)?`", TEXTS["docs/kubernetes.md"])
    paths = {name for name in named if name.partition(".")[0] in values}
    assert {"router.replicas", "nodeDefaults.rdma.rootWithIpcLock", "clusterKey.existingSecret"} <= paths
    for path in paths:
        found = values
        for key in path.split("."):
            assert key in found, path
            found = found[key]


def test_links_out_of_the_pages_are_checked() -> None:
    text = "[log](../benchmarks/LOG.md) [a](other.md) [LICENSE](../LICENSE) [gone](../no/such.md#x) [up](../../x)"
    found, missing = replaced(text, "page.md", "")
    assert found == "log, `benchmarks/LOG.md` [a](other.md) `LICENSE` gone up"
    assert missing == ["../no/such.md#x", "../../x"]
    linked, _ = replaced("[log](../../benchmarks/LOG.md#a)", "decisions/page.md", "https://host/repo")
    assert linked == "[log](https://host/repo/blob/main/benchmarks/LOG.md#a)"
    assert replaced("[b](../benchmarks.md)", "decisions/page.md", "") == ("[b](../benchmarks.md)", [])


def test_blocks_are_closed() -> None:
    for name, text in TEXTS.items():
        assert "```" not in prose(text), name
        assert all(content.strip() for _, content in blocks(text)), name
