"""Nodes from a file that is read periodically."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd_router.sources.base import NamedNode, Roster, make_spec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from pd_router.nodes.node import NodeSpec

log = logging.getLogger("pd_router")
# A change is seen within a second. The content is compared, not the modification time: a copy may keep an old time, and
# two writes within one tick of the file system's clock have the same time.
LOOK_EVERY_S = 0.5


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    role: str


class NodesFile:
    """A JSON file: `[{"url": "http://host:port", "role": "prefill" | "decode" | "mixed"}, ...]`.

    Replace the file (write another one, rename it) instead of overwriting it: a half-written file is an error.
    """

    name = "file"

    def __init__(self, path: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._path = Path(path)
        self._sleep = sleep

    async def watch(self) -> AsyncGenerator[Roster, None]:
        last: bytes | str | None = None  # the content, or the reason why there is none
        reported: Roster | None = None  # None: the content is broken
        while True:
            content = await asyncio.to_thread(self._content)  # the file system may block, the router must not
            if content != last:
                last, reported = content, None
                try:
                    reported = Roster(tuple(map(NamedNode, parse_nodes(content))))
                except ValueError as error:
                    log.error("%s: %s; the nodes stay unchanged", self._path, error)
            if reported is not None:
                yield reported
            await self._sleep(LOOK_EVERY_S)

    def read(self) -> tuple[NodeSpec, ...]:
        """The nodes in the file now. Raises ValueError."""
        return parse_nodes(self._content())

    def _content(self) -> bytes | str:
        try:
            return self._path.read_bytes()
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"


def parse_nodes(content: bytes | str) -> tuple[NodeSpec, ...]:
    """The nodes in a file. `content`: its bytes, or why it cannot be read. Raises ValueError."""
    if isinstance(content, str):
        raise ValueError(content)
    try:
        entries = msgspec.json.decode(content, type=tuple[_Entry, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f'not a JSON list of {{"url", "role"}}: {error}') from error
    nodes = tuple(make_spec(entry.url, entry.role) for entry in entries)
    if len({node.url for node in nodes}) < len(nodes):
        raise ValueError("a URL is given twice: each node has one role")
    return nodes
