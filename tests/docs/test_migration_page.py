"""The page for users of other charts: its values are files that the chart's tests render, and its keys exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART
from tests.deploy.value_files import value_file
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "kubernetes_migration.md").read_text()
KEY = re.compile(r"`([a-zA-Z]\w*(?:\.[a-zA-Z]\w*)*)`")
WORDS = {"enablePD", "honorLabels", "idleReplicaCount"}  # of theirs


def translations() -> list[tuple[str, str]]:
    """Of each row of the tables: their keys, ours."""
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "there" not in line]
    return [(row[0].strip(), row[1].strip()) for row in rows]


def test_the_values_on_the_page_are_files_that_are_rendered() -> None:
    shown = [text for language, text in blocks(PAGE) if language == "yaml"]
    files = [value_file(name).text.partition("\n") for name in ("from-production-stack", "from-llm-d")]
    assert all("docs/kubernetes_migration.md" in first for first, _, _ in files)
    assert shown == [rest for _, _, rest in files]


def test_every_row_names_a_key_that_is_there_or_says_why_there_is_none() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = translations()
    assert len(rows) >= 40
    for theirs, ours in rows:
        assert len(theirs) > 2
        keys = [key for key in KEY.findall(ours) if key not in WORDS]
        assert keys or ours.startswith("none: ") or "chart's" in ours, theirs
        for key in keys:
            assert exists(key, values), f"{theirs}: {key}"


def exists(key: str, values: dict[str, Any]) -> bool:
    found: Any = values
    parts = key.split(".")
    if len(parts) > 1 and parts[0] == "roles":
        parts = ["nodeDefaults", *parts[2:]]
    for part in parts:
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


@pytest.mark.parametrize(("key", "known"), [("roles.decode.gpus.count", True), ("roles.decode.gpu", False)])
def test_a_key_that_is_not_there_is_found(key: str, known: bool) -> None:
    assert exists(key, yaml.safe_load((CHART / "values.yaml").read_text())) is known
