"""A router in the process of a test: nodes with roles that signed orders change, as real ones do, and a load."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import httpx

from pd_connectors.protocol.errors import HandoffError
from pd_connectors.protocol.ticket import BALANCE_ACTION, NOT_SEEN, ORDER_HEADER, NodeOrder, verify
from tests.balancing.snapshots import MODEL

KEY = b"k" * 32


@dataclass
class FakeRouter:
    """Of `roles` by node. Its answers are those of `POST /balance` and `POST /nodes/{id}/role`."""

    roles: dict[str, str]
    now_s: float = 1000.0  # of the nodes' clocks, which tell ages
    is_up: bool = True
    loses_orders: bool = False  # nodes obey, and the answer is lost
    dead: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)  # nodes without a feed
    changes: dict[str, int] = field(default_factory=dict)
    words: list[tuple[str, str]] = field(default_factory=list)  # kinds and reasons that balances told
    obeyed: list[NodeOrder] = field(default_factory=list)
    ordered: dict[str, tuple[str, str, float]] = field(default_factory=dict)
    lengths: tuple[int, int] = (6000, 60)
    per_s: float = 21.0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if not self.is_up:
            raise httpx.ConnectError("refused")
        try:
            order = verify(KEY, request.headers[ORDER_HEADER], NodeOrder, time.time())
        except HandoffError as error:
            return httpx.Response(401, json={"error": {"message": str(error)}})
        if order.action == BALANCE_ACTION:
            self.words.append((order.role, order.reason))
            return httpx.Response(200, json=self._told())
        return self._change(order)

    def change(self, node: str, role: str, sender: str = "", reason: str = "") -> None:
        """Nodes obey; without a sender it is an operator's order."""
        self.changes[node] = self.changes.get(node, 0) + 1
        self.roles[node], self.ordered[node] = role, (sender, reason, self.now_s)

    def restart(self, node: str, role: str) -> None:
        """By its command line."""
        self.roles[node] = role
        self.changes.pop(node, None)
        self.ordered.pop(node, None)

    def _change(self, order: NodeOrder) -> httpx.Response:
        state, own = self._state(), self.changes.get(order.node, 0)
        if order.node in self.dead:
            return httpx.Response(502, json={"error": {"message": f"node {order.node} gave no answer"}})
        if order.seen_state not in (NOT_SEEN, state) or order.seen_changes not in (NOT_SEEN, own):
            return httpx.Response(409, json={"error": {"message": "roles have changed: look again"}})
        self.obeyed.append(order)
        self.change(order.node, order.role, order.sender, order.reason)
        if self.loses_orders:
            raise httpx.ReadTimeout("timed out")
        return httpx.Response(200, json={})

    def _state(self) -> int:
        return crc32(repr([(name, role, self.changes.get(name, 0)) for name, role in self.roles.items()]).encode())

    def _told(self) -> dict[str, Any]:
        seen = [(-number / self.per_s, self.lengths[0], 0, self.lengths[1]) for number in range(100)]
        rows = [self._row(name) for name in self.roles]
        return {"role_state": self._state(), "nodes": rows, "arrived_per_s": {MODEL: self.per_s}, "seen": {MODEL: seen}}

    def _row(self, name: str) -> dict[str, Any]:
        role, order = self.roles[name], self.ordered.get(name)
        streams = 0 if role == "prefill" else 6
        engine = {
            "slots": 256, "free_blocks": 9000, "num_blocks": 14_000, "block_size": 64, "context": streams * 6000,
            "token_s": 22e-6, "key_s": 0.75e-9, "context_s": 33e-9, "step_ms": 4.1 + streams * 0.2,
        }  # fmt: skip
        told = None if order is None else {"sender": order[0], "reason": order[1], "age_s": self.now_s - order[2]}
        is_live = name not in self.silent | self.dead
        return {
            "node_id": name, "role": role, "role_changes": self.changes.get(name, 0), "role_order": told,
            "tells_orders": True, "state": "active", "healthy": name not in self.dead, "models": [MODEL],
            "adapters": {}, "kv_version": "v/3", "tp": 1, "max_model_len": 8192,
            "load": {
                "feed": "live" if is_live else "lost", "queued_tokens": 0, "sequences": streams, "cached_blocks": 0,
                "stream_room": None, "engine": engine if is_live else None,
            },
        }  # fmt: skip
