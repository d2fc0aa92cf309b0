"""Fake nodes for measurements of routers: they speak the nodes' HTTP and compute nothing.

    python -m benchmarks.router_nodes [CHUNK_S [NUM_EACH [NEWS_S]]]

One process listens on a port for each of NUM_EACH (1) prefill nodes and as many decode nodes. P answers a leg with a
ticket as events if `x-pd-ticket` asks for them, else with one JSON body. D answers with JSON, or with a stream of
NUM_CHUNKS events, in frames if `x-pd-frames` asks for them. As at a node, the head of a stream leaves with its first
event. `/pd/feed` is the feed of a node with nothing to do, or, with NEWS_S, of a busy one with a load that changes so
often.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, cast

import httptools
import msgspec
import orjson
import uvloop

from pd_connectors.protocol.feed import FEED_TYPE, HEARTBEAT_S, WAIT_HEADER, FeedDelta, FeedSnapshot, NodeLoad
from pd_connectors.protocol.stream_codec import encode_message
from pd_http.endpoints import FEED_PATH
from pd_http.files import raise_file_limit
from pd_http.frames import FRAMES_HEADER, FRAMES_TYPE, ChoiceProgress, Frame, StreamEnd, StreamHead

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_CHUNKS = 64
# A request with PAUSES in its body gets the first chunk of its stream so long before the others: at a node a step is
# between them. Without it the node writes the others on the client's core while the client waits for the first.
PAUSES = {"user": "pauses"}
PAUSE_S = 0.002
_PAUSES = b'"user":"pauses"'
NUM_PROMPT_TOKENS = 512
LOAD = NodeLoad(num_slots=256, free_blocks=5000, num_blocks=5000, block_size=64, step_s=0.005, token_s=2e-5)
VERSION = "fake"
_DONE = b"data: [DONE]\n\n"


def _event(text: str) -> bytes:
    body = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
    }
    return b"data: " + orjson.dumps(body) + b"\n\n"


WHOLE = orjson.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "text": "word " * NUM_CHUNKS, "finish_reason": "length"}],
        "usage": {"prompt_tokens": NUM_PROMPT_TOKENS, "completion_tokens": NUM_CHUNKS, "total_tokens": 576},
    }
)
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "fake",
    "remote_block_ids": [1],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "ticket": "t" * 900,  # of a real ticket's length
    "prompt_token_ids": list(range(10000, 10000 + NUM_PROMPT_TOKENS)),
}
P_EVENTS = (
    b"event: ticket\ndata: " + orjson.dumps({"kv_transfer_params": PARAMS}) + b"\n\n",
    b"event: done\ndata: " + orjson.dumps({"usage": {"prompt_tokens": NUM_PROMPT_TOKENS}}) + b"\n\n",
)
P_WHOLE = orjson.dumps(orjson.loads(WHOLE) | {"kv_transfer_params": PARAMS})
EVENTS = tuple(_event(f"word{i} ") for i in range(NUM_CHUNKS))
HEAD = StreamHead(VERSION, "cmpl-1", 1, 7, NUM_PROMPT_TOKENS, 0, b"\0" * 16)
FRAMES = (
    encode_message(HEAD) + encode_message(Frame((ChoiceProgress(0, (5,), 6),), EVENTS[0])),
    *(encode_message(Frame((ChoiceProgress(0, (i,), 6),), event)) for i, event in enumerate(EVENTS[1:])),
    encode_message(StreamEnd(_DONE)),
)


class FakeNode(asyncio.Protocol):
    """One connection to a fake node of this role. `chunk_s`: time between the chunks of a stream; 0: none.

    `news_s`: between two messages of its feed; 0: it is idle.
    """

    def __init__(self, role: str, name: str, epoch: int, chunk_s: float, news_s: float) -> None:
        self._role = role
        self._name = name
        self._epoch = epoch
        self._chunk_s = chunk_s
        self._news_s = news_s
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def _begin(self) -> None:
        self._path = b""
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        path, headers, body = self._path.decode(), self._headers, b"".join(self._parts)
        self._begin()
        if path.startswith(("/v1/completions", "/v1/chat")):
            self._generate(headers, b'"stream":true' in body, PAUSE_S if _PAUSES in body else 0.0)
        elif path.startswith(FEED_PATH):
            self._stream(FEED_TYPE, ())
            self._spawn(self._feed(int(headers.get(WAIT_HEADER.encode(), b"0")) / 1e3))
        elif path.startswith("/v1/models"):
            self._whole(orjson.dumps({"object": "list", "data": [{"id": "fake", "object": "model"}]}))
        else:
            health = {"status": "ok", "node_id": self._name, "epoch": self._epoch, "max_num_seqs": 256}
            self._whole(orjson.dumps(health | {"max_model_len": 8192, "kv_in_use": 0.0, "stream_version": VERSION}))

    def _generate(self, headers: dict[bytes, bytes], wants_stream: bool, pause_s: float) -> None:
        if self._role == "prefill":
            if b"x-pd-ticket" in headers:
                self._stream("text/event-stream; charset=utf-8", P_EVENTS)
            else:
                self._whole(P_WHOLE)
        elif not wants_stream:
            self._whole(WHOLE)
        else:
            in_frames = FRAMES_HEADER.encode() in headers
            first, *others = FRAMES if in_frames else (*EVENTS, _DONE)
            self._stream(FRAMES_TYPE if in_frames else "text/event-stream; charset=utf-8", ())
            self._transport.write(_chunk(first))
            self._spawn(self._send(others, pause_s))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _stream(self, kind: str, pieces: tuple[bytes, ...]) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % kind.encode()
        last = b"0\r\n\r\n" if pieces else b""
        self._transport.write(head + b"".join(map(_chunk, pieces)) + last)

    async def _send(self, pieces: Iterable[bytes], pause_s: float) -> None:
        await asyncio.sleep(max(self._chunk_s, pause_s))
        for piece in pieces:
            self._transport.write(_chunk(piece))
            await asyncio.sleep(self._chunk_s)  # 0: one turn of the loop, so that chunks stay apart
        self._transport.write(b"0\r\n\r\n")

    async def _feed(self, wait_s: float) -> None:
        number, load = 1, self._load()
        self._transport.write(_chunk(encode_message(FeedSnapshot(self._epoch, number, load))))
        while True:
            await asyncio.sleep(max(self._news_s, wait_s) if self._news_s else HEARTBEAT_S)
            number += 1
            self._transport.write(_chunk(encode_message(FeedDelta(number, self._load()))))

    def _load(self) -> NodeLoad:
        if not self._news_s:
            return LOAD
        tokens, running = random.randrange(20_000), random.randrange(40)
        return msgspec.structs.replace(LOAD, queued_tokens=tokens, num_running=running, step_tokens=192)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(chunk_s: float, num_each: int, news_s: float) -> None:
    """Serve until cancelled. Prints the URLs, those of prefill nodes first."""
    loop = asyncio.get_running_loop()
    epoch = time.time_ns() >> 20
    servers = []
    for role in ("prefill", "decode"):
        for at in range(num_each):
            make = partial(FakeNode, role, f"{role}-{at}", epoch, chunk_s, news_s)
            servers.append(await loop.create_server(make, "127.0.0.1", 0, backlog=2048))
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    sys.stdout.write(" ".join(urls) + "\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    gc.freeze()
    raise_file_limit()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_nodes")
    for name, kind, usual in (("chunk_s", float, 0.0), ("num_each", int, 1), ("news_s", float, 0.0)):
        parser.add_argument(name, type=kind, nargs="?", default=usual)
    uvloop.run(serve(**vars(parser.parse_args())))
