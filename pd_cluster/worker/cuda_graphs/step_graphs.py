"""Whole steps as CUDA graphs: one replay instead of some hundred launches.

A step of a few hundred tokens keeps a GPU busy for less time than the host takes to launch its kernels one by one, and
the host reads no other step's result meanwhile. So a step is padded to a captured size. Its graph reads its inputs from
fixed places (`HostBuffer.take_first`, the block tables), takes last tokens from where earlier steps left them, and
writes its own draws there. Requests that need more than temperature and seed are drawn from its logits by a second
graph (`draw_graphs.py`).

One memory pool serves all graphs. The largest graph is captured first. The graphs can share the pool because their
replays follow each other on one stream, and no graph needs the content that an earlier one left in the pool.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pd_cluster.models.forward_inputs import ForwardInputs
from pd_cluster.worker.cuda_graphs.captured_step import CapturedStep, ReplayOutputs, make_captured_steps
from pd_kernels.values import Draws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.model import Model
    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.cuda_graphs.recorder import Recorder
    from pd_cluster.worker.draw_places import DrawLayout
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.input_batch import InputBatch
    from pd_cluster.worker.kv_cache import KVCache
    from pd_cluster.worker.sampler import TokenSampler
    from pd_cluster.worker.step_inputs import ReplayInputs
    from pd_kernels.attention import GroupAttention
    from pd_kernels.values import StepSize


class _Graph(NamedTuple):
    step: CapturedStep
    replay: Callable[[], None]
    outputs: ReplayOutputs


class StepGraphs:
    """The captured graphs, by size. Their replays follow each other on one stream."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rows: InputBatch,
        host_buffer: HostBuffer,
        sampler: TokenSampler,
        attentions: Sequence[GroupAttention],
    ) -> None:
        """There are no graphs until `capture`. `attentions`: by KV group."""
        self._model = model
        self._rows = rows
        self._host_buffer = host_buffer
        self._sampler = sampler
        self._attentions = attentions
        self._caches = cache.layer_caches
        groups = cache.layout.groups[: len(attentions)]
        self._no_slot = cache.padding_block(len(groups)) if len(groups) < len(cache.layout.groups) else None
        paddings = [cache.padding_block(index) * group.block_size for index, group in enumerate(groups)]
        self._padding_slots = np.array(paddings)[:, None]
        self._graphs: dict[StepSize, _Graph] = {}
        self._block_tables: list[torch.Tensor] = []  # by KV group

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        """The captured sizes."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[StepSize], recorder: Recorder, progress: Callable[[str], None]) -> None:
        """Capture every size that attention can replay, or as many of the first sizes as there is memory for.

        Steps with decodes only come first. Of each kind the largest step comes first. Call it once.
        """
        started_s, free = time.perf_counter(), recorder.free_bytes
        most, device = max(size.num_seqs for size in sizes) + 1, self._model.device
        self._block_tables = [
            torch.zeros((most, width), dtype=torch.int32, device=device) for width in self._rows.max_blocks
        ]
        columns = self._sampler.num_columns
        steps = make_captured_steps(sizes, self._model, self._attentions, columns, self._no_slot)
        for step in steps:
            if not recorder.has_room():
                progress(f"no memory for {len(steps) - len(self._graphs)} of {len(steps)} graphs of steps")
                break
            self._write_padding(step)
            self._graphs[step.size] = _Graph(step, *recorder(partial(self._run, step)))
        used_gb = (free - recorder.free_bytes) / 1e9
        progress(f"{_describe(self.sizes)} in {time.perf_counter() - started_s:.1f} s and {used_gb:.2f} GB")

    @property
    def logits(self) -> dict[StepSize, torch.Tensor]:
        """Where each captured size leaves its logits [R, vocab_size]."""
        return {size: graph.outputs.logits for size, graph in self._graphs.items()}

    def build(self, chunks: tuple[SequenceChunk, ...], size: StepSize, draws: DrawLayout | None) -> ReplayInputs:
        """Pack the step's inputs, padded to `size`. They are in place once the host buffer was flushed.

        `draws`: the layout of captured draws; None: there are none.
        """
        return self._rows.build_replay(chunks, self._graphs[size].step, self._padding_slots, draws)

    def replay(self, inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        """Run the step. Its outputs have a row for each token after which one is sampled.

        The replay also writes the drawn tokens to `InputBatch.last_tokens`.
        """
        for place, tables in zip(self._block_tables, inputs.block_tables, strict=True):
            num_seqs, width = tables.shape
            place[:num_seqs, :width].copy_(tables)
        _, replay, outputs = self._graphs[size]
        replay()
        count = inputs.samples.num_logits
        return ReplayOutputs(outputs.logits[:count], outputs.token_ids[:count])

    def _write_padding(self, step: CapturedStep) -> None:
        """Write the inputs of a step of padding alone, for the run before the capture."""
        self._host_buffer.begin()
        places = step.places(self._host_buffer.take_first(step.length))
        step.pad(places, self._rows.padding_row, self._padding_slots)
        places.put_adapters(np.empty(0, np.int64))
        self._host_buffer.flush()

    def _run(self, step: CapturedStep) -> ReplayOutputs:
        """The work that a graph captures.

        Its inputs are the host buffer's fields, `token_choices`, the block tables and the cache.
        """
        rows, places = self._rows, step.places(self._host_buffer.first(step.length))
        token_ids = rows.token_choices.index_select(0, places.tokens)
        plans, tail = step.plan(places, self._block_tables)
        if self._model.adapters is not None:
            self._model.adapters.rows = None if places.adapters is None else places.adapters.on_device()
        inputs = ForwardInputs(
            token_ids, places.positions, places.slots.unbind(), plans, tail, states=step.states(places)
        )
        logits = self._model.forward(inputs, self._caches)
        temperatures = places.temperatures.view(torch.float32)[: step.size.num_rows]
        chosen = self._sampler.draw(logits, Draws(temperatures, places.seeds, places.lengths))
        rows.last_tokens.index_copy_(0, places.owners, chosen)
        return step.keep(logits, chosen)


def _describe(sizes: Sequence[StepSize]) -> str:
    """The numbers and largest sizes of the graphs, in words."""
    decodes = [size.num_seqs for size in sizes if size.is_plain]
    mixed = [size.num_tokens for size in sizes if size.num_chunks]
    drafts = [size.num_tokens for size in sizes if size.has_drafts]
    told = f", {len(drafts)} of decodes with drafts, up to {max(drafts)} tokens," if drafts else ""
    return (
        f"{len(decodes)} graphs of up to {max(decodes, default=0)} decodes{told} and {len(mixed)} of steps with "
        f"prompts, up to {max(mixed, default=0)} tokens,"
    )
