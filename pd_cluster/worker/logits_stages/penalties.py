"""The logits stage for penalties on tokens that a sequence has seen.

The first request with a penalty allocates the tables over rows and vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.logits_stages.stage import LogitsStage
from pd_kernels import sampling

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """One step's penalties, for P of its R logits rows. A part is None when no row asks for it."""

    rows: torch.Tensor | slice  # int64 [P] into R
    repetition: tuple[torch.Tensor, torch.Tensor] | None  # seen bool [P, V], penalty float32 [P]
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # int32 [P, V], presence, frequency float32 [P]


class Penalties(LogitsStage):
    """Repetition, presence and frequency penalties.

    The tables are on the device, so that a step can be launched before the previous step's tokens are read.
    """

    def __init__(self, context: StageContext) -> None:
        num_rows = context.num_rows
        self._shape = (num_rows, context.vocab_size)
        self._device = context.device
        self._settings = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))  # repetition, presence, frequency
        self._active = np.zeros(num_rows, bool)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # seen bool, output counts int32, [rows, V]

    def start(self, row: int, start: SequenceStart) -> bool:
        params = start.sampling
        self._settings[row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._active[row] = tuple(self._settings[row]) != (1, 0, 0)
        if self._active[row]:
            if self._tables is None:
                self._tables = (
                    torch.zeros(self._shape, dtype=torch.bool, device=self._device),
                    torch.zeros(self._shape, dtype=torch.int32, device=self._device),
                )
            tokens = np.array(start.token_ids, np.int64)
            counts = np.bincount(tokens[start.num_prompt_tokens :], minlength=self._shape[1]).astype(np.int32)
            seen, table = self._tables
            seen[row] = False
            seen[row, self._send(tokens)] = True
            table[row] = self._send(counts)
        return bool(self._active[row])

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        found = np.flatnonzero(self._active[rows])
        if len(found) and self._tables is not None:
            seen, counts = self._tables
            index = self._send(rows[found]), token_ids[self._send(found)]
            seen[index] = True
            counts[index] += 1

    def prepare(self, rows: Ints, lengths: Ints) -> PenaltyInputs | None:
        found = np.flatnonzero(self._active[rows])
        if not len(found) or self._tables is None:
            return None
        chosen = rows[found]
        settings = self._send(self._settings[chosen])
        index, (seen, counts) = self._send(chosen), self._tables
        repeated, counted = self._settings[chosen, 0] != 1, self._settings[chosen, 1:] != 0
        return PenaltyInputs(
            rows=slice(None) if len(found) == len(rows) else self._send(found),
            repetition=(seen[index], settings[:, 0]) if repeated.any() else None,
            counts=(counts[index], settings[:, 1], settings[:, 2]) if counted.any() else None,
        )

    def apply(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        part = logits[inputs.rows]  # a view when the rows are a slice
        if inputs.repetition is not None:
            sampling.penalize_repetition(part, *inputs.repetition)
        if inputs.counts is not None:
            sampling.penalize_counts(part, *inputs.counts)
        if not isinstance(inputs.rows, slice):
            logits[inputs.rows] = part

    def _send(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Copy to the device, behind the steps under way and without waiting for them.

        CUDA has read pageable memory by the time that the call returns.
        """
        return torch.from_numpy(array).to(self._device, non_blocking=True)
