"""Small steps with prompts as CUDA graphs, whole: one replay instead of some hundred launches.

A step of a few hundred tokens keeps a GPU busy for less time than the host takes to launch its kernels one by one, and
the host hears of no other step meanwhile. So steps of any mix are padded to a captured size: room for some tokens, for
some sequences, and for a few chunks among them. Steps without decodes have sizes of their own, which need no attention
of decodes. Inputs lie in fixed places, as for decode graphs (`decode_graphs`). Logits are those of the tokens that
sample, and are copied out of the pool: otherwise each of many graphs would keep its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.worker.cuda_graphs.captured_steps import ReplayOutputs
from pd_cluster.worker.cuda_graphs.step_layout import StepLayout
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


class StepGraphs:
    """Graphs of steps with prompts, as CapturedSteps."""

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
        self._layouts: dict[StepSize, StepLayout] = {}
        self._replays: dict[StepSize, Callable[[], None]] = {}
        self._block_tables = self._logits = self._token_ids = torch.empty(0)

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        return tuple(self._replays)

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

    def build(self, chunks: tuple[SequenceChunk, ...], size: StepSize) -> ReplayInputs:
        return self._rows.build_step(chunks, self._layouts[size], self._padding_slot)

    def replay(self, inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        num_seqs, width = inputs.block_tables.shape
        self._block_tables[:num_seqs, :width].copy_(inputs.block_tables)
        self._replays[size]()
        count = len(inputs.samples)
        return ReplayOutputs(self._logits[:count], self._token_ids[:count])

    def _lay_out(self, sizes: Sequence[StepSize]) -> list[StepLayout]:
        """Layouts, the largest first, of the sizes that attention of every KV group can replay."""
        layouts = []
        for size in sorted(sizes, key=lambda size: (-size.num_tokens, -size.num_seqs, size.is_far)):
            captured = [attention.captured(size) for attention in self._attentions]
            replayables = tuple(replayable for replayable in captured if replayable is not None)
            if len(replayables) == len(captured):
                layouts.append(StepLayout(size, replayables))
        return layouts

    def _write_padding(self, layout: StepLayout) -> None:
        """A step of padding alone, for the run before the capture."""
        fields = np.zeros((1, layout.length), np.int64)
        places = layout.places(fields)
        places.owners[:] = self._rows.padding_row
        places.slots[:] = self._padding_slot
        for tiles in places.tiles.values():
            tiles[0] = layout.size.num_seqs
        self._host_buffer.begin()
        self._host_buffer.move_first(fields)
        self._host_buffer.flush()

    def _run(self, layout: StepLayout) -> ReplayOutputs:
        """What is captured. Its inputs are the host buffer's fields, `last_tokens`, the block tables and the cache."""
        size, last_tokens = layout.size, self._rows.last_tokens
        places = layout.places(self._host_buffer.first(1, layout.length))
        token_ids = torch.where(places.token_ids < 0, last_tokens[places.rows], places.token_ids)
        decode_lens, seq_lens, query_starts = (
            numbers.to(torch.int32) for numbers in (places.decode_lens, places.seq_lens, places.query_starts)
        )
        block_tables = self._block_tables[: size.num_seqs + 1]
        steps = {
            tiles: StepOnDevice(decode_lens, seq_lens, query_starts, block_tables, place.to(torch.int32))
            for tiles, place in places.tiles.items()
        }
        plans = [replayable.plan(steps[replayable.tiles]) for replayable in layout.replayables]
        inputs = ForwardInputs(token_ids, places.positions, places.slots, plans, Tail(places.sampled, plan=None))
        logits = self._model.forward(inputs, self._views)
        temperatures = places.temperatures.view(torch.float32)[: size.num_seqs]
        chosen = self._kernels.draw(logits, Draws(temperatures, places.seeds, places.lengths, None))
        last_tokens.index_copy_(0, places.owners, chosen)
        outputs = ReplayOutputs(self._logits[: size.num_seqs], self._token_ids[: size.num_seqs])
        outputs.logits.copy_(logits)
        outputs.token_ids.copy_(chosen)
        return outputs
