"""One forward pass over a packed batch: inputs, attention plans, logits, samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_cluster.engine.batch import Batch, StepResult
from pd_cluster.models.llama import ForwardInputs, Llama
from pd_cluster.worker.sampler import Sampled, sample

if TYPE_CHECKING:
    from pd_cluster.worker.input_batch import InputBatch, StepInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_connectors.protocol.messages import SampledToken
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose work is on its way to the device; a later one may be launched before this one's result is read."""

    step: int
    rows: InputBatch
    inputs: StepInputs | None
    sampled: Sampled | None
    retired: torch.cuda.Event | None  # None: there is no device, or nothing to wait for

    def result(self) -> StepResult:
        """Wait until all the step's work on the device is done and read what was sampled.

        Call once, in the order of launches. Waits even when nothing was sampled: others may read its blocks next.
        """
        if self.retired is not None:
            self.retired.synchronize()
        samples: dict[int, tuple[SampledToken, ...]] = {}
        if self.inputs is None or self.sampled is None:
            return StepResult(self.step, samples)
        wanted = [entry.num_logprobs for entry in self.inputs.samples for _ in range(entry.num_samples)]
        tokens = self.sampled.read(wanted)
        at = 0
        for entry in self.inputs.samples:
            samples[entry.seq_id] = tuple(tokens[at : at + entry.num_samples])
            self.rows.note_result(entry, tokens[at].token_id)
            at += entry.num_samples
        return StepResult(self.step, samples)


class ModelRunner:
    """Runs batches in the order given. Not thread-safe."""

    def __init__(self, model: Llama, cache: KVCache, rows: InputBatch, kernels: Kernels) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._kernels = kernels
        self._views = list(cache.layer_views)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Apply the batch's changes and start its work."""
        self._rows.apply(batch)
        self._cache.run_copies(batch.copies, self._kernels)
        if not batch.chunks:
            return self._pending(batch, None, None)
        inputs = self._rows.build(batch.chunks)
        if inputs.fresh_blocks is not None:
            self._cache.clear(inputs.fresh_blocks)
        logits = self.forward(inputs)
        if not inputs.samples:
            return self._pending(batch, None, None)
        sampled = sample(logits, inputs.sampling, self._kernels)
        self._rows.note_launched(inputs, sampled.token_ids)
        return self._pending(batch, inputs, sampled)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [R, vocab_size] of the rows that sample."""
        key_view = self._views[0][0]
        plans = {
            window: self._kernels.plan_attention(inputs.sequences, key_view, window) for window in self._model.windows
        }
        forward_inputs = ForwardInputs(
            inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.sample_rows, plans
        )
        return self._model.forward(forward_inputs, self._views)

    def _pending(self, batch: Batch, inputs: StepInputs | None, sampled: Sampled | None) -> PendingStep:
        retired = None
        if self._cache.tensor.is_cuda:
            retired = torch.cuda.Event()  # type: ignore[no-untyped-call]
            retired.record()
        return PendingStep(batch.step, self._rows, inputs, sampled, retired)
