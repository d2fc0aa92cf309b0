"""Simulated nodes after the product's own choice of nodes, which knows of them what their feeds have told.

A request waits for memory as an engine's does. Equal prompts, tiers, drafts and busy links are not simulated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain, count
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.planning.delays import Delays
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.simulated_node import DRAWN, Rule, SimulatedNode, VirtualTime
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.sequence import Request
from pd_connectors.protocol.messages import SampledToken
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.candidates import to_generate
from pd_router.policy.charge import Charge
from pd_router.policy.cost_policy import TRIED, CostPolicy
from pd_router.policy.prompt_facts import PromptFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.device import Device
    from pd_router.nodes.node import Node

WARM = 0.2  # of the time of arrivals, in which an empty cluster fills
RETRY_S = 0.005  # until a decode node asks for memory again


class RoleDevices(NamedTuple):
    """What nodes of each role run on: ranks of a node differ between roles."""

    prefill: Device
    decode: Device
    mixed: Device

    @classmethod
    def alike(cls, device: Device) -> RoleDevices:
        return cls(device, device, device)


@dataclass(slots=True)
class Served:
    """One request: when it came, its tokens, and why one node served it alone."""

    arrival: Arrival
    tokens_s: list[float] = field(default_factory=list)
    reason: str = ""  # "": two did, as usual; docs/routing.md lists them
    read_s: float = 0.0  # when a prefill node had read its prompt; 0: none has
    is_reserved: bool = False  # its decode node has blocks for it
    on_read: Callable[[], None] = lambda: None  # a prefill node has read the prompt
    charges: dict[str, Charge] = field(default_factory=dict)  # open ones at the router, by side

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.tokens_s[0] - self.arrival.at_s)

    @property
    def tpot_ms(self) -> float:
        num = len(self.tokens_s) - 1
        return 1e3 * (self.tokens_s[-1] - self.tokens_s[0]) / num if num else 0.0


class SimulatedCluster:
    """Nodes and a router, with the rule's targets as `pd-cluster up` gives them."""

    def __init__(
        self, roles: RoleCounts, rule: Rule, seed: int, devices: RoleDevices, delays: Delays | None = None
    ) -> None:
        """Raises StartupError."""
        roles.check()
        self.world, self._delays = VirtualTime(seed), delays or Delays()
        self.nodes = {
            role: [SimulatedNode(self.world, rule, device, role=role) for _ in range(number)]
            for role, device, number in zip(RoleCounts._fields, devices, roles, strict=True)
        }
        self._config = self._router_config(rule)
        self._policy = CostPolicy(self._config)
        self._table = NodeTable(self._config, lambda: self.world.now_s)
        self._nodes = dict(zip(self._table.nodes, chain(*self.nodes.values()), strict=True))
        self._told_s = dict.fromkeys(self._nodes, -inf)
        self._unheard = {node: list[int]() for node in self._nodes}  # numbers of charges since
        for node in self._nodes:
            node.reachable = True
        self._turns = count()
        self.num_short = 0  # times that a handover waited for memory

    def _router_config(self, rule: Rule) -> RouterConfig:
        slo_ttft_ms = 0.0 if rule.targets.ttft_s == inf else 1e3 * rule.targets.ttft_s
        prefill, decode, mixed = (
            tuple(f"http://{role}{at}:1" for at, _ in enumerate(nodes)) for role, nodes in self.nodes.items()
        )
        return RouterConfig(
            prefill=prefill, decode=decode, mixed=mixed, slo_ttft_ms=slo_ttft_ms,
            decode_on_prefill="auto" if rule.keeps else "never",
        )  # fmt: skip

    def serve(self, arrivals: Sequence[Arrival], num: int = 0) -> list[Served]:
        """What becomes of all, or of the first `num`: no more is simulated than that takes."""
        served = [Served(arrival) for arrival in arrivals]
        begin_s, end_s = (arrivals[at].at_s if arrivals else 0.0 for at in (0, -1))
        self.world.counted_s = (begin_s + WARM * (end_s - begin_s), end_s)
        for index, one in enumerate(served):
            at_s = one.arrival.at_s + self._delays.api_s
            self.world.at(at_s, lambda one=one, index=index: self._route(one, str(index)))  # type: ignore[misc]
        first = deque(served[: num or len(served)])

        def are_served() -> bool:
            while first and len(first[0].tokens_s) == first[0].arrival.num_output:
                first.popleft()
            return not first

        self.world.run(*[are_served] * bool(num))
        assert are_served()
        return served[: num or len(served)]

    @property
    def steps(self) -> dict[str, tuple[float, ...]]:
        """By role: steps, their tokens and seconds, while the cluster was neither filled nor emptied."""
        tallies = {role: [node.tally for node in nodes] for role, nodes in self.nodes.items() if nodes}
        return {role: tuple(map(sum, zip(*each, strict=True))) for role, each in tallies.items()}

    # the router

    def _hear(self) -> None:
        """What the feeds have told by now. A message names the charges that its load includes: all before it."""
        now_s = self.world.now_s
        for node, simulated in self._nodes.items():
            if now_s - self._told_s[node] >= self._delays.feed_s:
                self._told_s[node] = now_s
                node.view.receive(simulated.load, self._unheard[node])
                self._unheard[node].clear()

    def _route(self, one: Served, name: str) -> None:
        self._hear()
        num_input = one.arrival.num_input
        facts = PromptFacts(num_input, num_tokens=num_input, most_output=float(one.arrival.num_output))
        candidates, now_s = to_generate(self._table, None, facts, self._config, next(self._turns)), self.world.now_s
        plan = self._policy.choose(facts, candidates, now_s)
        if plan.order is not HandoffOrder.DIRECT:
            decode, first = plan.best(plan.decodes, now_s), plan.prefills[0]
            assert decode is not None
            if plan.reason == TRIED:
                one.reason = TRIED
                first.view.trial.begin()
            if not first.view.queued_tokens and first.view.ledger.reported.token_s:
                told_s = plan.costs.reading_s(first)
                one.on_read = lambda: first.view.trial.note(self.world.now_s - now_s, told_s)
            self._charge(one, "first", first, num_input, 0)
            self._charge(one, "last", decode, 0, 1)
            return self._hand_over(self._nodes[first], self._nodes[decode], one, name)
        alone = plan.best(plan.decodes, now_s)
        assert alone is not None
        one.reason = plan.reason
        self._charge(one, "last", alone, num_input, 1)
        return self._generate(self._nodes[alone], one, name)

    def _charge(self, one: Served, side: str, node: Node, tokens: int, sequences: int) -> None:
        """Book the request's work on the node, where the next choice does not see the node as it is."""
        if self._delays.feed_s:
            one.charges[side] = charge = Charge(
                node, lambda: self.world.now_s, prompt_tokens=tokens, sequences=sequences, context=one.arrival.num_input
            )
            self._unheard[node].append(charge.number)

    # a request's way

    def _take(self, one: Served) -> None:
        one.tokens_s.append(self.world.now_s)
        if len(one.tokens_s) == one.arrival.num_output and (charge := one.charges.pop("last", None)):
            charge.release()

    def _begin(self, node: SimulatedNode, one: Served, name: str, work: Work) -> Request:
        sampling = SamplingParams(max_tokens=one.arrival.num_output, ignore_eos=True)
        prompt = [1] * one.arrival.num_input
        message = AddRequest(name, prompt, sampling, work, received_s=one.arrival.at_s)
        return Request.from_message(message, lease_id=name if work is Work.PREFILL else None)

    def _generate(self, node: SimulatedNode, one: Served, name: str) -> None:
        node.on_token[name] = lambda: self._take(one)
        node.scheduler.add(self._begin(node, one, name, Work.GENERATE))
        node.wake()

    def _hand_over(self, first: SimulatedNode, node: SimulatedNode, one: Served, name: str) -> None:
        world, taken = self.world, self._begin(node, one, name, Work.TAKE_OVER)
        taken.load_id = name
        node.scheduler.park(taken)

        def reserve() -> None:
            if node.scheduler.reserve(taken) is None:
                self.num_short += 1
                world.after(RETRY_S, reserve)
            elif one.read_s:
                world.after(self._delays.link_s, load_ends)
            else:
                one.is_reserved = True

        def is_read() -> None:
            one.on_read()
            one.read_s = world.now_s
            if (charge := one.charges.pop("first", None)) is not None:
                charge.release()
            world.after(self._delays.first_token_s, give)
            if one.is_reserved:
                world.after(self._delays.link_s, load_ends)

        def give() -> None:
            self._take(one)
            node.scheduler.set_first_tokens(taken, (SampledToken(DRAWN),))

        def load_ends() -> None:
            first.scheduler.end_lease(name)
            first.wake()
            if one.arrival.num_output == 1:  # ended with its first token
                node.scheduler.drain(name)
            else:
                node.scheduler.admit_loaded(taken)
            node.wake()

        reserve()
        node.on_token[name] = lambda: self._take(one)
        first.on_token[name] = is_read
        first.scheduler.add(self._begin(first, one, name, Work.PREFILL))
        first.wake()
