"""A simulated node: the engine's own scheduler, two steps deep, over a virtual clock and a device that takes time."""

from __future__ import annotations

import random
from collections import deque
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pd_cluster.config import SchedulerConfig
from pd_cluster.planning.device import DeviceHeat, steps_at_start
from pd_cluster.planning.event_queue import EventQueue
from pd_cluster.scheduling.batch import StepResult
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.queue_order import Fifo, Shortest
from pd_cluster.scheduling.scheduler import Scheduler
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel, StepWork
from pd_cluster.scheduling.stream_room import StreamRoom
from pd_cluster.scheduling.targets import Targets
from pd_connectors.protocol.layout import KVGroup, KVKind
from pd_connectors.protocol.messages import SampledToken
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.planning.device import Device
    from pd_cluster.scheduling.batch import Batch, BlockCopies
    from pd_connectors.protocol.feed import NodeLoad

DRAWN = 7  # every token of every answer
NO_TARGETS = Targets()
HOST_BYTES_S = 50e9  # of copies, one way; measured: 53
NOISE, LEAD_S = 0.02, 0.7e-3  # of a step; planning begins so long before the running step ends


@dataclass(frozen=True, slots=True)
class Rule:
    """How D, or a mixed node, shares its steps: by targets, by the usual gaps of a decode node, or without limit."""

    name: str
    targets: Targets = NO_TARGETS
    usual: bool = False
    shortest: bool = False
    keeps: bool = True  # prefill nodes may keep streams


class VirtualTime(EventQueue):
    """Virtual time, what happens at which, and what is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.counted_s = (0.0, inf)  # steps that end within are tallied
        self._fitted: dict[Device, StepModel] = {}

    def model_of(self, device: Device) -> StepModel:
        """A model of its own for each node, fitted to its steps at start: once, for equal ones."""
        if device not in self._fitted:
            self._fitted[device] = StepModel(steps_at_start(device))
        return deepcopy(self._fitted[device])


class SimulatedNode:
    """A scheduler and its device."""

    def __init__(
        self, world: VirtualTime, rule: Rule, device: Device, *, role: str = "decode", num_blocks: int = 0,
        is_measured: bool = True, blocks: BlockManager | None = None,
    ) -> None:  # fmt: skip
        """A decode node is one by the rule's usual gaps, else a mixed one. `num_blocks`: of its memory, with a
        prefix cache; 0: the device's, without. `is_measured`: its steps' model is fitted at start, else to its first
        steps. `blocks`: in place of them.
        """
        self.world, self.device = world, device
        group = KVGroup(KVKind.FULL, (0,), (1, 1, 2, device.block_size, 1), "float32", device.block_size)
        most = num_blocks or device.num_blocks
        slabs = KvSlabs(1, most * group.block_bytes, (most,))
        self.blocks = blocks or BlockManager((group,), slabs, prefix_caching=num_blocks > 0)
        self.model = world.model_of(device) if is_measured else StepModel()
        self.room = StreamRoom(rule.targets.tpot_s, device.max_seqs, self.model, lambda: world.now_s)
        role = "mixed" if role == "decode" and not rule.usual else role
        self.room.prompts_first = role == "prefill"
        model = deepcopy(self.model) if role == "decode" else self.model
        targets = rule.targets.on(role, "cuda:0", model)
        self.room.gap_s = targets.itl_s
        self.budget = StepBudget(targets, self.model, lambda: world.now_s, self._busy_s)
        self.budget.model = model
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=device.max_seqs, max_num_batched_tokens=device.step_tokens, max_waiting=1_000_000
            ),
            self.blocks, step_budget=self.budget, order=Shortest(self.model, self.blocks) if rule.shortest else Fifo(),
            max_model_len=1 << 20, eos_token_ids=frozenset({0}), retract=lambda lease: 0, clock=lambda: world.now_s,
        )  # fmt: skip
        self._heat = DeviceHeat()
        self._decode_s = 0.0  # of the last step with decodes only
        self.tally = (0, 0, 0.0)  # steps, their tokens and seconds
        self.on_token: dict[str, Callable[[], None]] = {}
        self.before_plan: Callable[[], None] = lambda: None
        self._flights: deque[tuple[Batch, StepWork, float, float]] = deque()  # begin, end
        self._is_awake = False

    @property
    def load(self) -> NodeLoad:
        """As NewsReport tells it."""
        model, scheduler = self.model, self.scheduler
        token_s, key_s = (model.token_s, model.key_s) if model.knows_prompts else (0.0, 0.0)
        share, (num_streams, num_context, num_promised) = scheduler.step_tokens, scheduler.streams
        load = replace(
            scheduler.load, step_s=self._decode_s, token_s=token_s, key_s=key_s, step_tokens=share,
            step_keys=self.budget.step_keys(scheduler.load.num_running, share) if share else 0,
            prompts_share=self.room.share, num_context=num_context, context_s=model.context_s,
        )  # fmt: skip
        return self.room.filled_in(load, num_streams, num_promised)

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
        self.before_plan()
        if not self.scheduler.has_work or len(self._flights) > 1:
            return
        batch = self.scheduler.schedule()
        if not batch.moves_worker:
            return
        work = StepWork.of(batch.chunks)
        begin_s = max([world.now_s, *(flight[3] for flight in self._flights)])
        self._heat = self._heat.at(begin_s, work.num_tokens)
        warm = 1.0 + self.device.heat * self._heat.value
        seconds = self.device.seconds(work) * warm * world.rng.gauss(1.0, NOISE) if batch.chunks else 0.0
        end_s = begin_s + max(seconds, self._side_s(batch.copies))
        self._flights.append((batch, work, begin_s, end_s))
        world.at(end_s, self._retire)
        world.at(max(begin_s, end_s - LEAD_S), self._plan)

    def _side_s(self, copies: BlockCopies) -> float:
        """Of the copies to and from host memory that run beside a step, each way by itself."""
        pools = self.blocks.pools
        return max(sum(pools[group].group.block_bytes for group, _, _ in way) for way in (copies.save, copies.load)) / (
            HOST_BYTES_S
        )

    def _retire(self) -> None:
        batch, work, begin_s, end_s = self._flights.popleft()
        if batch.chunks:
            if not batch.copies.may_outlast:
                self.model.note(work, end_s - begin_s)
            self.room.note(work, end_s - begin_s)
            if self.world.counted_s[0] <= end_s <= self.world.counted_s[1]:
                num, tokens, seconds = self.tally
                self.tally = num + 1, tokens + work.num_decodes + work.num_tokens, seconds + end_s - begin_s
            if not work.num_tokens:
                self._decode_s = end_s - begin_s
        token: tuple[SampledToken, ...] = (SampledToken(DRAWN),)
        samples = {chunk.seq_id: token for chunk in batch.chunks if chunk.num_samples}
        for update in self.scheduler.update(batch, StepResult(batch.step, samples)):
            self.on_token[update.request.request_id]()
        if not self._flights:
            self.wake()
