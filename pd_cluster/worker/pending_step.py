"""A launched step and the reading of its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.scheduling.batch import StepResult

if TYPE_CHECKING:
    import torch

    from pd_cluster.worker.input_batch import InputBatch, Samples
    from pd_cluster.worker.sampler import Sampled
    from pd_connectors.protocol.messages import SampledToken


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A Pending of one device."""

    step: int
    rows: InputBatch
    samples: Samples | None
    sampled: Sampled | None  # in host memory once `retired` has happened
    retired: torch.cuda.Event | None  # None: there is no device, or nothing to wait for

    @property
    def is_over(self) -> bool:
        return self.retired is None or bool(self.retired.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Waits even when nothing was sampled: others may read the step's blocks next."""
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
        found: dict[int, tuple[SampledToken, ...]] = {
            seq_id: tuple(tokens[end - count : end])
            for seq_id, count, end in zip(samples.seq_ids, samples.counts, ends.tolist(), strict=True)
        }
        return StepResult(self.step, found)
