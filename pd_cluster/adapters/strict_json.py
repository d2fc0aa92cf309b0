"""JSON of files that others wrote: what a reader could understand in two ways is an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from pathlib import Path


def strict_object(content: bytes | bytearray | memoryview, file: Path) -> dict[str, Any]:
    """A JSON object without a key that is there twice, and without NaN. Raises BadAdapter naming the file."""
    try:
        value = json.loads(bytes(content), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadAdapter(f"{file} does not hold a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last of equal keys, and others the first: a tensor would be left out without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        again = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{again[:100]!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
