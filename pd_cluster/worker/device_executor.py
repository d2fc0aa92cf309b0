"""The executor of one device: the only rank of an engine, or one of several."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Self

import torch

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.models.directory import model_directory
from pd_cluster.models.shard import Shard
from pd_cluster.worker.capacity import decide_capacity, longest_sequence
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.cuda_graphs.set_up import capturable, capture_steps, captured_bytes, captures_steps
from pd_cluster.worker.executor import run_phases
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.kernel_selection import attention_by_group
from pd_cluster.worker.kv_cache import DTYPES, KVCache, longest_in
from pd_cluster.worker.logits_stages.order import find_stage
from pd_cluster.worker.memory_measurement import gpu_bytes, measure_free_bytes, run_largest_step
from pd_cluster.worker.model_loading import describe_model, load_model
from pd_cluster.worker.model_runner import ModelRunner
from pd_cluster.worker.profiler import Profiler
from pd_cluster.worker.step_measurement import (
    StepTimer,
    limit_beside_decodes,
    limit_of_prompts,
    measure_for_model,
    unmeasured_limit_of_prompts,
)
from pd_cluster.worker.warm_up import NUM_BLOCKS, run_first_steps, run_steps_of_all_kinds
from pd_connectors.protocol.layout import BlockLayout
from pd_kernels.selection import select_kernels
from pd_kernels.values import FEW_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pd_cluster.config import ModelConfig, NodeConfig
    from pd_cluster.models.model import Model
    from pd_cluster.models.reduce import Reduce
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.executor import ModelDescription
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.logits_stages.stage import LogitsStage
    from pd_cluster.worker.pending_step import PendingStep
    from pd_cluster.worker.rank_sampler import RankPlace
    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort
    from pd_kernels.attention import GroupAttention
    from pd_kernels.backends import Kernels
    from pd_kernels.values import StepSize

_BLOCK_SIZE_STEP = 16  # tokens; a block holds a whole number of these units of hashing


class DeviceExecutor:
    """The Executor of one device. See Executor for the phases.

    Each comment below names the phase that sets the attribute and those after it.
    """

    model: ModelDescription  # load
    layout: BlockLayout
    _attentions: tuple[GroupAttention, ...]  # by KV group
    _kernels: Kernels
    _grammars: Grammars
    _model: Model
    _is_budget_measured: bool
    _cache: KVCache  # allocate
    _outside_stages: list[type[LogitsStage]]
    _runner: ModelRunner  # warm_up
    _graph_sizes: GraphSizes

    def __init__(self, config: NodeConfig, progress: Callable[[str], None], place: RankPlace | None = None) -> None:
        """`progress` gets lines about the weights, kernels and graphs. `place`: None for the only rank.

        Raises StartupError if there is no device.
        """
        self._config = config
        self._progress = progress
        self._place = place
        self._shard = Shard() if place is None else place.shard
        self._device = resolve_device(config.model, self._shard.rank)
        self._cleanup = ExitStack()
        self._profiler = Profiler(self._device)
        self._cleanup.callback(self._profiler.stop)

    @classmethod
    def started(cls, config: NodeConfig, progress: Callable[[str], None]) -> Self:
        """Make an executor and run all its phases. Raises StartupError."""
        executor = cls(config, progress)
        run_phases(executor, config.cache, progress)
        return executor

    @property
    def config(self) -> NodeConfig:
        """The settings. They include the decided capacity from `load` on, and the measured limits from `warm_up` on."""
        return self._config

    @property
    def slabs(self) -> KvSlabs:
        return self._cache.slabs

    @property
    def num_host_blocks(self) -> int:
        return self._cache.num_host_blocks

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def cache(self) -> CacheDescription:
        """The description of the cache, for a connector."""
        return self._cache.describe()

    def load(self) -> None:
        config, progress, device = self._config, self._progress, self._device
        if device.type == "cpu" and (config.model.num_threads or self._place):
            torch.set_num_threads(config.model.num_threads or max(1, torch.get_num_threads() // self._shard.size))
        # First, so that a wrong path ends the start before the weights are read
        self._outside_stages = [find_stage(path) for path in config.model.logits_stages]
        self.model = describe_model(config.model, device, progress)
        self._shard.kv_heads(self.model.spec.num_kv_heads)  # raises before attention is chosen
        self._shard.part(self.model.spec.num_heads, "attention heads")
        self._kernels = select_kernels(device)
        if device.type == "cuda":
            limits = capturable(config.scheduler, self.model.spec, self._kernels, progress)
            config = replace(config, scheduler=limits)
        item_bytes = DTYPES[self.model.dtype].itemsize
        capacity = decide_capacity(config, self.model.spec, item_bytes, gpu_bytes(device))
        progress(capacity.line)
        self._is_budget_measured = capacity.is_budget_measured
        self._config = config = capacity.applied_to(config)
        block_size = _resolve_block_size(config.cache.block_size, device)
        self.layout = BlockLayout(self.model.spec.kv_groups(block_size, self.model.kv_dtype), self._shard.size)
        self._attentions = attention_by_group(
            self.model.spec, self.layout, DTYPES[self.model.dtype], config.model.attention_backend, device, progress,
        )  # fmt: skip
        self._grammars = Grammars(model_directory(config.model.model), self.model.vocab_size, self.model.eos_token_ids)
        self._cleanup.callback(self._grammars.close)
        self._model = load_model(
            self.model, config.model, self._kernels, device, progress, self._shard, self._make_reduce()
        )
        progress(self.model.ends)

    def free_kv_bytes(self) -> int:
        config, limits = self._config.cache, self._config.scheduler
        if self._device.type == "cpu":
            return int(config.kv_cache_gb * 1e9)
        free = measure_free_bytes(
            self.layout, limits.max_num_batched_tokens, self._run_largest_step, config.gpu_memory_utilization,
            self._device,
        )  # fmt: skip
        if captures_steps(limits, self._attentions, self._device):
            free -= captured_bytes(limits, self.model.vocab_size * DTYPES[self.model.dtype].itemsize)
        return max(0, int(free))

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> tuple[CacheDescription, ...]:
        limit = max(self.model.max_model_len, self._config.model.max_model_len)
        self._fit_sequences(longest_in(slabs, self.layout, limit))
        self._cache = KVCache.allocate(self.layout, slabs, num_host_blocks, self._device)
        return (self.cache,)

    def adopt(self, config: NodeConfig) -> None:
        """Use the settings that rank 0 has decided in `load`."""
        self._config = config

    def warm_up(self) -> tuple[StepSize, ...]:
        self._graph_sizes = GraphSizes(self.capture())
        self.measure()
        return self._graph_sizes.sizes

    def capture(self) -> tuple[StepSize, ...]:
        """The part of `warm_up` that every rank runs: the first steps, and graphs. -> the captured sizes."""
        limits, device = self._config.scheduler, self._device
        self._run_first_steps()
        try:
            self._runner = runner = self._make_runner(self._cache, self.model.max_model_len)
            if captures_steps(limits, self._attentions, device):
                agree = None if self._place is None else self._place.reduce.agree
                capture_steps(self._model, runner.graphs, runner.draws, limits, self._cleanup, self._progress, agree)
        except torch.OutOfMemoryError as error:
            hint = "lower --gpu-memory-utilization or --max-graph-tokens"
            raise StartupError(f"{device} has no room for captured steps: {hint} ({error})") from error
        except RuntimeError as error:
            raise StartupError(f"steps cannot be captured on {device}: {error}") from error
        return runner.graphs.sizes

    def measure(self) -> None:
        """The part of `warm_up` that only rank 0 decides: it measures steps on a GPU, through `launch`."""
        # On a shared GPU other nodes' steps would be measured, too
        if self._device.type == "cuda" and self._config.cache.gpu_share == 1:
            self._measure_steps()

    def clear(self) -> None:
        """Forget all sequences and zero the cache."""
        self._runner.forget_sequences()
        self._cache.memory.zero_()

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        return ()

    def check(self, sampling: SamplingParams) -> None:
        for kind in self._outside_stages:
            try:
                kind.check(sampling)
            except Exception as error:  # the stage is foreign and may raise anything
                raise InvalidRequest(f"logits_args: {error}", "logits_args") from error
        if sampling.grammar:
            self._grammars.prepare(sampling.grammar)

    def launch(self, batch: Batch, deadline_s: float = inf) -> PendingStep:
        return self._runner.launch(batch, self._graph_sizes.choose(batch.chunks))

    def follow(self, batch: Batch, graph: StepSize | None, staged: Staged) -> PendingStep:
        """On a rank > 0: launch a step as rank 0 does. `staged`: the starting sequences that rank 0 draws itself."""
        assert self._place is not None
        self._place.told.changed, self._place.told.late = staged
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
        assert self._place is not None
        self._place.told.absent = absent
        self._runner.draw_late()

    def use_device(self) -> None:
        """Make the device the calling thread's own: else a call of CUDA takes memory of the first one."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def leave(self) -> None:
        """Leave the other ranks, after `close`. Every rank must do so."""
        if self._place is not None:
            self._place.reduce.close()

    def start_profile(self) -> None:
        self._profiler.start()

    def stop_profile(self, directory: str) -> None:
        self._profiler.stop(directory)

    def watch_logits(self, watcher: Callable[[torch.Tensor], None] | None) -> None:
        """Show `watcher` the logits [R, vocab_size] of every step's R samples, in the order of `launch`.

        The tensor is on the device. It holds the logits before any logits stage changes them and before the draw. A
        later step overwrites the tensor, so the watcher must copy the values that it needs. None removes the watcher.
        """
        self._runner.watcher = watcher

    def close(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._cleanup.close()

    def _make_reduce(self) -> Reduce | None:
        """The sums of the model's products over the ranks; None for the only rank."""
        if self._place is None or self._device.type == "cpu":
            return None if self._place is None else self._place.reduce
        from pd_cluster.worker.symmetric_reduce import start_symmetric_reduce

        spec, dtype = self.model.spec, DTYPES[self.model.dtype]
        half_rows = FEW_ROWS[0] if dtype is torch.bfloat16 and not spec.quantization else 0  # as few rows have products
        return start_symmetric_reduce(
            self._place.reduce, spec.hidden_size, dtype, self._device, self._progress, half_rows
        )

    def _fit_sequences(self, cache_tokens: int) -> None:
        """Lower the longest length of a sequence to the size of the cache. Raises StartupError."""
        limit = self.model.max_model_len
        longest = longest_sequence(self._config.model.max_model_len, limit, cache_tokens)
        if longest < limit:
            self._progress(f"max_model_len {longest} (the KV cache has no room for the model's {limit} tokens)")
            self.model = replace(self.model, max_model_len=longest)

    def _make_runner(self, cache: KVCache, max_len: int) -> ModelRunner:
        return ModelRunner.make(
            self._model,
            cache,
            self._kernels,
            self._attentions,
            self._config,
            self.model.eos_token_ids,
            max_len,
            self._device,
            self._grammars,
            self._place,
        )

    def _run_largest_step(self, scratch: KVCache) -> None:
        limits = self._config.scheduler
        budget = limits.max_num_batched_tokens
        runner = self._make_runner(scratch, budget)
        run_largest_step(runner, budget, limits.max_num_seqs, self.model.max_model_len)

    def _measure_steps(self) -> None:
        """Decide the sizes of steps that the settings leave open: as measured, else the defaults.

        Leaves the cache zeroed and no sequences.
        """
        limits, progress, model = self._config.scheduler, self._progress, self.model
        timer = StepTimer(self.launch, self.slabs, self.block_size, model.max_model_len, model.vocab_size)
        try:
            if limits.max_tokens_beside_decodes < 0 and self._config.tokens_beside_decodes_on(model.device):
                limits, keys = limit_beside_decodes(limits, timer, model.keys_per_token, progress)
                self.model = replace(model, measured_keys=keys)
            if limits.has_targets and model.device != "cpu":
                measure_for_model(limits, timer)
            if self._is_budget_measured:
                limits = limit_of_prompts(limits, timer, progress)
            self.model = replace(self.model, step_times=tuple(timer.samples))
        except Exception as error:  # of a kernel, memory, a watcher: a node with default sizes serves all the same
            if self._place is not None:
                raise  # other ranks may wait for ever in the step that failed here
            progress(f"default sizes of steps: their measurement failed ({type(error).__name__}: {error})")
            if self._is_budget_measured:
                limits = unmeasured_limit_of_prompts(limits)
        self._config = replace(self._config, scheduler=limits)
        self.clear()

    def _run_first_steps(self) -> None:
        """Compile and load the kernels that steps need, by steps of a separate runner. Leaves the cache zeroed."""
        max_len = self.model.max_model_len
        runner = self._make_runner(self._cache, max_len)
        run_first_steps(runner, self.block_size, max_len)
        if self._device.type == "cuda":
            run_steps_of_all_kinds(runner, max_len, self._config.scheduler)
        for tensor in self._cache.tensors:
            tensor[:NUM_BLOCKS].zero_()


def resolve_device(config: ModelConfig, rank: int = 0) -> torch.device:
    """The device of a rank, which becomes the current one. Raises StartupError if there is none."""
    name = config.device
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if config.tp == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.device_count() < config.tp:
        raise StartupError(f"--tp {config.tp} needs {config.tp} GPUs; torch finds {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _resolve_block_size(wanted: int, device: torch.device) -> int:
    if wanted % _BLOCK_SIZE_STEP or wanted < 0:
        raise StartupError(f"--block-size {wanted} is not a multiple of {_BLOCK_SIZE_STEP}")
    return wanted or (16 if device.type == "cpu" else 64)
