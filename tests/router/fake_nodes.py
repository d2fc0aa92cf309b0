"""Fake nodes: small aiohttp servers on ports of the OS's choosing that follow a script and note what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pd_http.errors import error_body
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

WAIT_S = HANG_S  # every wait of a test
SILENT: set[str] = set()  # URLs of nodes that do not answer /health


@dataclass
class Seen:
    """One request as it arrived, and how it went on."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the peer closed before the answer was complete
    finished: bool = False


Script = Callable[["FakeNode", web.Request, Seen], Awaitable[web.StreamResponse]]


async def _turns() -> None:
    """Let the event loop run what is due, and what that makes due."""
    for _ in range(4):
        await asyncio.sleep(0)


class FakeNode:
    """A node that answers by `script`; `seen` grows by one per generating request."""

    def __init__(
        self,
        role: str,
        script: Script,
        models: tuple[str, ...] = ("demo",),
        node_id: str = "",
        max_model_len: int | None = None,
    ) -> None:
        self.role = role
        self.script = script
        self.models = models
        self.node_id = node_id or f"fake-{role}"
        self.epoch = 7
        self.stand_in: str | None = None  # the text of a proxy, for its health
        self.num_slots: int | None = None  # as other engines, which do not tell
        self.kv_in_use: float | None = None  # the same
        self.stream_version: str | None = None  # the same
        self.facts: dict[str, Any] = {}  # further fields of /health
        self.max_model_len = max_model_len  # the same
        self.prompt_ids = [1, 2, 3]  # of every prompt, by its tickets
        self.is_up = True
        self.holds_checks = False  # of /health: they wait
        self.is_full = False  # /health answers as a server without a place for the connection
        self.is_frozen = False  # /health says so of the engine
        self.num_checks = 0  # of /health
        self.feed: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None  # answers GET /pd/feed
        self.metrics: str | None = None  # answer of GET /metrics
        self.seen: list[Seen] = []
        self.released: list[str] = []
        self.go_on = asyncio.Event()  # scripts that stop half-way wait for this
        self.url = ""
        self.tls: ssl.SSLContext | None = None
        self._arrival = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def is_silent(self) -> bool:
        """Checks of /health are not answered, and `sure_checks` gives them up."""
        return self.url in SILENT

    @is_silent.setter
    def is_silent(self, is_silent: bool) -> None:
        (SILENT.add if is_silent else SILENT.discard)(self.url)

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/pd/feed", self._feed)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/pd/release", self._release)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        port = int(self.url.rsplit(":", 1)[1]) if self.url else 0
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def vanish(self) -> None:
        """No process listens any more. What is open stays open until its script ends it."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def stop(self) -> None:
        self.is_silent = False  # its port may become another node's
        if self._runner is not None:
            await self.vanish()
            await _turns()  # a connection that was accepted just now must be known to the cleanup, which closes it
            server = self._runner.server
            transports = [] if server is None else [one.transport for one in server.connections]
            await self._runner.cleanup()
            for transport in filter(None, transports):  # closed ones wait until their peer has read what was written
                transport.abort()
            await _turns()
            self._runner = None

    async def wait_seen(self, count: int) -> Seen:
        """The `count`th generating request."""
        await self._wait(lambda: len(self.seen) >= count)
        return self.seen[count - 1]

    async def wait_released(self, count: int) -> None:
        await self._wait(lambda: len(self.released) >= count)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._arrival:
            await self._arrival.wait_for(condition)

    async def _notify(self) -> None:
        async with self._arrival:
            self._arrival.notify_all()

    async def _health(self, request: web.Request) -> web.Response:
        self.num_checks += 1
        if self.holds_checks or self.is_silent:
            await asyncio.Event().wait()
        if self.is_frozen:
            return web.json_response({"status": "frozen", "reason": "no progress", "epoch": self.epoch}, status=503)
        if self.stand_in is not None:
            return web.Response(status=503, text=self.stand_in)
        if self.is_full:
            return web.json_response(error_body("no place", "server_error", "connections"), status=503)
        told = {
            "status": "ok",
            "role": self.role,
            "node_id": self.node_id,
            "epoch": self.epoch,
            "max_num_seqs": self.num_slots,
            "kv_in_use": self.kv_in_use,
            "stream_version": self.stream_version,
            "model": self.models[0],
            "max_model_len": self.max_model_len,
        } | self.facts
        told = {name: value for name, value in told.items() if value is not None}
        return web.json_response(told, status=200 if self.is_up else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404) if self.feed is None else await self.feed(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def _release(self, request: web.Request) -> web.Response:
        self.released.append((await request.json())["ticket"])
        await self._notify()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, json.loads(raw), raw)
        self.seen.append(seen)
        await self._notify()
        try:
            answer = await self.script(self, request, seen)
            seen.finished = True
            return answer
        except (asyncio.CancelledError, ConnectionError):
            seen.gone.set()
            raise


@contextlib.asynccontextmanager
async def running(*nodes: FakeNode) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await node.start()
            stack.push_async_callback(node.stop)
        yield


# --- prefill scripts


def kv_params(node: FakeNode, ticket: str = "ticket-1") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"engine-{node.node_id}",
        "remote_block_ids": [],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "ticket": ticket,
        "prompt_token_ids": node.prompt_ids,
        "later": {"key": [1.00000000000000000001]},
    }


async def _open_stream(request: web.Request, headers: dict[str, str] | None = None) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
    await response.prepare(request)
    return response


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


async def prefill(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A ticket at once, then done."""
    response = await _open_stream(request)
    await response.write(_event("ticket", {"kv_transfer_params": kv_params(node, f"ticket-{len(node.seen)}")}))
    await response.write(_event("done", {"usage": {"prompt_tokens": 3}}))
    await response.write_eof()
    return response


async def prefill_until_told(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A ticket at once, done when `go_on` is set."""
    response = await _open_stream(request)
    await response.write(_event("ticket", {"kv_transfer_params": kv_params(node)}))
    await node.go_on.wait()
    await response.write(_event("done", {"usage": {}}))
    await response.write_eof()
    return response


async def prefill_error_after_ticket(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await _open_stream(request)
    await response.write(_event("ticket", {"kv_transfer_params": kv_params(node)}))
    await response.write(_event("error", {"error": {"message": "out of blocks"}, "status": 503}))
    await response.write_eof()
    return response


async def prefill_error_first(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await _open_stream(request)
    await response.write(_event("error", {"error": {"message": "queue full"}, "status": 503}))
    await response.write_eof()
    return response


async def prefill_without_tickets(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """An engine that speaks the field's JSON form."""
    params = {k: v for k, v in kv_params(node).items() if k != "ticket"}
    return web.json_response({"id": "x", "choices": [], "kv_transfer_params": params})


async def silent(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Says nothing until told, then breaks off."""
    await node.go_on.wait()
    return await hang_up(node, request, seen)


async def hang_up(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Closes the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def refuse(status: int) -> Script:
    async def script(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        error = {"message": f"no ({node.node_id})", "type": "t", "param": None, "code": "c"}
        return web.json_response({"error": error}, status=status)

    return script


def error(status: int, code: str) -> web.Response:
    """A node's own error."""
    told = {"message": "as scripted", "type": "server_error", "param": None, "code": code}
    return web.json_response({"error": told}, status=status)


# --- decode scripts


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


WHOLE_STREAM = chunk("a") + chunk("b") + b"data: [DONE]\n\n"
NODE_HEADERS = {
    "x-pd-prefill": "the-prefill-node",
    "x-pd-decode": "the-decode-node",
    "x-extra": "kept",
    "connection": "x-dropped",
    "x-dropped": "1",
}


async def decode(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A whole answer, streamed when asked."""
    if not seen.body.get("stream"):
        return web.json_response({"object": "chat.completion", "by": node.node_id})
    response = await _open_stream(request)
    await response.write(chunk("a"))
    await response.write(chunk("b"))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def decode_with_headers(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"by": node.node_id}, headers=NODE_HEADERS)


async def decode_until_told(
    node: FakeNode, request: web.Request, seen: Seen, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """The first piece at once, the rest when `go_on` is set."""
    if not seen.body.get("stream"):
        await node.go_on.wait()
        return await decode(node, request, seen)
    response = await _open_stream(request, headers)
    await response.write(chunk("a"))
    await node.go_on.wait()
    await response.write(chunk("b"))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def prefill_and_decode_until_told(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """As `decode_until_told`. Its headers say that the node prefilled the prompt itself."""
    return await decode_until_told(node, request, seen, {"x-pd-prefill": node.node_id})


async def decode_dies(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Dies after the first piece, in the middle of the second; in JSON, in the middle of the body."""
    streamed = seen.body.get("stream")
    kind = "text/event-stream" if streamed else "application/json"
    response = web.StreamResponse(headers={"content-type": kind})
    await response.prepare(request)
    await response.write(chunk("a") + b'data: {"choi' if streamed else b'{"object": ')
    await node.go_on.wait()
    return await hang_up(node, request, seen)


async def decode_floods(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """More than any buffer holds."""
    response = await _open_stream(request)
    while True:
        await response.write(chunk("x" * (1 << 16)))


async def decode_forgets_done(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await _open_stream(request)
    await response.write(chunk("[DONE]"))
    await response.write_eof()
    return response


async def decode_tells_error(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await _open_stream(request)
    await response.write(chunk("a"))
    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
    await response.write_eof()
    return response
