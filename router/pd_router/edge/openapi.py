"""The router's OpenAPI document: that of a node, which knows bodies and answers, with the router's own paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from pd_connectors.protocol.ticket import ORDER_HEADER
from pd_http.endpoints import Kind
from pd_router.errors import NodeFailed
from pd_router.nodes.upstream import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_http.endpoints import Endpoint

_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_PAGE = {"text/html": {"schema": {"type": "string"}}}


def router_document(served: Iterable[Endpoint], is_open: bool, of_node: Answer) -> Answer:
    """The document of a router that serves these, from a node's answer; a node's error is returned as it is.

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
    for one in sorted(served, key=lambda one: (one.template, one.method)):
        described = known.get(one.template, {}).get(one.method.lower()) or _own(one)
        if one.kind in (Kind.ORDER, Kind.ADAPTER) and is_open:
            described.pop("parameters", None)
        if one.kind not in (Kind.OWN, Kind.ROUTER):  # those ask no node
            described["responses"] |= {"502": _failure("no node could answer"), "503": _failure("no node is healthy")}
        paths.setdefault(one.template, {})[one.method.lower()] = described
    headers = tuple(pair for pair in of_node.headers if pair[0].lower() != b"content-length")
    return Answer(200, headers, orjson.dumps(document | {"paths": paths}))


def _own(one: Endpoint) -> dict[str, Any]:
    """An operation that the node's document lacks."""
    parameters: list[dict[str, Any]] = []
    if "{id}" in one.template:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if one.signed:
        parameters.append({"name": ORDER_HEADER, "in": "header", "required": True, "schema": {"type": "string"}})
    content = _PAGE if one.name == "dashboard" else _OBJECT
    answers = {"200": {"description": "success", "content": content}, "default": _failure("an error")}
    return {"summary": one.summary, "parameters": parameters, "responses": answers}


def _failure(description: str) -> dict[str, Any]:
    return {"description": description, "content": _ERROR}
