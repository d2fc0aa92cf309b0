"""Drafts that grammars leave no choice about: names and braces of JSON, frames of tool calls, tails of enums.

The worker tells them with their place (`pd_cluster/worker/logits_stages/draft_masks.py`). Where a drafter expects the
same tokens, its own drafts go on after them; else they are offered alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd_cluster.drafting.offer import DraftOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

PRIOR, NUM_PRIOR = 0.98, 8.0  # of one token: all are right, but none is accepted after a mask that is late
MEMORY = 0.97  # of what was noted, at each run: about 33 runs count
# And at each offer of which a step has taken nothing, so that a node tries again: 700 after the worst, then one in 50
RETURN = 0.998


class ForcedTokens(NamedTuple):
    """Tokens of a sequence, as far as is known. Drafts that a step verifies may be the first ones."""

    seq_id: int
    start: int  # tokens of prompt and output before them
    token_ids: Sequence[int]


class ForcedDrafts:
    """The newest forced tokens of each sequence, and the chance that the node accepts one."""

    def __init__(self, told: Callable[[], Sequence[ForcedTokens]]) -> None:
        """`told`: those that were found since its last call."""
        self._told = told
        self.known: dict[int, ForcedTokens] = {}  # by sequence. The others have nothing to join
        self._offered: dict[int, tuple[int, bool]] = {}  # forced ones of the last offer; whether a drafter's follow
        self._right = self._tried = 0.0

    def take(self, expected: Collection[int]) -> None:
        """Take what was told of sequences that may have drafts. Call it before the offers of each step."""
        self.known.update((one.seq_id, one) for one in self._told() if one.seq_id in expected)

    def joined(
        self, seq_id: int, token_ids: list[int], num_ahead: int, most: int, offer: DraftOffer | None
    ) -> DraftOffer | None:
        """A drafter's offer and the known forced tokens. The arguments are those of `Drafter.offer`, and its answer."""
        if self._offered.pop(seq_id, None):
            self._right, self._tried = RETURN * self._right, RETURN * self._tried
        _, start, known = self.known[seq_id]
        drawn = len(token_ids) - start
        if not 0 <= drawn < len(known) or list(known[:drawn]) != token_ids[start:]:
            del self.known[seq_id]
            return offer
        ahead = list(known[drawn + num_ahead :][:most])
        if not (num := len(ahead)):
            return offer
        chance = (self._right + NUM_PRIOR * PRIOR) / (self._tried + NUM_PRIOR)
        chances = np.float32(chance) ** np.arange(1, num + 1, dtype=np.float32)
        # After many places a chance may be 0
        goes_on = offer is not None and bool(np.any(offer.chances[num:])) and list(offer.first(num)) == ahead
        self._offered[seq_id] = num, goes_on
        if offer is None or not goes_on:
            return DraftOffer(ahead, chances)
        later = offer.chances[num:] / offer.chances[num - 1] * chances[-1]
        return DraftOffer(offer.text, np.concatenate([chances, later]), offer.start)

    def note(self, seq_id: int, num_drafts: int, num_right: int) -> bool:
        """Note a step's drafts, at least one, as `Drafter.note`. -> whether they were those of the drafter."""
        num_forced, goes_on = self._offered.pop(seq_id, (0, True))
        if tried := min(num_drafts, num_forced):
            right = min(num_right, tried)
            self._right = MEMORY * self._right + right
            self._tried = MEMORY * self._tried + right + (right < tried)
        return goes_on

    def forget(self, seq_id: int) -> None:
        """Note that a sequence has ended."""
        self.known.pop(seq_id, None)
        self._offered.pop(seq_id, None)

    def check(self) -> None:
        """Raise AssertionError if anything is kept of a sequence. Call it while there is none."""
        assert not self.known, "forced tokens of an ended sequence are kept"
        assert not self._offered, "an offer to an ended sequence is kept"
