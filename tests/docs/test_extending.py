"""The page about new parts of models names files that exist, and seams that are in the files of their row."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
PLACE = re.compile(r"(?:pd_cluster|router|connectors|kernels|tests)/[\w/.]+")
KEPT_CHANGES = ["a drafter", "images", "a stage of logits", "sleep"]


def rows(header: str) -> list[list[str]]:
    """The rows of the tables of which the header begins so."""
    tables = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]


def test_files_and_folders_exist() -> None:
    named = {name for name in CODE.findall(PAGE) if PLACE.fullmatch(name)}
    assert len(named) > 60
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_seams_are_in_the_files_of_their_rows() -> None:
    found = 0
    for row in rows("step | file | seam") + rows("to add"):
        files = [ROOT / name for cell in row[:2] for name in CODE.findall(cell) if PLACE.fullmatch(name)]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in CODE.findall(row[2]):
            if re.fullmatch(r"_?[A-Za-z]\w*(?:\.\w+)*", name):
                assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), (row[:2], name)
                found += 1
    assert found > 30


def test_the_changes_have_a_row() -> None:
    assert [row[0] for row in rows("to add")] == KEPT_CHANGES
    assert "docs/extending.md#where-do-i-change-x" in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
