"""`POST /balance`: a balance tells what it has decided, and hears how the nodes and the load are. Signed.

What it decided stands in `GET /nodes`, in metrics and on the dashboard, so that it is told why roles do not move. It is
kept by the process that got it; others ask that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pd_connectors.protocol.ticket import BALANCE_ACTION, ORDER_HEADER
from pd_http.names import plain_text
from pd_http.reply import json_response
from pd_router.records.recent_load import LoadPart, total_load

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd_router.edge.worker_views import WorkerViews
    from pd_router.edge.workers import Workers
    from pd_router.requests.services import Services
    from pd_router.sources.posted import PostedNodes

LOAD, WORD = "balance_load", "balance_word"  # topics of `Workers.ask`
MAX_SENDER_CHARS, MAX_REASON_CHARS = 100, 1000
KINDS = ("start", "hold", "change", "refused")


class BalanceBoard:
    """What the last balance said that asked this router, and what it hears."""

    def __init__(self, services: Services, posted: PostedNodes, views: WorkerViews, workers: Workers) -> None:
        self._s = services
        self._posted = posted
        self._views = views
        self._workers = workers
        self._word: dict[str, Any] | None = None
        self._heard_s = 0.0
        self.topics = {LOAD: services.recent.load.part, WORD: self._own_word}

    async def hear(self, request: Request) -> Response:
        """200 with nodes and load. Raises errors about the order."""
        order = self._posted.read(request.headers.get(ORDER_HEADER), BALANCE_ACTION)
        kind = order.role if order.role in KINDS else "hold"
        before, self._heard_s = self._word, self._s.table.clock()
        self._word = {
            "sender": plain_text(order.sender, MAX_SENDER_CHARS), "kind": kind,
            "reason": plain_text(order.reason, MAX_REASON_CHARS),
        }  # fmt: skip
        if before != self._word:
            self._s.metrics.balance_decisions.labels(kind).inc()
        others = await self._workers.ask(LOAD)
        parts = [msgspec.convert(other, LoadPart) for other in others.values() if other is not None]
        load = total_load([self._s.recent.load.part(), *parts])
        state = self._s.table.role_state  # before the nodes: what changes between the two makes an order be refused
        return json_response({"role_state": state, "nodes": await self._views.nodes(), **msgspec.to_builtins(load)})

    async def word(self) -> dict[str, Any] | None:
        """The newest word to any worker. None: no balance has asked."""
        words = [self._own_word(), *(await self._workers.ask(WORD)).values()]
        return min((word for word in words if word), key=lambda word: word["age_s"], default=None)

    def _own_word(self) -> dict[str, Any] | None:
        return None if self._word is None else {**self._word, "age_s": round(self._s.table.clock() - self._heard_s, 1)}
