"""Whatever was killed and restarted, an idle prefill node is in use again: the router's choice over simulated nodes.

The nodes are a CPU's, which measures no steps at start: they have the engine's scheduler, and its model of steps is
fitted to the steps that each of them happens to have.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from benchmarks.slo import rules
from benchmarks.slo.setting import roles_of
from pd_cluster.bench.workload import Arrival
from pd_cluster.planning.device import Device
from pd_cluster.planning.simulated_cluster import RoleDevices, Served, SimulatedCluster
from pd_cluster.planning.simulated_node import SimulatedNode
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.trial import MOST, SAVED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.scheduling.step_model import StepWork
    from pd_router.nodes.node import Node

LENGTHS = (400, 1500)  # prompt tokens
NUM_OUTPUT = 8
AWAY = 10  # requests between two events
WITHIN = 100  # requests until an idle prefill node is in use
AFTER = 60
# -P: all prefill nodes are killed, +P: they are back
ORDERS = ("-P +P", "-D +D", "-P +P -D +D", "-D +D -P +P", "-P -D +P +D", "-P -D +D +P", "-D -P +P +D", "-D -P +D +P")


@dataclass(frozen=True, slots=True)
class CpuDevice(Device):
    """The demo model on one core."""

    factor: float = 1.0

    def seconds(self, work: StepWork) -> float:
        prompts_s = 0.17e-3 * work.num_tokens + 80e-9 * work.num_keys
        return self.factor * (5e-3 + 1e-3 * work.num_decodes + prompts_s)


class RestartedCluster(SimulatedCluster):
    """Nodes that are killed and restarted between requests. `slow`: how many times as long P takes."""

    def __init__(self, setting: str, slow: float = 1.0, seed: int = 0) -> None:
        self.rule = next(rule for rule in rules(200, 10) if rule.name == "no limit")
        super().__init__(roles_of(setting), self.rule, seed, RoleDevices.alike(CpuDevice()))
        self.devices = {"P": CpuDevice(slow), "D": CpuDevice()}
        self._lengths = cycle(LENGTHS)
        for name in "PD":
            self.restart(name)

    def of(self, name: str) -> list[Node]:
        first = len(self.nodes["prefill"])
        return list(self._table.nodes[:first] if name == "P" else self._table.nodes[first:])

    def restart(self, name: str) -> None:
        for node in self.of(name):
            made = SimulatedNode(self.world, self.rule, self.devices[name], is_measured=False)
            made.room.prompts_first = name == "P"
            self._nodes[node] = made
            node.reachable = True

    def kill(self, name: str) -> None:
        for node in self.of(name):
            node.view.forget()
            node.reachable = False

    def restart_router(self) -> None:
        before = dict(zip((node.url for node in self._nodes), self._nodes.items(), strict=True))
        self._table = NodeTable(self._config, lambda: self.world.now_s)
        self._nodes = {node: before[node.url][1] for node in self._table.nodes}
        self._told_s, self._unheard = dict.fromkeys(self._nodes, 0.0), {node: [] for node in self._nodes}
        for node in self._nodes:
            node.reachable = before[node.url][0].reachable

    def ask(self, count: int, clients: int = 1) -> list[Served]:
        """So many requests of clients that send one each half second, more than a prompt takes one client."""
        if not any(node.reachable for node in self.of("D")):
            return []
        start_s = self.world.now_s
        return self.serve(
            [Arrival(start_s + 0.5 * number / clients, next(self._lengths), NUM_OUTPUT) for number in range(count)]
        )

    def play(self, events: Sequence[str]) -> None:
        for event in events:
            if event == "R":
                self.restart_router()
            elif event[0] == "-":
                self.kill(event[1])
            else:
                self.restart(event[1])
            self.ask(AWAY)

    def speed_up(self, slow: float) -> None:
        """From now on prefill nodes take so many times as long; what they tell is of before."""
        for node in self.of("P"):
            self._nodes[node].device = CpuDevice(slow)


def share_of_p(served: Sequence[Served]) -> float:
    return mean(one.reason in ("", "prefill-idle") for one in served)


def check(order: str, setting: str, places: Sequence[int], clients: int = 1) -> None:
    """The order, with a restart of the router at each of these places in it; -1: at none."""
    for seed, at in enumerate(places):
        events = order.split() if at < 0 else [*order.split()[:at], "R", *order.split()[at:]]
        cluster = RestartedCluster(setting, seed=seed)
        cluster.ask(AWAY)
        cluster.play(events)
        cluster.ask(WITHIN, clients)
        assert share_of_p(cluster.ask(AFTER)) > 0.9, events


@pytest.mark.long
@pytest.mark.parametrize(("order", "router_too"), [(order, at % 2 > 0) for at, order in enumerate(ORDERS)])
def test_an_idle_prefill_node_is_in_use_within_100_requests(order: str, router_too: bool) -> None:
    """Before, none of the prompts after it went P-first in each order in which D reads prompts beside no P."""
    check(order, "1P1D", (len(order.split()) if router_too else -1,))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["1P1D", "2P2D", "3P1D"])
@pytest.mark.parametrize("order", ORDERS)
def test_so_it_is_wherever_the_router_is_restarted(order: str, setting: str) -> None:
    for clients in (1, 4):
        check(order, setting, range(-1, len(order.split()) + 1), clients)


@pytest.mark.long
@pytest.mark.parametrize("slow", [0.5, 2.0, 3.0, 8.0])
def test_a_prefill_node_of_other_hardware_gets_what_its_speed_is_worth(slow: float) -> None:
    """A slower one is tried at a price of some percent of the mean time to the first token."""
    cluster = RestartedCluster("1P1D", slow)
    cluster.ask(AWAY)
    cluster.play(("-P", "+P", "R"))
    cluster.ask(WITHIN)
    served = cluster.ask(300)
    if slow < 1.0:
        assert share_of_p(served) == 1.0
        return
    tried = [one for one in served if one.reason == "prefill-idle"]
    direct = {one.arrival.num_input: one.ttft_ms for one in served if one.reason == "prefill-busy"}
    lost_ms = sum(one.ttft_ms - direct[one.arrival.num_input] for one in tried)
    assert 300 // (MOST + 1) <= len(tried) < 75
    dear = slow > 4  # then a trial each MOST prompts costs more than what they save up
    assert lost_ms < sum(one.ttft_ms for one in served) * (slow / MOST if dear else 1.5 * SAVED)


@pytest.mark.long
@pytest.mark.parametrize("setting", ["1P1D", "2P1D"])
def test_a_pace_that_is_no_longer_true_is_found_out(setting: str) -> None:
    """The prefill nodes were slow once, as beside another process, and get nothing by their word of then."""
    cluster = RestartedCluster(setting, 4.0)
    cluster.ask(AWAY)
    cluster.play(("-P", "+P"))
    cluster.ask(WITHIN)
    assert share_of_p(cluster.ask(AFTER)) < 0.2
    cluster.speed_up(1.0)
    cluster.ask(WITHIN)
    assert share_of_p(cluster.ask(AFTER)) > 0.9
