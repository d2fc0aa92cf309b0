"""Simulated nodes that change roles by the product's own `decide`, on what feeds and a router would tell."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.balancing.decision import decide
from pd_cluster.balancing.snapshot import BALANCE, BalancedNode, BalanceSnapshot, BalanceTargets, EndedRequest
from pd_cluster.planning.simulated_cluster import RoleDevices, Served, SimulatedCluster
from pd_cluster.scheduling.step_model import StepModel
from pd_router.nodes.node import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.balancing.decision import BalanceDecision, Memory
    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.delays import Delays
    from pd_cluster.planning.device import Device
    from pd_cluster.planning.role_counts import RoleCounts
    from pd_cluster.planning.simulated_node import Rule
    from pd_connectors.protocol.feed import NodeLoad
    from pd_router.nodes.node import Node

FEED_S, ORDER_S, PERIOD_S = 0.01, 0.02, 5.0  # until a router has a node's word; of an order; of a round
WINDOW_S = 60.0  # of which a router tells requests
MODEL = "m"


def _is_over(one: Served) -> bool:
    return len(one.tokens_s) == one.arrival.num_output


@dataclass(frozen=True, slots=True)
class RoleEvent:
    at_s: float
    node: str
    role: str
    reason: str


class BalancedCluster(SimulatedCluster):
    """`is_balanced`: else the roles of the start stay. `told`: what was decided, each reason once while it lasts."""

    def __init__(
        self, roles: RoleCounts, rule: Rule, device: Device, seed: int, *, is_balanced: bool, targets: BalanceTargets,
        delays: Delays | None = None,
    ) -> None:  # fmt: skip
        super().__init__(roles, rule, seed, RoleDevices.alike(device), delays)
        self._rule, self._targets, self._is_balanced = rule, targets, is_balanced
        self._ordered_s = dict.fromkeys(self._nodes, -inf)
        self._served: list[Served] = []  # what has not ended, or in the last minute
        self._memory: Memory = {}
        self._end_s = 0.0
        self.changes: list[RoleEvent] = []
        self.told: list[BalanceDecision] = []

    def serve(self, arrivals: Sequence[Arrival], num: int = 0) -> list[Served]:
        self._end_s = arrivals[-1].at_s
        if self._is_balanced:
            self.world.at(PERIOD_S, self._round)
        return super().serve(arrivals, num)

    def _route(self, one: Served, name: str) -> None:
        self._served.append(one)
        super()._route(one, name)

    def foresee(self, at_s: float, num_prefills: int) -> None:
        """From then on, have so many prefill nodes, as if the load were known. Those with the least to do change."""
        self.world.at(at_s, lambda: self._become(num_prefills))

    def _become(self, num_prefills: int) -> None:
        loads = {node: simulated.load for node, simulated in self._nodes.items()}
        nodes = sorted(loads, key=lambda node: (loads[node].num_running + loads[node].num_waiting, node.node_id))
        reading = [node for node in nodes if node.role is Role.PREFILL]
        others = [node for node in nodes if node.role is not Role.PREFILL]
        for node in reading[: max(0, len(reading) - num_prefills)]:
            self.order(node.node_id, "decode", "foreseen")
        for node in others[: max(0, num_prefills - len(reading))]:
            self.order(node.node_id, "prefill", "foreseen")

    def _round(self) -> None:
        world = self.world
        loads = {node: simulated.load for node, simulated in self._nodes.items()}
        world.at(world.now_s + FEED_S, lambda: self._decide(loads))
        if world.now_s + PERIOD_S < self._end_s:
            world.at(world.now_s + PERIOD_S, self._round)

    def _decide(self, loads: dict[Node, NodeLoad]) -> None:
        now_s = self.world.now_s
        since_s = now_s - WINDOW_S
        self._served = [one for one in self._served if not _is_over(one) or one.tokens_s[-1] >= since_s]
        ended = tuple(
            EndedRequest(one.arrival.at_s - now_s, one.arrival.num_input, 0, one.arrival.num_output)
            for one in self._served if _is_over(one)
        )  # fmt: skip
        nodes = tuple(self._seen(node, load) for node, load in loads.items())
        rate = sum(one.arrival.at_s >= since_s for one in self._served) / min(WINDOW_S, now_s)
        snapshot = BalanceSnapshot(nodes, {MODEL: rate}, {MODEL: ended}, FEED_S)
        (decision,), self._memory = decide(snapshot, self._memory, self._targets)
        if not self.told or self.told[-1].reason != decision.reason:
            self.told.append(decision)
        if (change := decision.change) is not None:
            self.world.at(now_s + ORDER_S, lambda: self.order(change.node, change.role, decision.reason))

    def _seen(self, node: Node, load: NodeLoad) -> BalancedNode:
        ordered_s = self._ordered_s[node]
        return BalancedNode(
            node.node_id, node.role.value, node.role_changes or 0, frozenset({MODEL}), frozenset({MODEL}),
            sender=None if ordered_s == -inf else BALANCE, order_age_s=min(1e9, self.world.now_s - ordered_s),
            queued_tokens=load.queued_tokens, num_streams=load.num_running + load.num_waiting,
            num_slots=load.num_slots, context=load.num_context, kv_tokens=load.num_blocks * load.block_size,
            step_s=load.step_s, token_s=load.token_s, key_s=load.key_s,
            context_s=load.context_s,
        )  # fmt: skip

    def order(self, name: str, role: str, reason: str) -> None:
        """As a node and its engine take it, but for streams of the old role, which are protected a little longer."""
        (node,) = (one for one in self._nodes if one.node_id == name)
        node.receive_role(role, (node.role_changes or 0) + 1)
        assert node.role is Role(role)
        simulated = self._nodes[node]
        simulated.room.prompts_first = role == "prefill"
        model = StepModel() if self._rule.usual and role == "decode" else simulated.model
        simulated.budget.targets = self._rule.targets.on(role, "cuda:0", model)
        simulated.room.gap_s = simulated.budget.targets.itl_s
        self._ordered_s[node] = self.world.now_s
        self.changes.append(RoleEvent(self.world.now_s, name, role, reason))
        simulated.wake()
