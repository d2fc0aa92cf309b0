"""The page that follows one chat names files that exist, and objects that are in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "one_chat.md"
CODE = re.compile(r"`([^`]+)`")


def test_files_and_objects_are_there() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split(" | ", 2) for line in lines if line.startswith("| `")]
    assert len(rows) > 30
    for files, objects, _ in rows:
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in CODE.findall(files))
        for name in CODE.findall(objects)[:1]:
            assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), (files, name)
