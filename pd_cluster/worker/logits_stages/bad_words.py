"""The logits stage for `bad_words`: it bans the token that would complete one of a request's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.protocol.sampling_params import MAX_BAD_WORD_TOKENS
from pd_cluster.worker.logits_stages.stage import LogitsStage
from pd_cluster.worker.verification import NO_TOKEN

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints

_TAIL = MAX_BAD_WORD_TOKENS - 1  # output tokens before the drawn one that decide about it
_ANY = -1  # in a pattern: any token, also none
_NONE = -2  # in a tail: before the output


@dataclass(frozen=True, slots=True)
class WordList:
    """The words of one row, W of them, on the device."""

    beginnings: torch.Tensor  # int64 [W, _TAIL]: the tokens before a word's last one, aligned to the right
    ends: torch.Tensor  # int64 [W]: its last token


@dataclass(frozen=True, slots=True)
class WordInputs:
    """The words of one step. E: words of all of its rows."""

    places: torch.Tensor  # int64 [E] into the step's logits rows
    rows: torch.Tensor  # int64 [E] of the worker
    lists: tuple[WordList, ...]
    # After drafts: int64 [E, K], the tokens that a row assumes after its tail, and int64 [E, _TAIL], which places of
    # both are the last ones
    drafted: tuple[torch.Tensor, torch.Tensor] | None = None


class BadWords(LogitsStage):
    """Bans the last token of a word after an output that ends in the word's other tokens. The prompt does not count.

    The last output tokens of each row are on the device, so a step is launched before the tokens of the step before it
    are read.
    """

    def __init__(self, context: StageContext) -> None:
        self._device = context.device
        self._move = context.move
        self._lists: list[WordList | None] = [None] * context.num_rows
        self._tails = torch.full((context.num_rows, _TAIL), _NONE, device=context.device)

    def start(self, row: int, start: SequenceStart) -> bool:
        words = start.sampling.bad_words
        self._lists[row] = None
        if not words:
            return False
        beginnings = np.full((len(words), _TAIL), _ANY)
        for at, word in enumerate(words):
            beginnings[at, _TAIL - len(word) + 1 :] = word[:-1]
        tail, output = np.full(_TAIL, _NONE), start.token_ids[start.num_prompt_tokens :][-_TAIL:]
        tail[_TAIL - len(output) :] = output
        self._tails[row] = self._send(tail)
        self._lists[row] = WordList(self._send(beginnings), self._send(np.array([word[-1] for word in words])))
        return True

    def prepare(self, rows: Ints, lengths: Ints) -> WordInputs | None:
        places, lists = self._found(rows)
        return WordInputs(self._move(places), self._move(rows[places]), lists)

    def prepare_behind(self, rows: Ints, lengths: Ints, before: Ints) -> WordInputs | None:
        places, lists = self._found(rows)
        drafts = before[places]
        last = np.arange(_TAIL) + (drafts != NO_TOKEN).sum(1)[:, None]
        return WordInputs(self._move(places), self._move(rows[places]), lists, (self._move(drafts), self._move(last)))

    def apply(self, logits: torch.Tensor, inputs: WordInputs) -> None:
        beginnings = torch.cat([one.beginnings for one in inputs.lists])
        ends = torch.cat([one.ends for one in inputs.lists])
        tails = self._tails[inputs.rows]
        if inputs.drafted is not None:
            drafts, last = inputs.drafted
            tails = torch.cat((tails, drafts), 1).gather(1, last)
        completes = ((tails == beginnings) | (beginnings == _ANY)).all(1)
        amounts = torch.zeros(len(ends), device=logits.device).masked_fill_(completes, -torch.inf)
        logits.index_put_((inputs.places, ends), amounts, accumulate=True)

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        found = np.flatnonzero([self._lists[row] is not None for row in rows.tolist()])
        chosen = self._send(rows[found])
        drawn = token_ids[self._send(found)][:, None]
        self._tails[chosen] = torch.cat((self._tails[chosen, 1:], drawn), 1)

    def _found(self, rows: Ints) -> tuple[Ints, tuple[WordList, ...]]:
        """The place of each word in `rows` (int64 [E]), and the lists that have them."""
        found = [(at, one) for at, row in enumerate(rows.tolist()) if (one := self._lists[row]) is not None]
        return np.repeat([at for at, _ in found], [len(one.ends) for _, one in found]), tuple(one for _, one in found)

    def _send(self, array: Ints) -> torch.Tensor:
        """Copy to the device after the steps under way; CUDA has read pageable memory when the call returns."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)
