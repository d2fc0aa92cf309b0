"""What the engine core drives: weights, cache and runner of one device, built from the node's config."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import model_directory, read_json
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.llama import Llama
from pd_cluster.models.registry import resolve_spec
from pd_cluster.models.spec import ModelSpec, read_eos_token_ids
from pd_cluster.models.weights import fill_at_random, load_weights
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart, StepResult
from pd_cluster.worker.cuda_graphs.decode_graphs import CAPTURABLE, DecodeGraphs, bucket_sizes
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder, GraphTimer
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs, step_sizes, token_buckets
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.input_batch import InputBatch, table_width
from pd_cluster.worker.kv_cache import DTYPES, KVCache, blocks_in
from pd_cluster.worker.model_runner import ModelRunner, PendingStep
from pd_cluster.worker.sampling_state import SamplingState
from pd_cluster.worker.warm_up import NUM_BLOCKS, run_first_steps, run_steps_of_all_kinds
from pd_connectors.protocol.layout import BlockLayout
from pd_kernels.backends import not_replayable, select_kernels, with_flashinfer
from pd_kernels.cublas_lt import CublasLt
from pd_kernels.prefill_choice import AttentionShape, choose_prefill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd_cluster.config import NodeConfig
    from pd_connectors.base import CacheDescription
    from pd_kernels.backends import Kernels

GRAPH_BYTES = 1.0e9  # what captured steps take besides the logits: 0.8 GB (8B, 0.6B)
CUDA_CONTEXT_BYTES = 0.7e9  # the driver's and the libraries' own, which no allocator statistic shows
_BLOCK_SIZE_STEP = 16  # the hash unit: blocks are whole numbers of it


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the rest of the node must know about the model."""

    spec: ModelSpec
    eos_token_ids: frozenset[int]
    max_model_len: int  # prompt + output, in tokens
    dtype: str
    device: str
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers


class Executor:
    """One device's half of the engine. Not thread-safe."""

    def __init__(self, config: NodeConfig, progress: Callable[[str], None]) -> None:
        """Loads the weights, allocates the cache, warms up. Raises StartupError. `progress` hears one line a stage."""
        self._config = config
        device = _resolve_device(config.model.device)
        if device.type == "cpu" and config.model.num_threads:
            torch.set_num_threads(config.model.num_threads)
        self._device = device
        self._cublas: CublasLt | None = None
        directory = model_directory(config.model.model)
        raw = read_json(directory / "config.json")
        spec = resolve_spec(directory, raw)
        dtype = _resolve_dtype(config.model.dtype, spec.dtype, device)
        dummy = config.model.load_format == "dummy"
        dummy_name = f"dummy seed={config.model.seed} {device.type} {dtype}"
        self.model = ModelDescription(
            spec=spec,
            eos_token_ids=read_eos_token_ids(directory, raw),
            max_model_len=_resolve_max_len(config.model.max_model_len, spec.max_len),
            dtype=dtype,
            device=str(device),
            fingerprint=fingerprint(spec, dummy_name if dummy else directory),
        )
        self.block_size = _resolve_block_size(config.cache.block_size, device)
        self._kernels = self._choose_kernels(progress)
        self._llama = self._load_model(None if dummy else directory, progress)
        layout = BlockLayout(spec.kv_groups(self.block_size, dtype))
        num_blocks = self._size_cache(layout)
        num_host_blocks = blocks_in(config.cache.swap_gb * 1e9, layout)
        progress(f"cache {num_blocks} blocks of {self.block_size} tokens")
        self._cache = KVCache.allocate(layout, num_blocks, num_host_blocks, device)
        self.cache: CacheDescription = self._cache.describe()
        progress("warm-up")
        self._warm_up()
        try:
            self._runner = self._make_runner(self._cache, self.model.max_model_len, progress)
        except torch.OutOfMemoryError as error:
            hint = "lower --gpu-memory-utilization or --max-graph-tokens"
            raise StartupError(f"{device} has no room for captured steps: {hint} ({error})") from error
        except RuntimeError as error:
            raise StartupError(f"steps cannot be captured on {device}: {error}") from error

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._cache.num_host_blocks

    def launch(self, batch: Batch) -> PendingStep:
        """Apply the batch and start its work. Loads and publishes are the connector's, not ours."""
        return self._runner.launch(batch)

    def execute(self, batch: Batch) -> StepResult:
        """Run one step to its end."""
        return self.launch(batch).result()

    def watch_logits(self, watcher: Callable[[torch.Tensor], None] | None) -> None:
        """Show `watcher` the logits [R, vocab_size] of every step's R samples, in the order of `launch`, before they
        are adjusted and drawn from. They are on the device and void afterwards: copy what is wanted. None: nobody."""
        self._runner.watcher = watcher

    def close(self) -> None:
        """Wait for the device. The tensors live as long as someone (a transport) refers to them. Idempotent."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._cublas is not None:
            self._cublas.close()

    def _choose_kernels(self, progress: Callable[[str], None]) -> Kernels:
        """The device's own, or with another one's attention of prompts. Raises StartupError if that was asked for."""
        usual, wanted = select_kernels(self._device), self._config.model.prefill_attention
        if wanted == "triton" or (wanted == "auto" and usual.name != "triton"):
            return usual
        spec, dtype = self.model.spec, DTYPES[self.model.dtype]
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, self.block_size, dtype, self._device
        )  # fmt: skip
        if wanted == "flashinfer":
            try:
                # Steps that are captured would all have Triton's
                return replace(with_flashinfer(shape, compiles=True), replayable=not_replayable)
            except Exception as error:  # a foreign library's, of any kind
                raise StartupError(f"--prefill-attention flashinfer: {error}") from error
        num_tokens = min(self._config.scheduler.max_num_batched_tokens, self.model.max_model_len)
        with torch.inference_mode():
            timer = GraphTimer(CudaRecorder(self._device))
            choice = choose_prefill(usual, partial(with_flashinfer, shape, compiles=False), shape, num_tokens, timer)
            del timer
            torch.cuda.empty_cache()  # of its pool
        progress(f"attention of prompts by {choice.reason}")
        return choice.kernels

    def _load_model(self, directory: Path | None, progress: Callable[[str], None]) -> Llama:
        """The model with its weights from `directory`; None: random ones. Raises StartupError."""
        spec = self.model.spec
        try:
            model = Llama(spec, self._kernels, self.model.max_model_len, DTYPES[self.model.dtype], self._device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise StartupError(f"the weights of {spec.architecture} do not fit on {self._device}: {error}") from error
        if directory is None:
            fill_at_random(model, self._config.model.seed)
        else:
            load_weights(model, directory, spec.tied_embeddings, progress)
        model.finish_loading()
        return model

    def _make_runner(self, cache: KVCache, max_len: int, capture: Callable[[str], None] | None = None) -> ModelRunner:
        """With `capture`, which hears of the progress, decode steps are captured as graphs where that is possible."""
        config, block_size = self._config.scheduler, cache.layout.block_size
        num_rows = config.max_num_seqs
        # Up to 50 bytes a token, 150 a sequence, block tables of all and of those that sample; more goes its own way
        num_bytes = config.max_num_batched_tokens * 64 + num_rows * (160 + 8 * table_width(max_len, block_size)) + 1024
        staging = HostBuffer(self._device, num_bytes)
        sampling = SamplingState(num_rows, self.model.vocab_size, self.model.eos_token_ids, staging, self._device)
        rows = InputBatch(num_rows, max_len, block_size, sampling, staging, self._device)
        graphs, steps = None, None
        if capture is not None and self._captures_graphs:
            graphs = DecodeGraphs(self._llama, cache, rows, staging, self._kernels, cache.padding_block)
            decodes, budget = bucket_sizes(self._max_graph_batch), config.max_num_batched_tokens
            limit = min(config.max_graph_tokens, budget)
            # What larger steps of prompts have is often the whole budget, or a power of two
            powers = [1 << power for power in range(10, budget.bit_length())]
            self._choose_products(decodes, [*token_buckets(limit), *powers, budget], capture)
            recorder = CudaRecorder(self._device)
            graphs.capture(decodes, recorder, capture)
            if limit:
                steps = StepGraphs(self._llama, cache, rows, staging, self._kernels)
                # Under a window no chunk has many keys
                sizes = step_sizes(limit, num_rows, with_far=not any(self._llama.windows))
                steps.capture(sizes, recorder, capture)
        return ModelRunner(self._llama, cache, rows, staging, self._kernels, graphs, steps)

    def _choose_products(self, decodes: list[int], prompts: list[int], progress: Callable[[str], None]) -> None:
        """How steps of so many decodes, and steps of so many tokens, multiply."""
        started_s = time.perf_counter()
        try:
            self._cublas = CublasLt(self._device)
        except OSError as error:  # a torch that is linked otherwise
            progress(f"products as torch chooses them: {error}")
            return
        with torch.inference_mode():
            timer = GraphTimer(CudaRecorder(self._device))
            num_chosen = self._llama.choose_products(decodes, prompts, self._cublas.propose, timer)
            del timer
            torch.cuda.empty_cache()  # of its pool
        seconds = time.perf_counter() - started_s
        progress(f"{num_chosen} products are not as torch would choose ({seconds:.1f} s)")

    @property
    def _captures_graphs(self) -> bool:
        on_gpu = self._device.type == "cuda"
        return on_gpu and self._config.scheduler.cuda_graphs and self._kernels.name in CAPTURABLE

    @property
    def _max_graph_batch(self) -> int:
        return min(self._config.scheduler.max_graph_batch, self._config.scheduler.max_num_seqs)

    def _size_cache(self, layout: BlockLayout) -> int:
        """Blocks in the cache. Raises StartupError when that is not even one sequence's first step."""
        cache = self._config.cache
        if cache.num_blocks:
            num_blocks = cache.num_blocks
        elif self._device.type == "cpu":
            num_blocks = blocks_in(cache.kv_cache_gb * 1e9, layout)
        else:
            num_blocks = blocks_in(self._measure_free_bytes(layout), layout)
        if num_blocks < 2:
            size = layout.block_bytes / 1e6
            raise StartupError(f"the KV cache has room for {num_blocks} blocks of {size:.1f} MB; give it more memory")
        return num_blocks

    def _measure_free_bytes(self, layout: BlockLayout) -> float:
        """What `gpu_memory_utilization` leaves for the cache after weights and the largest step's activations.

        The share is of this process: nodes that share a GPU each get theirs, whoever allocates first.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        budget = self._config.scheduler.max_num_batched_tokens
        scratch = KVCache.allocate(layout, -(-budget // layout.block_size) + 1, 0, self._device)
        self._run_largest_step(self._make_runner(scratch, budget), budget)
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before - scratch.num_bytes
        del scratch
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        own = torch.cuda.memory_reserved(self._device) + CUDA_CONTEXT_BYTES
        graphs = GRAPH_BYTES + self._captured_logits_bytes if self._captures_graphs else 0.0
        return min(total * self._config.cache.gpu_memory_utilization - own, free) - peak - graphs

    @property
    def _captured_logits_bytes(self) -> int:
        """Each decode graph keeps its own; those of steps with prompts share one place, and compute them in another."""
        num_rows = sum(bucket_sizes(self._max_graph_batch)) + 2 * self._config.scheduler.max_num_seqs
        return num_rows * self.model.vocab_size * DTYPES[self.model.dtype].itemsize

    def _run_largest_step(self, runner: ModelRunner, budget: int) -> None:
        """A step with the whole token budget in as many sequences as may run, each with every sampling feature."""
        num_seqs = self._config.scheduler.max_num_seqs
        params = SamplingParams(max_tokens=1, top_k=50, top_p=0.9, frequency_penalty=0.1, logprobs=1)
        share, rest = divmod(budget, num_seqs)
        sizes = [min(share + (i >= num_seqs - rest), self.model.max_model_len) for i in range(num_seqs)]
        blocks = (0,) * -(-max(sizes) // self.block_size)
        seeds = (0, 1)  # a step may sample twice as many tokens as sequences run: see `Draft.rows`
        starts = tuple(SequenceStart(i, (0,) * size, size, blocks, params, i, seeds) for i, size in enumerate(sizes))
        chunks = tuple(SequenceChunk(i, 0, size, num_samples=2) for i, size in enumerate(sizes))
        runner.launch(Batch(0, starts, chunks)).result()

    def _warm_up(self) -> None:
        """Leaves the cache zeroed."""
        runner, max_len = self._make_runner(self._cache, self.model.max_model_len), self.model.max_model_len
        run_first_steps(runner, self.block_size, max_len)
        if self._device.type == "cuda":
            run_steps_of_all_kinds(runner, self.block_size, max_len, self._config.scheduler)
        for tensor in self._cache.tensors:
            tensor[:NUM_BLOCKS].zero_()


def _resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _resolve_dtype(name: str, checkpoint: str, device: torch.device) -> str:
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    if name not in DTYPES:
        raise StartupError(f"dtype {name} is not served; choose one of {', '.join(DTYPES)}")
    return name


def _resolve_max_len(wanted: int, limit: int) -> int:
    if wanted and wanted < 2:
        raise StartupError(f"--max-model-len {wanted} has no room for a prompt and an output token")
    if wanted > limit:
        raise StartupError(f"--max-model-len {wanted} exceeds the model's own limit of {limit} tokens")
    return wanted or limit


def _resolve_block_size(wanted: int, device: torch.device) -> int:
    if wanted % _BLOCK_SIZE_STEP or wanted < 0:
        raise StartupError(f"--block-size {wanted} is not a multiple of {_BLOCK_SIZE_STEP}")
    return wanted or (16 if device.type == "cpu" else 64)
