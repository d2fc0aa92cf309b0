"""The endpoints without generation: the router's own state, and calls that any node can answer."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from pd_http.body import ClientGone, read_body
from pd_http.dialects import dialect_of
from pd_http.errors import ModelNotFound, PdError
from pd_http.held_bytes import Share
from pd_http.metrics import EXPOSITION_TYPE
from pd_http.reply import json_response
from pd_router.admission.api_keys import KEY_HEADERS
from pd_router.calls import headers as rules
from pd_router.calls.body import RequestBody
from pd_router.calls.reply import RouterReply
from pd_router.errors import NodeFailed, NoNode
from pd_router.nodes.node import DECODERS, Node, Role
from pd_router.nodes.upstream import Answer, LegFailed, Refused
from pd_router.requests.liveness_guard import LivenessGuard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from pd_router.edge.worker_views import WorkerViews
    from pd_router.requests.services import Services

log = logging.getLogger("pd_router")
_ANY_ROLE = (Role.PREFILL, Role.MIXED, Role.DECODE)


class Control:
    """Handlers for the router's own state."""

    def __init__(
        self, services: Services, views: WorkerViews, word: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> None:
        """`word`: what a balance said last."""
        self._s = services
        self._views = views
        self._word = word

    async def health(self, request: Request) -> Response:
        """200 while a node may answer: then requests can be served, whichever other nodes are down.

        503 `draining` from the signal on that ends this router, which still serves: balancers shall turn to another.
        """
        table = self._s.table
        is_leaving = self._s.leaving.is_set()
        decodes = table.healthy(DECODERS, None)
        prefills = table.healthy((Role.PREFILL,), None)
        can_serve = bool(table.answering(None))
        report = {
            "status": "draining" if is_leaving else "ok" if can_serve else "unavailable",
            "role": "router",
            "healthy": {"prefill": len(prefills), "decode": len(decodes)},
            "nodes": len(table.nodes),
        }
        return json_response(report, 200 if can_serve and not is_leaving else 503)

    async def version(self, request: Request) -> Response:
        try:
            known = version("pd-cluster")
        except PackageNotFoundError:  # a source tree that is not installed
            known = "unknown"
        return json_response({"version": known})

    async def load(self, request: Request) -> Response:
        """Generations under way on all nodes, by this router."""
        return json_response({"server_load": await self._views.load()})

    async def nodes(self, request: Request) -> Response:
        return json_response({"nodes": await self._views.nodes(), "balance": await self._word()})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._views.metrics(), media_type=EXPOSITION_TYPE)


class Relay:
    """An ASGI endpoint for calls that any healthy node can answer: models, tokenize, detokenize, facts of the model.

    If a node fails, the next one is asked.
    """

    def __init__(self, services: Services, rewrite: Callable[[Answer], Answer] = lambda answer: answer) -> None:
        """`rewrite`: makes the answer to the client from that of a node. May raise PdError."""
        self._s = services
        self._rewrite = rewrite

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = rules.request_id(rules.first_values(scope["headers"]))
        reply = RouterReply(send, request_id)
        reply.dialect = dialect_of(scope["path"])
        try:
            with Share(self._s.held) as share:
                await self._relay(scope, receive, reply, request_id, share)
        except ClientGone:
            return  # no node was asked
        except asyncio.CancelledError:
            await reply.stopped()
        except PdError as error:
            await reply.fail(error)
        except Exception as error:
            await reply.crashed(error)

    async def _relay(self, scope: Scope, receive: Receive, reply: RouterReply, request_id: str, share: Share) -> None:
        """Returns when the client has taken all but a buffer of the answer. `share`: of the body and the answer.

        Raises ClientGone, PdError.
        """
        admission = self._s.admission
        key = None if admission is None else admission.find(scope["headers"]).key  # before the body is read
        raw = await read_body(scope, receive, self._s.longest_body)
        share.grow(len(raw))
        if admission is not None:
            admission.let_relay(scope["headers"], raw)
        await self._s.turns.take(len(raw))
        name = scope["path_params"].get("name")
        if name is not None and admission is not None and key is not None:
            admission.check_model(key, name)
        if name is not None:  # looked up in a node's list: a client's text never becomes part of a node's URL
            answer = _card(await self._ask(scope, "/v1/models", request_id, name, None), name)
        else:
            body = RequestBody(raw, reply.dialect) if scope["method"] == "POST" else None
            model = body.model if body is not None else None
            if admission is not None and key is not None:
                admission.check_model(key, model)
            answer = self._rewrite(await self._ask(scope, scope["path"], request_id, model, body))
            if key is not None and key.adapters is not None and scope["path"] == "/v1/models":
                answer = _own(answer, key.adapters)
        share.grow(len(answer.body))
        length = (b"content-length", b"%d" % len(answer.body))
        await reply.start(answer.status, [*rules.answered(answer.headers), length])
        await reply.write(answer.body)
        await reply.end()

    async def _ask(
        self, scope: Scope, path: str, request_id: str, model: str | None, body: RequestBody | None
    ) -> Answer:
        """Raises ModelNotFound, NoNode, NodeFailed."""
        s = self._s
        if model is not None and not s.table.knows_model(model):
            raise ModelNotFound(f"no node serves the model {model!r}", param="model")
        headers = rules.forwarded(scope["headers"], request_id)
        if s.admission is not None:
            for secret in KEY_HEADERS:
                headers.popall(secret.decode(), None)
        last: LegFailed | None = None
        nodes = s.table.healthy(_ANY_ROLE, model)
        for i, node in enumerate(nodes):
            has_next = i + 1 < len(nodes)
            try:
                with LivenessGuard(node, lambda has_next=has_next: has_next):  # type: ignore[misc]
                    return await self._ask_one(node, path, headers, body)
            except LegFailed as failure:
                s.metrics.legs.failures.labels("relay", node.node_id, failure.kind.value).inc()
                if failure.wait:
                    s.metrics.legs.waits.labels(failure.wait, node.node_id).inc()
                last = failure
        if last is None:
            raise NoNode("no healthy node; try again later")
        raise NodeFailed(f"no node could answer; the last one: {last}")

    async def _ask_one(self, node: Node, path: str, headers: rules.Headers, body: RequestBody | None) -> Answer:
        timeout_s = self._s.config.control_timeout_s
        if body is None:
            return await self._s.upstream.get(node, path, headers, timeout_s)
        try:
            return await self._s.upstream.post_whole(node, path, headers, body.plain(), timeout_s)
        except Refused as refusal:
            return refusal.answer


def _own(listing: Answer, adapters: Collection[str]) -> Answer:
    """The list without the adapters that a key may not use. Raises NodeFailed."""
    if listing.status != 200:
        return listing
    try:
        told = orjson.loads(listing.body)
        told["data"] = [one for one in told["data"] if one.get("parent") is None or one["id"] in adapters]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise NodeFailed("a node gave no list of its models") from error
    return Answer(200, listing.headers, orjson.dumps(told))


def _card(listing: Answer, name: str) -> Answer:
    """The entry `name` of a node's list of models; a node's error is returned as it is.

    Raises ModelNotFound, NodeFailed.
    """
    if listing.status != 200:
        return listing
    try:
        cards = {entry["id"]: entry for entry in orjson.loads(listing.body)["data"]}
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise NodeFailed("a node gave no list of its models") from error
    if name not in cards:
        raise ModelNotFound(f"no node serves the model {name!r}", param="model")
    return Answer(200, listing.headers, orjson.dumps(cards[name]))
