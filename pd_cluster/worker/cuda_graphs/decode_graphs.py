"""Decode steps as CUDA graphs: one replay instead of some hundred launches.

A step of nothing but decodes is padded to the next *bucket* of sequences. A bucket's graph reads its inputs from fixed
places (`HostBuffer.move_first`, `block_tables`), takes last tokens from where earlier steps left them, and leaves what
it draws there in turn. Where temperature and seed do not say all, others draw from its logits. Padding has length 0, so
attention reads nothing for it; it writes into a block of its own.

One memory pool serves all buckets, the largest first: their replays follow each other on one stream, and nothing that a
graph leaves in the pool is needed once the next one has started.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.llama import ForwardInputs
from pd_kernels.draws import Draws
from pd_kernels.packed import PackedSequences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.llama import Llama
    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.cuda_graphs.recorder import Recorder
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.input_batch import InputBatch, ReplayInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_kernels.backends import Kernels

CAPTURABLE = frozenset({"triton", "flashinfer"})  # kernels whose plan of decodes reads lengths on the device only
_NUM_FIELDS = 7


@dataclass(frozen=True, slots=True)
class ReplayOutputs:
    """What a replay leaves where it is until the next one, for all rows that there is room for."""

    logits: torch.Tensor  # [R, vocab_size]
    token_ids: torch.Tensor  # int64 [R]: drawn from them, or the greedy choice


def bucket_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, then every 8th up to 64, every 16th from there, and `limit` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, limit, 16), limit]
    return sorted({size for size in sizes if size <= limit})


class DecodeGraphs:
    """The buckets' graphs. The kernels are of a CAPTURABLE backend."""

    def __init__(
        self, model: Llama, cache: KVCache, rows: InputBatch, staging: HostBuffer, kernels: Kernels, padding_block: int
    ) -> None:
        self._model = model
        self._views = list(cache.layer_views)
        self._key_views = cache.key_views
        self._rows = rows
        self._staging = staging
        self._kernels = kernels
        self._block_size = cache.layout.block_size
        self._padding_slot = padding_block * self._block_size
        self._sizes: list[int] = []
        self._graphs: dict[int, tuple[Callable[[], None], ReplayOutputs]] = {}
        self._block_tables = self._query_starts = torch.empty(0)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], recorder: Recorder, progress: Callable[[str], None]) -> None:
        """Capture every size, or as many of the largest as there is memory for."""
        started_s, free = time.perf_counter(), recorder.free_bytes
        device = self._rows.last_tokens.device
        self._block_tables = torch.zeros((max(sizes), self._rows.max_blocks), dtype=torch.int32, device=device)
        self._query_starts = torch.arange(max(sizes) + 1, dtype=torch.int32, device=device)
        for size in sorted(sizes, reverse=True):
            if not recorder.has_room():
                progress(f"no memory for decode graphs of fewer than {min(self._sizes, default=0)} sequences")
                break
            self._write_padding(size)
            self._graphs[size] = recorder(lambda size=size: self._run(size))  # type: ignore[misc]
            self._sizes.insert(0, size)
        if self._sizes:
            used_gb = (free - recorder.free_bytes) / 1e9
            progress(
                f"{len(self._sizes)} decode graphs up to {self._sizes[-1]} sequences in "
                f"{time.perf_counter() - started_s:.1f} s and {used_gb:.2f} GB"
            )

    def bucket_for(self, chunks: tuple[SequenceChunk, ...]) -> int:
        """The bucket that serves a step of these chunks; 0 when none does."""
        if not self._sizes or len(chunks) > self._sizes[-1]:
            return 0
        for chunk in reversed(chunks):  # those of several tokens come last
            if chunk.num_tokens != 1 or chunk.num_samples != 1:
                return 0
        return next(size for size in self._sizes if size >= len(chunks))

    def build(self, chunks: tuple[SequenceChunk, ...], bucket: int) -> ReplayInputs:
        """The step's inputs. They are in place once staging has flushed."""
        return self._rows.build_decodes(chunks, bucket, self._padding_slot)

    def replay(self, inputs: ReplayInputs) -> ReplayOutputs:
        """Run the step. Row i of the outputs is chunk i's; what was drawn is in `last_tokens` already."""
        count, width = inputs.block_tables.shape
        self._block_tables[:count, :width].copy_(inputs.block_tables)
        replay, outputs = self._graphs[inputs.fields.shape[1]]
        replay()
        return ReplayOutputs(outputs.logits[:count], outputs.token_ids[:count])

    def _write_padding(self, size: int) -> None:
        """A step of nobody, for the run before the capture."""
        self._staging.begin()
        fields = np.zeros((_NUM_FIELDS, size), np.int64)
        fields[0], fields[3] = self._rows.padding_row, self._padding_slot
        self._staging.move_first(fields)
        self._staging.flush()

    def _run(self, size: int) -> ReplayOutputs:
        """What is captured. Its only inputs are the staged fields, `last_tokens`, the block tables and the cache."""
        rows, known_ids, positions, slots, lengths, temperatures, seeds = self._staging.first(_NUM_FIELDS, size)
        last_tokens = self._rows.last_tokens
        token_ids = torch.where(known_ids < 0, last_tokens[rows], known_ids)
        ones = np.ones(size, np.int64)
        packed = PackedSequences(
            num_decodes=size,
            query_starts=self._query_starts[: size + 1],
            seq_lens=lengths.to(torch.int32),
            block_tables=self._block_tables[:size],
            host_query_lens=ones,
            host_seq_lens=ones,  # void: a capturable plan does not ask
        )
        plans = {
            window: self._kernels.plan_attention(packed, self._key_views[window], window)
            for window in self._model.windows
        }
        logits = self._model.forward(ForwardInputs(token_ids, positions, slots, plans, tail=None), self._views)
        chosen = self._kernels.draw(logits, Draws(temperatures.view(torch.float32)[:size], seeds, lengths, None))
        last_tokens.index_copy_(0, rows, chosen)
        return ReplayOutputs(logits, chosen)
