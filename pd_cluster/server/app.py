"""The node's HTTP API. `create_app` builds it over a `NodeState`; its lifespan closes what it opens."""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import aiohttp
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from pd_cluster import __version__
from pd_cluster.server.node.adapter_metrics import AdapterCollector
from pd_cluster.server.node.caller import Caller
from pd_cluster.server.node.feed_hub import ChargeMark
from pd_cluster.server.node.request_id import MAX_REQUEST_ID_CHARS, is_request_id
from pd_cluster.server.requests.answer_task import AnswerTask
from pd_cluster.server.requests.takeover_policy import GROUP_HEADER
from pd_cluster.server.routes.embeddings import embeddings, pooling
from pd_cluster.server.routes.endpoints import chat_completions, completions, messages, responses
from pd_cluster.server.routes.feed_route import feed
from pd_cluster.server.routes.meta_routes import meta_handlers
from pd_cluster.server.routes.order_routes import order_handlers
from pd_cluster.server.routes.rerank import rerank, score
from pd_cluster.server.routes.status_routes import status_handlers
from pd_connectors.protocol.feed import CHARGE_HEADER, PREFILL_CHARGE_HEADER
from pd_connectors.protocol.ticket import OFFER_HEADER
from pd_http.body import ClientGone
from pd_http.cross_origin import cross_origin
from pd_http.endpoints import ENDPOINTS, Kind, methods_of
from pd_http.exception_handlers import exception_handlers
from pd_http.frames import FRAMES_HEADER, FRAMES_VERSION
from pd_http.names import CLIENT_HEADER, MAX_NAME_CHARS
from pd_http.node_report import REPORT_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.state import NodeState

Work: TypeAlias = "Callable[[NodeState, Caller, CountedReply, bytes], Awaitable[None]]"
WORKS: dict[str, Work] = {  # by the name of the endpoint
    "chat": chat_completions,
    "completions": completions,
    "messages": messages,
    "responses": responses,
    "embeddings": embeddings,
    "pooling": pooling,
    "score": score,
    "rerank": rerank,
}
# W3C Trace Context, as a node makes no spans; and which client of the router it is
PASSED_ON = ("traceparent", "tracestate", CLIENT_HEADER)
MAX_TRACE_CHARS = 4096  # of each; the standard's least for `tracestate` is 512
CONNECT_DEADLINE_S = 3.0  # to a prefill node


def create_app(state: NodeState) -> FastAPI:
    """One app per state. Serve it with the lifespan on."""

    app = FastAPI(
        title="pd-cluster node",
        version=__version__,
        lifespan=partial(_lifespan, state),
        openapi_url=None,  # no /docs either
        middleware=cross_origin(state.config.http),
        exception_handlers=exception_handlers() | {ClientGone: _on_client_gone},
    )
    state.metrics.add_engine(lambda: state.engine.stats, partial(_node_info, state), lambda: state.engine.num_freezes)
    if state.adapters.num_slots:
        state.metrics.registry.register(AdapterCollector(state.adapters))
    app.add_middleware(RequestIdMiddleware)
    handlers = meta_handlers() | status_handlers() | order_handlers(state) | {"feed": feed}
    handlers |= {name: partial(_answer, name, work) for name, work in WORKS.items()}
    for one in ENDPOINTS:
        if one.kind is not Kind.ROUTER:
            app.add_route(one.path, partial(handlers[one.name], state), methods=methods_of(one))
    return app


@contextlib.asynccontextmanager
async def _lifespan(state: NodeState, _: FastAPI) -> AsyncIterator[None]:
    """While the app serves, `state.peers` asks prefill nodes for tickets."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
    http = state.config.http
    connector = aiohttp.TCPConnector(limit=0, ssl=http.client_context() if http.tls_ca or http.tls_name else True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as state.peers:
        try:
            yield
        finally:
            state.tokenizer.close()
            state.grammar_checks.close()
    state.peers = None


async def _answer(endpoint: str, work: Work, state: NodeState, request: Request) -> AnswerTask:
    caller = _caller(request, ChargeMark(state.feed, request.headers.get(CHARGE_HEADER, "")))
    return AnswerTask(state, endpoint, partial(work, state, caller), caller.charge)


def _passed_on(request: Request) -> tuple[tuple[str, str], ...]:
    """The headers that go on to P. Those that P might refuse are left out: its answer would count as a failure.

    Aiohttp writes what is not ASCII in UTF-8, so it would not go on unchanged. Several `tracestate` are one list.
    """
    given = ((name, ",".join(request.headers.getlist(name))) for name in PASSED_ON)
    return tuple((name, value) for name, value in given if value.isascii() and 0 < len(value) <= MAX_TRACE_CHARS)


def _caller(request: Request, charge: ChargeMark) -> Caller:
    """A request from D names its group; any other request gets a new one: 122 random bits, which no answer contains."""
    wants_stream = request.headers.get("x-pd-ticket") == "stream"
    group = request.headers.get(GROUP_HEADER, "")[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex
    wants_frames = request.headers.get(FRAMES_HEADER) == FRAMES_VERSION
    return Caller(
        request_id=request.state.request_id,
        group=group,
        wants_ticket_stream=wants_stream,
        wants_frames=wants_frames,
        wants_report=REPORT_HEADER in request.headers,
        started_s=time.monotonic(),
        drawn_seed=secrets.randbits(63),
        charge=charge,
        prefill_charge=request.headers.get(PREFILL_CHARGE_HEADER, ""),
        client=request.headers.get(CLIENT_HEADER, "")[:MAX_NAME_CHARS],
        passed_on=_passed_on(request),
        offer=request.headers.get(OFFER_HEADER, ""),
    )


def _node_info(state: NodeState) -> dict[str, str] | None:
    ready = state.engine.ready
    if ready is None:
        return None
    return {
        "node_id": state.node_id,
        "role": state.role.name,
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
        request_id = given if is_request_id(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
