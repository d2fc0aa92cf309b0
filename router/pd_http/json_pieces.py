"""JSON in pieces: a long list of an answer becomes bytes while it is written, and is never there twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PLACE = b"\0"  # of a list in the text around it: JSON has no NUL


class JsonList:
    """A list in an answer. `items`: objects, or bytes: some items as JSON with commas between them, b"" for none."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for item in (one for one in self._items if one != b""):
            yield before
            yield from (item,) if isinstance(item, bytes) else json_pieces(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"


def json_pieces(value: Any) -> Iterator[bytes]:
    """`value` as JSON: each JsonList in it in pieces, what is between them in one."""
    lists: list[JsonList] = []
    place = orjson.Fragment(_PLACE)
    text = orjson.dumps(value, default=lambda one: lists.append(one) or place)  # type: ignore[func-returns-value]
    first, *others = text.split(_PLACE) if lists else (text,)
    yield first
    for one, other in zip(lists, others, strict=True):
        yield from one.pieces()
        yield other
