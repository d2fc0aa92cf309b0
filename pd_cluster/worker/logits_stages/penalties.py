"""The logits stage for penalties on tokens that a sequence has seen.

The first request with a penalty allocates the tables over rows and vocabulary, or the capture of draws does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.logits_stages.stage import CapturedStage
from pd_cluster.worker.verification import NO_TOKEN

if TYPE_CHECKING:
    import numpy.typing as npt

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints

NEUTRAL = (1, 0, 0)  # repetition, presence and frequency penalty that change nothing


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """One step's penalties, for its R logits rows."""

    settings: torch.Tensor  # float32 [R, 3]: repetition, presence, frequency
    rows: torch.Tensor  # int64 [R], of the tables
    drafted: DraftedRows | None = None  # None: of the tables as they are


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Rows of the tables to copy, A of them, and the D drafts to note in the copies. `PenaltyInputs.rows`: into A."""

    rows: torch.Tensor  # int64 [A]
    places: torch.Tensor  # int64 [D] into A
    tokens: torch.Tensor  # int64 [D]


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """The tokens of each row, on the device. The last row belongs to no sequence."""

    seen: torch.Tensor  # bool [rows + 1, V]: tokens of prompt and output
    counts: torch.Tensor  # int32 [rows + 1, V]: occurrences in the output

    @classmethod
    def make(cls, num_rows: int, vocab_size: int, device: torch.device) -> PenaltyTables:
        shape = (num_rows + 1, vocab_size)
        seen, counts = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.bool, torch.int32))
        return cls(seen, counts)

    def note(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one token (int64 [R]) of each of `rows` (int64 [R]). A row may occur several times."""
        places = rows * self.seen.shape[1] + token_ids
        self.seen.view(-1).index_fill_(0, places, True)
        self.counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def with_drafts(self, drafted: DraftedRows) -> PenaltyTables:
        """Copies of rows, with drafts noted. These tables stay as they are."""
        copies = PenaltyTables(self.seen[drafted.rows], self.counts[drafted.rows])
        copies.note(drafted.places, drafted.tokens)
        return copies


class Penalties(CapturedStage):
    """Repetition, presence and frequency penalties.

    The tables are on the device, so that a step can be launched before the previous step's tokens are read.
    """

    def __init__(self, context: StageContext) -> None:
        self._sizes = context.num_rows, context.vocab_size, context.device
        self._device = context.device
        self._move = context.move
        self._penalize = context.kernels.penalize
        self._settings = np.tile(np.array(NEUTRAL, np.float32), (context.num_rows, 1))
        self._active = np.zeros(context.num_rows, bool)
        self._tables: PenaltyTables | None = None

    def tables(self) -> PenaltyTables:
        """The tables, which the first call allocates."""
        if self._tables is None:
            self._tables = PenaltyTables.make(*self._sizes)
        return self._tables

    def start(self, row: int, start: SequenceStart) -> bool:
        params = start.sampling
        self._settings[row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._active[row] = tuple(self._settings[row]) != NEUTRAL
        if self._active[row]:
            tokens, tables = np.array(start.token_ids, np.int64), self.tables()
            counts = np.bincount(tokens[start.num_prompt_tokens :], minlength=self._sizes[1]).astype(np.int32)
            tables.seen[row] = False
            tables.seen[row, self._send(tokens)] = True
            tables.counts[row] = self._send(counts)
        return bool(self._active[row])

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        found = np.flatnonzero(self._active[rows])
        if len(found):
            self.tables().note(self._send(rows[found]), token_ids[self._send(found)])

    def prepare(self, rows: Ints, lengths: Ints) -> PenaltyInputs | None:
        if not self._active[rows].any():
            return None
        return PenaltyInputs(self._move(self._settings[rows]), self._move(rows))

    def prepare_behind(self, rows: Ints, lengths: Ints, before: Ints) -> PenaltyInputs | None:
        active = self._active[rows]
        if not active.any():
            return None
        chosen = np.flatnonzero(active)
        places, columns = np.nonzero(before[chosen] != NO_TOKEN)
        tokens = before[chosen[places], columns]
        drafted = DraftedRows(*map(self._move, (rows[chosen], places, tokens)))
        copies = np.maximum(np.cumsum(active) - 1, 0)  # a row without penalties reads any
        return PenaltyInputs(self._move(self._settings[rows]), self._move(copies), drafted)

    def apply(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        tables = self.tables()
        if inputs.drafted is not None:
            tables = tables.with_drafts(inputs.drafted)
        self._penalize(logits, tables.seen, tables.counts, inputs.settings, inputs.rows)

    def fold(self, rows: Ints, lengths: Ints, changes: DrawChanges) -> bool:
        found = np.flatnonzero(self._active[rows])
        changes.penalize(found, rows[found], self._settings[rows[found]])
        return True

    def _send(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Copy to the device, after the steps under way and without waiting for them.

        CUDA has read pageable memory by the time that the call returns.
        """
        return torch.from_numpy(array).to(self._device, non_blocking=True)
