"""One forward pass over a packed batch: inputs, attention plans, logits, samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.llama import ForwardInputs, Llama, Tail
from pd_cluster.scheduling.batch import Batch, StepResult
from pd_cluster.worker.sampler import Sampled, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.worker.cuda_graphs.decode_graphs import DecodeGraphs, ReplayOutputs
    from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.input_batch import InputBatch, ReplayInputs, Samples, StepInputs
    from pd_cluster.worker.kv_cache import KVCache
    from pd_connectors.protocol.messages import SampledToken
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose work is on its way to the device; a later one may be launched before this one's result is read."""

    step: int
    rows: InputBatch
    samples: Samples | None
    sampled: Sampled | None  # in host memory, once retired
    retired: torch.cuda.Event | None  # None: there is no device, or nothing to wait for

    @property
    def is_over(self) -> bool:
        """Whether `result` has nothing to wait for."""
        return self.retired is None or bool(self.retired.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait until all the step's work on the device is done and read what was sampled.

        Call once, in the order of launches. Waits even when nothing was sampled: others may read its blocks next.
        """
        if self.retired is not None:
            self.retired.synchronize()
        samples, sampled = self.samples, self.sampled
        if samples is None or sampled is None:
            return StepResult(self.step, {})
        token_ids = sampled.token_ids.numpy()
        if samples.firsts is None:
            tokens = sampled.read(samples.num_logprobs.tolist())
            self.rows.note_result(samples, token_ids)
            return StepResult(
                self.step, {seq_id: (token,) for seq_id, token in zip(samples.seq_ids, tokens, strict=True)}
            )
        counts = np.array(samples.counts)
        tokens = sampled.read(np.repeat(samples.num_logprobs, counts).tolist())
        ends = np.cumsum(counts)
        self.rows.note_result(samples, token_ids[ends - counts])
        runs: dict[int, tuple[SampledToken, ...]] = {}
        firsts: dict[int, tuple[SampledToken, ...]] = {}
        for seq_id, count, end in zip(samples.seq_ids, samples.counts, ends.tolist(), strict=True):
            (runs if count == 1 else firsts)[seq_id] = tuple(tokens[end - count : end])
        return StepResult(self.step, runs, firsts)


class ModelRunner:
    """Runs batches in the order given. Not thread-safe. Steps that `decodes` or `steps` can replay are replayed."""

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        rows: InputBatch,
        staging: HostBuffer,
        kernels: Kernels,
        decodes: DecodeGraphs | None = None,
        steps: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._staging = staging
        self._kernels = kernels
        self._decodes = decodes
        self._steps = steps
        self._views = list(cache.layer_views)
        self._key_views = cache.key_views
        self.watcher: Callable[[torch.Tensor], None] | None = None  # is shown every step's logits [R, vocab_size]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Apply the batch's changes and start its work."""
        self._staging.begin()
        self._rows.apply(batch)
        self._cache.run_copies(batch.copies, self._kernels)
        chunks, decodes, steps = batch.chunks, self._decodes, self._steps
        if not chunks:
            return self._pending(batch, None, None)
        if decodes is not None and (bucket := decodes.bucket_for(chunks)):
            return self._replay(batch, decodes.build(chunks, bucket), decodes.replay)
        if steps is not None and (size := steps.size_for(chunks)):
            return self._replay(batch, steps.build(chunks, size), partial(steps.replay, size=size))
        return self._compute(batch)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [R, vocab_size] of the samples. Its inputs are on the device."""
        plan, key_views, tail = self._kernels.plan_attention, self._key_views, None
        plans = {window: plan(inputs.sequences, key_views[window], window) for window in self._model.windows}
        if inputs.tail is not None:
            window = self._model.last_window
            tail = Tail(inputs.tail.rows, plan(inputs.tail.sequences, key_views[window], window))
        step = ForwardInputs(inputs.token_ids, inputs.positions, inputs.slot_mapping, plans, tail)
        logits = self._model.forward(step, self._views)
        return logits if inputs.samples.owners is None else logits[inputs.samples.owners]

    def _compute(self, batch: Batch) -> PendingStep:
        rows, inputs = self._rows, self._rows.build(batch.chunks)
        self._staging.flush()
        rows.fill_late(inputs)
        if inputs.fresh_blocks is not None:
            self._cache.clear(inputs.fresh_blocks)
        logits = self.forward(inputs)
        if not len(inputs.samples):
            return self._pending(batch, None, None)
        if self.watcher is not None:
            self.watcher(logits)
        sampled = sample(logits, inputs.sampling, self._kernels)
        rows.note_launched(inputs.samples, sampled.token_ids)
        return self._pending(batch, inputs.samples, sampled)

    def _replay(
        self, batch: Batch, inputs: ReplayInputs, replay: Callable[[ReplayInputs], ReplayOutputs]
    ) -> PendingStep:
        """No blocks are cleared: kernels that can be captured use nothing past a sequence's length."""
        self._staging.flush()
        outputs = replay(inputs)
        if not len(inputs.samples):
            return self._pending(batch, None, None)
        if self.watcher is not None:
            self.watcher(outputs.logits)
        if inputs.sampling is None:
            sampled = Sampled(outputs.token_ids)
        else:
            sampled = sample(outputs.logits, inputs.sampling, self._kernels)
        self._rows.note_launched(inputs.samples, sampled.token_ids, is_written=inputs.sampling is None)
        return self._pending(batch, inputs.samples, sampled)

    def _pending(self, batch: Batch, samples: Samples | None, sampled: Sampled | None) -> PendingStep:
        if sampled is not None:
            sampled = sampled.to_host()
        retired = None
        if self._cache.tensors[0].is_cuda:
            retired = torch.cuda.Event()  # type: ignore[no-untyped-call]
            retired.record()
        return PendingStep(batch.step, self._rows, samples, sampled, retired)
