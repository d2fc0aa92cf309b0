"""Guesses what follows in a sequence: what followed its last tokens where they stood before.

A *match* is a place in a text after tokens that are the sequence's last ones. The texts are the output so far, the
prompt, and the client's prediction of the answer; never one of another request, because by the time that an answer
takes its client would see what others wrote.

    the drawn tokens are those of the match     it is followed: the place moves on, and the match is longer
    another one is drawn                        the longest match of all texts is searched, the newest of equals
    none of two tokens or more                  nothing is offered until the next token
    none for some tokens                        a match that begins then has two: it is searched while no step waits,
                                                and followed from the next token on
    before the first token                      a prediction is followed from its beginning, without a match

The output is also what the prompt goes on with, so a match may reach from one into the other. One that reaches the end
of the output repeats: after `a b a b` it says `a b a b ...`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.drafting.chances import LONGEST, Chances
from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.drafting.token_index import TokenIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.drafting.token_index import OutputIndex

PIECE = 512  # tokens that are indexed at a time, 0.1 ms: a sequence without drafts for long has many
# Tokens that need no index while a match is followed: 16 at once take as long as 6 one by one. While no step waits
# fewer are indexed, so that a search finds little left to do
LAG, LEAST = 16, 4
# Tokens without a match, after which a search waits until no step does. Of 32 streams of mixed texts searches took 170
# of 393 us of all offers; where the first one waited, answers of 15 tokens that repeat had 34 drafts in place of 51
NUM_NONE = 8
# Of what was expected and what was right in a sequence, at each token after a match: some ten count
OWN_MEMORY = 0.9
# And what counts as right and as expected before them. A sequence is trusted for half at first: trusted at once, short
# answers that repeat nothing had 0.98 of the tokens a second of `none`, and others no more than now
OWN_RIGHT, OWN_EXPECTED = 1.0, 2.0
REST, MOST_REST = 16, 1024  # tokens without drafts, after a right one that was not verified


class Lookup:
    """The texts of one sequence, and the match that is followed."""

    def __init__(
        self,
        token_ids: list[int],
        texts: Sequence[tuple[list[int], TokenIndex | OutputIndex]],
        chances: Chances,
        prediction: list[int] | None = None,
        *,
        num_indexed: int = 0,
        output: OutputIndex | None = None,
    ) -> None:
        """token_ids: of the sequence. Others append to them, and then call `advance`.

        texts: their tokens and indexes; the prompt's tokens are `token_ids`. prediction: followed from the token after
        `num_indexed` on. num_indexed: so many of `token_ids` are in an index. output: the index of the others; None:
        they are not looked up.
        """
        self._token_ids, self._chances, self._output = token_ids, chances, output
        self._texts = texts if output is None else [(token_ids, output), *texts]
        self._num_taken = self._num_indexed = self._num_searched = num_indexed
        self._text = prediction  # that is followed; None: none
        self._place = 0  # in it, of the token that is expected next
        self._length = 0  # of the match
        self._num_none = 0  # searches in a row that have found nothing
        self._runs = chances.beginning
        self._own_expected = self._own_right = 0.0  # first tokens after matches: of this sequence's own
        self._num_ahead = 0  # of the last offer
        self._num_verified: int | None = None  # tokens of it that a step has verified, all but the first wrong one
        self._rest, self._rests_until = REST, 0

    @property
    def expected(self) -> int | None:
        """The next token of the match; None: there is none."""
        return None if self._text is None else self._text[self._place]

    def advance(self, *, may_wait: bool = False) -> None:
        """Take the tokens that have come. may_wait: `prepare` will be called, so a match of two tokens waits for it."""
        token_ids, start = self._token_ids, self._num_taken
        end = self._num_taken = len(token_ids)
        if end > start and self._text is not None:
            self._follow(self._text, token_ids[start:end])
        if self._text is not None:
            if end - self._num_indexed >= LAG:
                self.index(1)
        elif end > self._num_searched:
            if may_wait and self._num_none >= NUM_NONE and self._num_searched == start == end - 1:
                return
            self.index(2)  # it finds what was before the last token, which is indexed while no step waits
            if self._num_indexed >= end - 1 > 0:
                self._search()

    def prepare(self) -> None:
        """Index a piece, if it `is_behind`, and search what has waited. Nothing new is taken."""
        self.index()
        num_taken = self._num_taken
        is_searched = self._text is not None or self._num_searched == num_taken
        if not is_searched and len(self._token_ids) == num_taken and self._num_indexed >= num_taken - 1 > 0:
            self._search()

    @property
    def is_behind(self) -> bool:
        """Whether `prepare` has something to do. Without a match the next token is searched."""
        return self._num_taken - self._num_indexed >= (1 if self._text is None else LEAST)

    def index(self, least: int = 0) -> None:
        """Index the next tokens that `advance` has taken, a piece, if there are so many. 0: if it `is_behind`."""
        token_ids, first = self._token_ids, self._num_indexed
        if self._num_taken - first >= least if least else self.is_behind:
            last = self._num_indexed = min(self._num_taken, first + PIECE)
            if self._output is not None:
                self._output.take(token_ids[first - 1], token_ids[first:last])

    def offer(self, num_ahead: int, most: int, *, may_wait: bool = False) -> DraftOffer | None:
        """Take what has come. -> at most `most` tokens that may follow, after `num_ahead` that running steps draw."""
        self.advance(may_wait=may_wait)
        text, start, num = self._text, self._place, num_ahead + most
        if text is None or self._num_taken < self._rests_until:
            return None
        if start + num > len(text):
            if text is self._token_ids:
                text, start = (text[start:] * (num // (len(text) - start) + 1))[:num], 0
            else:
                num = len(text) - start
                if num <= num_ahead:
                    return None
        self._num_ahead = num_ahead
        # The node's chances are of all sequences: of edits, and of prose beside them
        trust = min(1.0, (self._own_right + OWN_RIGHT) / (self._own_expected + OWN_EXPECTED))
        return DraftOffer(text, self._runs.reached[num_ahead:num], start + num_ahead, trust)

    def note(self, num_drafts: int, num_right: int) -> None:
        """Note that a step has verified drafts of the last offer. Call it before its tokens are taken."""
        if num_right:
            self._rest = REST
        if num_right < num_drafts:
            self._num_verified = self._num_ahead + num_right

    def _follow(self, text: list[int], drawn: list[int]) -> None:
        """Compare the drawn tokens with those that were expected, learn from them, and move on as far as they agree."""
        place, num_right = self._place, len(drawn)
        expected = text[place : place + num_right]
        if expected != drawn:
            num_right = 0
            while num_right < len(expected) and expected[num_right] == drawn[num_right]:
                num_right += 1
        self._own_expected = OWN_MEMORY * self._own_expected + self._runs.first
        self._own_right = OWN_MEMORY * self._own_right + (num_right > 0)
        self._runs.note(len(expected), num_right)
        if self._num_verified is not None:
            if num_right > self._num_verified:  # there was no mask of a grammar after this right draft
                self._rests_until = len(self._token_ids) + self._rest
                self._rest = min(2 * self._rest, MOST_REST)
            self._num_verified = None
        self._place = place = place + num_right
        self._length = length = self._length + num_right
        if num_right < len(drawn) or place == len(text):
            self._text = None
        elif length > 1:
            self._runs = self._chances.after[length if length < LONGEST else LONGEST]

    def _search(self) -> None:
        """Find the longest match. Of equals the first text's newest."""
        token_ids, longest = self._token_ids, 1
        num_taken = self._num_searched = self._num_taken
        first, second = token_ids[-2:]
        further = first  # a match that is longer than the longest has this token before it, too
        for text, index in self._texts:
            num_tokens = len(text)
            for place in index.places(first, second, num_taken):
                if longest < place < num_tokens and text[place - longest - 1] == further:
                    length = _match(text, place, token_ids)
                    if length > longest:
                        longest = length
                        self._text, self._place = text, place
                        further = token_ids[~longest] if longest < len(token_ids) else -1
        self._length, self._runs = longest, self._chances.after[longest]
        self._num_none = self._num_none + 1 if longest == 1 else 0


def _match(text: list[int], place: int, token_ids: list[int]) -> int:
    """The number of tokens before the place that are the last ones of `token_ids`. Two are known to be."""
    length, most = 2, min(place, len(token_ids), LONGEST)
    while length < most and text[place - length - 1] == token_ids[~length]:
        length += 1
    return length


def num_followed(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """The tokens of the answer that were expected when they came, where nothing but the prediction is looked up."""
    text, known, num = [*prediction], list[int](), 0
    lookup = Lookup(known, [(text, TokenIndex(text))], Chances(), text or None)
    for token in answer:
        num += lookup.expected == token
        known.append(token)
        lookup.advance()
    return num
