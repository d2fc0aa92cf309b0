"""Measures how much GPU memory the weights and the largest step leave for the KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.capacity import CUDA_CONTEXT_BYTES, SAMPLES_PER_SEQ
from pd_cluster.worker.cuda_graphs.set_up import captured_bytes, captures_steps
from pd_cluster.worker.kv_cache import DTYPES, KVCache
from pd_cluster.worker.warm_up import equal_tables
from pd_connectors.protocol.layout import KVKind
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.worker.device_plan import DevicePlan
    from pd_cluster.worker.kv_cache import StateViews
    from pd_cluster.worker.model_runner import ModelRunner
    from pd_connectors.protocol.layout import BlockLayout


def bytes_for_cache(plan: DevicePlan, run_largest_step: Callable[[KVCache], None], *, has_adapters: bool) -> int:
    """Bytes that this rank can give to its cache, beside what is captured. `run_largest_step`: see below."""
    config, limits = plan.config.cache, plan.config.scheduler
    if plan.device.type == "cpu":
        return int(config.kv_cache_gb * 1e9)
    free = measure_free_bytes(
        plan.layout, limits.max_num_batched_tokens, run_largest_step, config.gpu_memory_utilization,
        plan.device, plan.state_views,
    )  # fmt: skip
    if captures_steps(limits, plan.attentions, plan.device):
        row_bytes = plan.model.vocab_size * DTYPES[plan.model.dtype].itemsize
        has_drafts, has_states = plan.most_drafts > 0, plan.state_views is not None
        free -= captured_bytes(
            limits, row_bytes, has_drafts=has_drafts, has_states=has_states, has_adapters=has_adapters
        )
    return max(0, int(free))


def measure_free_bytes(
    layout: BlockLayout,
    budget: int,
    run_largest_step: Callable[[KVCache], None],
    utilization: float,
    device: torch.device,
    states: StateViews | None = None,
) -> float:
    """Bytes for the cache: `utilization` of the GPU's memory less the weights and the activations of the largest step.

    Negative when they do not fit. `run_largest_step` runs a step of `budget` tokens on a scratch cache. Only the memory
    of this process counts. So nodes that share a GPU each get their share, whichever allocates first.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    scratch = KVCache.allocate(layout, _scratch_slabs(layout, budget), 0, device, states=states)
    run_largest_step(scratch)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - scratch.memory.nbytes
    del scratch
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES
    return min(total * utilization - own, free) - peak


def _scratch_slabs(layout: BlockLayout, budget: int) -> KvSlabs:
    """Blocks for `budget` tokens and one more, of a STATE group one slot: that of all rows (`equal_tables`).

    129 states, for a budget of 8,192 tokens, would take 20 GB with Qwen3.5 27B.
    """
    slabs = KvSlabs.of_blocks(layout, 1)
    num_blocks = -(-budget // layout.block_size) + 1
    wanted = (1 if group.kind is KVKind.STATE else num_blocks for group in layout.groups)
    return replace(slabs, num_slabs=sum(-(-num // most) for num, most in zip(wanted, slabs.per_slab, strict=True)))


def run_largest_step(runner: ModelRunner, budget: int, num_seqs: int, max_model_len: int) -> None:
    """Run a step with the whole token budget, in as many sequences as may run.

    Each sequence uses sampling features, which need memory too.
    """
    params = SamplingParams(max_tokens=1, top_k=50, top_p=0.9, frequency_penalty=0.1, logprobs=1)
    share, rest = divmod(budget, num_seqs)
    sizes = [min(share + (i >= num_seqs - rest), max_model_len) for i in range(num_seqs)]
    tables = equal_tables(runner, max(sizes))
    # A step may sample twice as many tokens as sequences run: see `BatchBuilder.rows`
    seeds = tuple(range(SAMPLES_PER_SEQ))
    starts = tuple(SequenceStart(i, (0,) * size, size, tables, params, i, seeds) for i, size in enumerate(sizes))
    chunks = tuple(SequenceChunk(i, 0, size, num_samples=SAMPLES_PER_SEQ) for i, size in enumerate(sizes))
    runner.launch(Batch(0, starts, chunks)).result()
