"""Keeps a number of streams running in an engine of this process, and counts the tokens of whole answers.

A stream that ends is followed by the next one, so a batch never empties while its slowest stream goes on. The rate is
that of whole answers, times the streams: tokens by the time that the places of these answers were taken. Tokens in a
window would tell more: it begins with fast streams beside slow ones, and ends with the slowest of them, when fast ones
have come a second time: 4 to 10% too many, of six tasks at 8 to 128 streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.recorded_sampler import TEMPERATURE
from pd_cluster.protocol.messages import Abort, AddRequest, RequestFailed, TokensOut
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.offline import OfflineEngine
    from benchmarks.recorded_texts import RecordedAnswer


@dataclass(slots=True)
class LoopStream:
    """One answer, as a client would see it."""

    number: int  # in the order of their begin
    answer: RecordedAnswer
    tokens: list[int] = field(default_factory=list)
    num_events: int = 0  # that had tokens
    begin_s: float = 0.0  # when its place became free; of one that found it empty, when its first tokens came
    num_before: int = 0  # tokens that came until then
    first_s: float = 0.0
    last_s: float = 0.0
    is_over: bool = False  # by itself

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token from the first to the last. None: there were not two events."""
        return (self.last_s - self.first_s) / (len(self.tokens) - 1) if self.last_s > self.first_s else None

    @property
    def is_right(self) -> bool:
        """Whether what was written is what was recorded: all of it, or as far as it came before the round's end."""
        answer = self.answer.answer
        return self.tokens == list(answer if self.is_over else answer[: len(self.tokens)])


@dataclass(slots=True)
class LoopResult:
    """What was counted."""

    seconds: float = 0.0  # that the answers which count took, through the number of streams
    num_tokens: int = 0  # of these answers
    streams: list[LoopStream] = field(default_factory=list)  # all of them, also those that were ended at the end
    counters: dict[str, float] = field(default_factory=dict)  # what the engine's gained, from the first request on

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


class ClosedLoop:
    """Runs answers in turn. For one run."""

    def __init__(
        self,
        engine: OfflineEngine,
        answers: Sequence[RecordedAnswer],
        seeds: Sequence[int],
        num_streams: int,
        num_counted: int,
    ) -> None:
        """`num_streams` at a time until the first `num_counted` answers, at least as many, have ended.

        seeds: of the requests, by answer.
        """
        assert num_counted >= num_streams
        self._engine, self._answers, self._seeds, self._num_streams = engine, answers, seeds, num_streams
        self._num_left = self._num_counted = num_counted
        self._num_open = 0
        self._is_ending = False
        self._streams: dict[str, LoopStream] = {}

    def run(self) -> LoopResult:
        """Raises RuntimeError when a request is refused."""
        engine, before = self._engine, self._engine.counters()
        core, mailbox = engine.core, engine.mailbox
        while self._num_left:
            while self._num_open < self._num_streams:
                self._begin()
            core.turn()
            self._take()
        self._is_ending = True
        mailbox.inbox += [Abort(name) for name, stream in self._streams.items() if not stream.is_over]
        while core.turn():
            self._take()
        self._take()
        streams = list(self._streams.values())
        counted = streams[: self._num_counted]
        return LoopResult(
            seconds=sum(one.last_s - one.begin_s for one in counted) / self._num_streams,
            num_tokens=sum(len(one.tokens) - one.num_before for one in counted),
            streams=streams,
            counters={name: value - before.get(name, 0.0) for name, value in engine.counters().items()},
        )

    def _begin(self) -> None:
        number = len(self._streams)
        at = number % len(self._answers)
        answer, name = self._answers[at], f"{id(self)}-{number}"
        self._streams[name] = LoopStream(number, answer, begin_s=self._engine.mailbox.flushed_s)
        self._num_open += 1
        sampling = sampling_of(self._seeds[at], len(answer.answer))
        self._engine.mailbox.inbox.append(AddRequest(name, list(answer.prompt), sampling))

    def _take(self) -> None:
        """Take what the engine has sent."""
        mailbox = self._engine.mailbox
        messages, mailbox.outbox = mailbox.outbox, []
        for message in messages:
            if isinstance(message, RequestFailed):
                raise RuntimeError(f"{message.error}: {message.message}")
            if isinstance(message, TokensOut):
                self._note(self._streams[message.request_id], message, mailbox.flushed_s)

    def _note(self, stream: LoopStream, message: TokensOut, now_s: float) -> None:
        tokens = [token.token_id for part in message.sequences for token in part.tokens]
        if tokens:
            if not stream.num_events:
                stream.first_s = now_s
                if stream.number < self._num_streams:
                    stream.begin_s, stream.num_before = now_s, len(tokens)
            stream.num_events += 1
            stream.tokens += tokens
            stream.last_s = now_s
        if message.finished and not stream.is_over and not self._is_ending:
            stream.is_over = True
            self._num_open -= 1
            self._num_left -= stream.number < self._num_counted


def sampling_of(seed: int, num_tokens: int) -> SamplingParams:
    """Of a request that writes a recorded answer."""
    return SamplingParams(max_tokens=num_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True)


def fill_cache(engine: OfflineEngine, answers: Sequence[RecordedAnswer], seeds: Sequence[int]) -> None:
    """Compute the prompts, so that a stream begins with a step of one token."""
    samplings = [sampling_of(seed, 1) for seed, _ in zip(seeds, answers, strict=False)]
    engine.generate([list(one.prompt) for one in answers], samplings)
