"""Drafts by lookup (`lookup`), for the sequences of one node. It implements the scheduler's `Drafter`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.drafting.chances import Chances
from pd_cluster.drafting.indexes import IndexedText, Indexes
from pd_cluster.drafting.lookup import Lookup
from pd_cluster.drafting.token_index import OutputIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_cluster.drafting.offer import DraftOffer
    from pd_cluster.drafting.token_index import TokenIndex

OUTPUT_PIECE, OUTPUT_BYTES = 1024, 150  # tokens of an output for which memory is taken at a time, and of each


@dataclass(slots=True)
class _Drafted:
    """A sequence that may have drafts."""

    # The prompt, with the tokens of the answer that another node drew; and the client's prediction, if there is one
    texts: tuple[IndexedText, ...]
    begins: bool  # with the prediction: nothing of the answer was known
    room: int  # tokens for which memory is taken
    lookup: Lookup | None = None  # from its first offer on


class LookupDrafter:
    """Looks up each sequence in its own texts. Those of one request share the indexes of prompt and prediction."""

    def __init__(self, indexes: Indexes | None = None) -> None:
        self._indexes = indexes or Indexes()
        self._chances = Chances()
        self._drafted: dict[int, _Drafted] = {}
        self._behind: dict[int, Lookup] = {}  # what `prepare` indexes a piece of, by sequence: it has room for it
        self._may_wait = False  # for `prepare`: the last one has left nothing. On CPUs no step leaves time for one

    def expect(self, known: Mapping[int, list[int]], prediction: Sequence[int], num_prompt: int) -> None:
        """See `Drafter`."""
        texts = dict[int, IndexedText]()
        predicted = (IndexedText([*prediction], len(prediction), len(known)),) if prediction else ()
        for seq_id, token_ids in known.items():
            if (text := texts.get(id(token_ids))) is None:
                num_users = sum(other is token_ids for other in known.values())
                text = texts[id(token_ids)] = IndexedText(token_ids, len(token_ids), num_users)
            begins = bool(predicted) and len(token_ids) == num_prompt
            self._drafted[seq_id] = _Drafted((text, *predicted), begins, len(token_ids))

    def offer(self, seq_id: int, token_ids: list[int], num_ahead: int, most: int) -> DraftOffer | None:
        """See `Drafter`."""
        one = self._drafted[seq_id]
        lookup = one.lookup or self._begin(one, token_ids)
        if lookup is None or (len(token_ids) > one.room and not self._take_memory(one)):
            return None
        offer = lookup.offer(num_ahead, most, may_wait=self._may_wait)
        if lookup.is_behind:
            self._behind[seq_id] = lookup
        return offer

    def note(self, seq_id: int, num_drafts: int, num_right: int) -> None:
        """See `Drafter`."""
        lookup = self._drafted[seq_id].lookup
        assert lookup is not None
        lookup.note(num_drafts, num_right)

    def prepare(self, is_late: Callable[[], bool]) -> None:
        """See `Drafter`."""
        self._may_wait = False
        for runs in self._chances.all:
            if is_late():
                return
            runs.correct()
        while self._behind and not is_late():
            self._behind.popitem()[1].prepare()
        self._may_wait = not self._behind

    def forget(self, seq_id: int) -> None:
        """See `Drafter`."""
        one = self._drafted.pop(seq_id)
        self._behind.pop(seq_id, None)
        self._indexes.give(OUTPUT_BYTES * (one.room - one.texts[0].num_tokens))
        for text in one.texts:
            self._indexes.release(text)

    def check(self) -> None:
        """See `Drafter`."""
        assert not self._drafted, "a sequence has ended and is still drafted"
        assert not self._behind, "a sequence has ended and is still indexed"
        assert not self._indexes.num_bytes, "an index of an ended sequence is kept"

    def _take_memory(self, one: _Drafted) -> bool:
        if has_room := self._indexes.take(OUTPUT_PIECE * OUTPUT_BYTES):
            one.room += OUTPUT_PIECE
        return has_room

    def _begin(self, one: _Drafted, token_ids: list[int]) -> Lookup | None:
        """Look the sequence up from now on, if its texts have their indexes. Else those begin."""
        texts, given = list[tuple[list[int], "TokenIndex"]](), one.texts
        for text in given:
            if (index := self._indexes.index_of(text)) is not None:
                texts.append((token_ids if text is given[0] else text.token_ids, index))
        if len(texts) == len(given):
            num, begins_with = given[0].num_tokens, given[1].token_ids if one.begins else None
            one.lookup = Lookup(token_ids, texts, self._chances, begins_with, num_indexed=num, output=OutputIndex(num))
        return one.lookup
