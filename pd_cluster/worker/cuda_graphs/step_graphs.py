"""Small steps with prompts as CUDA graphs, whole: one replay instead of some hundred launches.

A step of a few hundred tokens keeps a GPU busy for less time than the host takes to launch its kernels one by one, and
meanwhile nobody hears of the step before it. So steps of any mix are padded to the next *size*: with room for some
tokens, for some sequences, and for a few chunks among them; steps without decodes have sizes of their own, which need
no attention of decodes. Inputs lie in fixed places as those of decode graphs do (`graphs`). Logits are of the tokens
that sample, and copied out of the pool, where otherwise each of many graphs would keep its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.llama import ForwardInputs, Tail
from pd_cluster.worker.cuda_graphs.decode_graphs import ReplayOutputs
from pd_cluster.worker.cuda_graphs.step_layout import StepLayout
from pd_kernels.draws import Draws
from pd_kernels.packed import StepOnDevice, StepSize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.llama import Llama
    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.cuda_graphs.recorder import Recorder
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.input_batch import InputBatch, ReplayInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_kernels.backends import Kernels

FAR_KEYS = 1024  # a chunk that ends behind as many in the cache is better off in a step meant for that
FEW_SEQS = 64  # in most steps: more take longer where only those rows go on that sample
# A size has room for so many chunks, or as many as if they had so many tokens each. Tiles of nobody cost 0.1 ms a step
# of 192 tokens (8B, one H200) where programs share keys, else nothing
NEAR_CHUNKS, FAR_CHUNKS = (8, 16), (4, 32)
_MOST_PADDING = 256  # tokens; more take the device longer than launching their step as it is takes the host


class StepGraphs:
    """The sizes' graphs."""

    def __init__(self, model: Llama, cache: KVCache, rows: InputBatch, staging: HostBuffer, kernels: Kernels) -> None:
        self._model = model
        self._views = list(cache.layer_views)
        self._key_views = cache.key_views
        self._rows = rows
        self._staging = staging
        self._kernels = kernels
        self._padding_slot = cache.padding_block * cache.layout.block_size
        self._layouts: dict[StepSize, StepLayout] = {}
        self._replays: dict[StepSize, Callable[[], None]] = {}
        self._block_tables = self._logits = self._token_ids = torch.empty(0)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[StepSize], recorder: Recorder, progress: Callable[[str], None]) -> None:
        """Capture every size, or as many of the largest as there is memory for."""
        started_s, free = time.perf_counter(), recorder.free_bytes
        device, num_seqs = self._model.device, max(size.num_seqs for size in sizes)
        self._block_tables = torch.zeros((num_seqs + 1, self._rows.max_blocks), dtype=torch.int32, device=device)
        self._logits = torch.empty((num_seqs, self._model.spec.vocab_size), dtype=self._model.dtype, device=device)
        self._token_ids = torch.empty(num_seqs, dtype=torch.int64, device=device)
        layouts = self._lay_out(sizes)
        for layout in layouts:
            if not recorder.has_room():
                progress(f"no memory for {len(layouts) - len(self._replays)} graphs of smaller steps with prompts")
                break
            self._write_padding(layout)
            self._replays[layout.size], _ = recorder(lambda layout=layout: self._run(layout))  # type: ignore[misc]
            self._layouts[layout.size] = layout
        if self._replays:
            progress(
                f"{len(self._replays)} graphs of steps with prompts, up to "
                f"{max(size.num_tokens for size in self._replays)} tokens, in "
                f"{time.perf_counter() - started_s:.1f} s and {(free - recorder.free_bytes) / 1e9:.2f} GB"
            )

    def size_for(self, chunks: tuple[SequenceChunk, ...]) -> StepSize | None:
        """The size that serves a step of these chunks, as small as can be. None as well where all are far too large:
        many chunks of few tokens, or no memory was left for smaller ones."""
        num_tokens = num_decodes = 0
        for chunk in chunks:
            if chunk.num_samples > 1:
                return None
            if num_tokens == num_decodes and chunk.num_tokens == 1:
                num_decodes += 1
            num_tokens += chunk.num_tokens
        later = chunks[num_decodes:]
        is_far = any(chunk.start + chunk.num_tokens >= FAR_KEYS for chunk in later)
        fitting = [
            size for size in self._replays
            if 0 <= size.num_tokens - num_tokens < _MOST_PADDING and size.num_seqs >= len(chunks)
            and size.num_chunks >= len(later) and (size.has_decodes or not num_decodes)
        ]  # fmt: skip
        return min(
            fitting,
            key=lambda size: (size.num_tokens, size.has_decodes, size.num_seqs, size.is_far != is_far),
            default=None,
        )

    def build(self, chunks: tuple[SequenceChunk, ...], size: StepSize) -> ReplayInputs:
        """The step's inputs. They are in place once staging has flushed."""
        return self._rows.build_step(chunks, self._layouts[size], self._padding_slot)

    def replay(self, inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        """Run the step. Rows of the outputs are of the chunks that sample; what was drawn is in `last_tokens`."""
        num_seqs, width = inputs.block_tables.shape
        self._block_tables[:num_seqs, :width].copy_(inputs.block_tables)
        self._replays[size]()
        count = len(inputs.samples)
        return ReplayOutputs(self._logits[:count], self._token_ids[:count])

    def _lay_out(self, sizes: Sequence[StepSize]) -> list[StepLayout]:
        """Largest first; without those that the kernels have nothing for."""
        num_heads, layouts = self._model.spec.num_heads, []
        for size in sorted(sizes, key=lambda size: (-size.num_tokens, -size.num_seqs, size.is_far)):
            attention = self._kernels.replayable(size, num_heads, self._views[0][0], any(self._model.windows))
            if attention is not None:
                layouts.append(StepLayout(size, attention))
        return layouts

    def _write_padding(self, layout: StepLayout) -> None:
        """A step of nobody, for the run before the capture."""
        fields = np.zeros((1, layout.length), np.int64)
        places = layout.places(fields)
        places.owners[:] = self._rows.padding_row
        places.slots[:] = self._padding_slot
        places.tiles[0] = layout.size.num_seqs
        self._staging.begin()
        self._staging.move_first(fields)
        self._staging.flush()

    def _run(self, layout: StepLayout) -> ReplayOutputs:
        """What is captured. Its only inputs are the staged fields, `last_tokens`, the block tables and the cache."""
        size, last_tokens = layout.size, self._rows.last_tokens
        places = layout.places(self._staging.first(1, layout.length))
        token_ids = torch.where(places.token_ids < 0, last_tokens[places.rows], places.token_ids)
        step = StepOnDevice(
            decode_lens=places.decode_lens.to(torch.int32),
            seq_lens=places.seq_lens.to(torch.int32),
            query_starts=places.query_starts.to(torch.int32),
            block_tables=self._block_tables[: size.num_seqs + 1],
            tiles=places.tiles.to(torch.int32),
        )
        plans = {window: layout.attention.plan(step, self._key_views[window], window) for window in self._model.windows}
        inputs = ForwardInputs(token_ids, places.positions, places.slots, plans, Tail(places.sampled, plan=None))
        logits = self._model.forward(inputs, self._views)
        temperatures = places.temperatures.view(torch.float32)[: size.num_seqs]
        chosen = self._kernels.draw(logits, Draws(temperatures, places.seeds, places.lengths, None))
        last_tokens.index_copy_(0, places.owners, chosen)
        outputs = ReplayOutputs(self._logits[: size.num_seqs], self._token_ids[: size.num_seqs])
        outputs.logits.copy_(logits)
        outputs.token_ids.copy_(chosen)
        return outputs


def step_sizes(limit: int, max_seqs: int, *, with_far: bool) -> list[StepSize]:
    """For every bucket of tokens: no decodes; few sequences; `max_seqs`. Each near, and far if that is asked for."""
    sizes = set()
    for num_tokens in token_buckets(limit):
        most = min(num_tokens, max_seqs)
        few = min(FEW_SEQS, most)
        for is_far, (least, num_tokens_each) in enumerate((NEAR_CHUNKS, FAR_CHUNKS)[: 1 + with_far]):
            num_chunks = min(max(least, num_tokens // num_tokens_each), few)
            for num_seqs, has_decodes in ((num_chunks, False), (few, True), (most, True)):
                sizes.add(StepSize(num_tokens, num_seqs, num_chunks, has_decodes, bool(is_far)))
    return sorted(sizes, key=lambda size: (size.num_tokens, size.num_seqs, size.has_decodes, size.is_far))


def token_buckets(limit: int) -> list[int]:
    """Every 64th up to 512, every 128th from there, `limit` itself: products compute whole tiles of 64 or 128 rows."""
    sizes = [16, 32, *range(64, 512, 64), *range(512, limit, 128), limit]
    return sorted({size for size in sizes if size <= limit})
