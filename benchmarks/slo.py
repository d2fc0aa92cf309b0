"""`python -m benchmarks slo`: what targets of streams and the order of prompts do, simulated without a device.

Schedulers of the engine, two steps deep, on a virtual clock; steps take what the 8B shape takes on an H200
(benchmarks/LOG.md), padded to captured sizes, with noise. A router hands prompts to P, or to D where that is clearly
sooner. The steps' model is fitted to other steps of this device and corrected, as in an engine. Not simulated: HTTP,
links that are busy, memory that is short.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.presets import PRESETS
from pd_cluster.bench.report import report_console
from pd_cluster.config import SchedulerConfig
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import StepResult
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.queue_order import Fifo, Shortest
from pd_cluster.scheduling.scheduler import Scheduler
from pd_cluster.scheduling.sequence import Request
from pd_cluster.scheduling.step_budget import FixedBudget, SlackBudget, Targets
from pd_cluster.scheduling.step_model import StepModel, StepWork, keys_of
from pd_cluster.worker.cuda_graphs.graph_sizes import token_buckets
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.scheduling.batch import Batch

SLOS_MS = ((200.0, 10.0), (400.0, 15.0))
STEP_TOKENS, SEQS, BLOCK, BLOCKS = 2048, 256, 64, 14_000
SIZES = token_buckets(STEP_TOKENS)
# ms of a step with 32 decodes more than of the decodes alone, by the tokens of the step
PROMPT_MS = (
    (32, 0.0),
    (128, 0.8),
    (192, 1.7),
    (256, 2.7),
    (384, 5.7),
    (512, 8.3),
    (768, 13.7),
    (1024, 18.4),
    (2048, 40),
)
NEAR_KEY_S, FAR_KEY_S = 2.2e-9, 0.9e-9  # a key of a prompt's token, in steps up to 512 tokens and above
NOISE, LEAD_S = 0.02, 0.7e-3  # of a step; planning begins so long before the running step ends
FIRST_TOKEN_S, LINK_S = 1.5e-3, 4e-3  # from P's step to the client; until D has the KV
KEYS_PER_TOKEN = 5990
GUESS, MARGIN, CLEAR_S = 0.5, 0.25, 0.03  # of the router: D's speed until it is known, and a saving that is worth it


def device_s(work: StepWork) -> float:
    """Seconds of a step on the simulated device."""
    decodes_s = 4.1e-3 + 6e-6 * work.num_decodes + 33e-9 * work.context if work.num_decodes else 4.1e-3
    if not work.num_tokens:
        return decodes_s
    total = work.num_decodes + work.num_tokens
    total = SIZES[bisect_left(SIZES, total)]
    key_s = NEAR_KEY_S if total <= 512 else FAR_KEY_S
    prompts_ms = _prompt_ms(total) - _prompt_ms(work.num_decodes)
    return decodes_s + max(0.0, prompts_ms) / 1e3 + key_s * work.num_keys


def _prompt_ms(num_tokens: int) -> float:
    index = max(1, bisect_left(PROMPT_MS, (num_tokens, 0.0)))
    (low, low_ms), (high, high_ms) = PROMPT_MS[index - 1], PROMPT_MS[min(index, len(PROMPT_MS) - 1)]
    return low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low) if num_tokens > low else low_ms


def steps_at_start() -> list[tuple[StepWork, float]]:
    """What `measure_for_model` measures."""
    works = [StepWork(num, 1024 * num) for num in (1, 32, 128)] + [StepWork(32, 32 * 4096)]
    works += [StepWork(32, 32 * 1024, size - 32, keys_of(size - 32, 0)) for size in (128, 256, 512, 1024)]
    works.append(StepWork(32, 32 * 1024, 96, keys_of(96, 4096)))
    return [(work, device_s(work)) for work in works]


@dataclass(frozen=True, slots=True)
class Rule:
    """How D, or a mixed node, shares its steps: a fixed limit, or targets."""

    name: str
    limit: int = 0
    targets: Targets | None = None
    shortest: bool = False


@dataclass(slots=True)
class Served:
    """One request: when it came, and its tokens."""

    arrival: Arrival
    tokens_s: list[float] = field(default_factory=list)

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


class VirtualTime:
    """Virtual time, and what happens at which."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._serial), act))

    def run(self) -> None:
        while self._events:
            self.now_s, _, act = heapq.heappop(self._events)
            act()


class SimulatedNode:
    """A scheduler and its device."""

    def __init__(self, world: VirtualTime, rule: Rule, name: str) -> None:
        self.world, self.name = world, name
        self.blocks = BlockManager(BLOCKS, BLOCK, prefix_caching=False)
        self.model = StepModel(steps_at_start())
        budget = FixedBudget(rule.limit, KEYS_PER_TOKEN)
        if rule.targets is not None:
            budget = SlackBudget(rule.targets, self.model, lambda: world.now_s, self._busy_s)  # type: ignore[assignment]
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=STEP_TOKENS, max_waiting=10_000),
            self.blocks, step_budget=budget, order=Shortest(self.model, self.blocks) if rule.shortest else Fifo(),
            max_model_len=1 << 20, eos_token_ids=frozenset({0}), retract=lambda lease: 0, clock=lambda: world.now_s,
        )  # fmt: skip
        self.queued_tokens = 0  # of prompts that have no first token yet
        self.pace_s = 0.0  # of a prompt's token, as the router has seen it
        self.on_token: dict[str, Callable[[], None]] = {}
        self._flights: deque[tuple[Batch, StepWork, float, float]] = deque()  # begin, end
        self._is_awake = False

    def _busy_s(self) -> float:
        """As Pipeline.busy_s: predicted, not known."""
        if not self._flights:
            return 0.0
        predicted_s = sum(self.model.seconds(work) for _, work, _, _ in self._flights)
        return max(0.0, predicted_s - (self.world.now_s - self._flights[0][2]))

    def wake(self) -> None:
        if not self._is_awake and not self._flights:
            self._is_awake = True
            self.world.at(self.world.now_s, self._plan)

    def _plan(self) -> None:
        self._is_awake = False
        world = self.world
        if not self.scheduler.has_work or len(self._flights) > 1:
            return
        batch = self.scheduler.schedule()
        if not batch.moves_worker:
            return
        work = StepWork.of(batch.chunks)
        begin_s = max([world.now_s, *(flight[3] for flight in self._flights)])
        end_s = begin_s + device_s(work) * world.rng.gauss(1.0, NOISE)
        self._flights.append((batch, work, begin_s, end_s))
        world.at(end_s, self._retire)
        world.at(max(begin_s, end_s - LEAD_S), self._plan)

    def _retire(self) -> None:
        batch, work, begin_s, end_s = self._flights.popleft()
        if batch.chunks:
            self.model.note(work, end_s - begin_s)
        token: tuple[SampledToken, ...] = (SampledToken(7),)
        samples = {chunk.seq_id: token for chunk in batch.chunks if chunk.num_samples}
        for update in self.scheduler.update(batch, StepResult(batch.step, samples)):
            self.on_token[update.request.request_id]()
        if not self._flights:
            self.wake()


class SimulatedCluster:
    """Nodes and a router: least loaded first, with spilling from P to D."""

    def __init__(self, setting: str, rule: Rule, seed: int) -> None:
        self.world = VirtualTime(seed)
        on_p = Rule(rule.name, shortest=rule.shortest)
        self.prefills = [SimulatedNode(self.world, on_p, "P")] if setting == "1P1D" else []
        self.decodes = [SimulatedNode(self.world, rule, f"D{index}") for index in range(2 if setting == "2M" else 1)]

    def serve(self, arrivals: Sequence[Arrival]) -> list[Served]:
        served = [Served(arrival) for arrival in arrivals]
        for index, one in enumerate(served):
            self.world.at(one.arrival.at_s, lambda one=one, index=index: self._route(one, str(index)))  # type: ignore[misc]
        self.world.run()
        for one in served:
            assert len(one.tokens_s) == one.arrival.num_output
        return served

    def _route(self, one: Served, name: str) -> None:
        num = one.arrival.num_input
        best = min(self.decodes, key=lambda node: (node.queued_tokens, node.scheduler.num_running))
        if not self.prefills:
            self._generate(best, one, name)
            return
        [first] = self.prefills
        usual_s = first.pace_s or first.model.token_s
        p_s = (first.queued_tokens + num) * usual_s
        d_s = (best.queued_tokens + num) * (best.pace_s or usual_s / GUESS)
        if first.queued_tokens and p_s - d_s > max(CLEAR_S, MARGIN * d_s):
            self._generate(best, one, name)
        else:
            self._hand_over(first, best, one, name)

    def _begin(self, node: SimulatedNode, one: Served, name: str, work: Work) -> Request:
        sampling = SamplingParams(max_tokens=one.arrival.num_output, ignore_eos=True)
        prompt = [1] * one.arrival.num_input
        message = AddRequest(name, prompt, sampling, work, received_s=one.arrival.at_s)
        return Request.from_message(message, lease_id=name if work is Work.PREFILL else None)

    def _generate(self, node: SimulatedNode, one: Served, name: str) -> None:
        begun_s, is_idle = self.world.now_s, not node.queued_tokens
        node.queued_tokens += one.arrival.num_input

        def take() -> None:
            if not one.tokens_s:
                self._note_pace(node, one, begun_s, is_idle=is_idle)
            one.tokens_s.append(self.world.now_s)

        node.on_token[name] = take
        node.scheduler.add(self._begin(node, one, name, Work.GENERATE))
        node.wake()

    def _note_pace(self, node: SimulatedNode, one: Served, begun_s: float, *, is_idle: bool) -> None:
        node.queued_tokens -= one.arrival.num_input
        if is_idle:
            pace_s = (self.world.now_s - begun_s) / one.arrival.num_input
            node.pace_s = 0.8 * (node.pace_s or pace_s) + 0.2 * pace_s

    def _hand_over(self, first: SimulatedNode, node: SimulatedNode, one: Served, name: str) -> None:
        begun_s, is_idle, world = self.world.now_s, not first.queued_tokens, self.world
        first.queued_tokens += one.arrival.num_input
        taken = self._begin(node, one, name, Work.TAKE_OVER)
        taken.load_id = name
        node.scheduler.park(taken)
        load = node.scheduler.reserve(taken)
        assert load is not None, "the simulated memory is short"
        node.on_token[name] = lambda: one.tokens_s.append(world.now_s)

        def is_read() -> None:
            self._note_pace(first, one, begun_s, is_idle=is_idle)
            world.at(world.now_s + FIRST_TOKEN_S, give)
            world.at(world.now_s + LINK_S, load_ends)

        def give() -> None:
            one.tokens_s.append(world.now_s)
            node.scheduler.set_first_tokens(taken, (SampledToken(7),))

        def load_ends() -> None:
            first.scheduler.end_lease(name)
            node.scheduler.admit_loaded(taken)
            node.wake()

        first.on_token[name] = is_read
        first.scheduler.add(self._begin(first, one, name, Work.PREFILL))
        first.wake()


def rules(ttft_ms: float, tpot_ms: float) -> tuple[Rule, ...]:
    targets = Targets(ttft_ms / 1e3, tpot_ms / 1e3, 3 * tpot_ms / 1e3)
    return (
        Rule("192", 192), Rule("384", 384), Rule("no limit"),
        Rule("slack, fifo", targets=targets), Rule("slack", targets=targets, shortest=True),
    )  # fmt: skip


def spread(values: list[float]) -> str:
    """p50/p90/p99."""
    ordered = sorted(values)
    return "/".join(f"{ordered[min(len(ordered) - 1, int(len(ordered) * share))]:.1f}" for share in (0.5, 0.9, 0.99))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks slo", allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data"), metavar="DIR", help="Where traces are.")
    parser.add_argument("--workloads", nargs="+", choices=tuple(PRESETS), default=list(PRESETS), metavar="NAME")
    parser.add_argument("--settings", nargs="+", choices=("1P1D", "2M", "1M"), default=["1P1D", "2M"])
    parser.add_argument("--rules", nargs="+", default=[], metavar="NAME", help="Only these.")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="Draws of each workload.")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="Multiplies the rate of arrivals.")
    parser.add_argument("--num-requests", type=int, default=0, metavar="N", help="Fewer of each, for rehearsals.")
    namespace = parser.parse_args(arguments)
    for name in namespace.workloads:
        for setting in namespace.settings:
            table = Table("rule", "attained", "TTFT", "TPOT", "ITL", title=f"{PRESETS[name].title}, {setting}")
            for ttft_ms, tpot_ms in SLOS_MS:
                for rule in rules(ttft_ms, tpot_ms):
                    if not namespace.rules or rule.name in namespace.rules:
                        table.add_row(*_row(namespace, name, setting, rule, ttft_ms, tpot_ms))
            report_console().print(table)
            sys.stdout.flush()
    return 0


def _row(
    namespace: argparse.Namespace, name: str, setting: str, rule: Rule, ttft_ms: float, tpot_ms: float
) -> list[str]:
    shares, served = list[float](), list[Served]()
    for seed in range(namespace.seeds):
        drawn = PRESETS[name].arrivals(namespace.data, seed)[: namespace.num_requests or None]
        arrivals = [replace(arrival, at_s=arrival.at_s / namespace.rate_scale) for arrival in drawn]
        ours = SimulatedCluster(setting, rule, seed).serve(arrivals)
        shares.append(statistics.mean(one.ttft_ms <= ttft_ms and one.tpot_ms <= tpot_ms for one in ours))
        served += ours
    return [
        f"{ttft_ms:g}/{tpot_ms:g} {rule.name}", f"{statistics.mean(shares):.3f}",
        spread([one.ttft_ms for one in served]), spread([one.tpot_ms for one in served]),
        spread([gap for one in served for gap in one.gaps_ms]),
    ]  # fmt: skip
