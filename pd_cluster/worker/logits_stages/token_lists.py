"""Lists of tokens with the amounts that a request adds to their logits: biases, or -inf for banned tokens.

A list is converted once, when the first of the request's sequences enters a row, and the rows of that request share it:
a list of a whole vocabulary took 120 ms of Python for each row and step. The short lists of a step go to the device as
one array of entries. A long list stays on the device as a vector over the vocabulary, which costs a step one addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.worker.draw_places import DrawChanges
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints

    Floats = npt.NDArray[np.float32]

LONG_LIST = 512  # entries; OpenAI's clients may send 300


@dataclass(frozen=True, slots=True)
class Entries:
    """The short lists of one step, on the device."""

    rows: torch.Tensor  # int64 [E] into the step's logits rows
    tokens: torch.Tensor  # int64 [E]
    amounts: torch.Tensor  # float32 [E]


@dataclass(frozen=True, slots=True)
class Shift:
    """A long list in one step: `amounts` (float32 [V]) is added to each of `rows` of the step's logits."""

    rows: torch.Tensor | slice  # int64 [S]
    amounts: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        """Add the amounts to `logits` float32 [R, V], in place."""
        logits[self.rows] += self.amounts


@dataclass(frozen=True, slots=True, eq=False)
class TokenList:
    """The tokens of one request's list, and the amounts to add to their logits."""

    tokens: Ints  # [N], each once
    amounts: Floats  # [N]
    vector: torch.Tensor | None  # float32 [V] on the device: a long list's amounts

    @classmethod
    def make(cls, tokens: Ints, amounts: Floats, vocab_size: int, device: torch.device) -> TokenList:
        """Make a list. A long list is copied to the device after the steps under way; nothing waits for the copy."""
        vector = None
        if len(tokens) > LONG_LIST:
            dense = np.zeros(vocab_size, np.float32)
            dense[tokens] = amounts
            vector = torch.from_numpy(dense).to(device, non_blocking=True)
        return cls(tokens, amounts, vector)


@dataclass(frozen=True, slots=True)
class ListInputs:
    """The lists that one step applies."""

    entries: Entries | None  # of the short lists
    shifts: tuple[Shift, ...]  # the long lists, one for all rows that share it


class RowLists:
    """The token list of each row. The rows of one request share one list."""

    def __init__(self, context: StageContext, list_of: Callable[[SamplingParams], Mapping[int, float]]) -> None:
        """`list_of`: a request's tokens and the amounts that are added to their logits."""
        self._list_of = list_of
        self._vocab_size = context.vocab_size
        self._device = context.device
        self._move = context.move
        self._params: list[SamplingParams | None] = [None] * context.num_rows  # of the rows that want a list
        self._lists: list[TokenList | None] = [None] * context.num_rows

    def start(self, row: int, params: SamplingParams, *, is_wanted: bool) -> bool:
        """Set a row for a new sequence. -> whether the row has a list."""
        self._params[row] = self._lists[row] = None
        if is_wanted:
            twin = next((other for other, known in enumerate(self._params) if known is params), None)
            self._params[row] = params
            self._lists[row] = self._make(params) if twin is None else self._lists[twin]
        return self._lists[row] is not None

    def prepare(self, rows: Ints, places: Ints) -> ListInputs | None:
        """The lists of `rows` at `places` (int64, ascending) of the step's logits rows; None if there are none."""
        lists = [(at, one) for at in places.tolist() if (one := self._lists[rows[at]]) is not None]
        if not lists:
            return None
        shared: dict[TokenList, list[int]] = {}
        for at, one in lists:
            if one.vector is not None:
                shared.setdefault(one, []).append(at)
        shifts = (Shift(self._index(rows), one.vector) for one, rows in shared.items() if one.vector is not None)
        return ListInputs(self._entries([(at, one) for at, one in lists if one.vector is None]), tuple(shifts))

    def fold(self, rows: Ints, places: Ints, changes: DrawChanges) -> bool:
        """Write the same lists for a captured draw. Returns False if one of them is long, or there is no room."""
        lists = [(at, one) for at in places.tolist() if (one := self._lists[rows[at]]) is not None]
        if any(one.vector is not None for _, one in lists):
            return False
        return not lists or changes.add(*_joined(lists))

    def _make(self, params: SamplingParams) -> TokenList | None:
        wanted = self._list_of(params)
        tokens = np.fromiter(wanted.keys(), np.int64, len(wanted))
        amounts = np.fromiter(wanted.values(), np.float32, len(wanted))
        return TokenList.make(tokens, amounts, self._vocab_size, self._device) if wanted else None

    def _entries(self, short: list[tuple[int, TokenList]]) -> Entries | None:
        if not short:
            return None
        places, tokens, amounts = _joined(short)
        return Entries(self._move(places), self._move(tokens), self._move(amounts))

    def _index(self, places: list[int]) -> torch.Tensor | slice:
        """Places in ascending order; a slice, which copies nothing, when they are neighbours."""
        if places[-1] - places[0] + 1 == len(places):
            return slice(places[0], places[-1] + 1)
        return self._move(np.array(places))


def _joined(lists: list[tuple[int, TokenList]]) -> tuple[Ints, Ints, Floats]:
    """The place, token and amount of each entry of `lists` (at least one, by place)."""
    places = np.repeat([at for at, _ in lists], [len(one.tokens) for _, one in lists])
    return places, np.concatenate([one.tokens for _, one in lists]), np.concatenate([one.amounts for _, one in lists])
