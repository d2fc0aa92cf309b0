"""Random requests for a soak, and a ledger that checks their outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_cluster.protocol.messages import Abort, AddRequest, FinishReason, FromEngine, SequenceTokens, TokensOut
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from random import Random

_ROUNDING = 1e-3  # a logprob of 0 may be so far above 0


class Breach(Exception):
    """An invariant does not hold."""


@dataclass(slots=True)
class Traffic:
    """Makes requests. `longest`: most tokens of a prompt and its output together; `usual`: most tokens of most prompts
    and of every output."""

    rng: Random
    vocab_size: int
    longest: int
    usual: int
    num_prefixes: int = 3
    prefixes: list[list[int]] = field(init=False)
    _num_made: int = 0

    def __post_init__(self) -> None:
        self.prefixes = [self._tokens(self.longest // 2) for _ in range(self.num_prefixes)]

    def request(self) -> AddRequest:
        """A request with a prompt of 1 token to half the longest; half of the prompts have a common prefix."""
        rng, longest, usual = self.rng, self.longest, self.usual
        self._num_made += 1
        length = rng.randint(1, rng.choice((16, usual // 4, usual // 4, usual, longest // 2)))
        shared = rng.choice((length, rng.randint(0, length))) if rng.random() < 0.5 else 0
        prompt = rng.choice(self.prefixes)[:shared] + self._tokens(length - shared)
        sampling = self._sampling(rng.randint(1, rng.choice((8, usual, usual))))
        return AddRequest(f"soak-{self._num_made}", prompt, sampling, priority=rng.choice((0, 0, 0, 1)))

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=count)

    def _sampling(self, max_tokens: int) -> SamplingParams:
        """Each feature is on for some requests, so that a step has rows with and without it."""
        rng = self.rng
        features: tuple[tuple[float, dict[str, Any]], ...] = (
            (0.3, {"temperature": 0.0}),
            (0.2, {"n": rng.randint(2, 4)}),
            (0.2, {"top_k": rng.randint(1, 200)}),
            (0.2, {"top_p": rng.uniform(0.1, 1)}),
            (0.1, {"min_p": rng.uniform(0, 0.2)}),
            (0.15, {"repetition_penalty": rng.uniform(0.7, 1.5)}),
            (0.15, {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
            (0.5, {"seed": rng.getrandbits(64)}),
            (0.1, {"logit_bias": {token: rng.uniform(-100, 100) for token in self._tokens(3)}}),
            (0.1, {"min_tokens": rng.randint(1, max_tokens), "stop_token_ids": tuple(self._tokens(5))}),
            (0.5, {"ignore_eos": True}),
            (0.15, {"logprobs": rng.randint(0, 5)}),
        )
        chosen: dict[str, Any] = {"temperature": rng.uniform(0.2, 1.8)}
        for share, settings in features:
            if rng.random() < share:
                chosen |= settings
        return SamplingParams(max_tokens=max_tokens, **chosen)


@dataclass(slots=True)
class Entry:
    """An open request."""

    request: AddRequest
    num_tokens: list[int]  # by sequence
    ended: dict[int, FinishReason] = field(default_factory=dict)  # by index
    aborted: set[int] = field(default_factory=set)  # sequences with an abort, which may have come too late


@dataclass(slots=True)
class TrafficLedger:
    """Open requests and their outputs so far. Methods raise Breach."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    open: dict[str, Entry] = field(default_factory=dict)
    num_ended: int = 0
    num_tokens: int = 0

    def add(self, request: AddRequest) -> AddRequest:
        """Note a request. Returns it."""
        self.open[request.request_id] = Entry(request, [0] * request.sampling.n)
        return request

    def abort(self, rng: Random) -> Abort:
        """Abort a random open request or one of its sequences."""
        entry = self.open[rng.choice(list(self.open))]
        n = entry.request.sampling.n
        index = rng.randrange(n) if rng.random() < 0.3 else None
        entry.aborted |= set(range(n)) if index is None else {index}
        return Abort(entry.request.request_id, index)

    def take(self, message: FromEngine) -> None:
        """Check a message. Only tokens of open requests are allowed."""
        if not isinstance(message, TokensOut) or message.request_id not in self.open:
            raise Breach(f"no open request for {message}")
        entry = self.open[message.request_id]
        for part in message.sequences:
            self._take_part(entry, part)
        if message.finished != (len(entry.ended) == entry.request.sampling.n):
            raise Breach(f"finished is {message.finished}, but the ends of {entry.request} are {entry.ended}")
        if message.finished:
            del self.open[message.request_id]
            self.num_ended += 1

    def _take_part(self, entry: Entry, part: SequenceTokens) -> None:
        request, sampling, index = entry.request, entry.request.sampling, part.index
        if index in entry.ended:
            raise Breach(f"sequence {index} of {request} continues after its end: {part}")
        entry.num_tokens[index] += len(part.tokens)
        self.num_tokens += len(part.tokens)
        for token in part.tokens:
            if not 0 <= token.token_id < self.vocab_size:
                raise Breach(f"token {token.token_id} is not in the vocabulary of {self.vocab_size}")
            if (token.logprob is None) != (sampling.logprobs is None):
                raise Breach(f"logprobs of {request}: {token}")
            if token.logprob is not None and not (math.isfinite(token.logprob) and token.logprob < _ROUNDING):
                raise Breach(f"a logprob of {token.logprob} in {request}")
        if part.finish_reason is not None:
            entry.ended[index] = part.finish_reason
            self._check_end(entry, part)

    def _check_end(self, entry: Entry, part: SequenceTokens) -> None:
        sampling, count = entry.request.sampling, entry.num_tokens[part.index]
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        match part.finish_reason:
            case FinishReason.LENGTH:
                fits = count == sampling.max_tokens
            case FinishReason.STOP:
                fits = part.stop_token_id in ends and sampling.min_tokens < count <= sampling.max_tokens
            case _:
                fits = part.index in entry.aborted and count <= sampling.max_tokens
        if not fits:
            raise Breach(f"sequence {part.index} of {entry.request} ended with {count} tokens: {part}")
