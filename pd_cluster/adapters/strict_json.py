"""JSON of files that others wrote: what a reader could understand in two ways is an error.

Several threads read such files at once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from pathlib import Path

Described = TypeVar("Described", bound=type[msgspec.Struct])


def described(kind: Described) -> Described:
    """Class decorator of what is converted to: msgspec describes the struct to itself now, not at its first use.

    Two threads that use one first, at once, end the process by a segmentation fault (msgspec 0.22.0, Python 3.11).
    """
    msgspec.json.Decoder(kind)
    return kind


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
