"""Simulated nodes behind the product's own choice of nodes. Feeds are not simulated: it sees each node as it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from benchmarks.slo.device import DEVICES, SHAPES
from benchmarks.slo.node import Rule, SimulatedNode, VirtualTime
from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.sequence import Request
from pd_connectors.protocol.messages import SampledToken
from pd_router.config import HandoffOrder, RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.candidates import to_generate
from pd_router.policy.cost_policy import TRIED, CostPolicy
from pd_router.policy.prompt_facts import PromptFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.bench.workload import Arrival

FIRST_TOKEN_S, LINK_S = 1.5e-3, 4e-3  # from P's step to the client; until D has the KV
_NAME = re.compile(r"(?:(?P<prefills>[1-9]\d*)P(?P<decodes>[1-9]\d*)D|(?P<mixed>[1-9]\d*)M)(?:-TP(?P<ranks>[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Setting:
    """Nodes of a cluster: NPMD or NM, each of one GPU; with -TP2 of two."""

    name: str
    num_prefills: int
    num_decodes: int  # or mixed ones
    num_ranks: int = 1

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Raises StartupError."""
        found = _NAME.fullmatch(name)
        num_ranks = int(found["ranks"] or 1) if found else 0
        if found is None or (SHAPES[0], num_ranks) not in DEVICES:
            raise StartupError(f"setting {name!r} is not like 2P1D or 3M, with -TP2 for nodes of two ranks")
        return cls(name, int(found["prefills"] or 0), int(found["decodes"] or found["mixed"]), num_ranks)

    @property
    def num_gpus(self) -> int:
        return (self.num_prefills + self.num_decodes) * self.num_ranks


@dataclass(slots=True)
class Served:
    """One request: when it came, its tokens, and why one node served it alone."""

    arrival: Arrival
    tokens_s: list[float] = field(default_factory=list)
    reason: str = ""  # "": two did, as usual; docs/routing.md lists them
    on_read: Callable[[], None] = lambda: None  # a prefill node has read the prompt

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.tokens_s[0] - self.arrival.at_s)

    @property
    def tpot_ms(self) -> float:
        num = len(self.tokens_s) - 1
        return 1e3 * (self.tokens_s[-1] - self.tokens_s[0]) / num if num else 0.0

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (b - a) for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


class SimulatedCluster:
    """Nodes and a router, with the rule's targets as `pd-cluster up` gives them."""

    def __init__(self, setting: Setting, rule: Rule, seed: int, shape: str = SHAPES[0]) -> None:
        """Raises StartupError."""
        if (shape, setting.num_ranks) not in DEVICES:
            raise StartupError(f"no steps of {shape} are known for nodes of {setting.num_ranks} ranks")
        device, self.world = DEVICES[shape, setting.num_ranks], VirtualTime(seed)
        self.prefills = [SimulatedNode(self.world, rule, device, role="prefill") for _ in range(setting.num_prefills)]
        self.decodes = [SimulatedNode(self.world, rule, device) for _ in range(setting.num_decodes)]
        self._config = self._router_config(rule)
        self._policy = CostPolicy(self._config)
        self._table = NodeTable(self._config, lambda: self.world.now_s)
        self._nodes = dict(zip(self._table.nodes, (*self.prefills, *self.decodes), strict=True))
        for node in self._nodes:
            node.reachable = True
        self._turns = count()

    def _router_config(self, rule: Rule) -> RouterConfig:
        slo_ttft_ms = 0.0 if rule.targets.ttft_s == inf else 1e3 * rule.targets.ttft_s
        return RouterConfig(
            prefill=tuple(f"http://p{number}:1" for number, _ in enumerate(self.prefills)),
            decode=tuple(f"http://d{number}:1" for number, _ in enumerate(self.decodes)),
            slo_ttft_ms=slo_ttft_ms, decode_on_prefill="auto" if rule.keeps else "never",
        )  # fmt: skip

    def serve(self, arrivals: Sequence[Arrival]) -> list[Served]:
        served = [Served(arrival) for arrival in arrivals]
        for index, one in enumerate(served):
            self.world.at(one.arrival.at_s, lambda one=one, index=index: self._route(one, str(index)))  # type: ignore[misc]
        self.world.run()
        for one in served:
            assert len(one.tokens_s) == one.arrival.num_output
        return served

    # the router

    def _route(self, one: Served, name: str) -> None:
        for node, simulated in self._nodes.items():
            node.view.receive(simulated.load, ())
        facts = PromptFacts(
            one.arrival.num_input, num_tokens=one.arrival.num_input, most_output=float(one.arrival.num_output)
        )
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
            return self._hand_over(self._nodes[first], self._nodes[decode], one, name)
        alone = plan.best(plan.decodes, now_s)
        assert alone is not None
        one.reason = plan.reason
        return self._generate(self._nodes[alone], one, name)

    # a request's way

    def _begin(self, node: SimulatedNode, one: Served, name: str, work: Work) -> Request:
        sampling = SamplingParams(max_tokens=one.arrival.num_output, ignore_eos=True)
        prompt = [1] * one.arrival.num_input
        message = AddRequest(name, prompt, sampling, work, received_s=one.arrival.at_s)
        return Request.from_message(message, lease_id=name if work is Work.PREFILL else None)

    def _generate(self, node: SimulatedNode, one: Served, name: str) -> None:
        node.on_token[name] = lambda: one.tokens_s.append(self.world.now_s)
        node.scheduler.add(self._begin(node, one, name, Work.GENERATE))
        node.wake()

    def _hand_over(self, first: SimulatedNode, node: SimulatedNode, one: Served, name: str) -> None:
        world = self.world
        taken = self._begin(node, one, name, Work.TAKE_OVER)
        taken.load_id = name
        node.scheduler.park(taken)
        load = node.scheduler.reserve(taken)
        assert load is not None, "the simulated memory is short"

        def take() -> None:
            one.tokens_s.append(world.now_s)

        def is_read() -> None:
            one.on_read()
            world.at(world.now_s + FIRST_TOKEN_S, give)
            world.at(world.now_s + LINK_S, load_ends)

        def give() -> None:
            take()
            node.scheduler.set_first_tokens(taken, (SampledToken(7),))

        def load_ends() -> None:
            first.scheduler.end_lease(name)
            node.scheduler.admit_loaded(taken)
            node.wake()

        node.on_token[name] = take
        first.on_token[name] = is_read
        first.scheduler.add(self._begin(first, one, name, Work.PREFILL))
        first.wake()
