"""Which steps a worker captures, what that costs in memory, and the capture itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.worker.cuda_graphs.decode_graphs import DecodeGraphs
from pd_cluster.worker.cuda_graphs.graph_sizes import bucket_sizes, decode_sizes, step_sizes, token_buckets
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_cluster.worker.kernel_selection import choose_products

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    import torch

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.models.model import Model
    from pd_cluster.worker.cuda_graphs.captured_steps import CapturedSteps
    from pd_cluster.worker.model_runner import ModelRunner
    from pd_kernels.attention import GroupAttention

GRAPH_BYTES = 1.0e9  # what captured steps take besides the logits: 0.8 GB (8B, 0.6B)


def captures_steps(limits: SchedulerConfig, attentions: Sequence[GroupAttention], device: torch.device) -> bool:
    """Whether steps are captured at all: if attention of every KV group can be."""
    is_wanted = device.type == "cuda" and limits.cuda_graphs
    return is_wanted and all(attention.captured(decode_sizes(1)[0]) for attention in attentions)


def captured_bytes(limits: SchedulerConfig, bytes_per_row: int) -> float:
    """What captured steps take at most; `bytes_per_row`: of one row of logits.

    Each decode graph keeps its own logits. Graphs of steps with prompts share one place, and compute them in another.
    """
    num_rows = sum(bucket_sizes(_max_decodes(limits))) + 2 * limits.max_num_seqs
    return GRAPH_BYTES + num_rows * bytes_per_row


def capture_steps(
    model: Model,
    runner: ModelRunner,
    limits: SchedulerConfig,
    device: torch.device,
    cleanup: ExitStack,
    progress: Callable[[str], None],
) -> list[CapturedSteps]:
    """Choose the products and capture steps of both kinds, as many as there is memory for.

    `cleanup` releases what the products use. Raises RuntimeError, of which torch.OutOfMemoryError is one.
    """
    budget = limits.max_num_batched_tokens
    limit = min(limits.max_graph_tokens, budget)
    # Steps with prompts that are larger than any graph often have the whole budget, or a power of two of tokens
    powers = [1 << power for power in range(10, budget.bit_length())]
    products = [*token_buckets(limit), *powers, budget]
    choose_products(model, bucket_sizes(_max_decodes(limits)), products, device, cleanup, progress)
    recorder = CudaRecorder(device)
    parts = model, runner.cache, runner.rows, runner.host_buffer, runner.kernels, runner.attentions
    decodes = DecodeGraphs(*parts)
    decodes.capture(decode_sizes(_max_decodes(limits)), recorder, progress)
    if not limit:
        return [decodes]
    steps = StepGraphs(*parts)
    steps.capture(step_sizes(limit, limits.max_num_seqs, with_far=True), recorder, progress)
    return [decodes, steps]


def _max_decodes(limits: SchedulerConfig) -> int:
    return min(limits.max_graph_batch, limits.max_num_seqs)
