"""The real scheduler over a real executor, without an engine: each draw's logits beside those of transformers."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pd_cluster.config import SchedulerConfig
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import BeamParams, SamplingParams
from pd_cluster.scheduling.adapter_places import AdapterPlaces
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.queue_order import Fifo
from pd_cluster.scheduling.scheduler import Scheduler
from pd_cluster.scheduling.sequence import Request
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.targets import Targets
from pd_connectors.protocol.cache_space import cache_space

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Ids

    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.pending_step import PendingStep
    from pd_connectors.base import LoadSpec, PublishSpec
    from pd_connectors.protocol.messages import SampledToken


@dataclass
class Drawn:
    """The logits of one draw, after so many tokens of a sequence. Its tokens may become known later."""

    seq: Sequence
    end: int
    logits: torch.Tensor


@dataclass
class ScheduledWorker:
    """Requests of one node. `depth`: steps that are planned before the result of the first is known, itself counted."""

    executor: DeviceExecutor
    budget: int = 512
    depth: int = 2
    max_num_seqs: int = 8
    host_cache: bool = False
    swaps: bool = True
    num_slots: int = 0  # of adapters
    drawn: list[Drawn] = field(default_factory=list)
    published: dict[str, PublishSpec] = field(default_factory=dict)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    firsts: dict[str, tuple[SampledToken, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        executor = self.executor
        for tensor in executor._cache.tensors:
            tensor.fill_(torch.nan)
        self.blocks = BlockManager(
            executor.layout.groups, executor.slabs, num_host_blocks=executor.num_host_blocks if self.swaps else 0,
            host_cache=self.host_cache,
        )  # fmt: skip
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.budget), self.blocks,
            max_model_len=executor.model.max_model_len, eos_token_ids=frozenset(), retract=lambda lease_id: 1,
            step_budget=StepBudget(Targets(), StepModel(), lambda: 0.0, lambda: 0.0), order=Fifo(), clock=lambda: 0.0,
            adapters=AdapterPlaces(self.num_slots),
        )  # fmt: skip
        self._running: deque[tuple[Batch, PendingStep]] = deque()
        self._logits: list[torch.Tensor] = []
        executor.watch_logits(lambda logits: self._logits.append(logits.clone().cpu()))

    def add(
        self, name: str, ids: Ids[int], max_tokens: int = 4, work: Work = Work.GENERATE, n: int = 1,
        temperature: float = 0.0, beams: BeamParams | None = None, known: Ids[int] = (), adapter: str = "",
    ) -> Request:  # fmt: skip
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, n=n, seed=1, ignore_eos=True, beams=beams
        )
        lease_id = f"lease-{name}" if work is Work.PREFILL else None
        message = AddRequest(
            name, list(ids), sampling, work, known=(tuple(known),) if known else (), adapter=adapter,
            salt=cache_space(adapter, ""),
        )  # fmt: skip
        request = Request.from_message(message, lease_id=lease_id)
        (self.scheduler.park if work is Work.TAKE_OVER else self.scheduler.add)(request)
        self.outputs[name] = [[] for _ in range(n)]
        return request

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        sequences = self.scheduler._queues.sequences
        num_logits = len(self._logits)
        self._running.append((batch, self.executor.launch(batch)))
        rows = iter(self._logits[num_logits]) if len(self._logits) > num_logits else iter(())
        for chunk in batch.chunks:
            end = chunk.start + chunk.num_tokens
            self.drawn += [Drawn(sequences[chunk.seq_id], end, next(rows)) for _ in range(chunk.num_samples)]
        while len(self._running) >= self.depth:
            self._retire()
        return batch

    def _retire(self) -> None:
        batch, pending = self._running.popleft()
        result = pending.result()
        for publish in self.scheduler.publishes(batch, result):
            self.published[publish.lease_id] = publish
        for update in self.scheduler.update(batch, result):
            for one in update.sequences:
                self.outputs[update.request.request_id][one.index] += [token.token_id for token in one.tokens]
            if update.request.work is Work.PREFILL and update.finished:
                self.firsts[update.request.request_id] = tuple(
                    token for one in update.sequences for token in one.tokens
                )

    def run(self) -> None:
        while self.scheduler.has_work or self._running:
            if self.scheduler.has_work:
                self.step()
            if not self.scheduler.has_work or len(self._running) >= self.depth:
                while self._running:
                    self._retire()
        self.executor.launch(self.scheduler.schedule()).result()  # departures
        self.blocks.check()

    def take_over(self, request: Request, peer: ScheduledWorker, lease_id: str) -> None:
        """Read a prompt's blocks of all groups from a peer of the same layout."""
        request.load_id = f"load-{request.request_id}"
        load = self.scheduler.reserve(request)
        assert load is not None
        self.schedule_load()
        read(self.executor, load, peer.executor, peer.published[lease_id])
        self.scheduler.admit_loaded(request)
        update = self.scheduler.set_first_tokens(request, peer.firsts[lease_id.removeprefix("lease-")])
        assert (update is None) is bool(request.message.known), "of an answer that has begun none is used"
        for one in () if update is None else update.sequences:
            self.outputs[request.request_id][one.index] += [token.token_id for token in one.tokens]

    def schedule_load(self) -> None:
        """A load begins when the steps before it have retired."""
        self.step()
        while self._running:
            self._retire()


def read(here: DeviceExecutor, load: LoadSpec, there: DeviceExecutor, publish: PublishSpec) -> None:
    """As a connector does: the blocks of each group from the first one that is lacking here."""
    for group, (mine, theirs) in enumerate(zip(load.runs, publish.runs, strict=True)):
        for block, target in zip(mine.span, mine.block_ids, strict=True):
            (source,) = theirs.ids_of(range(block, block + 1))
            here._cache.tensors[group][target] = there._cache.tensors[group][source]


def largest_error(worker: ScheduledWorker, model: torch.nn.Module) -> float:
    """Of all draws, of the deviation of the logits that transformers computes."""
    return max(errors_by_request(worker, model).values())


def errors_by_request(
    worker: ScheduledWorker, model: torch.nn.Module, names: Collection[str] | None = None
) -> dict[str, float]:
    """The largest of each request, of these or of all. One pass computes what is expected of all sequences.

    They are padded to the longest one: no token sees those after it.
    """
    by_seq = defaultdict[int, list[Drawn]](list)
    for one in worker.drawn:
        if names is None or one.seq.request.request_id in names:
            by_seq[one.seq.seq_id].append(one)
    sequences = [draws[0].seq for draws in by_seq.values()]
    longest = max(len(seq.token_ids) for seq in sequences)
    padded = [[*seq.token_ids, *[0] * (longest - len(seq.token_ids))] for seq in sequences]
    with torch.inference_mode():
        expected = model(torch.tensor(padded)).logits
    worst = dict.fromkeys((seq.request.request_id for seq in sequences), 0.0)
    for seq, rows in zip(sequences, expected, strict=True):
        for one in by_seq[seq.seq_id]:
            if one.end <= len(seq.token_ids):  # a step was planned before the last token was known to be the last
                row, name = rows[one.end - 1], seq.request.request_id
                error = ((one.logits - row).abs().max() / row.std()).item()
                worst[name] = max(worst[name], math.inf if math.isnan(error) else error)  # NaN is above nothing
    return worst
