"""Which beams a beam search keeps, and which it returns. Pure policy over log-probabilities.

The rules are those of transformers' `generate(num_beams)` without sampling. In each round, of all continuations of the
W beams by one token, in the order of their scores (the sum of log-probabilities):

    the first W        of these, the ones that end join the finished ones, ranked by score / tokens ** length_penalty;
                       the best W finished ones are kept
    the first W that   are the next beams
    do not end

A continuation ends by a stop token, and in the last round in any case. The search is over after that round, or when W
have finished and either `early_stopping` is True, or the best beam cannot pass the worst finished one any more. That is
judged as if the beam ended now, or for NEVER with a positive penalty at the longest length.

Each beam needs its best W + E tokens only, where E is the number of stop tokens: fewer than W of them are passed by
other continuations, and at most E of them end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.protocol.sampling_params import NEVER
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.sampling_params import BeamParams
    from pd_connectors.protocol.messages import TopLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam: another one and a token after it. The first of all has neither."""

    parent: Beam | None = None
    token: SampledToken | None = None
    score: float = 0.0  # the sum of its tokens' log-probabilities

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        found: list[SampledToken] = []
        beam: Beam | None = self
        while beam is not None and beam.token is not None:
            found.append(beam.token)
            beam = beam.parent
        return tuple(reversed(found))


class FinishedBeam(NamedTuple):
    """A beam that has ended."""

    score: float  # with the length penalty
    beam: Beam
    stop_token_id: int | None  # None: it has the most tokens that are allowed


class Step(NamedTuple):
    """A beam of the next round: the place of its parent in this round, and the token after that."""

    parent: int
    token_id: int


class BeamSearch:
    """One search. `max_tokens`: of an answer. `num_logprobs`: of each token, as in SamplingParams."""

    def __init__(
        self, params: BeamParams, max_tokens: int, stop_ids: frozenset[int], num_logprobs: int | None = None
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._num_logprobs = num_logprobs
        self._num_tokens = 0  # of each beam
        self._beams = [Beam()]
        self.finished: list[FinishedBeam] = []  # best first, at most W

    def advance(self, rows: Sequence[SampledToken]) -> list[Step]:
        """Take the candidates after each beam (`SampledToken.top`); return the next beams, best first.

        An empty list: the search is over, and `finished` is final.
        """
        width, stop_ids = self._params.width, self._stop_ids
        ranked = [
            (beam.score + one.logprob, index, one)
            for index, (beam, row) in enumerate(zip(self._beams, rows, strict=True))
            for one in row.top
        ]
        ranked.sort(key=lambda candidate: -candidate[0])
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_tokens
        for score, index, one in ranked[:width]:
            if is_last or one.token_id in stop_ids:
                self._finish(Beam(self._beams[index], self._sampled(one, rows[index]), score))
        going = [candidate for candidate in ranked if candidate[2].token_id not in stop_ids][:width]
        if is_last or not going or not self._may_improve(going[0][0]):
            self._beams = []
            return []
        self._beams = [Beam(self._beams[index], self._sampled(one, rows[index]), score) for score, index, one in going]
        return [Step(index, one.token_id) for _, index, one in going]

    def _finish(self, beam: Beam) -> None:
        assert beam.token is not None
        stop_token_id = beam.token.token_id if beam.token.token_id in self._stop_ids else None
        score = beam.score / self._num_tokens**self._params.length_penalty
        self.finished.append(FinishedBeam(score, beam, stop_token_id))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._params.width :]

    def _may_improve(self, best_score: float) -> bool:
        """Whether the search goes on, by the score of the best beam that goes on."""
        params = self._params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping is True:
            return False
        is_longest = params.early_stopping == NEVER and params.length_penalty > 0
        num_tokens = self._max_tokens if is_longest else self._num_tokens
        best_possible: float = best_score / num_tokens**params.length_penalty
        return best_possible > self.finished[-1].score

    def _sampled(self, one: TopLogprob, row: SampledToken) -> SampledToken:
        """The token as the client gets it."""
        if self._num_logprobs is None:
            return SampledToken(one.token_id)
        return SampledToken(one.token_id, one.logprob, row.top[: self._num_logprobs])
