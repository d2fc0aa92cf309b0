"""Where the inputs of a captured draw lie: one array for all sizes of draws, with a part for each input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import Ints

# Tokens with a bias or a ban in one step: one list of OpenAI's clients (300), and for each row the end tokens of a
# model and some more. A step with more is drawn without a graph
ENTRIES, ENTRIES_PER_ROW = 512, 16


class DrawPlaces(NamedTuple):
    """The inputs of a captured draw, as numpy views on the host and torch views on the device. M rows, E entries.

    A row that the draw must leave alone is like padding: it has temperature 0, no change, and the rows of padding.
    """

    owners: Any  # int64 [M]: the row in InputBatch that continues with the drawn token
    counted: Any  # int64 [M]: the row of the penalties' tables that notes the drawn token
    positions: Any  # int64 [M]: see Draws, as for `seeds` and `temperature`
    seeds: Any  # int64 [M]
    temperature: Any  # float32 [M]
    top_k: Any  # int64 [M]: see Limits, as for `top_p` and `min_p`
    top_p: Any  # float32 [M]
    min_p: Any  # float32 [M]
    settings: Any  # float32 [M, 3]: repetition, presence and frequency penalty
    entries: Any  # int64 [E]: row * vocabulary + token; entries behind the last one have the amount 0
    amounts: Any  # float32 [E], added to the logits; -inf bans the token

    def first(self, num_rows: int) -> DrawPlaces:
        """The inputs of the first rows, and all entries."""
        *rows, entries, amounts = self
        return DrawPlaces._make([*(part[:num_rows] for part in rows), entries, amounts])


class DrawLayout:
    """The sizes of the array. The inputs of limits come first, those of changes to the logits behind them."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        """`num_rows`: M, the rows of InputBatch; row M is that of padding."""
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_entries = ENTRIES + ENTRIES_PER_ROW * num_rows
        self.length = 8 * num_rows + self.num_entries + self.num_entries // 2  # of the array, in int64
        self._padding = np.zeros(self.length, np.int64)
        places = self.places(self._padding, np.float32)
        places.owners[:] = places.counted[:] = num_rows
        places.top_k[:], places.top_p[:] = vocab_size, 1
        places.settings[:, 0] = 1
        # Spread, because additions to one place wait for each other
        places.entries[:] = np.arange(self.num_entries) % vocab_size

    def places(self, fields: Any, float32: Any) -> DrawPlaces:
        """Divide `fields` (int64 [length]). `float32`: numpy's or torch's type."""
        rows, ends = self.num_rows, 8 * self.num_rows + self.num_entries
        owners, counted, positions, seeds, top_k = fields[: 5 * rows].reshape(5, -1)
        floats = fields[5 * rows : 8 * rows].view(float32)
        temperature, top_p, min_p = floats[: 3 * rows].reshape(3, -1)
        settings = floats[3 * rows :].reshape(-1, 3)
        entries, amounts = fields[8 * rows : ends], fields[ends:].view(float32)
        return DrawPlaces(
            owners, counted, positions, seeds, temperature, top_k, top_p, min_p, settings, entries, amounts
        )

    def padded(self) -> Ints:
        """An array of padding alone, in host memory."""
        return self._padding.copy()

    def used(self, fields: Ints, *, has_changes: bool) -> Ints:
        """The part of the array that a draw reads."""
        return fields if has_changes else fields[: 8 * self.num_rows]


class DrawVariant(NamedTuple):
    """What a captured draw computes besides temperature and limits."""

    has_changes: bool = False  # penalties, biases and bans
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class CapturedDraw:
    """The inputs of a captured draw, for a step's logits rows."""

    variant: DrawVariant
    fields: torch.Tensor  # int64: `DrawLayout.used`, on the device once the host buffer was flushed


class DrawChanges:
    """The changes to the logits of P rows, as stages write them into the places of a captured draw."""

    def __init__(self, places: DrawPlaces, at: Ints, vocab_size: int) -> None:
        """`at` int64 [P]: the logits rows of the stages' rows."""
        self._places = places
        self._at = at
        self._vocab_size = vocab_size
        self._num_entries = 0
        self._has_penalties = False

    @property
    def is_empty(self) -> bool:
        return not (self._num_entries or self._has_penalties)

    def penalize(self, chosen: Ints, rows: Ints, settings: Any) -> None:
        """Penalize the logits of `chosen` (int64 [C] into P). `rows`: of the tables; `settings`: float32 [C, 3]."""
        at = self._at[chosen]
        self._places.counted[at], self._places.settings[at] = rows, settings
        self._has_penalties = True

    def add(self, chosen: Ints, tokens: Ints, amounts: Any) -> bool:
        """Add `amounts` (float32 [N]) to the logits of `tokens` in the rows `chosen` (int64 [N] into P).

        Returns False if there is no room for them.
        """
        start, end = self._num_entries, self._num_entries + len(tokens)
        if end > len(self._places.entries):
            return False
        self._places.entries[start:end] = self._at[chosen] * self._vocab_size + tokens
        self._places.amounts[start:end] = amounts
        self._num_entries = end
        return True
