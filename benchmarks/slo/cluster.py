"""Simulated nodes behind a router with the product's own sums. It knows what it has given to a node, without feeds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.slo.device import DEVICES
from benchmarks.slo.node import SEQS, Rule, SimulatedNode, VirtualTime
from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.sequence import Request
from pd_connectors.protocol.messages import SampledToken
from pd_router.cost import CHUNK_TOKENS, DOUBT_S, ERROR_FACTOR, HANDOVER_S, SEQUENCE_S, STREAM_SHARE, TRANSFER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.bench.workload import Arrival

FIRST_TOKEN_S, LINK_S = 1.5e-3, 4e-3  # from P's step to the client; until D has the KV
GUESS = 0.5  # D's speed as a share of P's, until it is known
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
        if found is None or num_ranks not in DEVICES:
            raise StartupError(f"setting {name!r} is not like 2P1D or 3M, with -TP2 for nodes of two ranks")
        return cls(name, int(found["prefills"] or 0), int(found["decodes"] or found["mixed"]), num_ranks)

    @property
    def num_gpus(self) -> int:
        return (self.num_prefills + self.num_decodes) * self.num_ranks


@dataclass(slots=True)
class Served:
    """One request: when it came, its tokens, and whether D read its prompt although there was a P."""

    arrival: Arrival
    tokens_s: list[float] = field(default_factory=list)
    is_spilled: bool = False

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
    """Nodes and a router that gives a prompt to the node where the first token comes sooner."""

    def __init__(self, setting: Setting, rule: Rule, seed: int) -> None:
        self.world = VirtualTime(seed)
        device, on_p = DEVICES[setting.num_ranks], Rule(rule.name, shortest=rule.shortest)
        self.prefills = [SimulatedNode(self.world, on_p, device) for _ in range(setting.num_prefills)]
        self.decodes = [SimulatedNode(self.world, rule, device) for _ in range(setting.num_decodes)]

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
        num = one.arrival.num_input
        alone = min(self.decodes, key=lambda node: self._direct_s(node, num))
        if not self.prefills:
            return self._generate(alone, one, name)
        first = min(self.prefills, key=lambda node: self._reading_s(node, num))
        node = min(self.decodes, key=lambda node: self._handing_over_s(node, num))
        prefill_s, has_room = self._reading_s(first, num), alone.num_streams < SEQS
        saves = self._direct_s(alone, num) + DOUBT_S < prefill_s + self._handing_over_s(node, num)
        if prefill_s >= DOUBT_S / 2 and has_room and saves:
            one.is_spilled = True
            return self._generate(alone, one, name)
        return self._hand_over(first, node, one, name)

    def _pace_s(self, node: SimulatedNode) -> float:
        if node in self.prefills or not self.prefills:
            return node.pace_s or node.model.token_s
        usual_s = min(first.pace_s or first.model.token_s for first in self.prefills)
        return node.pace_s or usual_s / GUESS

    def _reading_s(self, node: SimulatedNode, num: int) -> float:
        return (node.queued_tokens + num) * self._pace_s(node)

    def _handing_over_s(self, node: SimulatedNode, num: int) -> float:
        queue_s = STREAM_SHARE * self._reading_s(node, 0)
        return HANDOVER_S + TRANSFER_S * min(num, CHUNK_TOKENS) + queue_s + SEQUENCE_S * node.num_streams

    def _direct_s(self, node: SimulatedNode, num: int) -> float:
        own_s = num * self._pace_s(node) * (ERROR_FACTOR + STREAM_SHARE * node.num_streams)
        return self._reading_s(node, 0) + own_s + SEQUENCE_S * node.num_streams

    def _note_pace(self, node: SimulatedNode, one: Served, begun_s: float, *, is_idle: bool) -> None:
        node.queued_tokens -= one.arrival.num_input
        if is_idle:
            pace_s = (self.world.now_s - begun_s) / one.arrival.num_input
            node.pace_s = 0.8 * (node.pace_s or pace_s) + 0.2 * pace_s

    # a request's way

    def _begin(self, node: SimulatedNode, one: Served, name: str, work: Work) -> Request:
        sampling = SamplingParams(max_tokens=one.arrival.num_output, ignore_eos=True)
        prompt = [1] * one.arrival.num_input
        message = AddRequest(name, prompt, sampling, work, received_s=one.arrival.at_s)
        return Request.from_message(message, lease_id=name if work is Work.PREFILL else None)

    def _take(self, node: SimulatedNode, one: Served) -> None:
        one.tokens_s.append(self.world.now_s)
        node.num_streams -= len(one.tokens_s) == one.arrival.num_output

    def _generate(self, node: SimulatedNode, one: Served, name: str) -> None:
        begun_s, is_idle = self.world.now_s, not node.queued_tokens
        node.queued_tokens += one.arrival.num_input
        node.num_streams += 1

        def take() -> None:
            if not one.tokens_s:
                self._note_pace(node, one, begun_s, is_idle=is_idle)
            self._take(node, one)

        node.on_token[name] = take
        node.scheduler.add(self._begin(node, one, name, Work.GENERATE))
        node.wake()

    def _hand_over(self, first: SimulatedNode, node: SimulatedNode, one: Served, name: str) -> None:
        begun_s, is_idle, world = self.world.now_s, not first.queued_tokens, self.world
        first.queued_tokens += one.arrival.num_input
        node.num_streams += 1
        taken = self._begin(node, one, name, Work.TAKE_OVER)
        taken.load_id = name
        node.scheduler.park(taken)
        load = node.scheduler.reserve(taken)
        assert load is not None, "the simulated memory is short"
        node.on_token[name] = lambda: self._take(node, one)

        def is_read() -> None:
            self._note_pace(first, one, begun_s, is_idle=is_idle)
            world.at(world.now_s + FIRST_TOKEN_S, give)
            world.at(world.now_s + LINK_S, load_ends)

        def give() -> None:
            self._take(node, one)
            node.scheduler.set_first_tokens(taken, (SampledToken(7),))

        def load_ends() -> None:
            first.scheduler.end_lease(name)
            node.scheduler.admit_loaded(taken)
            node.wake()

        first.on_token[name] = is_read
        first.scheduler.add(self._begin(first, one, name, Work.PREFILL))
        first.wake()
