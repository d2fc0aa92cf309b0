"""Decode steps as CUDA graphs: one replay instead of some hundred launches.

A step of decodes alone is padded to the next captured number of sequences. Its graph reads its inputs from fixed places
(`HostBuffer.move_first`, `block_tables`), takes last tokens from where earlier steps left them, and writes its own
draws there. Requests that need more than temperature and seed are sampled outside the graph, from its logits. Padding
rows have length 0, so attention reads nothing for them, and they write into a block of their own.

One memory pool serves all graphs, the largest first: their replays follow each other on one stream, and nothing that a
graph leaves in the pool is needed once the next one has started.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.forward_inputs import ForwardInputs
from pd_cluster.worker.cuda_graphs.captured_steps import ReplayOutputs
from pd_kernels.values import Draws, StepOnDevice, StepSize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.model import Model
    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.cuda_graphs.recorder import Recorder
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.input_batch import InputBatch, ReplayInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_kernels.attention import GroupAttention
    from pd_kernels.backends import Kernels

_NUM_FIELDS = 7


class DecodeGraphs:
    """Graphs of steps of decodes alone, as CapturedSteps. Attention of decodes must be capturable."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rows: InputBatch,
        host_buffer: HostBuffer,
        kernels: Kernels,
        attentions: Sequence[GroupAttention],
    ) -> None:
        """`attentions`: by KV group."""
        self._model = model
        self._views = list(cache.layer_views)
        self._rows = rows
        self._host_buffer = host_buffer
        self._kernels = kernels
        self._attentions = attentions
        self._padding_slot = cache.padding_block * cache.layout.block_size
        self._graphs: dict[StepSize, tuple[Callable[[], None], ReplayOutputs]] = {}
        self._block_tables = self._query_starts = self._no_tiles = torch.empty(0)

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        return tuple(self._graphs)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[StepSize], recorder: Recorder, progress: Callable[[str], None]) -> None:
        """Capture every size, or as many of the largest as there is memory for."""
        started_s, free = time.perf_counter(), recorder.free_bytes
        device, largest = self._rows.last_tokens.device, max(size.num_seqs for size in sizes)
        self._block_tables = torch.zeros((largest, self._rows.max_blocks), dtype=torch.int32, device=device)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._no_tiles = torch.empty((2, 0), dtype=torch.int32, device=device)
        smallest = 0
        for size in sorted(sizes, key=lambda size: -size.num_seqs):
            if not recorder.has_room():
                progress(f"no memory for decode graphs of fewer than {smallest} sequences")
                break
            self._write_padding(size.num_seqs)
            self._graphs[size] = recorder(lambda size=size: self._run(size))  # type: ignore[misc]
            smallest = size.num_seqs
        if self._graphs:
            used_gb = (free - recorder.free_bytes) / 1e9
            progress(
                f"{len(self._graphs)} decode graphs up to {largest} sequences in "
                f"{time.perf_counter() - started_s:.1f} s and {used_gb:.2f} GB"
            )

    def build(self, chunks: tuple[SequenceChunk, ...], size: StepSize) -> ReplayInputs:
        return self._rows.build_decodes(chunks, size.num_seqs, self._padding_slot)

    def replay(self, inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        count, width = inputs.block_tables.shape
        self._block_tables[:count, :width].copy_(inputs.block_tables)
        replay, outputs = self._graphs[size]
        replay()
        return ReplayOutputs(outputs.logits[:count], outputs.token_ids[:count])

    def _write_padding(self, size: int) -> None:
        """A step of padding alone, for the run before the capture."""
        self._host_buffer.begin()
        fields = np.zeros((_NUM_FIELDS, size), np.int64)
        fields[0], fields[3] = self._rows.padding_row, self._padding_slot
        self._host_buffer.move_first(fields)
        self._host_buffer.flush()

    def _run(self, size: StepSize) -> ReplayOutputs:
        """What is captured. Its inputs are the host buffer's fields, `last_tokens`, the block tables and the cache."""
        count = size.num_seqs
        rows, known_ids, positions, slots, lengths, temperatures, seeds = self._host_buffer.first(_NUM_FIELDS, count)
        last_tokens = self._rows.last_tokens
        token_ids = torch.where(known_ids < 0, last_tokens[rows], known_ids)
        lens = lengths.to(torch.int32)
        step = StepOnDevice(lens, lens, self._query_starts[: count + 1], self._block_tables[:count], self._no_tiles)
        plans = []
        for attention in self._attentions:
            replayable = attention.captured(size)
            assert replayable is not None, "attention that cannot be captured has no graphs"
            plans.append(replayable.plan(step))
        logits = self._model.forward(ForwardInputs(token_ids, positions, slots, plans, tail=None), self._views)
        chosen = self._kernels.draw(logits, Draws(temperatures.view(torch.float32)[:count], seeds, lengths, None))
        last_tokens.index_copy_(0, rows, chosen)
        return ReplayOutputs(logits, chosen)
