"""Which tokens each sequence has seen: tables over rows and vocabulary, made with the first penalty that needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_kernels import sampling

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class Penalties:
    """One step's penalties, for P of its R logits rows. A part is None when none of them asks for it."""

    rows: torch.Tensor | slice  # int64 [P] into R
    repetition: tuple[torch.Tensor, torch.Tensor] | None  # seen bool [P, V], penalty float32 [P]
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # int32 [P, V], presence, frequency float32 [P]

    def apply(self, logits: torch.Tensor) -> None:
        """In place on `logits` [R, V]."""
        part = logits[self.rows]  # a view when the rows are a slice
        if self.repetition is not None:
            sampling.penalize_repetition(part, *self.repetition)
        if self.counts is not None:
            sampling.penalize_counts(part, *self.counts)
        if not isinstance(self.rows, slice):
            logits[self.rows] = part


class PenaltyTables:
    """Kept up to date on the device, so that a step can be launched before the previous one's tokens are read."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._settings = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))  # repetition, presence, frequency
        self._active = np.zeros(num_rows, bool)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # seen bool, output counts int32, [rows, V]

    def start(self, row: int, start: SequenceStart) -> bool:
        """Set a row from scratch; whether it has any penalty."""
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

    def count(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Each of `rows` (distinct) has sampled one more token: `token_ids` int64 [len(rows)], on the device."""
        found = np.flatnonzero(self._active[rows])
        if len(found) and self._tables is not None:
            seen, counts = self._tables
            index = self._send(rows[found]), token_ids[self._send(found)]
            seen[index] = True
            counts[index] += 1

    def prepare(self, rows: Ints) -> Penalties | None:
        """For logits of `rows`."""
        found = np.flatnonzero(self._active[rows])
        if not len(found) or self._tables is None:
            return None
        chosen = rows[found]
        settings = self._send(self._settings[chosen])
        index, (seen, counts) = self._send(chosen), self._tables
        repeated, counted = self._settings[chosen, 0] != 1, self._settings[chosen, 1:] != 0
        return Penalties(
            rows=slice(None) if len(found) == len(rows) else self._send(found),
            repetition=(seen[index], settings[:, 0]) if repeated.any() else None,
            counts=(counts[index], settings[:, 1], settings[:, 2]) if counted.any() else None,
        )

    def _send(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """To the device, behind the steps under way, without waiting for them: of pageable memory CUDA takes a copy
        before the call returns."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)
