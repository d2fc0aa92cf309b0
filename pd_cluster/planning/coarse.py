"""A second, coarse model of a cluster, for many settings. What it finds best, the fine model simulates.

Nodes plan steps as engines do, but those of streams alone many at once; they have no noise and room for all. The choice
of nodes is the router's sum without caches, feeds that are late, and trials (`pd_router/policy/cost.py`).
"""

from __future__ import annotations

import heapq
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.planning.coarse_node import CoarseNode, CoarseStream
from pd_cluster.planning.device import steps_at_start
from pd_cluster.scheduling.step_model import StepModel
from pd_router.nodes.ledger import DECODE_S
from pd_router.policy.cost import (
    CHUNK_TOKENS,
    DOUBT_S,
    ERROR_FACTOR,
    HANDOVER_S,
    STREAM_SHARE,
    STREAM_WEIGHT,
    TRANSFER_S,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.delays import Delays
    from pd_cluster.planning.role_counts import RoleCounts
    from pd_cluster.planning.simulated_cluster import RoleDevices
    from pd_cluster.scheduling.targets import Targets


class CoarseServed(NamedTuple):
    arrival: Arrival
    ttft_ms: float
    tpot_ms: float


class CoarseCluster:
    """Nodes, and the requests on their way."""

    def __init__(self, roles: RoleCounts, devices: RoleDevices, targets: Targets, delays: Delays) -> None:
        fitted = {device: StepModel(steps_at_start(device)) for device in set(devices)}
        self._prefills, decodes, mixed = (
            [CoarseNode(kind, fitted[kind], targets, prompts_first=first) for _ in range(number)]
            for kind, number, first in zip(devices, roles, (True, False, False), strict=True)
        )
        self._others = decodes + mixed
        self._nodes = [*self._prefills, *self._others]
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._ttft_s, self._delays = targets.ttft_s, delays
        self._arrivals: Sequence[Arrival] = ()
        self._events: list[tuple[float, int, int]] = []  # heap: time, place of a node, its version; or -1, a request
        self._takers: dict[int, tuple[CoarseNode, float]] = {}  # what decodes a request, and its time of a step
        self._first_s: dict[int, float] = {}
        self._served: list[CoarseServed] = []

    def serve(self, arrivals: Sequence[Arrival]) -> list[CoarseServed]:
        """What becomes of each request, in the order of their ends."""
        self._arrivals, events, coming = arrivals, self._events, 0
        while coming < len(arrivals) or events:
            arrival_s = arrivals[coming].at_s + self._delays.api_s if coming < len(arrivals) else inf
            if not events or arrival_s <= events[0][0]:
                self._arrive(coming, arrival_s)
                coming += 1
                continue
            now_s, place, number = heapq.heappop(events)
            if place < 0:
                node = self._takers[number][0]
                node.begin(self._stream(number))
                self._wake(node, now_s)
            elif self._nodes[place].version == number:
                self._end_steps(self._nodes[place], now_s)
        return self._served

    def _arrive(self, request: int, now_s: float) -> None:
        one = self._arrivals[request]
        reader, taker = self._choose(one, request % len(self._others), now_s)
        step_s = DECODE_S + taker.model.context_s * one.num_input
        self._takers[request] = taker, step_s
        taker.num_given += 1
        taker.streams_s += step_s
        reader.read(request, one.num_input, now_s)
        self._wake(reader, now_s)

    def _choose(self, one: Arrival, turn: int, now_s: float) -> tuple[CoarseNode, CoarseNode]:
        """Which node reads the prompt, and which decodes. Equal ones take turns."""
        others, prefills, size = self._others[turn:] + self._others[:turn], self._prefills, one.num_input
        context, steps = size + one.num_output / 2, STREAM_WEIGHT * one.num_output
        answers_s = [
            steps * (node.streams_s + node.num_given * (DECODE_S + node.model.context_s * context)) for node in others
        ]
        least_s = min(answers_s)
        taker = others[answers_s.index(least_s)]
        if prefills:
            reads_s = [sum(node.reading_s(size)) for node in prefills]
            prefill_s = min(reads_s)
            if all(node.is_late(now_s) for node in others):
                keepers = [(read_s, at) for at, read_s in enumerate(reads_s) if not prefills[at].is_late(now_s)]
                if keepers:
                    return (prefills[min(keepers)[1]],) * 2
            over_s = prefill_s + HANDOVER_S
            pair_s = over_s + TRANSFER_S * min(size, CHUNK_TOKENS) + least_s - DOUBT_S
            # No node is sooner than an idle one with the least streams
            alone_s = ERROR_FACTOR * size * others[0].token_s + least_s
            if over_s <= self._ttft_s and (prefill_s < DOUBT_S / 2 or alone_s >= pair_s):
                return prefills[reads_s.index(prefill_s)], taker
        reading_s = [node.reading_s(size) for node in others]
        direct_s = [
            queue_s + own_s * (ERROR_FACTOR + STREAM_SHARE * node.num_given) + answer_s
            for node, (queue_s, own_s), answer_s in zip(others, reading_s, answers_s, strict=True)
        ]
        best_s = min(direct_s)
        if not prefills or best_s < pair_s:
            return (others[direct_s.index(best_s)],) * 2
        meeting = [at for at, pair in enumerate(reading_s) if over_s > self._ttft_s >= sum(pair)]
        if meeting:
            return (others[min(meeting, key=direct_s.__getitem__)],) * 2
        return prefills[reads_s.index(prefill_s)], taker

    def _end_steps(self, node: CoarseNode, now_s: float) -> None:
        read, ended = node.end()
        for request in read:
            is_alone = self._takers[request][0] is node
            first_s = self._first_s[request] = now_s + (0.0 if is_alone else self._delays.first_token_s)
            if self._arrivals[request].num_output == 1:
                self._finish(request, first_s)
            elif is_alone:
                node.begin(self._stream(request))
            else:
                heapq.heappush(self._events, (now_s + self._delays.link_s, -1, request))
        for request in ended:
            self._finish(request, now_s)
        node.plan(now_s)
        self._note(node)

    def _wake(self, node: CoarseNode, now_s: float) -> None:
        before = node.version
        if node.end_s == inf:
            node.plan(now_s)
        else:
            node.cut(now_s)
        if node.version != before:
            self._note(node)

    def _note(self, node: CoarseNode) -> None:
        if node.end_s < inf:
            heapq.heappush(self._events, (node.end_s, self._places[node], node.version))

    def _stream(self, request: int) -> CoarseStream:
        one = self._arrivals[request]
        context = one.num_input + one.num_output // 2
        return CoarseStream(request, one.num_output - 1, context, self._first_s[request])

    def _finish(self, request: int, now_s: float) -> None:
        one, first_s, (taker, step_s) = self._arrivals[request], self._first_s.pop(request), self._takers.pop(request)
        taker.num_given -= 1
        taker.streams_s -= step_s
        tpot_s = (now_s - first_s) / max(1, one.num_output - 1)
        self._served.append(CoarseServed(one, 1e3 * (first_s - one.at_s), 1e3 * tpot_s))
