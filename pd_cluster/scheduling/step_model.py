"""Predicts how long a step takes, from what it computes. Pure: fed works and seconds.

The time is a sum of terms. Each term has a coefficient in seconds, always above 0:

    base        reading the weights, once a step
    decode      for each decode
    first       for each of the first FIRST tokens of a step, by segments: those of a mixture read most experts
    context     for each token that the decodes read KV of
    token       for each token of a prompt, by segments of the step's number of tokens, decodes included, because a GPU
                computes the first hundred or two while it reads the weights
    key         for each product of a prompt's token and a token before it
    drafts      what they cost beside their share of `first`: `draft_prices.py`

The first coefficients are those of the 8B shape on an H200. `fit` replaces them by measurements at start, else by the
first steps. `note` corrects them while the engine runs: least squares of the relative errors of some hundred steps that
forget old ones, and a weak pull to the coefficients of `fit`, which keeps those of terms that no step has. A step
counts as at most OUTLIER times its prediction: a process that was stopped for a minute changes predictions by 0.2%.
Where the last steps with prompts all lie beyond that on one side, the prices of prompts are wrong, not the steps: they
are multiplied by what these steps say. Without it a decode node on a CPU, fitted to decodes alone, told a token for
39 us that took 290, and for 64 us after 30 prompts (the price of an H200, scaled by its decodes).

Steps with drafts correct the prices of drafts and nothing else, and these only where no prompt is beside them: an error
of its price is often more than all that drafts cost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from math import inf
from operator import mul
from statistics import median
from typing import TYPE_CHECKING, Self

from pd_cluster.drafting.worth import StepPrice
from pd_cluster.scheduling.draft_prices import ROW_KNOTS, DraftPrices, DraftWork
from pd_cluster.scheduling.ladder import Ladder, segments
from pd_cluster.scheduling.term_factors import LEAST, TermFactors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pd_cluster.scheduling.batch import SequenceChunk

# 8B, bf16, one H200 ("Steps with prompts" and "Disaggregation" in benchmarks/LOG.md): 30, 60 and 90 decodes of 1,200
# tokens take 5.5, 7.2 and 8.3 ms; 32 decodes in steps of 128, 256, 512 and 1,024 tokens 6.2, 8.1, 13.7 and 23.8
BASE_S, CONTEXT_S, KEY_S = 4.1e-3, 33e-9, 1.5e-9
DECODE_S = 6e-6
TOKEN_KNOTS = (0, 128, 256, 512)  # tokens of a step where the price of one more changes
TOKEN_S = (8e-6, 15e-6, 22e-6, 20e-6)  # between and beyond
# A mixture of 128 experts reads 29, 69, 107 and 125 of them at 4, 12, 28 and 60 tokens. With one knot at 32, and for
# decodes only, steps of 4 decodes took 1.2 to 1.4 times as long as predicted, of 28 0.85 to 0.97 times (30B-A3B, H200)
FIRST_KNOTS, FIRST = (0, 4, 12, 28), 60
FIRST_S = 0.1e-6  # a dense model reads all its weights for one token

MOST_TOKENS = 1 << 20  # of a step that can be asked for
FULL_STEP = 2048  # tokens of a step that reads prompts only, for the mean price of a token
NUM_EARLY = 32  # steps that take the place of measurements at start where there are none
ENOUGH_PROMPTS = 4  # steps with prompts, before the price of a prompt's token counts as measured
OUTLIER = 1.5  # a step counts as at most so many times its prediction, or as one part in so many
EARLY_OUTLIER = 4.0  # of a step before the model is fitted
CORRECT_EVERY = 16  # steps; 0.1 ms each
MEMORY = 0.97  # of what was noted, at each correction: about 500 steps count
PULL = 1.0  # to the coefficients before, in steps
EARLY_PULL = 1e-4  # of the first fit, but for decodes and first tokens
# Of decodes and of first tokens, in a fit to measurements and to the first steps. Weak: a mixture's first tokens cost
# 4,000 times the default; weaker than of contexts, which grow with the decodes of short ones. The first steps are few
# and noisy: as weak a pull made 6 of 100 fits predict 3 to 7 times too much
MEASURED_PULLS, FIRST_STEPS_PULLS = (1e-8, 1e-10), (1e-6, 1e-7)
SWEEPS, EARLY_SWEEPS = 8, 3000  # of a solution at most; the latter take 0.1 s


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    num_decodes: int = 0
    context: int = 0  # tokens before those of the decodes, of all of them
    num_tokens: int = 0  # of prompts
    num_keys: int = 0  # products of a prompt's token and a token before it
    num_drafts: int = 0  # of the decodes
    draft_keys: int = 0  # products of a draft and a token before it
    num_drafting: int = 0  # of the decodes, those with drafts

    @classmethod
    def of(cls, chunks: Iterable[SequenceChunk]) -> Self:
        """A chunk of one token counts as a decode: it takes as long."""
        num_decodes = context = num_tokens = num_keys = num_drafts = draft_keys = num_drafting = 0
        for chunk in chunks:
            size, start = chunk.num_tokens, chunk.start
            if size == 1:
                num_decodes += 1
                context += start
            elif drafts := len(chunk.drafts):
                num_decodes += 1
                context += start
                num_drafts += drafts
                draft_keys += keys_of(drafts, start + 1)
                num_drafting += 1
            else:
                num_tokens += size
                num_keys += keys_of(size, start)
        return cls(num_decodes, context, num_tokens, num_keys, num_drafts, draft_keys, num_drafting)

    @property
    def drafts(self) -> DraftWork:
        return DraftWork(self.num_decodes + self.num_tokens, self.num_drafts, self.num_drafting, self.draft_keys)

    @property
    def streams(self) -> StepWork:
        """The same without prompts."""
        return replace(self, num_tokens=0, num_keys=0)


def keys_of(num_tokens: int, start: int) -> int:
    """Products of each token of a chunk after `start` tokens and the tokens before it."""
    return num_tokens * (2 * start + num_tokens - 1) // 2


def is_near(seconds: float, predicted_s: float) -> bool:
    return predicted_s < OUTLIER * seconds and seconds < OUTLIER * predicted_s


class StepModel:
    """Predicts the seconds of steps. Predictions are above 0, and do not fall with more tokens, keys or context.

    With more decodes beside prompts they may: the prompts' tokens move to segments where a token may cost less.
    """

    _seconds: list[float]
    _tokens: Ladder
    _firsts: Ladder

    def __init__(self, measured: Sequence[tuple[StepWork, float]] = ()) -> None:
        """`measured`: works and seconds of steps at start; empty: predictions begin with the defaults."""
        self._early: list[tuple[StepWork, float]] = []
        self._num_noted = 0
        self._num_with_prompts = 0  # of them
        self._most_decodes = 0  # so many are priced: a step of them alone took as long as predicted
        self.revision = 0  # of the coefficients, but for drafts
        self._drafts = DraftPrices()
        self._restart([BASE_S, CONTEXT_S, KEY_S, DECODE_S, *TOKEN_S, *(FIRST_S for _ in FIRST_KNOTS)])
        if measured:
            self.fit(measured)

    @property
    def is_fitted(self) -> bool:
        """Whether predictions rest on this engine's steps. Before that they are the defaults, or nearly."""
        return not self._early and self._num_noted > 0

    @property
    def knows_prompts(self) -> bool:
        """Whether `token_s` and `key_s` rest on this engine's prompts. Fitted to decodes only, they say nothing."""
        return self.is_fitted and self._num_with_prompts >= ENOUGH_PROMPTS

    @property
    def token_s(self) -> float:
        """Seconds of a prompt's token without tokens before it, in a full step of prompts only."""
        return self.seconds(StepWork(num_tokens=FULL_STEP)) / FULL_STEP

    @property
    def key_s(self) -> float:
        """Further seconds of a prompt's token for each token before it."""
        return self._seconds[2]

    @property
    def context_s(self) -> float:
        """Seconds of a step for each token that its decodes read KV of."""
        return self._seconds[1]

    def decode_s(self, num_decodes: int, context: int) -> float:
        """Seconds of a step of decodes only, after `context` tokens in all. `seconds` takes twice as long."""
        own, firsts = self._seconds, self._firsts.seconds(min(num_decodes, FIRST))
        return own[0] + (own[1] * context + own[3] * num_decodes if num_decodes else 0.0) + firsts

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Seconds of steps that compute `num_tokens` of one prompt after `start` tokens, and nothing else."""
        return num_tokens * self.token_s + keys_of(num_tokens, start) * self.key_s

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of a step. It takes 2 us, where the sum of `_parts` takes 18."""
        own, num_decodes, num_tokens = self._seconds, work.num_decodes, work.num_tokens
        seconds, total = own[0], num_decodes + num_tokens
        if num_decodes:
            seconds += own[1] * work.context + own[3] * num_decodes
        if num_tokens:
            seconds += own[2] * work.num_keys + self._tokens.seconds(total) - self._tokens.seconds(num_decodes)
        if work.num_drafts:
            seconds += self._drafts.seconds(work.drafts)
            total += work.num_drafts
        return seconds + self._firsts.seconds(min(total, FIRST))

    def draft_price(self, work: StepWork, most: int) -> StepPrice:
        """What up to `most` drafts (> 0) would cost in a step of this work, which has none yet. It takes 10 us.

        Each is taken to be after as many tokens as the decodes of the step are on average.
        """
        prices, firsts, before = self._drafts, self._firsts, work.num_decodes + work.num_tokens
        key_s = prices.key_s * (work.context / work.num_decodes + 1)
        rest_s = self.seconds(work) - prices.rows.seconds(before) - firsts.seconds(min(before, FIRST))
        knots = (0, *[knot - before for knot in KNOTS if before < knot < before + most], most)
        seconds = [
            rest_s + key_s * knot + prices.rows.seconds(before + knot) + firsts.seconds(min(before + knot, FIRST))
            for knot in knots
        ]
        return StepPrice(work.num_decodes, knots, seconds, prices.step_s, prices.sequence_s)

    def tokens_within(self, num_decodes: int, seconds: float) -> int:
        """The most prompt tokens without tokens before them that prolong a step of decodes by at most `seconds`."""
        num_tokens = 0
        for token_s, length in self._prices(num_decodes, MOST_TOKENS):
            if seconds < length * token_s:
                return num_tokens + int(max(0.0, seconds) / token_s)
            num_tokens += length
            seconds -= length * token_s
        return num_tokens

    def prolonged_s(self, num_decodes: int, num_tokens: int) -> float:
        """Seconds by which so many prompt tokens without tokens before them prolong a step of decodes."""
        return sum(token_s * length for token_s, length in self._prices(num_decodes, num_tokens))

    def token_s_at(self, num_tokens: int) -> float:
        """Seconds of one more prompt token in a step of so many tokens."""
        token_s = self._seconds[_TOKENS + bisect_right(TOKEN_KNOTS, num_tokens) - 1]
        if num_tokens < FIRST:
            token_s += self._seconds[_FIRST + bisect_right(FIRST_KNOTS, num_tokens) - 1]
        return token_s

    def _prices(self, num_decodes: int, num_tokens: int) -> Iterator[tuple[float, int]]:
        """Seconds of one more of so many prompt tokens beside decodes, in order, and for how many of them."""
        start, end = num_decodes, num_decodes + num_tokens
        for index in range(bisect_right(KNOTS, start), bisect_left(KNOTS, end) + 1):
            bound = KNOTS[index] if index < len(KNOTS) and KNOTS[index] < end else end
            yield self._steps_s[index - 1], bound - start
            start = bound

    def note(self, work: StepWork, seconds: float) -> None:
        """Correct the model by a step of this work that took so long."""
        if seconds <= 0:
            return
        if work.num_drafts:
            if self.is_fitted and not work.num_tokens:
                self._drafts.note(work.drafts, seconds, self._without_drafts_s(work))
        elif self.is_fitted:
            if not work.num_tokens and work.num_decodes > self._most_decodes and is_near(seconds, self.seconds(work)):
                self._most_decodes = work.num_decodes
            self._check_prices(work, seconds)
            self._add(work, seconds, OUTLIER)
            if not self._num_noted % CORRECT_EVERY:
                self._solve([PULL] * len(self._base), SWEEPS)
                self._factors.fade(MEMORY)
        else:
            self._early.append((work, seconds))
            if len(self._early) == NUM_EARLY:
                self.fit(self._early, EARLY_OUTLIER)

    def _without_drafts_s(self, work: StepWork) -> float:
        """Of a step with drafts, all but what these cost. Experts that they read are in it."""
        return self.seconds(work) - self._drafts.seconds(work.drafts)

    def fit(self, measured: Sequence[tuple[StepWork, float]], most: float = inf) -> None:
        """Replace the coefficients by measured steps. Each counts as at most `most` times the median error of all.

        Steps with drafts say what drafts cost, if there are steps without.
        """
        samples = [(work, seconds) for work, seconds in measured if seconds > 0 and not work.num_drafts]
        if not samples:
            return
        scale = median(seconds / self.seconds(work) for work, seconds in samples)
        self._restart([scale * own for own in self._seconds])
        self._drafts.scale(scale)
        self._most_decodes = max((work.num_decodes for work, _ in samples if not work.num_tokens), default=0)
        if most < inf:  # most of them may be decodes, and their scale says nothing of prompts
            for work, seconds in samples:
                self._check_prices(work, seconds)
        for work, seconds in samples:
            self._add(work, seconds, most)
        self._solve(_MEASURED_PULLS if most == inf else _EARLY_PULLS, EARLY_SWEEPS)
        self._restart(self._seconds)
        self._early = []
        drafted = [(work, seconds) for work, seconds in measured if seconds > 0 and work.num_drafts]
        if drafted:
            self._drafts.fit([(work.drafts, seconds, self._without_drafts_s(work)) for work, seconds in drafted])

    def _check_prices(self, work: StepWork, seconds: float) -> None:
        """Multiply prices of prompts where steps in a row that are mostly prompts all say that they are wrong.

        Those that lie beyond OUTLIER. A step within it ends the row if the row's prices would have it elsewhere.
        """
        num_decodes, predicted_s = work.num_decodes, self.seconds(work)
        if not work.num_tokens or num_decodes > self._most_decodes:
            return
        keys_s = self._seconds[2] * work.num_keys
        tokens_s = self._tokens.seconds(num_decodes + work.num_tokens) - self._tokens.seconds(num_decodes)
        is_keys = keys_s > tokens_s  # then only their price is wrong
        prompts_s = keys_s if is_keys else keys_s + tokens_s
        rest_s, row = predicted_s - prompts_s, self._rows[is_keys]
        if is_near(seconds, predicted_s):
            if row and (prompts_s > 2 * rest_s or not is_near(rest_s + row[0] * prompts_s, predicted_s)):
                row.clear()
            return
        if max(prompts_s, seconds - rest_s) < 2 * rest_s:
            return  # what it says is more about decodes, or about the weights
        factor = max((seconds - rest_s) / prompts_s, LEAST)
        if row and (row[0] > 1) != (factor > 1):
            row.clear()
        row.append(factor)
        row.sort(reverse=factor < 1)  # the first changes least
        if len(row) == ENOUGH_PROMPTS:
            # What made long ones dearer may have been their keys: short ones that say the opposite leave those alone
            wrong = _KEYS if is_keys else _TOKEN_PRICES if factor < 1 and 8 * keys_s < tokens_s else _PROMPTS
            self._restart([price * row[0] if at in wrong else price for at, price in enumerate(self._seconds)])

    def _restart(self, seconds: Sequence[float]) -> None:
        """Set the coefficients, and forget the steps after them."""
        self._base = list(seconds)
        self._rows: tuple[list[float], list[float]] = ([], [])  # see `_check_prices`: of tokens, and of keys
        self._use(self._base)
        self._factors = TermFactors([1.0] * len(seconds))  # `_seconds` / `_base`

    def _use(self, seconds: Sequence[float]) -> None:
        """Predict with these coefficients from now on."""
        self.revision += 1
        self._seconds = list(seconds)
        self._tokens = Ladder(TOKEN_KNOTS, self._seconds[_TOKENS:_FIRST])
        self._firsts = Ladder(FIRST_KNOTS, self._seconds[_FIRST:])
        self._steps_s = list(map(self.token_s_at, KNOTS))

    def _add(self, work: StepWork, seconds: float, most: float) -> None:
        self._num_noted += 1
        self._num_with_prompts += work.num_tokens > 0
        parts = self._parts(work)
        predicted = sum(part for _, part in parts)
        seconds = min(max(seconds, predicted / most), predicted * most)
        self._factors.add(parts, seconds)

    def _solve(self, pulls: Sequence[float], sweeps: int) -> None:
        self._factors.solve(pulls, sweeps)
        self._use(list(map(mul, self._base, self._factors.values)))

    def _parts(self, work: StepWork) -> list[tuple[int, float]]:
        """The terms that the work has: (index of the coefficient, seconds)."""
        num_decodes, num_tokens = work.num_decodes, work.num_tokens
        amounts = [(0, 1)]
        total = num_decodes + num_tokens
        if num_decodes:
            amounts += [(1, work.context), (3, num_decodes)]
        if num_tokens:
            amounts += [(2, work.num_keys), *segments(TOKEN_KNOTS, num_decodes, total, _TOKENS)]
        amounts += segments(FIRST_KNOTS, 0, min(total, FIRST), _FIRST)
        return [(index, self._seconds[index] * amount) for index, amount in amounts]


_TOKENS = 4  # index of the first coefficient of tokens, and of first tokens
_FIRST = _TOKENS + len(TOKEN_S)
_KEYS, _TOKEN_PRICES = (2,), tuple(range(_TOKENS, _FIRST))  # indices of the prices of prompts
_PROMPTS = (*_KEYS, *_TOKEN_PRICES)
_MEASURED_PULLS, _EARLY_PULLS = (
    [EARLY_PULL] * 3 + [decode] + [EARLY_PULL] * len(TOKEN_S) + [first] * len(FIRST_KNOTS)
    for decode, first in (MEASURED_PULLS, FIRST_STEPS_PULLS)
)
# Tokens of a step where the price of one more changes, of prompts or of drafts
KNOTS = sorted({*TOKEN_KNOTS, *ROW_KNOTS, *FIRST_KNOTS, FIRST})
