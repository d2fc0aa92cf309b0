"""The mutants that may survive: survivors.toml, one table each, by all that names a mutant, with the reason."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.mutation.operators import Mutant

LIST = Path(__file__).with_name("survivors.toml")
_FIELDS = ("file", "function", "operator", "line", "change", "number")


def read(text: str) -> dict[tuple[str, ...], str]:
    """Mutant's key -> reason. Raises ValueError for an entry without one, with an unknown field, or said twice."""
    reasons: dict[tuple[str, ...], str] = {}
    for entry in tomllib.loads(text).get("survivor", []):
        if unknown := entry.keys() - {*_FIELDS, "reason"}:
            raise ValueError(f"unknown in {entry}: {sorted(unknown)}")
        key = tuple(str(entry.get(field, 0)) for field in _FIELDS)
        if not entry.get("reason", "").strip():
            raise ValueError(f"no reason for {key}")
        if key in reasons:
            raise ValueError(f"listed twice: {key}")
        reasons[key] = entry["reason"]
    return reasons


def entries(mutants: Iterable[Mutant]) -> str:
    """What is to be added to the list for these, with the reasons left to be written."""
    texts = []
    for mutant in mutants:
        fields = zip(_FIELDS[:5], mutant.key[:5], strict=True)
        lines = ["[[survivor]]", *(f"{field} = {_quoted(value)}" for field, value in fields)]
        if mutant.number:
            lines.append(f"number = {mutant.number}")
        texts.append("\n".join((*lines, 'reason = ""')))
    return "\n\n".join(texts)


def _quoted(value: str) -> str:
    if "'" not in value:
        return f"'{value}'"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
