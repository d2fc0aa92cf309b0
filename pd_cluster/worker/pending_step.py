"""A launched step and the reading of its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.scheduling.batch import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_cluster.worker.input_batch import Samples
    from pd_cluster.worker.sampler import Sampled
    from pd_connectors.protocol.messages import SampledToken
    from pd_kernels.values import Ints


@dataclass(slots=True)
class PendingStep:
    """The Pending of a step on one device."""

    step: int
    samples: Samples | None
    note_result: Callable[[Samples, Ints], None]  # receives the sampled tokens (int64 [len(samples)])
    is_launched: bool = False  # False: the step is drawn when the result of the step before is read
    sampled: Sampled | None = None  # in host memory once `retired` has happened
    retired: torch.cuda.Event | None = None  # None: the device is a CPU, so the launch was all of the work
    failures: dict[int, str] = field(default_factory=dict)  # see StepResult

    @property
    def is_over(self) -> bool:
        return self.is_launched and (self.retired is None or bool(self.retired.query()))  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """See Pending. Waits even when nothing was sampled, because others may read the step's blocks next."""
        assert self.is_launched, "results are read in the order of launches"
        if self.retired is not None:
            self.retired.synchronize()
        samples, sampled = self.samples, self.sampled
        if samples is None or sampled is None:
            return StepResult(self.step, {})
        token_ids = sampled.token_ids.numpy()
        if samples.firsts is None:
            tokens = sampled.read(samples.num_logprobs.tolist())
            self.note_result(samples, token_ids)
            return StepResult(
                self.step,
                {seq_id: (token,) for seq_id, token in zip(samples.seq_ids, tokens, strict=True)},
                failures=self.failures,
            )
        counts = np.array(samples.counts)
        tokens = sampled.read(np.repeat(samples.num_logprobs, counts).tolist())
        ends = np.cumsum(counts)
        self.note_result(samples, token_ids[ends - counts])
        runs: dict[int, tuple[SampledToken, ...]] = {}
        firsts: dict[int, tuple[SampledToken, ...]] = {}
        for seq_id, count, end in zip(samples.seq_ids, samples.counts, ends.tolist(), strict=True):
            (runs if count == 1 else firsts)[seq_id] = tuple(tokens[end - count : end])
        return StepResult(self.step, runs, firsts, self.failures)
