"""What only the owner of the cluster's key may order: to forget cached prefixes, record work, change the role, or what
names of adapters mean."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.errors import EngineUnavailable, InvalidRequest, NotAuthorized, OrderVersion
from pd_cluster.protocol.orders import ResetCache, StartProfile, StopProfile
from pd_connectors.protocol.errors import HandoffError, ProtocolMismatch
from pd_connectors.protocol.ticket import ORDER_HEADER, ROLE_ACTION, NodeOrder, verify
from pd_http.endpoints import LOAD_PATH, NODE_ACTIONS
from pd_http.names import plain_text
from pd_http.reply import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd_cluster.server.routes.meta_routes import Handler
    from pd_cluster.server.state import NodeState

MAX_WORD_CHARS = 300  # of an order's sender and reason, which /health repeats
MAX_PROFILE_S = 120.0  # a record grows in memory: it is written after this time, whatever was forgotten


def order_handlers(state: NodeState) -> dict[str, Handler]:
    """What serves orders to the node of `state`, by the name of the endpoint."""
    profiling = _Profiling(state)

    async def obey(state: NodeState, request: Request) -> Response:
        action = NODE_ACTIONS[request.url.path]
        check_order(state, request.headers.get(ORDER_HEADER, ""), action)
        _ = state.ready
        if action == "reset_cache":
            state.engine.send(ResetCache())
        else:
            profiling.obey(action)
        return json_response({"success": True})

    adapters = dict.fromkeys(("load_adapter", "unload_adapter"), _obey_about_adapter)
    return {**dict.fromkeys(NODE_ACTIONS.values(), obey), **adapters, "role": _change_role}


async def _change_role(state: NodeState, request: Request) -> Response:
    order = check_order(state, request.headers.get(ORDER_HEADER, ""), ROLE_ACTION)
    _ = state.ready
    if state.draining:
        raise EngineUnavailable("this node is shutting down")
    sender, reason = (plain_text(text, MAX_WORD_CHARS) for text in (order.sender, order.reason))
    state.role.change(order.role, sender, reason, order.seen_changes)
    return json_response(state.role.report())


async def _obey_about_adapter(state: NodeState, request: Request) -> Response:
    """All that is obeyed is inside the signed order; the body is not read."""
    is_load = request.url.path == LOAD_PATH
    order = check_order(state, request.headers.get(ORDER_HEADER, ""), "load_adapter" if is_load else "unload_adapter")
    record, adapters = order.adapter, state.adapters
    if record is None or record.stamp <= 0 or (record.is_live and not is_load):
        raise InvalidRequest("the order names no adapter with a stamp: ask the router")
    _ = state.ready
    if state.draining:
        raise EngineUnavailable("this node is shutting down")
    if order.step == "drop":
        adapters.drop(record)
    elif order.step == "prepare":
        record = await adapters.prepare(record, order.seen_stamp)
    else:
        record = await adapters.hold(record)
    return json_response({"success": True, "adapter": msgspec.structs.asdict(record)})


def check_order(state: NodeState, signed: str, action: str) -> NodeOrder:
    """The order. Raises NotAuthorized, OrderVersion, InvalidRequest unless it is to this node, for this action."""
    if not signed:
        raise NotAuthorized(f"send the signed order in the header {ORDER_HEADER}, or ask the router")
    try:
        order = verify(state.key, signed, NodeOrder, time.time())
    except ProtocolMismatch as error:
        raise OrderVersion(str(error)) from error
    except HandoffError as error:
        raise NotAuthorized(str(error)) from error
    if (order.action, order.node) != (action, state.node_id):
        raise InvalidRequest(
            f"the order is for {order.action!r} of node {order.node!r}, the request for {action!r} of {state.node_id!r}"
        )
    return order


class _Profiling:
    """Starts and ends the engine's records."""

    def __init__(self, state: NodeState) -> None:
        self._engine = state.engine
        self._directory = state.config.server.profile_dir
        self._end: asyncio.TimerHandle | None = None

    def obey(self, action: str) -> None:
        """Raises InvalidRequest where no directory could take a record.

        A start while the engine records must not put off the end of the record. The engine ignores it.
        """
        if not self._directory:
            raise InvalidRequest("this node was started without --profile-dir", code="no_profile_dir")
        if action == "stop_profile":
            self._stop()
            return
        self._engine.send(StartProfile())
        if self._end is None:
            self._end = asyncio.get_running_loop().call_later(MAX_PROFILE_S, self._stop)

    def _stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
        self._engine.send(StopProfile(self._directory))
