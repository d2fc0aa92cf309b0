"""What drafts cost in a step, beyond what the step takes without them. Pure: fed works and seconds.

    step        once for a step with drafts: no other runs beside it, so that its launch takes part of its time
    sequence    for each sequence with drafts, because attention multiplies more rows for it
    row         for each draft, by segments of all rows of the step: a GPU computes the first hundred or two while it
                reads the weights. A row is a token of the model and one of the head
    key         for each product of a draft and a token before it. On a GPU nearly nothing: a decode reads those tokens
                anyhow

The experts of a mixture are not among them: the first tokens of a step read these, drafts or not (`step_model.py`).

These prices alone are learned from steps with drafts: from what such a step takes longer than the same without drafts
is predicted to. So no draft changes what a prompt or a decode costs. An error of those is taken for one of drafts until
steps without drafts correct it.
"""

from __future__ import annotations

from math import inf
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.scheduling.ladder import Ladder, segments
from pd_cluster.scheduling.term_factors import TermFactors

if TYPE_CHECKING:
    from collections.abc import Sequence

# 8B, bf16, one H200: 1, 32, 64 and 128 decodes after 1,024 tokens take 4.2, 5.3, 6.8 and 8.9 ms. From launch to result
# 1 x 1 drafts take 5.3 and 1 x 7 too, 8 x 3 5.5, 32 x 1, 3 and 7 6.8, 7.1 and 8.4, 64 x 3 9.7, 128 x 1 and 2 11.8 and
# 14.8; 32 x 3 after 4,096 tokens 9.7 (8.1 without). All prices are at most 3% off the times of these steps. With 1 us
# for the first rows it were 2%, but a CPU learns its price from this one, and there a row takes 30 times as much
STEP_S, SEQUENCE_S, KEY_S = 0.9e-3, 3.2e-6, 0.05e-9
ROW_KNOTS = (0, 128, 256)  # rows of a step where the price of one more changes
ROW_S = (4e-6, 11e-6, 25e-6)  # between and beyond

OUTLIER = 1.5  # a step counts as at most so many times its prediction, or as one part in so many
EARLY_OUTLIER = 4.0  # of the first steps, where none were measured at start
FIRST_FITS = (4, 8, 16)  # numbers of first steps that replace the prices where none were measured
CORRECT_EVERY = 16  # steps
FIRST_CORRECTIONS = (2, 4, 8)  # numbers of steps before that: few are tried where prices are too high
MEMORY = 0.97  # of what was noted, at each correction
# To the prices before, in steps: weaker than that of other terms, because drafts take a smaller share of a step
PULL, FIT_PULL = 0.1, 1e-5
SWEEPS, FIT_SWEEPS = 8, 1000


class DraftWork(NamedTuple):
    """What the drafts of a step compute."""

    before: int  # tokens of the step without them
    num_drafts: int
    num_sequences: int  # with drafts
    num_keys: int  # products of a draft and a token before it


Sample = tuple[DraftWork, float, float]  # drafts, seconds of their step, predicted seconds of the same without them


class DraftPrices:
    """Prices of drafts, always above 0."""

    step_s: float
    sequence_s: float
    key_s: float
    rows: Ladder

    def __init__(self) -> None:
        self._early: list[Sample] | None = []  # None: measured, or enough steps were noted
        self._num_noted = 0
        # Factors are of the first prices, also after a fit: where it made a price nearly 0, that may rise again
        self._first = [STEP_S, SEQUENCE_S, KEY_S, *ROW_S]
        self._restart([1.0] * len(self._first))

    def scale(self, factor: float) -> None:
        """Multiply all prices: the device takes so many times as long as was thought."""
        self._first = [factor * price for price in self._seconds]
        self._restart([1.0] * len(self._first))

    def seconds(self, work: DraftWork) -> float:
        """What the drafts of a step cost."""
        before, num_drafts, num_sequences, num_keys = work
        rows_s = self.rows.seconds(before + num_drafts) - self.rows.seconds(before)
        return self.step_s + self.sequence_s * num_sequences + self.key_s * num_keys + rows_s

    def note(self, work: DraftWork, seconds: float, alone_s: float) -> None:
        """Note a step with drafts that took so long. alone_s: predicted of the same without its drafts."""
        if self._early is not None:
            self._early.append((work, seconds, alone_s))
            if len(self._early) in FIRST_FITS:
                self._replace(self._early, EARLY_OUTLIER)
            if len(self._early) == FIRST_FITS[-1]:
                self._early = None
            return
        self._num_noted += 1
        self._add(work, seconds, alone_s, OUTLIER)
        if self._num_noted in FIRST_CORRECTIONS:
            self._solve(PULL, SWEEPS)
        elif not self._num_noted % CORRECT_EVERY:
            self._solve(PULL, SWEEPS)
            self._factors.fade(MEMORY)

    def fit(self, measured: Sequence[Sample]) -> None:
        """Replace the prices by measured steps."""
        self._replace(measured, inf)
        self._early = None

    def _replace(self, samples: Sequence[Sample], most: float) -> None:
        """Each sample counts as at most `most` times what it would be at first."""
        self._restart([1.0] * len(self._first))
        for work, seconds, alone_s in samples:
            self._add(work, seconds, alone_s, most)
        self._solve(FIT_PULL, FIT_SWEEPS)
        self._restart(self._factors.values)

    def _restart(self, factors: Sequence[float]) -> None:
        """Set the factors, and forget the steps after them."""
        self._factors = TermFactors(factors)
        self._use()

    def _use(self) -> None:
        self._seconds = list(map(mul, self._first, self._factors.values))
        self.step_s, self.sequence_s, self.key_s, *rows = self._seconds
        self.rows = Ladder(ROW_KNOTS, rows)

    def _add(self, work: DraftWork, seconds: float, alone_s: float, most: float) -> None:
        amounts = [(0, 1), (1, work.num_sequences), (2, work.num_keys)]
        amounts += segments(ROW_KNOTS, work.before, work.before + work.num_drafts, len(amounts))
        predicted_s = alone_s + self.seconds(work)
        seconds = min(max(seconds, predicted_s / most), predicted_s * most)
        self._factors.add([(index, self._seconds[index] * amount) for index, amount in amounts], seconds, alone_s)

    def _solve(self, pull: float, sweeps: int) -> None:
        self._factors.solve([pull] * len(self._first), sweeps)
        self._use()
