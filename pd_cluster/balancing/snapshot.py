"""What a balance sees of a cluster: its nodes by their feeds, and the requests of the last minutes. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ROLES = ("prefill", "decode", "mixed")
BALANCE = "balance"  # the sender of its orders
LIKE_SHARE = 0.9  # of another node's KV memory


class EndedRequest(NamedTuple):
    """A request that has ended. `at_s`: of its arrival, seconds before now, as a number below 0."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


class BalanceTargets(NamedTuple):
    """Seconds, as clients measure."""

    ttft_s: float
    tpot_s: float


class GroupLoad(NamedTuple):
    """What a prediction is made of. `queued_tokens`: of prompts, that wait now."""

    per_s: float
    seen: Sequence[EndedRequest]
    queued_tokens: int
    targets: BalanceTargets


@dataclass(frozen=True, slots=True)
class BalancedNode:
    """A node as a router shows it. Times of 0: not measured yet."""

    name: str
    role: str
    changes: int  # of its role, since its start
    models: frozenset[str] = frozenset()  # without adapters
    names: frozenset[str] = frozenset()  # of models and adapters
    shape: tuple[object, ...] = ()  # see `is_like`
    is_healthy: bool = True
    is_live: bool = True  # its feed is
    tells_orders: bool = True  # False: of an earlier release
    sender: str | None = None  # of the last role order; None: there was none; "": an operator
    order_age_s: float = 0.0
    queued_tokens: int = 0
    num_streams: int = 0
    num_slots: int = 0
    context: int = 0  # tokens of KV of its streams
    kv_tokens: int = 0  # that its memory holds
    cached_tokens: int = 0  # of prefixes that a router knows there
    step_s: float = 0.0
    token_s: float = 0.0
    key_s: float = 0.0
    context_s: float = 0.0

    @property
    def is_usable(self) -> bool:
        return self.is_healthy and self.is_live

    def is_like(self, other: BalancedNode) -> bool:
        """Whether the two can take each other's place. Equal GPUs do not leave equal bytes to the KV cache."""
        least, most = sorted((self.kv_tokens, other.kv_tokens))
        return self.shape == other.shape and least >= LIKE_SHARE * most


@dataclass(frozen=True, slots=True)
class BalanceSnapshot:
    """Of one moment. `arrived_per_s`: requests by model; `seen`: those of them that ended, by model."""

    nodes: tuple[BalancedNode, ...]
    arrived_per_s: dict[str, float] = field(default_factory=dict)
    seen: dict[str, tuple[EndedRequest, ...]] = field(default_factory=dict)
    age_s: float = 0.0  # since the routers answered
    num_answering: int = 1  # of the routers
    num_routers: int = 1
    role_state: int = 0  # of the router that gets the order
    are_agreed: bool = True  # the routers tell the same nodes, roles and health


def read_snapshot(answers: list[dict[str, Any]], num_routers: int, age_s: float = 0.0) -> BalanceSnapshot:
    """Of the routers that answered. Each knows all nodes; requests are of that router alone, so they are summed.

    A node counts as live where the first router has its feed: that router gets the order.
    """
    rates: dict[str, float] = {}
    seen: dict[str, list[EndedRequest]] = {}
    for answer in answers:
        for model, rate in answer["arrived_per_s"].items():
            rates[model] = rates.get(model, 0.0) + rate
        for model, rows in answer["seen"].items():
            seen.setdefault(model, []).extend(EndedRequest(*row) for row in rows)
    told = [tuple(_node(row) for row in answer["nodes"] if row["state"] != "leaving") for answer in answers]
    views = {frozenset((node.name, node.role, node.changes, node.is_healthy) for node in nodes) for nodes in told}
    ended = {model: tuple(sorted(rows)) for model, rows in seen.items()}
    nodes, state = (told[0], answers[0]["role_state"]) if answers else ((), 0)
    return BalanceSnapshot(nodes, rates, ended, age_s, len(answers), num_routers, state, len(views) < 2)


def _node(row: dict[str, Any]) -> BalancedNode:
    load, order = row["load"], row["role_order"]
    engine = load["engine"] or {}
    blocks, size = engine.get("num_blocks", 0), engine.get("block_size", 0)
    names = frozenset(row["models"] or ())
    return BalancedNode(
        row["node_id"], row["role"], row["role_changes"] or 0, names.difference(row["adapters"]), names,
        (row["kv_version"], row["tp"], row["max_model_len"], engine.get("slots", 0)),
        row["healthy"] and row["state"] == "active", load["feed"] == "live" and bool(engine), row["tells_orders"],
        None if order is None else order["sender"], 0.0 if order is None else order["age_s"],
        load["queued_tokens"], load["sequences"], engine.get("slots", 0), engine.get("context", 0), blocks * size,
        load["cached_blocks"] * size, engine.get("step_ms", 0.0) / 1e3,
        engine.get("token_s", 0.0), engine.get("key_s", 0.0), engine.get("context_s", 0.0),
    )  # fmt: skip
