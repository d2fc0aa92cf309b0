"""The page of fakes names files that exist, and every file that stands for something."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "test_doubles.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`((?:tests|connectors)/[\w/]+\.py)`", PAGE))
# A file of such a name stands for something, or starts it
STANDS = re.compile(
    r"fake|stand_in|simulat|world\.py|server\.py|_clusters?\.|_nodes?\.|fork|relay|_ranks?\.|_engine|drafters|receiver"
    r"|certificates|recorded_|recorder|held_|gate\.|patient|version_|_legs|_wires|one_process"
)


def helpers() -> set[str]:
    """Files of the tests that hold no tests."""
    paths = (ROOT / "tests").rglob("*.py")
    names = {path.relative_to(ROOT).as_posix() for path in paths}
    return {name for name in names if not re.search(r"/(test_\w+|conftest|__\w+__)\.py$", name)}


def test_files_exist() -> None:
    assert len(NAMED) > 70
    assert [name for name in NAMED if not (ROOT / name).is_file()] == []


def test_each_double_has_a_row() -> None:
    wanted = {name for name in helpers() if STANDS.search(name.rpartition("/")[2]) or name.count("/") == 1}
    assert len(wanted) > 60
    assert sorted(wanted - NAMED) == []
    assert [name for name in sorted(wanted) if PAGE.count(f"`{name}`") > 1] == []
