"""Tokens whose logits a request changes: those that it biases, and those that it bans for a while.

A list is converted once, when the first of the request's sequences enters a row, and the rows of that request share it:
a list of a whole vocabulary took 120 ms of Python for each row and step. Short lists of a step go to the device as one
array of entries. A long list stays on the device as a vector over the vocabulary, which costs a step one addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from pd_kernels.values import Ints

    Floats = npt.NDArray[np.float32]

LONG_LIST = 512  # entries; OpenAI's clients may send 300


@dataclass(frozen=True, slots=True)
class Entries:
    """Of the short lists of one step, on the device."""

    rows: torch.Tensor  # int64 [E] into the step's logits rows
    tokens: torch.Tensor  # int64 [E]
    amounts: torch.Tensor  # float32 [E]


@dataclass(frozen=True, slots=True)
class Shift:
    """A long list in one step: `amounts` (float32 [V]) is added to each of `rows` of the step's logits."""

    rows: torch.Tensor | slice  # int64 [S]
    amounts: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        """In place on `logits` float32 [R, V]."""
        logits[self.rows] += self.amounts


@dataclass(frozen=True, slots=True, eq=False)
class TokenList:
    """What one request adds to the logits of some tokens."""

    tokens: Ints  # [N], each once
    amounts: Floats  # [N]
    vector: torch.Tensor | None  # float32 [V] on the device: the same, of a long list

    @classmethod
    def make(cls, tokens: Ints, amounts: Floats, vocab_size: int, device: torch.device) -> TokenList:
        """The copy to the device goes behind the steps under way and is not waited for."""
        vector = None
        if len(tokens) > LONG_LIST:
            dense = np.zeros(vocab_size, np.float32)
            dense[tokens] = amounts
            vector = torch.from_numpy(dense).to(device, non_blocking=True)
        return cls(tokens, amounts, vector)


def entries_of(
    lists: Iterable[tuple[int, TokenList]], move: Callable[[npt.NDArray[np.generic]], torch.Tensor]
) -> Entries | None:
    """Of the short ones among (row of the step's logits, its list). None: there are none."""
    short = [(row, one) for row, one in lists if one.vector is None]
    if not short:
        return None
    rows = np.repeat([row for row, _ in short], [len(one.tokens) for _, one in short])
    tokens, amounts = (np.concatenate(part) for part in zip(*((o.tokens, o.amounts) for _, o in short), strict=True))
    return Entries(move(rows), move(tokens), move(amounts))


def shifts_of(
    lists: Iterable[tuple[int, TokenList]], move: Callable[[npt.NDArray[np.generic]], torch.Tensor]
) -> tuple[Shift, ...]:
    """Of the long ones, one for all rows that share a list."""
    rows_of: dict[TokenList, list[int]] = {}
    for row, one in lists:
        if one.vector is not None:
            rows_of.setdefault(one, []).append(row)
    return tuple(Shift(_index(rows, move), one.vector) for one, rows in rows_of.items() if one.vector is not None)


def _index(rows: Sequence[int], move: Callable[[npt.NDArray[np.generic]], torch.Tensor]) -> torch.Tensor | slice:
    """Rows in ascending order; a slice, which copies nothing, when they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return move(np.array(rows))
