"""A second, coarse model of a cluster, for many settings: nodes share their steps as a fluid, from event to event.

It has no blocks, no noise and a simple choice of nodes. A request costs four events, however many tokens it has. What
it finds best, the fine model (`simulated_cluster.py`) simulates.
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import Enum
from math import exp, inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.planning.device import HEAT_S, HEAVY_TOKENS
from pd_cluster.scheduling.queue_order import AGEING
from pd_cluster.scheduling.step_model import StepWork, keys_of
from pd_cluster.scheduling.targets import AIM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.delays import Delays
    from pd_cluster.planning.device import Device
    from pd_cluster.planning.role_counts import RoleCounts
    from pd_cluster.planning.simulated_cluster import RoleDevices

SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 1536, 2048)  # tokens of prompts of a step beside streams
GAP = 3  # times the target of a stream's time per token that one step may take
LEAST_SHARE = 0.1  # of the steps, with prompts that wait
OWED = 2  # steps that a new stream lets prompts take beyond its target: late ones may (`step_budget.DEBT`)
SPREAD = 2  # steps over which what is saved is spent
MOST_SAVED = 8  # steps that streams are ahead of their target, more count as these
ROUGH = 4096  # tokens of context between which steps are not told apart
SPILL = 1.5  # a node that also decodes reads a prompt if it is so many times as soon


class Ended(Enum):
    NOTHING, PROMPT, STREAM = range(3)  # NOTHING: a node's pace changes


class CoarseServed(NamedTuple):
    arrival: Arrival
    ttft_ms: float
    tpot_ms: float


class CoarseNode:
    """Its streams advance by one token a step; its prompts, one after the other, by what a step takes of them."""

    def __init__(self, device: Device, tpot_s: float) -> None:
        self._device, self._tpot_s = device, tpot_s
        self.token_s = device.seconds(StepWork(num_tokens=device.step_tokens)) / device.step_tokens
        far = StepWork(num_tokens=device.step_tokens, num_keys=device.step_tokens * 8192)
        self._key_s = (device.seconds(far) / device.step_tokens - self.token_s) / 8192
        self.num_streams = self.context = 0
        self.step_s, self._step_tokens = inf, 0.0
        self._tokens = self._at_s = 0.0  # of a stream since the start
        self._left = self._queued = 0.0  # tokens of the prompt that is read, and of those that wait
        self._reading = -1  # request; -1: none
        self._streams: list[tuple[float, int, int]] = []  # heap: the token at which it ends, request, context
        self._waiting: list[tuple[float, float, int]] = []  # heap, as `Shortest` orders: place, tokens, request
        self._warmth = 0.0  # 1: it has had full steps of prompts for long
        self._mean_s = AIM * tpot_s  # of steps, that streams are to have
        self._slack_s = 0.0  # by which the latest stream is ahead of that: prompts may take it
        self.version = 0  # of its next event
        self._steps: dict[tuple[int, int, bool, int], tuple[float, float]] = {}
        self._with_one: dict[tuple[int, int], float] = {}  # seconds, by streams and context
        self.refresh()

    def wait_s(self, num_tokens: int, now_s: float) -> float:
        """Until a prompt that comes now is read."""
        ahead = self._left + self._queued
        if ahead:
            ahead = max(0.0, ahead - (now_s - self._at_s) / self.step_s * self._step_tokens)
        return (ahead + num_tokens) * self._read_s

    def read(self, request: int, num_tokens: int) -> None:
        """Of a prompt: keys count as tokens, and a short one that comes alone as long as its step."""
        is_free = self._reading < 0
        alone_s = self._device.seconds(StepWork(num_tokens=min(num_tokens, self._device.step_tokens)))
        tokens = max(num_tokens, alone_s / self.token_s * is_free) + keys_of(num_tokens, 0) * self._key_s / self.token_s
        if is_free:
            self._reading, self._left = request, tokens
        else:
            heapq.heappush(self._waiting, (self._at_s + tokens * self.token_s / AGEING, tokens, request))
            self._queued += tokens

    def begin(self, request: int, num_tokens: int, context: int) -> None:
        heapq.heappush(self._streams, (self._tokens + num_tokens, request, context))
        self.num_streams += 1
        self.context += context
        self._slack_s = min(self._slack_s, OWED * self._mean_s)

    def advance(self, now_s: float) -> None:
        if self.step_s != inf:
            num = (now_s - self._at_s) / self.step_s
            self._tokens += num
            if self._tpot_s < inf:
                self._slack_s = max(0.0, self._slack_s + num * (self._mean_s - self.step_s))
            self._left = max(0.0, self._left - num * self._step_tokens)
        self._warmth += (1 - exp((self._at_s - now_s) / HEAT_S)) * (self._heavy(self._step_tokens) - self._warmth)
        self._at_s = now_s

    def next_s(self) -> tuple[float, Ended]:
        """When what ends next ends, and what it is. After each change."""
        self.version += 1
        self.step_s, self._step_tokens = self._pace(is_reading=self._reading >= 0)
        self.refresh()
        steps = self._left / self._step_tokens if self._reading >= 0 else inf
        ends = self._streams[0][0] - self._tokens if self._streams else inf
        found = min(steps, ends)
        if found == inf:
            return inf, Ended.NOTHING
        if self._step_tokens and (saved := self._saved) and (late_s := self.step_s - self._mean_s) > 0:
            spent = (self._slack_s - (saved - 1) * self._mean_s) / late_s  # until so much less is saved
            if spent < found:
                return self._at_s + spent * self.step_s, Ended.NOTHING
        return self._at_s + max(0.0, found) * self.step_s, Ended.PROMPT if steps < ends else Ended.STREAM

    def refresh(self) -> None:
        """Seconds of a step with one stream more, and of a token of a prompt that comes. After each change."""
        step_s, tokens = self._pace(is_reading=True)
        num, context = self.num_streams, self.context // ROUGH * ROUGH
        if (num, context) not in self._with_one:
            work = StepWork(num + 1, context + context // max(1, num))
            self._with_one[num, context] = self._device.seconds(work)
        self._read_s, self.stream_s = step_s / tokens, self._with_one[num, context]

    def end_prompt(self) -> int:
        request, self._reading, self._left = self._reading, -1, 0.0
        if self._waiting:
            _, self._left, self._reading = heapq.heappop(self._waiting)
            self._queued = max(0.0, self._queued - self._left)
        return request

    def end_stream(self) -> int:
        self._tokens, request, context = heapq.heappop(self._streams)
        self.num_streams -= 1
        self.context -= context
        return request

    def _pace(self, *, is_reading: bool) -> tuple[float, float]:
        """Seconds of a step, and prompt tokens in it."""
        key = self.num_streams, self.context // ROUGH, is_reading, self._saved
        if key not in self._steps:
            self._steps[key] = self._step(is_reading=is_reading)
        step_s, tokens = self._steps[key]
        if tokens and self._device.heat:
            step_s *= 1 + self._device.heat * (self._warmth + self._heavy(tokens)) / 2
        return step_s, tokens

    @property
    def _saved(self) -> int:
        return min(MOST_SAVED, int(self._slack_s / self._mean_s)) if self._slack_s else 0

    def _heavy(self, num_tokens: float) -> float:
        return min(1.0, num_tokens / HEAVY_TOKENS)

    def _step(self, *, is_reading: bool) -> tuple[float, float]:
        device, num, context = self._device, self.num_streams, self.context
        if not is_reading:
            return (device.seconds(StepWork(num, context)), 0.0) if num else (inf, 0.0)
        if not num:
            return self.token_s * device.step_tokens, float(device.step_tokens)
        most, alone_s = device.step_tokens - num, device.seconds(StepWork(num, context))
        if self._tpot_s == inf:
            return device.seconds(StepWork(num, context, most)), float(most)
        timed = [(size, device.seconds(StepWork(num, context, size))) for size in SIZES if size <= most]
        fitting = [pair for pair in timed if pair[1] <= GAP * self._mean_s] or timed[:1]
        # The most tokens in time: small sizes in all steps where their tokens are the cheapest, else large ones in some
        paces = [self._evenly(alone_s, full_s, size) for size, full_s in fitting]
        return max(paces, key=lambda pace: pace[1] / pace[0], default=(alone_s, 1.0))

    def _evenly(self, alone_s: float, full_s: float, size: int) -> tuple[float, float]:
        """Seconds and tokens of a mean step, if so many have prompts as the streams' slack allows."""
        allowed_s = self._mean_s * (1 + self._saved / SPREAD)
        if full_s <= max(alone_s, allowed_s):  # a measured step with few prompt tokens may be no longer than without
            return full_s, float(size)
        share = max(LEAST_SHARE, (allowed_s - alone_s) / (full_s - alone_s))
        return alone_s + share * (full_s - alone_s), share * size


def serve_coarsely(
    arrivals: Sequence[Arrival], roles: RoleCounts, devices: RoleDevices, ttft_s: float, tpot_s: float, delays: Delays
) -> list[CoarseServed]:
    """What becomes of each request, in the order of their ends."""
    prefills = [CoarseNode(devices.prefill, tpot_s) for _ in range(roles.prefill)]
    others = [CoarseNode(devices.decode, tpot_s) for _ in range(roles.decode)]
    others += [CoarseNode(devices.mixed, tpot_s) for _ in range(roles.mixed)]
    served, first_s, ends = list[CoarseServed](), dict[int, float](), list[tuple[float, int, int, Ended]]()
    nodes, joins = [*prefills, *others], list[tuple[float, int, int]]()
    places = {id(node): at for at, node in enumerate(nodes)}
    direct = dict[int, CoarseNode]()

    def changed(node: CoarseNode) -> None:
        when_s, what = node.next_s()
        if when_s < inf:
            heapq.heappush(ends, (when_s, places[id(node)], node.version, what))

    def arrive(request: int, one: Arrival, now_s: float) -> None:
        size = one.num_input
        reader = min(prefills, key=lambda node: node.wait_s(size, now_s), default=None)
        other = min(others, key=lambda node: node.wait_s(size, now_s) + node.stream_s * one.num_output)
        if reader is None or SPILL * other.wait_s(size, now_s) < reader.wait_s(size, now_s):
            reader = direct[request] = other
        elif other.stream_s > tpot_s > reader.stream_s and not reader.wait_s(0, now_s):
            direct[request] = reader
        reader.advance(now_s)
        reader.read(request, one.num_input)
        changed(reader)

    def prompt_ends(node: CoarseNode, now_s: float) -> None:
        request = node.end_prompt()
        one = arrivals[request]
        first_s[request] = now_s + (0.0 if request in direct else delays.first_token_s)
        if one.num_output == 1:
            served.append(CoarseServed(one, 1e3 * (first_s.pop(request) - one.at_s), 0.0))
        elif request in direct:
            node.begin(request, one.num_output - 1, one.num_input)
        else:
            heapq.heappush(joins, (now_s + delays.link_s, request, 0))

    def join(request: int, now_s: float) -> None:
        one = arrivals[request]
        node = min(others, key=attrgetter("stream_s"))
        node.advance(now_s)
        node.begin(request, one.num_output - 1, one.num_input + one.num_output // 2)
        changed(node)

    def stream_ends(node: CoarseNode, now_s: float) -> None:
        request = node.end_stream()
        one, begun_s = arrivals[request], first_s.pop(request)
        tpot_ms = 1e3 * (now_s - begun_s) / (one.num_output - 1)
        served.append(CoarseServed(one, 1e3 * (begun_s - one.at_s), tpot_ms))

    coming = deque(enumerate(arrivals))
    while coming or ends or joins:
        arrival_s = coming[0][1].at_s + delays.api_s if coming else inf
        join_s, end_s = joins[0][0] if joins else inf, ends[0][0] if ends else inf
        if arrival_s <= min(join_s, end_s):
            arrive(*coming.popleft(), arrival_s)
        elif join_s <= end_s:
            join(heapq.heappop(joins)[1], join_s)
        else:
            _, place, version, what = heapq.heappop(ends)
            node = nodes[place]
            if version == node.version:
                node.advance(end_s)
                if what is not Ended.NOTHING:
                    (prompt_ends if what is Ended.PROMPT else stream_ends)(node, end_s)
                changed(node)
    return served
