"""What became of the legs of requests: those that failed, moved or went on elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import NodesDied, NodesFrozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Counter


class LegMetrics:
    """`counter`: makes one in the router's registry."""

    def __init__(self, counter: Callable[..., Counter]) -> None:
        self.failures = counter("leg_failures", "Legs that failed, by node and kind of failure.", "leg", "node", "kind")
        self.waits = counter("waits_expired", "Waits for a node that reached their deadline, by name.", "wait", "node")
        self.moves = counter(
            "legs_moved", "Legs that left a node judged frozen, dead or gone by order.", "leg", "node", "kind"
        )
        self.continuations = counter(
            "continuations", "Streams that lost their decode node after their first byte, by what became of them.",
            "outcome",
        )  # fmt: skip
        self.exhausted = counter(
            "tries_exhausted", "Requests for which every healthy node of a role, or as many as allowed, failed.", "leg"
        )
        why = {NodesDied.code: "died while they served them", NodesFrozen.code: "stood still before a first token"}
        self.stoppers = {
            code: counter(f"requests_{code}", f"Requests that ended because too many nodes {what}.")
            for code, what in why.items()
        }
