"""Where the inputs of a captured draw lie: one array for all sizes of draws, with a part for each input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from pd_cluster.errors import PdError
    from pd_kernels.values import Ints

    Mask = npt.NDArray[np.int32]  # [W]: see TokenMasks

# Tokens with a bias or a ban in one step: one list of OpenAI's clients (300), and for each row the end tokens of a
# model and some more. A step with more is drawn without a graph
ENTRIES, ENTRIES_PER_ROW = 512, 16
_WORDS = 9  # int64 of a row, without its entries


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
    masks: Any  # int64 [M]: see TokenMasks.mask_of_row
    top_p: Any  # float32 [M]
    min_p: Any  # float32 [M]
    settings: Any  # float32 [M, 3]: repetition, presence and frequency penalty
    entries: Any  # int64 [E]: row * vocabulary + token; entries after the last one have the amount 0
    amounts: Any  # float32 [E], added to the logits; -inf bans the token

    def first(self, num_rows: int) -> DrawPlaces:
        """The inputs of the first rows, and all entries."""
        *rows, entries, amounts = self
        return DrawPlaces._make([*(part[:num_rows] for part in rows), entries, amounts])


class DrawLayout:
    """The sizes of the array. The inputs of limits come first, those of changes to the logits after them."""

    def __init__(self, num_rows: int, vocab_size: int, padding_row: int) -> None:
        """`num_rows`: M, the most rows of logits. `padding_row`: of InputBatch."""
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_entries = ENTRIES + ENTRIES_PER_ROW * num_rows
        self.length = _WORDS * num_rows + self.num_entries + self.num_entries // 2  # of the array, in int64
        self._padding = np.zeros(self.length, np.int64)
        places = self.places(self._padding, np.float32)
        places.owners[:] = places.counted[:] = padding_row
        places.top_k[:], places.top_p[:] = vocab_size, 1
        places.settings[:, 0] = 1
        places.masks[:] = -1
        # Spread, because additions to one place wait for each other
        places.entries[:] = np.arange(self.num_entries) % vocab_size

    def places(self, fields: Any, float32: Any) -> DrawPlaces:
        """Divide `fields` (int64 [length]). `float32`: numpy's or torch's type."""
        rows, start = self.num_rows, _WORDS * self.num_rows
        ends = start + self.num_entries
        owners, counted, positions, seeds, top_k, masks = fields[: 6 * rows].reshape(6, -1)
        floats = fields[6 * rows : start].view(float32)
        temperature, top_p, min_p = floats[: 3 * rows].reshape(3, -1)
        settings = floats[3 * rows :].reshape(-1, 3)
        entries, amounts = fields[start:ends], fields[ends:].view(float32)
        return DrawPlaces(
            owners, counted, positions, seeds, temperature, top_k, masks, top_p, min_p, settings, entries, amounts
        )

    def padded(self) -> Ints:
        """An array of padding alone, in host memory."""
        return self._padding.copy()

    def used(self, fields: Ints, *, has_changes: bool) -> Ints:
        """The part of the array that a draw reads."""
        return fields if has_changes else fields[: _WORDS * self.num_rows]


class DrawVariant(NamedTuple):
    """What a captured draw computes besides temperature and limits."""

    has_changes: bool = False  # penalties, biases and bans
    has_logprobs: bool = False
    has_masks: bool = False  # a row may take some tokens only


@dataclass(frozen=True, slots=True)
class CapturedDraw:
    """The inputs of a captured draw, for a step's logits rows."""

    variant: DrawVariant
    fields: torch.Tensor  # int64: `DrawLayout.used`, on the device once the host buffer was flushed
    masks: torch.Tensor | None  # int32 [N, W]: the same, see TokenMasks; None: no row has a mask
    failures: dict[int, PdError]  # rows that cannot go on, with the reason


def mask_words(is_allowed: npt.NDArray[np.bool_]) -> Mask:
    """The mask of the tokens that `is_allowed` [V] names."""
    padded = np.zeros(-(-len(is_allowed) // 32) * 32, bool)
    padded[: len(is_allowed)] = is_allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def first_token(mask: Mask) -> Mask:
    """The mask of the first token of `mask` alone, if it has one."""
    words, first = mask.view(np.uint32), np.zeros_like(mask)
    for at in np.flatnonzero(words)[:1]:
        word = int(words[at])
        first.view(np.uint32)[at] = word & -word
    return first


class DrawChanges:
    """The changes to the logits of P rows, as stages write them into the places of a captured draw."""

    def __init__(self, places: DrawPlaces, at: Ints, vocab_size: int) -> None:
        """`at` int64 [P]: the logits rows of the stages' rows."""
        self._places = places
        self._at = at
        self._vocab_size = vocab_size
        self._num_entries = 0
        self._has_penalties = False
        self._masks: dict[int, Mask] = {}  # by logits row

    @property
    def is_empty(self) -> bool:
        """Whether no logit changes. A mask bans tokens in the draw itself."""
        return not (self._num_entries or self._has_penalties)

    def penalize(self, chosen: Ints, rows: Ints, settings: Any) -> None:
        """Penalize the logits of `chosen` (int64 [C] into P). `rows`: of the tables; `settings`: float32 [C, 3]."""
        at = self._at[chosen]
        self._places.counted[at], self._places.settings[at] = rows, settings
        self._has_penalties = True

    def mask(self, chosen: Sequence[int], masks: Sequence[Mask]) -> None:
        """Let the rows `chosen` (of P) take the tokens of `masks` (see TokenMasks) only.

        A row with a mask already takes what both allow. If they have nothing in common, it takes the first token of the
        new one. So do draws by launches: the stage of the first mask has set all tokens of the new one to -inf.
        """
        for at, mask in zip(self._at[chosen].tolist(), masks, strict=True):
            known = self._masks.get(at)
            both = mask if known is None else known & mask
            self._masks[at] = both if both.any() else first_token(mask)

    def take_masks(self) -> list[Mask]:
        """The masks of all rows. From now on the places refer to them."""
        self._places.masks[list(self._masks)] = np.arange(len(self._masks))
        return list(self._masks.values())

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
