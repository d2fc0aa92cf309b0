"""How likely the next tokens of a match are drawn. Learned on the node from all sequences, in some hundred numbers.

What tells most is the length of the match, and how many tokens of it have been right since: a token later in a run is
one after a longer match. So each class of lengths has a chance for each place in the run, and so has the beginning of
a prediction. They begin with what was measured on edits, patches, JSON and code.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

LONGEST = 16  # tokens of a match that are compared
# Shares of first tokens that were right after matches of 1, 2 ... tokens; 9 and more
PRIORS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.92)
LENGTHS = (2, 3, 4, 5, 9)  # the least ones of the classes
BEGINNING_LENGTH = 5  # of the match that a prediction's beginning counts as, until some were seen
NUM_PRIOR = 8.0  # runs that the prior counts as
NUM_PLACES = 16  # with a chance each; later ones count as the last
MOST_RUN = 66  # tokens of a run: the most drafts, and those of running steps before them
MEMORY = 0.9  # of what was noted, when 16 runs are new: about 160 count
# New runs by which a class is corrected while no step waits, and after which it is in any case: it takes 30 us
LEAST_NEW, MOST_NEW = 16, 64


class Runs:
    """The runs after matches of one class: how many there were, and what the next one may be."""

    def __init__(self, length: int) -> None:
        """`length`: of the matches, at least."""
        lengths = np.arange(length - 1, length - 1 + NUM_PLACES)
        self._prior = np.array(PRIORS)[np.minimum(lengths, len(PRIORS) - 1)]
        self._right, self._tried = np.zeros(NUM_PLACES), np.zeros(NUM_PLACES)
        # [i]: the chance that the next i + 1 tokens of a match are drawn; MOST_RUN of them
        self.reached: npt.NDArray[np.float32]
        self.first: float  # the first of them
        self._begin()

    def note(self, num_tried: int, num_right: int) -> None:
        """Note a run: of `num_tried` tokens that were drawn, the first `num_right` were those of the match."""
        at = num_right if num_right < NUM_PLACES else NUM_PLACES
        self._ends[at] += 1
        if num_right < num_tried:
            self._wrong[at] += 1
        self._num_new += 1
        if self._num_new == MOST_NEW:
            self.correct()

    def correct(self) -> None:
        """Learn from the new runs, if there are enough."""
        if self._num_new >= LEAST_NEW:
            memory, right = MEMORY ** (self._num_new / 16), np.cumsum(self._ends[::-1])[-2::-1]  # by place
            self._right = memory * self._right + right
            self._tried = memory * self._tried + right + self._wrong[:NUM_PLACES]
            self._begin()

    def _begin(self) -> None:
        """Say what is known, and note new runs."""
        self._num_new = 0
        self._ends = [0] * (NUM_PLACES + 1)  # new runs by the number of their right tokens
        self._wrong = [0] * (NUM_PLACES + 1)  # those of them with a wrong token after these
        chances = (self._right + NUM_PRIOR * self._prior) / (self._tried + NUM_PRIOR)
        later = np.full(MOST_RUN - NUM_PLACES, chances[-1])
        self.reached = np.cumprod(np.concatenate([chances, later])).astype(np.float32)
        self.first = float(chances[0])


class Chances:
    """What is known of runs, by the length of the match."""

    def __init__(self) -> None:
        self.beginning = Runs(BEGINNING_LENGTH)  # of a prediction: there is no match
        classes = [Runs(length) for length in LENGTHS]
        self.all = [self.beginning, *classes]
        # by length; the first two are of no match
        self.after = [classes[max(0, bisect_right(LENGTHS, length) - 1)] for length in range(LONGEST + 1)]
