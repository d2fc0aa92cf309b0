"""The states of the executor on one device. The last one is the Executor.

    state             owns                                            method      next state
    DeviceDescribed   description and layout of the model, kernels    load        DeviceLoaded
    DeviceLoaded      the weights, too                                allocate    DeviceCached
                                                                      unload      DeviceDescribed
    DeviceCached      the cache, zeroed                               warm_up     DeviceExecutor, ready to serve
                                                                      free        DeviceLoaded
    DeviceExecutor    the rows of sequences, the captured steps       sleep       DeviceLoaded

Each state is an object of its own with complete attributes. One state is present at a time, and owns all that was
acquired; to use a state that was left raises StateLeft. A transition that fails leaves its state present. On one device
it may be tried again, also in the handler of the failure, which holds no memory. After a way back the memory is free,
unless the caller still holds some of it: a connector, a CacheDescription, a step. The weights are unchanged by `sleep`;
what was measured is measured again.

Of several ranks each has states of its own. Those of rank 0 take the other ranks along in each transition. When one has
failed, the state can only be closed.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Self

import msgspec
import torch

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.scheduling.sequence_room import cache_tokens
from pd_cluster.worker.adapter_store import AdapterStore
from pd_cluster.worker.capacity import longest_sequence
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.cuda_graphs.set_up import capture_steps, captures_steps, choose_step_products
from pd_cluster.worker.device_plan import DevicePlan, make_place
from pd_cluster.worker.host_link import measure_host_gb_s
from pd_cluster.worker.kv_cache import KVCache, describe_slabs, host_units, make_slabs
from pd_cluster.worker.memory_measurement import bytes_for_cache, run_largest_step
from pd_cluster.worker.model_loading import load_model
from pd_cluster.worker.rank_frames import AdapterFrame
from pd_cluster.worker.state import DeviceState, Weights, without_locals
from pd_cluster.worker.step_measurement import StepTimer, measure_sizes
from pd_cluster.worker.warm_up import NUM_BLOCKS, run_first_steps, run_steps_of_all_kinds
from pd_kernels.values import StepSize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pd_cluster.config import CacheConfig, NodeConfig
    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.executor import ModelDescription
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.model_runner import ModelRunner
    from pd_cluster.worker.pending_step import PendingStep
    from pd_cluster.worker.rank_sampler import RankPlace
    from pd_cluster.worker.ranks import Ranks
    from pd_connectors.base import Closes, ConnectorContext
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort

logger = logging.getLogger(__name__)


class DeviceDescribed(DeviceState):
    """The model is described, and all is chosen that needs no weights."""

    @classmethod
    def of(cls, config: NodeConfig, progress: Callable[[str], None], place: RankPlace | None = None) -> Self:
        """`progress` gets lines about the weights, kernels and graphs. `place`: None for the only rank.

        Raises StartupError, and then keeps nothing.
        """
        return cls(DevicePlan.make(config, progress, place), Weights())

    @classmethod
    def over(cls, ranks: Ranks, progress: Callable[[str], None]) -> Self:
        """Start `ranks`, and describe the model on all of them. `progress` gets the lines of rank 0, which is this one.

        Raises StartupError, and then ends the ranks.
        """
        described = None
        try:
            store = ranks.start()
            with ranks.phase("describe"):
                place = make_place(ranks.config.model, ranks.shard, store, ranks)
                ranks.reduce = place.reduce
                described = cls.of(ranks.config, progress, place)
            return described
        except BaseException:
            ranks.close(None if described is None else described.release)
            raise

    def load(self, config: NodeConfig | None = None) -> DeviceLoaded:
        """Read the weights from the model's files. Raises StartupError. `config`: that of rank 0, on another rank."""
        plan = replace(self._plan, config=config or self.config)
        with self._on_all("load", plan.config):
            self._weights.model = load_model(
                plan.model, plan.config.model, plan.kernels, plan.device, plan.progress, plan.shard, plan.reduce
            )
            if plan.config.lora.lora_slots:
                name, *_ = *plan.config.model.served_model_name, plan.config.model.model
                self._weights.adapters = AdapterStore(self._weights.model, plan.config.lora, name)
                plan.progress(f"--lora-slots: {self._weights.adapters.slots}")
        plan.progress(plan.model.ends)
        return self.left_for(DeviceLoaded(plan, self._weights))


class DeviceLoaded(DeviceState):
    """The weights are in place."""

    def free_kv_bytes(self) -> int:
        """Bytes that a rank can give to its cache: the minimum over the ranks."""
        with self._on_all("free_kv_bytes") as others:
            has_adapters = self._weights.adapters is not None
            own = bytes_for_cache(self._plan, self._run_largest_step, has_adapters=has_adapters)
        return min(own, *others) if others else own

    def allocate(self, slabs: KvSlabs, num_host_blocks: int, num_later: int = 0) -> DeviceCached:
        """Allocate every rank's cache, and host blocks. `num_later`: further ones, which are pinned after `connect`.

        Raises StartupError.
        """
        plan = self._plan
        with without_locals(), self._on_all("allocate", slabs, num_host_blocks, num_later):
            room, limit = cache_tokens(plan.layout.groups, slabs), plan.model.max_model_len
            longest = longest_sequence(plan.config.model.max_model_len, limit, room)
            if longest < limit:
                plan.progress(f"max_model_len {longest} (the KV cache has no room for the model's {limit} tokens)")
            torch.cuda.empty_cache()  # an attempt that failed may have left memory
            cache = KVCache.allocate(plan.layout, slabs, num_host_blocks, plan.device, num_later, plan.state_views)
        return self.left_for(DeviceCached(plan, self._weights, cache, replace(plan.model, max_model_len=longest)))

    def unload(self) -> DeviceDescribed:
        """Give the memory of the weights back."""
        if self._weights.adapters is not None:
            self._weights.owned.callback(self._weights.adapters.close)
        return self._back_to("unload", DeviceDescribed(self._plan, Weights()), self._weights.owned)

    def _run_largest_step(self, scratch: KVCache) -> None:
        limits, budget = self._plan.config.scheduler, self._plan.config.scheduler.max_num_batched_tokens
        runner = self._make_runner(scratch, budget)
        run_largest_step(runner, budget, limits.max_num_seqs, self._plan.model.max_model_len)


class DeviceCached(DeviceState):
    """The cache exists, zeroed."""

    _cache: KVCache

    def __init__(self, plan: DevicePlan, weights: Weights, cache: KVCache, model: ModelDescription) -> None:
        super().__init__(plan, weights, cache)
        self._model = model

    def warm_up(self) -> DeviceExecutor:
        """Run the first steps, capture graphs, measure steps. The cache is zero again. Raises StartupError.

        Ranks stop capturing when their own memory runs out; only sizes that all of them have may be replayed.
        """
        with without_locals():
            return self.left_for(self._measured())

    def _measured(self) -> DeviceExecutor:
        with self._on_all("capture") as others:
            executor = self.capture()
        for sizes in others:
            executor.replay_only(msgspec.convert(sizes, set[StepSize]))
        with nullcontext() if self._ranks is None else self._ranks.noted():
            executor.measure()
        return executor

    def capture(self) -> DeviceExecutor:
        """The part of `warm_up` that every rank runs: the first steps, and graphs. Does not leave this state."""
        plan, weights = self._plan, self._weights
        limits, device, max_len = plan.config.scheduler, plan.device, self._model.max_model_len
        self._run_first_steps()
        try:
            runner = self._make_runner(self._cache, max_len)
            if captures_steps(limits, plan.attentions, device):
                if not weights.has_products:
                    choose_step_products(weights.model, limits, weights.owned, plan.progress)
                    weights.has_products = True
                agree = None if plan.place is None else plan.place.reduce.agree
                capture_steps(
                    weights.model, runner.graphs, runner.draws, limits, plan.progress, agree,
                    has_drafts=plan.most_drafts > 0,
                )  # fmt: skip
        except torch.OutOfMemoryError as error:
            hint = "lower --gpu-memory-utilization or --max-graph-tokens"
            raise StartupError(f"{device} has no room for captured steps: {hint} ({error})") from error
        except RuntimeError as error:
            raise StartupError(f"steps cannot be captured on {device}: {error}") from error
        return DeviceExecutor(plan, weights, runner, self._model)

    def free(self) -> DeviceLoaded:
        """Give the memory of the cache back."""
        return self._back_to("free", DeviceLoaded(self._plan, self._weights))

    def _run_first_steps(self) -> None:
        """Compile and load the kernels that steps need, by steps of a separate runner. Leaves the cache zeroed."""
        plan, max_len, block_size = self._plan, self._model.max_model_len, self.layout.block_size
        runner = self._make_runner(self._cache, max_len)
        run_first_steps(runner, block_size, max_len)
        if plan.device.type == "cuda":
            run_steps_of_all_kinds(runner, max_len, plan.config.scheduler, plan.most_drafts)
        for tensor in self._cache.tensors:
            tensor[:NUM_BLOCKS].zero_()


class DeviceExecutor(DeviceState):
    """See Executor."""

    _cache: KVCache
    host_gb_s = 0.0

    def __init__(self, plan: DevicePlan, weights: Weights, runner: ModelRunner, model: ModelDescription) -> None:
        super().__init__(plan, weights, runner.cache)
        self.model, self._grammars = model, plan.grammars  # `measure` completes `model`
        self._runner, self.block_size = runner, plan.layout.block_size
        self.slabs, self.cache = runner.cache.slabs, runner.cache.describe()
        self.start_profile, self.stop_profile = plan.profiler.start, plan.profiler.stop
        self.graph_sizes = runner.graphs.sizes  # the captured ones
        self._graph_sizes = GraphSizes(self.graph_sizes)

    @classmethod
    def started(cls, config: NodeConfig, progress: Callable[[str], None]) -> DeviceExecutor:
        """Make an executor by all phases. Raises StartupError."""
        return run_phases(DeviceDescribed.of(config, progress), config.cache, progress)

    def replay_only(self, sizes: set[StepSize]) -> None:
        """Replay no graphs of other sizes: another rank has none."""
        self._graph_sizes = GraphSizes(size for size in self._graph_sizes.sizes if size in sizes)

    def measure(self) -> None:
        """The part of `warm_up` that rank 0 decides by: on a GPU, measure the sizes of steps that no setting tells.

        Leaves the cache zeroed and no sequences.
        """
        plan, model = self._plan, self.model
        # On a shared GPU other nodes' steps would be measured, too
        if (model.device == "cpu" and not plan.most_drafts) or self.config.cache.gpu_share < 1:
            return
        if self.config.cache.host_cache_gb:
            self.host_gb_s = measure_host_gb_s(self._cache.memory)
        timer = StepTimer(self.launch, self.slabs, self.block_size, model.max_model_len, model.vocab_size)
        self.config, self.model = measure_sizes(
            self.config, model, timer, plan.progress, measures_budget=plan.is_budget_measured,
            may_fail=plan.place is None, most_drafts=plan.most_drafts,
        )  # fmt: skip
        self.clear()

    def clear(self) -> None:
        """Forget all sequences and zero the cache."""
        with self._on_all("clear"):
            self._runner.forget_sequences()
            self._cache.memory.zero_()

    def sleep(self) -> DeviceLoaded:
        """Give back the memory of the cache and the graphs, and forget all sequences. No step may be under way.

        The connector must be closed before, and it needs `connect` again afterwards.
        """
        return self._back_to("sleep", DeviceLoaded(self._plan, self._weights))

    @property
    def num_host_blocks(self) -> int:
        host = self._cache.host
        if self._ranks is None:
            return host.num_ready
        return min(host.num_ready, max(host.num_filled, self._ranks.link.num_host_blocks))

    @property
    def most_host_blocks(self) -> int:
        return self._cache.host.num_blocks

    def host_block(self, group: int, block: int) -> memoryview:
        return self._cache.host.tensors[group][block].reshape(-1).view(torch.uint8).numpy().data

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        ports = () if self._ranks is None else self._ranks.connect(name, context)
        self.pin_rest()
        return ports

    def pin_rest(self) -> None:
        """The part of `connect` that every rank runs: begin to pin the host blocks that are not ready."""
        self._cache.host.start()

    def check(self, sampling: SamplingParams) -> None:
        for kind in self._plan.outside_stages:
            try:
                kind.check(sampling)
            except Exception as error:  # the stage is foreign and may raise anything
                raise InvalidRequest(f"logits_args: {error}", "logits_args") from error
        if sampling.grammar:
            self._grammars.prepare(sampling.grammar)

    def read_adapter(self, digest: str, path: str, told: Callable[[str, str, int], None]) -> None:
        assert self._weights.adapters is not None
        if self._ranks is not None:
            self._ranks.link.on_read = told
            self._ranks.link.send(AdapterFrame(digest, path))
        self._weights.adapters.begin(digest, path, told)

    def drop_adapter(self, digest: str) -> None:
        assert self._weights.adapters is not None
        if self._ranks is not None:
            self._ranks.link.send(AdapterFrame(digest))
        self._weights.adapters.drop(digest)

    def launch(self, batch: Batch, deadline_s: float = inf) -> PendingStep:
        ranks = self._ranks
        has_adapters = self._weights.adapters is not None and self._runner.rows.has_adapters(batch)
        graph = self._graph_sizes.choose(batch.chunks, has_adapters=has_adapters)
        if ranks is None:
            return self._runner.launch(batch, graph)
        pending = ranks.lead(self._runner.launch, batch, graph, deadline_s)
        pending.finish_late = self.draw_late  # notes a failure: the other ranks may wait in this draw's collectives
        return pending

    def follow(self, batch: Batch, graph: StepSize | None, staged: Staged) -> PendingStep:
        """On a rank > 0: launch a step as rank 0 does. `staged`: the starting sequences that rank 0 draws itself."""
        assert self._plan.place is not None
        self._plan.place.reported.changed, self._plan.place.reported.late = staged
        return self._runner.launch(batch, graph)

    def draw_late(self) -> float:
        if self._ranks is None:
            return self._runner.draw_late()
        with self._ranks.noted():
            return self._runner.draw_late()

    def ready(self, wanted: Mapping[int, SamplingParams], wake: Callable[[], None]) -> frozenset[int]:
        self._grammars.mask_threads.wake_once(wake)  # first: what becomes ready from here on calls it
        return frozenset(seq_id for seq_id, sampling in wanted.items() if not self._is_unready(seq_id, sampling))

    def _is_unready(self, seq_id: int, sampling: SamplingParams) -> bool:
        is_unready = self._runner.rows.is_unready(seq_id)
        return self._grammars.is_compiling(sampling.grammar) if is_unready is None else is_unready

    def take_forced(self) -> Sequence[ForcedTokens]:
        return self._grammars.take_forced()

    def follow_late(self, absent: Collection[int]) -> None:
        """On a rank > 0: draw the late rows of the newest step. The steps before it must have been read."""
        assert self._plan.place is not None
        self._plan.place.reported.absent = absent
        self._runner.draw_late()

    def watch_logits(self, watcher: Callable[[torch.Tensor], None] | None) -> None:
        """Show `watcher` the logits [R, vocab_size] of every step's R samples, in the order of `launch`.

        The tensor is on the device. It holds the logits before any logits stage changes them and before the draw. A
        later step overwrites the tensor, so the watcher must copy the values that it needs. None removes the watcher.
        """
        self._runner.watcher = watcher


def run_phases(described: DeviceDescribed, config: CacheConfig, progress: Callable[[str], None]) -> DeviceExecutor:
    """Take an executor from its first state to the last one. `progress` receives a line per phase.

    When a phase fails, the state before it is closed. Raises StartupError.
    """
    state: Closes = described
    try:
        state = loaded = described.load()
        slabs = make_slabs(loaded.layout, config.num_blocks, loaded.free_kv_bytes)
        progress(describe_slabs(slabs, loaded.layout))
        state = cached = loaded.allocate(slabs, *host_units(config, loaded.layout, slabs))
        progress("warm-up")
        return cached.warm_up()
    except BaseException:
        try:
            state.close()
        except RuntimeError:  # a device that has failed fails again; the first failure is the one to report
            logger.warning("the executor could not be closed after a failed start", exc_info=True)
        raise
