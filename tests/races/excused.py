"""Places that stay as they are, with a reason each."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.races.code import Finding

LIST = Path(__file__).parent / "excused.toml"


def read(text: str) -> dict[tuple[str, str], str]:
    """Place and rule to the reason."""
    found: dict[tuple[str, str], str] = {}
    for entry in tomllib.loads(text).get("excused", []):
        assert set(entry) == {"place", "rule", "reason"}, entry
        assert entry["reason"], entry
        key = (entry["place"], entry["rule"])
        assert key not in found, f"twice: {key}"
        found[key] = entry["reason"]
    return found


def left(findings: Iterable[Finding], excuses: dict[tuple[str, str], str]) -> tuple[list[Finding], list[str]]:
    """What is not excused, and the excuses that excuse nothing. `path::*` is a whole file."""
    used: set[tuple[str, str]] = set()
    remaining: list[Finding] = []
    for one in findings:
        keys = {(one.place, str(one.rule)), (f"{one.path}::*", str(one.rule))} & excuses.keys()
        used |= keys
        if not keys:
            remaining.append(one)
    return sorted(remaining), [f"{place} {rule}" for place, rule in excuses if (place, rule) not in used]
