"""One forward pass over a packed batch: inputs, attention plans, logits, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.input_batch import InputBatch, table_width
from pd_cluster.worker.pending_step import PendingStep
from pd_cluster.worker.sampler import Sampled, sample
from pd_cluster.worker.sampling_state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.models.model import Model
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.cuda_graphs.captured_steps import CapturedSteps
    from pd_cluster.worker.input_batch import Samples, StepInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_kernels.backends import Kernels
    from pd_kernels.packed import StepSize


class ModelRunner:
    """Runs batches in the order given. Not thread-safe."""

    def __init__(
        self, model: Model, cache: KVCache, rows: InputBatch, host_buffer: HostBuffer, kernels: Kernels
    ) -> None:
        self._model = model
        self.cache = cache
        self.rows = rows
        self.host_buffer = host_buffer
        self.kernels = kernels
        self._graphs: dict[StepSize, CapturedSteps] = {}
        self._views = list(cache.layer_views)
        self.watcher: Callable[[torch.Tensor], None] | None = None  # is shown every step's logits [R, vocab_size]

    @classmethod
    def make(
        cls,
        model: Model,
        cache: KVCache,
        kernels: Kernels,
        limits: SchedulerConfig,
        eos_token_ids: frozenset[int],
        max_len: int,
        device: torch.device,
    ) -> ModelRunner:
        """A runner with empty rows. `max_len`: tokens of a sequence, prompt and output."""
        num_rows, block_size = limits.max_num_seqs, cache.geometry.block_size
        # Up to 50 bytes a token, 150 a sequence, block tables of all sequences and of those that sample. Arrays that do
        # not fit are copied one by one
        num_bytes = limits.max_num_batched_tokens * 64 + num_rows * (160 + 8 * table_width(max_len, block_size)) + 1024
        host_buffer = HostBuffer(device, num_bytes)
        sampling = SamplingState(num_rows, model.spec.vocab_size, eos_token_ids, host_buffer, device)
        rows = InputBatch(num_rows, max_len, block_size, sampling, host_buffer, device)
        return cls(model, cache, rows, host_buffer, kernels)

    @property
    def graph_sizes(self) -> tuple[StepSize, ...]:
        """The sizes that `launch` may name."""
        return tuple(self._graphs)

    def use_graphs(self, captured: Iterable[CapturedSteps]) -> None:
        """Replay these captured steps, each size by its own kind."""
        self._graphs |= {size: steps for steps in captured for size in steps.sizes}

    @torch.inference_mode()
    def launch(self, batch: Batch, graph: StepSize | None = None) -> PendingStep:
        """Apply the batch's changes and start its work. `graph`: the captured size to replay; None: none."""
        self.host_buffer.begin()
        self.rows.apply(batch)
        self.cache.run_copies(batch.copies, self.kernels)
        if not batch.chunks:
            return self._pending(batch, None, None)
        return self._compute(batch) if graph is None else self._replay(batch, graph)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [R, vocab_size] of the samples. Its inputs are on the device."""
        plan, key_view, tail = self.kernels.plan_attention, self._views[0][0], None
        plans = {window: plan(inputs.sequences, key_view, window) for window in self._model.windows}
        if inputs.tail is not None:
            tail = Tail(inputs.tail.rows, plan(inputs.tail.sequences, key_view, self._model.last_window))
        step = ForwardInputs(inputs.token_ids, inputs.positions, inputs.slot_mapping, plans, tail)
        logits = self._model.forward(step, self._views)
        return logits if inputs.samples.owners is None else logits[inputs.samples.owners]

    def _compute(self, batch: Batch) -> PendingStep:
        rows, inputs = self.rows, self.rows.build(batch.chunks)
        self.host_buffer.flush()
        rows.fill_late(inputs)
        if inputs.fresh_blocks is not None:
            self.cache.clear(inputs.fresh_blocks)
        logits = self.forward(inputs)
        if not len(inputs.samples):
            return self._pending(batch, None, None)
        if self.watcher is not None:
            self.watcher(logits)
        sampled = sample(logits, inputs.sampling, self.kernels)
        rows.note_launched(inputs.samples, sampled.token_ids)
        return self._pending(batch, inputs.samples, sampled)

    def _replay(self, batch: Batch, graph: StepSize) -> PendingStep:
        """No blocks are cleared: kernels that can be captured use nothing past a sequence's length."""
        captured = self._graphs[graph]
        inputs = captured.build(batch.chunks, graph)
        self.host_buffer.flush()
        outputs = captured.replay(inputs, graph)
        if not len(inputs.samples):
            return self._pending(batch, None, None)
        if self.watcher is not None:
            self.watcher(outputs.logits)
        if inputs.sampling is None:
            sampled = Sampled(outputs.token_ids)
        else:
            sampled = sample(outputs.logits, inputs.sampling, self.kernels)
        self.rows.note_launched(inputs.samples, sampled.token_ids, is_written=inputs.sampling is None)
        return self._pending(batch, inputs.samples, sampled)

    def _pending(self, batch: Batch, samples: Samples | None, sampled: Sampled | None) -> PendingStep:
        if sampled is not None:
            sampled = sampled.to_host()
        retired = None
        if self.cache.tensor.is_cuda:
            retired = torch.cuda.Event()  # type: ignore[no-untyped-call]
            retired.record()
        return PendingStep(batch.step, self.rows, samples, sampled, retired)
