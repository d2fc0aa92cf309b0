"""The router's OpenAPI document: that of a node, which knows bodies and answers, with the router's own paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from pd_connectors.protocol.ticket import NODE_ACTIONS, ORDER_HEADER
from pd_router.errors import NodeFailed
from pd_router.upstream import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.routing import Route

ROUTER_ONLY = {
    ("GET", "/nodes"): "The nodes that the router knows, with their load, health and restarts",
    ("POST", "/nodes"): "Add a node (signed order)",
    ("DELETE", "/nodes/{id}"): "Remove a node that was added (signed order)",
    ("POST", "/nodes/{id}/drain"): "Send a node no new requests (signed order)",
    ("DELETE", "/nodes/{id}/drain"): "Send a drained node requests again (signed order)",
    ("POST", "/nodes/{id}/role"): "Change a node's role (signed order)",
    ("GET", "/dashboard"): "A page with the nodes, handoffs and recent requests (--dashboard)",
    ("GET", "/dashboard/state"): "What this page shows; its fields may change",
}
_OF_ROUTER = {"/health", "/ping", "/version", "/load", "/metrics", *(path for _, path in ROUTER_ONLY)}  # ask no node
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_PAGE = {"text/html": {"schema": {"type": "string"}}}


def routed(routes: Iterable[Route]) -> set[tuple[str, str]]:
    """Method and path of each route, as OpenAPI writes them."""
    pairs = {(method, one.path.replace(":path", "")) for one in routes for method in one.methods or ()}
    return {(method, path) for method, path in pairs if method != "HEAD"}


def router_document(routes: Iterable[Route], is_open: bool, of_node: Answer) -> Answer:
    """The document of a router with these routes, from a node's answer; a node's error is returned as it is.

    `is_open`: orders to all nodes need no signature. Raises NodeFailed for an answer that is no such document.
    """
    if of_node.status != 200:
        return of_node
    try:
        document = orjson.loads(of_node.body)
        known: dict[str, Any] = document["paths"]
        document["info"]["title"] = "pd-cluster router"
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise NodeFailed("a node gave no OpenAPI document") from error
    paths: dict[str, Any] = {}
    for method, path in sorted(routed(routes), key=lambda pair: (pair[1], pair[0])):
        described = known.get(path, {}).get(method.lower()) or _own(method, path)
        if path in NODE_ACTIONS and is_open:
            described.pop("parameters", None)
        if path not in _OF_ROUTER:
            described["responses"] |= {"502": _failure("no node could answer"), "503": _failure("no node is healthy")}
        paths.setdefault(path, {})[method.lower()] = described
    headers = tuple(pair for pair in of_node.headers if pair[0].lower() != b"content-length")
    return Answer(200, headers, orjson.dumps(document | {"paths": paths}))


def _own(method: str, path: str) -> dict[str, Any]:
    """An operation that nodes lack."""
    parameters: list[dict[str, Any]] = []
    if "{id}" in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if method != "GET":
        parameters.append({"name": ORDER_HEADER, "in": "header", "required": True, "schema": {"type": "string"}})
    content = _PAGE if path == "/dashboard" else _OBJECT
    answers = {"200": {"description": "success", "content": content}, "default": _failure("an error")}
    summary = ROUTER_ONLY.get((method, path), "This document")
    return {"summary": summary, "parameters": parameters, "responses": answers}


def _failure(description: str) -> dict[str, Any]:
    return {"description": description, "content": _ERROR}
