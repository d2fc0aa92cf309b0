"""Decides which steps a worker captures, bounds their memory, and captures them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pd_cluster.scheduling.captured_sizes import bucket_sizes, token_buckets
from pd_cluster.worker.cuda_graphs.graph_sizes import adapted_sizes, decode_sizes, draft_sizes, step_sizes
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder
from pd_cluster.worker.kernel_selection import choose_products

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    import torch

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.models.model import Model
    from pd_cluster.models.spec import ExpertsSpec, ModelSpec
    from pd_cluster.worker.cuda_graphs.draw_graphs import DrawGraphs
    from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
    from pd_kernels.attention import GroupAttention
    from pd_kernels.backends import Kernels

GRAPH_BYTES = 1.0e9  # memory of captured steps besides the logits: 0.8 GB were measured (8B, 0.6B)
DRAFT_GRAPH_BYTES = 0.3e9  # and of those with drafts
ADAPTER_GRAPH_BYTES = 0.8e9  # and of those with adapters: 0.7 GB were measured (8B, one H200)
# And of those with prompts of models with states: triangles of 158 pieces, of 48 heads, are 132 MB, and a layer has
# more launches. By calculation
STATE_GRAPH_BYTES = 0.5e9


def capturable(
    limits: SchedulerConfig, spec: ModelSpec, kernels: Kernels, progress: Callable[[str], None]
) -> SchedulerConfig:
    """`limits`, without graphs and overlapped steps where a kernel of the model waits for the host, or may wait.

    The launch of such a step returns when the step is nearly over. An overlapped step would delay the result of the
    step before it by its whole length. `--async-scheduling on` overlaps all the same. `progress` hears why.
    """
    if spec.modules is not None:
        progress(f"no captured steps: the modules of {spec.architecture} may wait for the host")
    elif spec.experts is not None and not _captures(spec.experts, kernels):
        progress(
            f"no captured steps: the experts of {spec.architecture} are computed by a kernel that waits for the host"
        )
    elif spec.state is not None and not kernels.captures_state:
        progress(
            f"no captured steps: the states of {spec.architecture} are computed by a kernel that waits for the host"
        )
    else:
        return limits
    overlap = "off" if limits.async_scheduling == "auto" else limits.async_scheduling
    return replace(limits, cuda_graphs=False, async_scheduling=overlap)


def _captures(experts: ExpertsSpec, kernels: Kernels) -> bool:
    return experts.form in kernels.captured_forms if experts.is_biased else kernels.captures_experts


def captures_steps(limits: SchedulerConfig, attentions: Sequence[GroupAttention], device: torch.device) -> bool:
    """Whether the worker captures steps: on a GPU, if the settings allow it and each KV group can capture decodes."""
    is_wanted, (smallest,) = device.type == "cuda" and limits.cuda_graphs, decode_sizes(1)
    return is_wanted and all(attention.captured(smallest) is not None for attention in attentions)


def captured_bytes(
    limits: SchedulerConfig,
    bytes_per_row: int,
    *,
    has_drafts: bool,
    has_states: bool = False,
    has_adapters: bool = False,
) -> float:
    """The most bytes that captured steps take. `bytes_per_row`: bytes of one row of logits.

    Each decode graph keeps its own logits. Graphs of steps with prompts compute their logits in one shared tensor and
    leave them in another. Draws share a copy in float32, which takes as much as two in bfloat16.
    """
    most_rows = limits.most_captured_rows if has_drafts else limits.max_num_seqs
    num_rows = sum(bucket_sizes(_max_decodes(limits))) * (1 + has_adapters) + 4 * most_rows
    kept = (
        GRAPH_BYTES
        + ADAPTER_GRAPH_BYTES * has_adapters
        + DRAFT_GRAPH_BYTES * has_drafts
        + STATE_GRAPH_BYTES * has_states
    )
    return kept + num_rows * bytes_per_row


def choose_step_products(
    model: Model, limits: SchedulerConfig, cleanup: ExitStack, progress: Callable[[str], None]
) -> None:
    """Choose the model's products for the steps within the limits. `cleanup` releases what they use."""
    budget = limits.max_num_batched_tokens
    # Steps with prompts that are larger than any graph often have the whole budget, or a power of two of tokens
    powers = [1 << power for power in range(10, budget.bit_length())]
    products = [*token_buckets(min(limits.max_graph_tokens, budget)), *powers, budget]
    choose_products(model, bucket_sizes(_max_decodes(limits)), products, model.device, cleanup, progress)


def capture_steps(
    model: Model,
    graphs: StepGraphs,
    draws: DrawGraphs,
    limits: SchedulerConfig,
    progress: Callable[[str], None],
    agree: Callable[[bool], bool] | None = None,
    *,
    has_drafts: bool = False,
) -> None:
    """Capture as many steps as there is memory for, and the draws from their logits. Their products must be chosen.

    `agree`: whether all ranks say yes; None: there is one rank. With several, draws are not captured, because rank 0
    alone has their inputs.

    Raises RuntimeError, of which torch.OutOfMemoryError is one.
    """
    limit = min(limits.max_graph_tokens, limits.max_num_batched_tokens)
    mixed = step_sizes(limit, limits.max_num_seqs) if limit else []
    recorder = CudaRecorder(model.device, agree)
    most_rows = min(limits.most_captured_rows, limits.max_num_batched_tokens)
    drafts = draft_sizes(most_rows, limits.max_num_seqs) if has_drafts else []
    sizes = [*decode_sizes(_max_decodes(limits)), *drafts, *mixed]
    graphs.capture([*sizes, *(adapted_sizes(sizes) if model.adapters is not None else ())], recorder, progress)
    if agree is None:
        draws.capture(graphs.logits, recorder, progress)


def _max_decodes(limits: SchedulerConfig) -> int:
    return min(limits.max_graph_batch, limits.max_num_seqs)
