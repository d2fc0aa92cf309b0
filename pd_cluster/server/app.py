"""The node's HTTP API. `create_app` builds it over a `NodeState`; its lifespan closes what it opens."""

from __future__ import annotations

import contextlib
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotation)
from starlette.responses import Response

from pd_cluster import __version__
from pd_cluster.server.answer_task import AnswerTask
from pd_cluster.server.endpoints import Caller, chat_completions, completions
from pd_cluster.server.meta_routes import admin_routes
from pd_cluster.server.takeover_policy import GROUP_HEADER
from pd_http.body import ClientGone
from pd_http.exception_handlers import exception_handlers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pd_cluster.server.state import NodeState

CONNECT_DEADLINE_S = 3.0  # to a prefill node
MAX_REQUEST_ID_CHARS = 128


def create_app(state: NodeState) -> FastAPI:
    """One app per state. Serve it with the lifespan on."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as state.peers:
            try:
                yield
            finally:
                state.tokenizer.close()
                state.grammar_checks.close()
        state.peers = None

    app = FastAPI(
        title="pd-cluster node",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # no /docs either
        exception_handlers=exception_handlers() | {ClientGone: _on_client_gone},
    )
    state.metrics.add_engine(lambda: state.engine.stats, partial(_node_info, state), lambda: state.engine.num_freezes)
    app.add_middleware(RequestIdMiddleware)
    app.include_router(admin_routes(state))

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_route(request: Request) -> Response:
        return AnswerTask(state, "chat", partial(chat_completions, state, _caller(request)))

    @app.post("/v1/completions", response_class=Response)
    async def completions_route(request: Request) -> Response:
        return AnswerTask(state, "completions", partial(completions, state, _caller(request)))

    return app


def _caller(request: Request) -> Caller:
    """A request from D names its group; any other request gets a new one: 122 random bits, which no answer contains."""
    wants_stream = request.headers.get("x-pd-ticket") == "stream"
    group = request.headers.get(GROUP_HEADER, "")[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex
    return Caller(request.state.request_id, group, wants_stream, time.monotonic())


def _node_info(state: NodeState) -> dict[str, str] | None:
    ready = state.engine.ready
    if ready is None:
        return None
    server = state.config.server
    return {
        "node_id": state.node_id,
        "role": server.role,
        "model": state.model_name,
        "engine_id": ready.engine_id,
        "connector": ready.connector,
        "version": __version__,
    }


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=400)  # no client is left to read it


class RequestIdMiddleware:
    """Every answer carries `x-request-id`: the caller's own if it is safe in headers and logs, else a new one.

    The router sets it without a middleware, which would wrap `send` for every chunk of a stream.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
        request_id = given if usable else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
