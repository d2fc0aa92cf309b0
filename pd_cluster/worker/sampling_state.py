"""Each live sequence's sampling settings, as arrays over rows, and the inputs that one step's sampler needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd_kernels.values import Draws, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.logits_stages.stage import LogitsStage
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampler's inputs for R logits rows."""

    num_logprobs: int  # -1: no row asks for logprobs
    changes: tuple[tuple[LogitsStage, Any], ...]  # stages that change the logits, in order, with their inputs
    draws: Draws | None  # None only in GREEDY and DEFERRED
    failures: dict[int, str] = field(default_factory=dict)  # rows that cannot go on, with the reason


GREEDY = SamplingInputs(-1, (), None)  # every row takes its best token, and nothing else is asked for
DEFERRED = SamplingInputs(-1, (), None)  # stands for inputs that need the tokens of the step before


class SamplingState:
    """The sampling settings of the live sequences, as arrays over rows.

    A row's entries are valid from `start` to the next `start` of the same row.
    """

    def __init__(self, num_rows: int, vocab_size: int, stages: Sequence[LogitsStage], host_buffer: HostBuffer) -> None:
        self._vocab_size = vocab_size
        self._move = host_buffer.move
        self._stages = [(stage, np.zeros(num_rows, bool)) for stage in stages]  # each with its active rows
        self._late_stages = [(stage, active) for stage, active in self._stages if stage.is_late]
        self._changed = np.zeros(num_rows, bool)  # any stage is active
        self._plain = np.ones(num_rows, bool)  # nothing but temperature and seed is asked for
        self._limited = np.zeros(num_rows, bool)  # top k, top p or min p
        self._temperature = np.zeros(num_rows, np.float32)  # 0: greedy
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.int64)
        self._sample_seeds: list[tuple[int, ...]] = [()] * num_rows
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # alternatives that the row wants; -1: no logprobs at all

    def start(self, row: int, start: SequenceStart) -> None:
        """Set the entries of `row` for a new sequence."""
        params = start.sampling
        self._temperature[row] = 0 if params.greedy else params.temperature
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[row], self._min_p[row] = params.top_p, params.min_p
        is_limited = self._top_k[row] < self._vocab_size or params.top_p < 1 or params.min_p > 0
        self._limited[row] = is_limited and not params.greedy
        self._seeds[row] = _wrap_64(start.seed)
        self._sample_seeds[row] = tuple(map(_wrap_64, start.num_sample_seeds))
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._changed[row] = False
        for stage, active in self._stages:
            active[row] = stage.start(row, start)
            self._changed[row] |= active[row]
        self._plain[row] = not (self._limited[row] or self._changed[row] or params.logprobs is not None)

    def plain_draws(self, rows: Ints) -> tuple[npt.NDArray[np.float32], Ints] | None:
        """Temperatures (0: greedy) and seeds of `rows` with one sample each; None if any row asks for more."""
        return (self._temperature[rows], self._seeds[rows]) if self._plain[rows].all() else None

    def prepare(self, rows: Ints, lengths: Ints, num_samples: Sequence[int]) -> SamplingInputs:
        """Make the sampler's inputs for logits of `rows`; `lengths`: tokens of each sequence before the sampled one.

        A row with several samples occurs once for each, in neighbouring places. The i-th uses the i-th sample seed.
        """
        if self._plain[rows].all() and not self._temperature[rows].any():
            return GREEDY
        changes = [
            (stage, inputs)
            for stage, active in self._stages
            if active[rows].any() and (inputs := stage.prepare(rows, lengths)) is not None
        ]
        return SamplingInputs(
            num_logprobs=int(self.num_logprobs[rows].max()),
            changes=tuple(changes),
            draws=self._prepare_draws(rows, lengths, num_samples),
            failures={row: why for stage, _ in self._late_stages for row, why in stage.take_failures().items()},
        )

    def are_late(self, rows: Ints) -> npt.NDArray[np.bool_] | None:
        """Which of `rows` have an active late stage; None: there is no late stage."""
        if not self._late_stages:
            return None
        are_late: npt.NDArray[np.bool_] = np.logical_or.reduce([active[rows] for _, active in self._late_stages])
        return are_late

    def note_sampled(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Tell the stages that each of `rows` (distinct) continues with its token.

        `token_ids`: int64 [len(rows)], on the device.
        """
        if self._changed[rows].any():
            for stage, active in self._stages:
                if not stage.is_late and active[rows].any():
                    stage.note(rows, token_ids)

    def note_read(self, rows: Ints, token_ids: Ints) -> None:
        """Tell the late stages the same tokens (int64 [len(rows)]), when they are in host memory."""
        for stage, active in self._late_stages:
            if active[rows].any():
                stage.note(rows, torch.from_numpy(token_ids))

    def _resolve_seeds(self, rows: Ints, num_samples: Sequence[int]) -> Ints:
        seeds = self._seeds[rows]
        if any(count > 1 for count in num_samples):
            at = 0
            for count in num_samples:
                if count > 1:
                    seeds[at : at + count] = self._sample_seeds[rows[at]]
                at += count
        return seeds

    def _prepare_draws(self, rows: Ints, lengths: Ints, num_samples: Sequence[int]) -> Draws:
        limits = None
        if len(found := np.flatnonzero(self._limited[rows])):
            bounds = (values[rows[found]] for values in (self._top_k, self._top_p, self._min_p))
            limits = Limits(*map(self._move, (found, *bounds)))
        seeds = self._resolve_seeds(rows, num_samples)
        return Draws(self._move(self._temperature[rows]), self._move(seeds), self._move(lengths), limits)


def _wrap_64(seed: int) -> int:
    """The low 64 bits of any integer, as a signed number."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
