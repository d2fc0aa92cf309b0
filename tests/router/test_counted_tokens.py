"""The router counts the tokens that a framed stream brings, and the pieces of any other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from pd_connectors.protocol.stream_codec import encode_message
from pd_http.frames import FRAMES_TYPE, ChoiceProgress, Frame
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.framed_streams import END, HEAD, VERSION
from tests.router.router_process import serving, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.router.fake_nodes import Seen
    from tests.router.router_process import Router

pytestmark = [pytest.mark.anyio, pytest.mark.long]
ITL, LONGEST = "pd_router_inter_token_latency_seconds", "pd_router_longest_gap_seconds"


def frame(text: str, *counts: int) -> bytes:
    """`counts`: tokens of each choice."""
    choices = tuple(ChoiceProgress(index, (7,) * num, len(text)) for index, num in enumerate(counts))
    return encode_message(Frame(choices, f"data: {text}\n\n".encode() if text else b""))


class Steps:
    """A node that writes each piece when the client has all of the piece before it."""

    def __init__(self, content_type: str, pieces: Sequence[bytes]) -> None:
        self._content_type, self._pieces = content_type, pieces
        self.had = asyncio.Event()

    async def __call__(self, node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": self._content_type, "x-pd-decode": node.node_id})
        await response.prepare(request)
        for piece in self._pieces:
            await response.write(piece)
            await self.had.wait()
            self.had.clear()
        await response.write_eof()
        return response


async def counted(content_type: str, pieces: Sequence[bytes], shown: Sequence[bytes]) -> tuple[int, int]:
    """(gaps between tokens, streams with a longest gap). `shown`: what the client has of each piece."""
    script = Steps(content_type, pieces)
    node = FakeNode("decode", script, node_id="d0")
    node.stream_version = VERSION if content_type == FRAMES_TYPE else ""
    async with running(node), serving(decode=[node]) as router:
        await read(router, script, shown)
        await until(lambda: router.count("pd_router_request_seconds_count", order="direct"))
        return (int(router.count(f"{ITL}_count", model="demo")), int(router.count(f"{LONGEST}_count", model="demo")))


async def read(router: Router, script: Steps, shown: Sequence[bytes]) -> None:
    body = {"model": "demo", "prompt": "x", "stream": True, "n": 2}
    async with asyncio.timeout(fakes.WAIT_S), router.session.post(router.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200
        for text in shown:
            assert await answer.content.readexactly(len(text)) == text
            script.had.set()
        assert not await answer.content.read()


async def test_tokens_of_frames_are_counted() -> None:
    held = frame("", 2, 1)
    pieces = [encode_message(HEAD) + frame("a", 1, 1), frame("b", 3, 1), held + frame("c", 1, 2), frame("d", 0, 1)]
    shown = [f"data: {text}\n\n".encode() for text in "abcd"]
    last = encode_message(END)
    # after the first piece: 3, 2 held ones and 2, 1; none with the end
    assert await counted(FRAMES_TYPE, [*pieces, last], [*shown, END.data]) == (8, 1)
    # the last tokens may come with the end
    assert await counted(FRAMES_TYPE, [*pieces[:-1], pieces[-1] + last], [*shown[:-1], shown[-1] + END.data]) == (8, 1)


async def test_a_frame_without_tokens_is_no_gap() -> None:
    pieces = [encode_message(HEAD) + frame("a", 1), frame("b", 0), encode_message(END)]
    assert await counted(FRAMES_TYPE, pieces, [b"data: a\n\n", b"data: b\n\n", END.data]) == (0, 0)


async def test_without_frames_each_piece_is_one_gap() -> None:
    pieces = [b"data: a\n\n", b"data: b\n\n", b"data: c\n\n", b"data: [DONE]\n\n"]
    assert await counted("text/event-stream", pieces, pieces) == (2, 1)
