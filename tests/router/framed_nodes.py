"""Fake decode nodes that write one scripted stream in frames, and fail it where a test says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pd_connectors.protocol.stream_codec import encode_message
from pd_http.frames import FRAMES_HEADER, FRAMES_TYPE, FRAMES_VERSION, StreamFailed
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode
from tests.router.framed_streams import HEAD, VERSION

if TYPE_CHECKING:
    from tests.router.fake_nodes import Seen
    from tests.router.framed_streams import ScriptedStream

ERROR_EVENT = b'data: {"error": {"message": "as scripted", "code": "as_scripted"}}\n\ndata: [DONE]\n\n'


class End(StrEnum):
    """How a node stops in the middle of its stream."""

    BREAKS = "breaks"  # the connection ends
    STANDS = "stands"  # nothing more comes; the connection stays
    GIVES_UP = "gives up"  # 503, as at the end of a drain
    ENGINE_DIED = "engine died"
    REFUSES = "refuses"  # 400: the request is wrong
    TIME_IS_UP = "time is up"  # 504
    SECOND_HEAD = "second head"


TOLD = {
    End.GIVES_UP: StreamFailed(503, "shutting_down", ERROR_EVENT),
    End.ENGINE_DIED: StreamFailed(503, "engine_died", ERROR_EVENT),
    End.REFUSES: StreamFailed(400, "invalid_value", ERROR_EVENT),
    End.TIME_IS_UP: StreamFailed(504, "time_is_up", ERROR_EVENT),
}


@dataclass
class FramedScript:
    """The script of all nodes of a test. `cuts`: one for each node that is asked in turn, then whole answers."""

    stream: ScriptedStream
    cuts: list[tuple[int, End]] = field(default_factory=list)  # (bytes after the head, what then)
    counts: list[int] = field(default_factory=list)  # of frames that the client had, by each continuation

    async def __call__(self, node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        assert seen.headers[FRAMES_HEADER] == FRAMES_VERSION
        continuation = seen.body.get("kv_transfer_params", {}).get("continuation")
        skip = 0 if continuation is None else self._replay(continuation)
        head, *rest = self.stream.messages(skip)
        size, end = self.cuts.pop(0) if self.cuts else (None, None)
        response = web.StreamResponse(headers={"content-type": FRAMES_TYPE, "x-pd-decode": node.node_id})
        await response.prepare(request)
        written = head + b"".join(rest)
        await response.write(written if size is None else written[: len(head) + size])
        if end is None:
            await response.write_eof()
        else:
            await self._end(end, response, request)
        return response

    def _replay(self, continuation: dict[str, Any]) -> int:
        """As a node does: what the client has must be what this node would have written."""
        assert continuation["head"] == msgspec.structs.asdict(HEAD) | {"prompt_digest": HEAD.prompt_digest.hex()}
        self.counts.append(self.stream.count_of(continuation["choices"]))
        return self.counts[-1]

    async def _end(self, end: End, response: web.StreamResponse, request: web.Request) -> None:
        assert request.transport is not None
        if end is End.STANDS:
            await asyncio.Event().wait()
        if end is End.BREAKS:
            request.transport.close()  # after what was written, without the end of the body
            return
        await response.write(encode_message(TOLD.get(end, HEAD)))
        await response.write_eof()


def framed_nodes(script: FramedScript, count: int = 2) -> list[FakeNode]:
    nodes = [FakeNode("decode", script, node_id=f"d{number}") for number in range(count)]
    for node in nodes:
        node.stream_version = VERSION
    return nodes


async def foreign(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Another engine's stream: it knows nothing of frames, and is not asked for them."""
    assert FRAMES_HEADER not in seen.headers
    return await fakes.decode(node, request, seen)
