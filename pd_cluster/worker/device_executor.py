"""The states of the executor on one device: of the only rank of an engine, or of one of several. See `executor`."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from traceback import clear_frames
from typing import TYPE_CHECKING, Self

import torch

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.scheduling.sequence_room import cache_tokens
from pd_cluster.worker.capacity import longest_sequence
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.cuda_graphs.set_up import capture_steps, captured_bytes, captures_steps, choose_step_products
from pd_cluster.worker.device_plan import DevicePlan
from pd_cluster.worker.executor import run_phases
from pd_cluster.worker.kv_cache import DTYPES, KVCache
from pd_cluster.worker.memory_measurement import measure_free_bytes, run_largest_step
from pd_cluster.worker.model_loading import load_model
from pd_cluster.worker.model_runner import ModelRunner
from pd_cluster.worker.state import ExecutorState, NextState
from pd_cluster.worker.step_measurement import (
    StepTimer,
    limit_beside_decodes,
    limit_of_prompts,
    measure_for_model,
    unmeasured_limit_of_prompts,
)
from pd_cluster.worker.warm_up import NUM_BLOCKS, run_first_steps, run_steps_of_all_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from pd_cluster.config import NodeConfig
    from pd_cluster.models.model import Model
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.executor import ModelDescription, Pending
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.pending_step import PendingStep
    from pd_cluster.worker.rank_sampler import RankPlace
    from pd_connectors.base import ConnectorContext
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort
    from pd_kernels.values import StepSize


@contextmanager
def _without_locals() -> Iterator[None]:
    """Let a failure hold no memory by the variables in its traceback: the handler may free the cache and make another.

    Those of the function that uses this context stay.
    """
    try:
        yield
    except BaseException as error:
        one: BaseException | None = error
        while one is not None:
            clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        raise


@dataclass(slots=True)
class Weights:
    """A loaded model, and what its chosen products use."""

    model: Model = field(init=False)
    owned: ExitStack = field(default_factory=ExitStack)
    has_products: bool = False  # they are chosen by measurement once, beside the first cache


class DeviceState(ExecutorState):
    """A state of the executor on one device."""

    def __init__(self, plan: DevicePlan, weights: Weights) -> None:
        """`weights`: empty before they are loaded."""
        self._plan, self._weights = plan, weights
        self.layout, self.config = plan.layout, plan.config

    def close(self, *, waits: bool = True) -> None:
        """See ExecutorState. `waits`: for the device."""
        with self._plan.owned, self._weights.owned:
            if waits:
                self._synchronize()

    def use_device(self) -> None:
        """Make the device the calling thread's own: else a call of CUDA takes memory of the first one."""
        if self._plan.device.type == "cuda":
            torch.cuda.set_device(self._plan.device)

    def _back_to(self, state: NextState) -> NextState:
        """Leave this state for one that owns less, and give the memory to the device."""
        self._synchronize()
        self.left_for(state)
        torch.cuda.empty_cache()  # nothing on a CPU
        return state

    def _make_runner(self, cache: KVCache, max_len: int) -> ModelRunner:
        plan = self._plan
        return ModelRunner.make(
            self._weights.model, cache, plan.kernels, plan.attentions, plan.config, plan.model.eos_token_ids, max_len,
            plan.device, plan.grammars, plan.place,
        )  # fmt: skip

    def _synchronize(self) -> None:
        if self._plan.device.type == "cuda":
            torch.cuda.synchronize(self._plan.device)


class DeviceDescribed(DeviceState):
    """See DescribedState."""

    @classmethod
    def of(cls, config: NodeConfig, progress: Callable[[str], None], place: RankPlace | None = None) -> Self:
        """`progress` gets lines about the weights, kernels and graphs. `place`: None for the only rank.

        Raises StartupError, and then leaves nothing behind.
        """
        return cls(DevicePlan.make(config, progress, place), Weights())

    def load(self, config: NodeConfig | None = None) -> DeviceLoaded:
        """See DescribedState. `config`: the settings of rank 0, on another rank."""
        plan = replace(self._plan, config=config or self.config)
        self._weights.model = load_model(
            plan.model, plan.config.model, plan.kernels, plan.device, plan.progress, plan.shard, plan.reduce
        )
        plan.progress(plan.model.ends)
        return self.left_for(DeviceLoaded(plan, self._weights))


class DeviceLoaded(DeviceState):
    """See LoadedState."""

    def free_kv_bytes(self) -> int:
        plan, config, limits = self._plan, self._plan.config.cache, self._plan.config.scheduler
        if plan.device.type == "cpu":
            return int(config.kv_cache_gb * 1e9)
        free = measure_free_bytes(
            plan.layout, limits.max_num_batched_tokens, self._run_largest_step, config.gpu_memory_utilization,
            plan.device,
        )  # fmt: skip
        if captures_steps(limits, plan.attentions, plan.device):
            free -= captured_bytes(limits, plan.model.vocab_size * DTYPES[plan.model.dtype].itemsize)
        return max(0, int(free))

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> DeviceCached:
        plan = self._plan
        model = self._fit_sequences(cache_tokens(plan.layout.groups, slabs))
        torch.cuda.empty_cache()  # an attempt that failed may have left memory
        with _without_locals():
            cache = KVCache.allocate(plan.layout, slabs, num_host_blocks, plan.device)
        return self.left_for(DeviceCached(plan, self._weights, cache, model))

    def unload(self) -> DeviceDescribed:
        self._synchronize()
        self._weights.owned.close()
        return self._back_to(DeviceDescribed(self._plan, Weights()))

    def _fit_sequences(self, room: int) -> ModelDescription:
        """The model with sequences that are no longer than the cache. Raises StartupError."""
        model, limit = self._plan.model, self._plan.model.max_model_len
        longest = longest_sequence(self._plan.config.model.max_model_len, limit, room)
        if longest < limit:
            self._plan.progress(f"max_model_len {longest} (the KV cache has no room for the model's {limit} tokens)")
        return replace(model, max_model_len=longest)

    def _run_largest_step(self, scratch: KVCache) -> None:
        limits, budget = self._plan.config.scheduler, self._plan.config.scheduler.max_num_batched_tokens
        runner = self._make_runner(scratch, budget)
        run_largest_step(runner, budget, limits.max_num_seqs, self._plan.model.max_model_len)


class DeviceCached(DeviceState):
    """See CachedState."""

    def __init__(self, plan: DevicePlan, weights: Weights, cache: KVCache, model: ModelDescription) -> None:
        super().__init__(plan, weights)
        self._cache, self._model = cache, model

    def warm_up(self) -> DeviceExecutor:
        with _without_locals():
            return self.left_for(self._measured())

    def _measured(self) -> DeviceExecutor:
        executor = self.capture()
        executor.measure(executor.launch)
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
                capture_steps(weights.model, runner.graphs, runner.draws, limits, plan.progress, agree)
        except torch.OutOfMemoryError as error:
            hint = "lower --gpu-memory-utilization or --max-graph-tokens"
            raise StartupError(f"{device} has no room for captured steps: {hint} ({error})") from error
        except RuntimeError as error:
            raise StartupError(f"steps cannot be captured on {device}: {error}") from error
        return DeviceExecutor(plan, weights, runner, self._model)

    def free(self) -> DeviceLoaded:
        return self._back_to(DeviceLoaded(self._plan, self._weights))

    def _run_first_steps(self) -> None:
        """Compile and load the kernels that steps need, by steps of a separate runner. Leaves the cache zeroed."""
        plan, max_len, block_size = self._plan, self._model.max_model_len, self.layout.block_size
        runner = self._make_runner(self._cache, max_len)
        run_first_steps(runner, block_size, max_len)
        if plan.device.type == "cuda":
            run_steps_of_all_kinds(runner, max_len, plan.config.scheduler)
        for tensor in self._cache.tensors:
            tensor[:NUM_BLOCKS].zero_()


class DeviceExecutor(DeviceState):
    """The Executor of one device."""

    def __init__(self, plan: DevicePlan, weights: Weights, runner: ModelRunner, model: ModelDescription) -> None:
        super().__init__(plan, weights)
        self.model, self._model, self._grammars = model, weights.model, plan.grammars  # `measure` completes `model`
        self._runner, self._cache = runner, runner.cache
        cache = runner.cache
        self.slabs, self.num_host_blocks, self.block_size = cache.slabs, cache.num_host_blocks, plan.layout.block_size
        self.cache = cache.describe()
        self.start_profile, self.stop_profile = plan.profiler.start, plan.profiler.stop
        self.graph_sizes = runner.graphs.sizes  # the captured ones
        self._graph_sizes = GraphSizes(self.graph_sizes)

    @classmethod
    def started(cls, config: NodeConfig, progress: Callable[[str], None]) -> DeviceExecutor:
        """Make an executor by all phases. Raises StartupError."""
        return run_phases(DeviceDescribed.of(config, progress), config.cache, progress)

    def measure(self, launch: Callable[[Batch], Pending]) -> None:
        """The part of `warm_up` for rank 0 alone: on a GPU, measure the sizes of steps that the settings leave open.

        Where that fails they are the defaults. Leaves the cache zeroed and no sequences.
        """
        # On a shared GPU other nodes' steps would be measured, too
        if self.model.device == "cpu" or self.config.cache.gpu_share < 1:
            return
        limits, progress, model = self.config.scheduler, self._plan.progress, self.model
        timer = StepTimer(launch, self.slabs, self.block_size, model.max_model_len, model.vocab_size)
        try:
            if limits.max_tokens_beside_decodes < 0 and self.config.tokens_beside_decodes_on(model.device):
                limits, keys = limit_beside_decodes(limits, timer, model.keys_per_token, progress)
                self.model = replace(model, measured_keys=keys)
            if limits.has_targets:
                measure_for_model(limits, timer)
            if self._plan.is_budget_measured:
                limits = limit_of_prompts(limits, timer, progress)
            self.model = replace(self.model, step_times=tuple(timer.samples))
        except Exception as error:  # of a kernel, memory, a watcher: a node with default sizes serves all the same
            if self._plan.place is not None:
                raise  # other ranks may wait for ever in the step that failed here
            progress(f"default sizes of steps: their measurement failed ({type(error).__name__}: {error})")
            if self._plan.is_budget_measured:
                limits = unmeasured_limit_of_prompts(limits)
        self.config = replace(self.config, scheduler=limits)
        self.clear()

    def clear(self) -> None:
        """Forget all sequences and zero the cache."""
        self._runner.forget_sequences()
        self._cache.memory.zero_()

    def sleep(self) -> DeviceLoaded:
        return self._back_to(DeviceLoaded(self._plan, self._weights))

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        return ()

    def check(self, sampling: SamplingParams) -> None:
        for kind in self._plan.outside_stages:
            try:
                kind.check(sampling)
            except Exception as error:  # the stage is foreign and may raise anything
                raise InvalidRequest(f"logits_args: {error}", "logits_args") from error
        if sampling.grammar:
            self._grammars.prepare(sampling.grammar)

    def launch(self, batch: Batch, deadline_s: float = inf) -> PendingStep:
        return self._runner.launch(batch, self._graph_sizes.choose(batch.chunks))

    def lead(self, batch: Batch, graph: StepSize | None, announce: Callable[[Staged], None]) -> PendingStep:
        """On rank 0 of several: launch a step that the others hear of by `announce`."""
        return self._runner.launch(batch, graph, announce)

    def follow(self, batch: Batch, graph: StepSize | None, staged: Staged) -> PendingStep:
        """On a rank > 0: launch a step as rank 0 does. `staged`: the starting sequences that rank 0 draws itself."""
        assert self._plan.place is not None
        self._plan.place.told.changed, self._plan.place.told.late = staged
        return self._runner.launch(batch, graph)

    def draw_late(self) -> float:
        return self._runner.draw_late()

    def ready(self, wanted: Mapping[int, SamplingParams], wake: Callable[[], None]) -> frozenset[int]:
        self._grammars.mask_threads.wake_once(wake)  # first: what becomes ready from here on calls it
        return frozenset(seq_id for seq_id, sampling in wanted.items() if not self._is_unready(seq_id, sampling))

    def _is_unready(self, seq_id: int, sampling: SamplingParams) -> bool:
        is_unready = self._runner.rows.is_unready(seq_id)
        return self._grammars.is_compiling(sampling.grammar) if is_unready is None else is_unready

    def follow_late(self, absent: Collection[int]) -> None:
        """On a rank > 0: draw the late rows of the newest step. The steps before it must have been read."""
        assert self._plan.place is not None
        self._plan.place.told.absent = absent
        self._runner.draw_late()

    def watch_logits(self, watcher: Callable[[torch.Tensor], None] | None) -> None:
        """Show `watcher` the logits [R, vocab_size] of every step's R samples, in the order of `launch`.

        The tensor is on the device. It holds the logits before any logits stage changes them and before the draw. A
        later step overwrites the tensor, so the watcher must copy the values that it needs. None removes the watcher.
        """
        self._runner.watcher = watcher
