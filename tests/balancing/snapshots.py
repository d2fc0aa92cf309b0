"""Snapshots of clusters with the figures of 8B, for tests of decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_cluster.balancing.estimate import Forecast
from pd_cluster.balancing.snapshot import BalancedNode, BalanceSnapshot, BalanceTargets, EndedRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.balancing.snapshot import GroupLoad
    from pd_cluster.planning.role_counts import RoleCounts

MODEL = "demo"
TARGETS = BalanceTargets(0.4, 0.010)


def a_node(name: str, role: str, **fields: Any) -> BalancedNode:
    usual = {
        "num_slots": 256, "kv_tokens": 900_000, "step_s": 0.006, "token_s": 22e-6, "key_s": 0.7e-9, "context_s": 33e-9,
        "num_streams": 4 if role != "prefill" else 0, "context": 4000 if role != "prefill" else 0,
    }  # fmt: skip
    return BalancedNode(name, role, fields.pop("changes", 0), **_named(usual | fields))


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    models = fields.get("models", frozenset({MODEL}))
    return {"models": models, "names": models} | fields


def nodes_of(prefill: int, decode: int, mixed: int = 0) -> list[BalancedNode]:
    numbers = (("prefill", prefill), ("decode", decode), ("mixed", mixed))
    return [a_node(f"{role[0]}-{number}", role) for role, count in numbers for number in range(count)]


def a_snapshot(
    nodes: list[BalancedNode], per_s: float = 10.0, lengths: tuple[int, int] = (1000, 200), **fields: Any
) -> BalanceSnapshot:
    ended = tuple(EndedRequest(-number / per_s, lengths[0], 0, lengths[1]) for number in range(60))
    return BalanceSnapshot(tuple(nodes), {MODEL: per_s}, {MODEL: ended}, **fields)


def by_prefills(shares: dict[int, float]) -> Callable[[GroupLoad, RoleCounts], Forecast]:
    """A forecast that depends on the number of prefill nodes alone."""
    return lambda load, roles: Forecast(*[shares[roles.prefill]] * 3)
