"""Runs the steps of one device: packs inputs, plans attention, computes logits, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.input_batch import InputBatch, table_width
from pd_cluster.worker.logits_stages.order import make_stages
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.pending_step import PendingStep
from pd_cluster.worker.sampler import Sampled, sample
from pd_cluster.worker.sampling_state import DEFERRED, SamplingState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.config import NodeConfig
    from pd_cluster.models.model import Model
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.grammars import Grammars
    from pd_cluster.worker.input_batch import ReplayInputs, Samples, StepInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.attention import GroupAttention
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Ints, StepSize


class ModelRunner:
    """Runs batches in the order of `launch`. Not thread-safe."""

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
        self.cache = cache
        self.rows = rows
        self.host_buffer = host_buffer
        self.kernels = kernels
        self._attentions = attentions
        # `launch` may name their sizes
        self.graphs = StepGraphs(model, cache, rows, host_buffer, kernels, attentions)
        self._deferred: tuple[PendingStep, torch.Tensor] | None = None  # the step that waits to be drawn, its logits
        self._views = list(cache.layer_views)
        last_layer = len(self._views) - 1
        self._last = next(
            attention for attention, group in zip(attentions, cache.layout.groups, strict=True)
            if last_layer in group.layers
        )  # fmt: skip
        self.watcher: Callable[[torch.Tensor], None] | None = None  # is shown every step's logits [R, vocab_size]

    @classmethod
    def make(
        cls,
        model: Model,
        cache: KVCache,
        kernels: Kernels,
        attentions: Sequence[GroupAttention],
        config: NodeConfig,
        eos_token_ids: frozenset[int],
        max_len: int,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> ModelRunner:
        """A runner with empty rows. `max_len`: tokens of a sequence, prompt and output."""
        limits, vocab_size, block_size = config.scheduler, model.spec.vocab_size, cache.layout.block_size
        num_rows = limits.max_num_seqs
        # Up to 50 bytes a token, 150 a sequence, block tables of all sequences and of those that sample. Arrays that do
        # not fit are copied one by one
        num_bytes = limits.max_num_batched_tokens * 64 + num_rows * (160 + 8 * table_width(max_len, block_size)) + 1024
        host_buffer = HostBuffer(device, num_bytes)
        context = StageContext(num_rows, vocab_size, eos_token_ids, device, host_buffer.move, grammars)
        stages = make_stages(context, config.model.logits_stages)
        sampling = SamplingState(num_rows, vocab_size, stages, host_buffer)
        rows = InputBatch(num_rows, max_len, block_size, sampling, host_buffer, device)
        return cls(model, cache, rows, host_buffer, kernels, attentions)

    @torch.inference_mode()
    def launch(self, batch: Batch, graph: StepSize | None = None) -> PendingStep:
        """Apply the batch's changes and start its work. `graph`: the captured size to replay; None: no graph."""
        assert self._deferred is None, "a step with late rows is drawn before the next one is launched"
        self.host_buffer.begin()
        self.rows.apply(batch)
        self.cache.run_copies(batch.copies, self.kernels)
        if not batch.chunks:
            return self._launched(PendingStep(batch.step, None, self._note_result), None)
        return self._compute(batch) if graph is None else self._replay(batch, graph)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the logits [R, vocab_size] of the samples. The inputs must be on the device."""
        packed, tail = inputs.sequences, None
        plans = [attention.plan(packed) for attention in self._attentions]
        if inputs.tail is not None:
            tail = Tail(inputs.tail.rows, self._last.plan(inputs.tail.sequences))
        step = ForwardInputs(inputs.token_ids, inputs.positions, inputs.slot_mapping, plans, tail, packed)
        logits = self._model.forward(step, self._views)
        return logits if inputs.samples.owners is None else logits[inputs.samples.owners]

    def _compute(self, batch: Batch) -> PendingStep:
        rows, inputs = self.rows, self.rows.build(batch.chunks)
        self.host_buffer.flush()
        rows.fill_late(inputs)
        if inputs.fresh_blocks is not None:
            self.cache.clear(inputs.fresh_blocks)
        return self._sample(batch, inputs, self.forward(inputs))

    def _replay(self, batch: Batch, graph: StepSize) -> PendingStep:
        """Run the step by the graph of size `graph`.

        No blocks are cleared, because kernels that can be captured use nothing past a sequence's length.
        """
        inputs = self.graphs.build(batch.chunks, graph)
        self.host_buffer.flush()
        outputs = self.graphs.replay(inputs, graph)
        return self._sample(batch, inputs, outputs.logits, outputs.token_ids)

    def _sample(
        self, batch: Batch, inputs: StepInputs | ReplayInputs, logits: torch.Tensor, drawn: torch.Tensor | None = None
    ) -> PendingStep:
        """Draw a step's tokens from its logits [R, vocab_size].

        `drawn`: the tokens that a graph drew; they count if the step needs no other sampling.
        """
        samples, sampling = inputs.samples, inputs.sampling
        pending = PendingStep(batch.step, samples, self._note_result)
        if not len(samples):
            return self._launched(pending, None)
        if self.watcher is not None:
            self.watcher(logits)
        if sampling is DEFERRED:
            self._deferred = pending, logits
            return pending
        if sampling is None:
            assert drawn is not None
            self.rows.note_launched(samples, drawn, is_written=True)
            return self._launched(pending, Sampled(drawn))
        return self._draw(pending, logits, sampling)

    def _draw(self, pending: PendingStep, logits: torch.Tensor, sampling: SamplingInputs) -> PendingStep:
        assert pending.samples is not None
        sampled = sample(logits, sampling, self.kernels)
        if sampling.failures:
            by_row = dict(zip(pending.samples.rows.tolist(), pending.samples.seq_ids, strict=True))
            pending.failures = {by_row[row]: why for row, why in sampling.failures.items()}
        self.rows.note_launched(pending.samples, sampled.token_ids)
        return self._launched(pending, sampled)

    def _launched(self, pending: PendingStep, sampled: Sampled | None) -> PendingStep:
        """Note that all of the step's work is on its way to the device."""
        if sampled is not None:
            pending.sampled = sampled.to_host()
        if self.cache.tensors[0].is_cuda:
            pending.retired = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.retired.record()
        pending.is_launched = True
        return pending

    def _note_result(self, samples: Samples, token_ids: Ints) -> None:
        """Note that a step's tokens have been read. If a step waits for these tokens, draw its tokens now."""
        self.rows.note_result(samples, token_ids)
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            self._draw_deferred(*deferred)

    @torch.inference_mode()
    def _draw_deferred(self, pending: PendingStep, logits: torch.Tensor) -> None:
        assert pending.samples is not None
        sampling = self.rows.prepare_sampling(pending.samples)
        assert sampling is not DEFERRED, "at most one step is under way when another with late rows is launched"
        self.host_buffer.flush()
        self._draw(pending, logits, sampling)
