"""One prompt's way through the engine, as text: what chat and completions, streaming and not, have in common."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.errors import EngineUnavailable, PdError, error_named
from pd_cluster.protocol.messages import (
    Abort,
    FinishReason,
    NeedsPrefill,
    RequestFailed,
    SequenceTokens,
    TicketOpened,
    TokensOut,
    Work,
)
from pd_cluster.server.detokenizer import Detokenizer
from pd_cluster.server.stopwatch import Stopwatch
from pd_cluster.server.takeover_policy import PrefillSearch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.engine.client import RequestMessage, RequestStream
    from pd_cluster.protocol.messages import Timeline
    from pd_cluster.server.generation_request import GenerationRequest
    from pd_cluster.server.state import NodeState
    from pd_connectors.protocol.messages import SampledToken
    from pd_connectors.protocol.ticket import Ticket

logger = logging.getLogger("pd_cluster.server")

SETTLE_DEADLINE_S = 5.0  # after a stop string: until the engine says that it has stopped


@dataclass(frozen=True, slots=True)
class Delta:
    """What one of the n sequences gained."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it


class _Choice:
    """One of the n sequences on the text side."""

    def __init__(self, index: int, job: GenerationRequest, state: NodeState) -> None:
        text = job.text
        self.index = index
        self.finished = False
        self._include_stop = text.include_stop
        self._stop_token_ids = job.sampling.stop_token_ids
        self.detokenizer = Detokenizer(
            state.tokenizer,
            text.stop,
            include_stop=text.include_stop,
            skip_special=text.skip_special,
            min_tokens=job.sampling.min_tokens,
        )

    def extend(self, new: SequenceTokens) -> Delta:
        """Tokens behind the one that completed a stop string are not the client's."""
        detokenizer = self.detokenizer
        parts, used = [], 0
        for used, token in enumerate(new.tokens, 1):
            ends_it = new.stop_token_id is not None and used == len(new.tokens)
            parts.append(detokenizer.push(token.token_id, hidden=ends_it and not self._include_stop))
            if detokenizer.stop is not None:
                break
        reason = new.finish_reason
        # the model's own end token needs no word
        stop = new.stop_token_id if new.stop_token_id in self._stop_token_ids else None
        if detokenizer.stop is None and reason is not None:
            parts.append(detokenizer.flush())
        if detokenizer.stop is not None:
            reason = FinishReason.STOP
        self.finished = reason is not None
        return Delta(self.index, "".join(parts), new.tokens[:used], reason, detokenizer.stop or stop)


class GenerationStream:
    """`async with` admits it (raises EngineUnavailable); iterate once.

    Leaving early aborts the request and hangs up on the prefill node.
    """

    def __init__(self, state: NodeState, job: GenerationRequest, started_s: float) -> None:
        self._state = state
        self.job = job
        self._started_s = started_s
        self._search = PrefillSearch(state, job)
        self.stopwatch = Stopwatch(started_s)
        self._choices = [_Choice(i, job, state) for i in range(job.sampling.n)]
        self._stream: RequestStream | None = None
        self._failure: PdError | None = None  # raised once the tokens before it are delivered
        self.ticket: Ticket | None = None  # PREFILL: what P hands out
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self.timeline: Timeline | None = None  # once the engine has given its last reply

    @property
    def prefill_node(self) -> str | None:
        """Who computes the prompt, as known now. None: not settled yet."""
        return self._search.prefill_node

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.detokenizer.num_tokens for choice in self._choices)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    async def __aenter__(self) -> GenerationStream:
        handoff = self._state.config.handoff
        self._stream = self._state.engine.open(
            self.job.to_engine(
                min_remote_tokens=handoff.min_remote_tokens,
                load_deadline_s=handoff.load_deadline_s,
                received_s=self._started_s,
            )
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._count()
        try:
            await self._admitted.__aexit__(*exc)
        finally:
            await self._search.close()

    @property
    def _admitted(self) -> RequestStream:
        assert self._stream is not None, "a generation is used as `async with`"
        return self._stream

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> list[Delta]:
        """What is new, until every sequence has ended. Under backlog one list covers several steps.
        A PREFILL's first item may be empty: `ticket` is there. Raises PdError when the engine or the handoff fails."""
        stream = self._admitted
        while not self.finished:
            if self._failure is not None:
                raise self._failure
            message = await anext(stream, None)
            if message is None:
                raise EngineUnavailable("the engine ended the request early")
            ready = [message, *stream.drain_ready()]
            deltas: list[Delta] = []
            try:
                for one in ready:
                    deltas.extend(await self._take(one))
            except PdError as error:
                self._failure = error
            if deltas or isinstance(message, TicketOpened):
                self.stopwatch.delivered(deltas, self._choices[0].detokenizer.num_tokens)
                return _merged(deltas) if len(ready) > 1 else deltas
        raise StopAsyncIteration

    async def settle(self) -> None:
        """When the client has its answer: wait for the engine's terminal reply, which carries the timeline."""
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                async for message in self._admitted:
                    await self._take(message)
        except (TimeoutError, PdError) as error:
            if isinstance(error, TimeoutError):
                self._state.metrics.waits.labels("settle").inc()
            logger.warning("request %s: the engine did not confirm its end: %r", self.job.request_id, error)

    async def _take(self, message: RequestMessage) -> Iterable[Delta]:
        match message:
            case TokensOut():
                self._search.has_tokens()
                self.num_cached_tokens = max(self.num_cached_tokens, message.num_cached_tokens)
                self.num_external_tokens = max(self.num_external_tokens, message.num_external_tokens)
                if message.timeline is not None:
                    self.timeline = message.timeline
                    self._state.metrics.observe_timeline(message.timeline)
                return [delta for new in message.sequences if (delta := self._extend(new)) is not None]
            case TicketOpened():
                self.ticket = message.ticket
            case NeedsPrefill():
                self._state.engine.send(await self._search.answer(message))
            case RequestFailed():
                raise error_named(message.error, message.message, message.param, message.code)
        return ()

    def _extend(self, new: SequenceTokens) -> Delta | None:
        choice = self._choices[new.index]
        if choice.finished:
            return None  # steps that were under way when its stop string was found
        if new.finish_reason is FinishReason.ABORT:
            raise EngineUnavailable("the engine aborted the request")
        delta = choice.extend(new)
        if choice.detokenizer.stop is not None and new.finish_reason is None:
            self._state.engine.send(Abort(self.job.request_id, choice.index, FinishReason.STOP))
        return delta

    def _count(self) -> None:
        metrics, job = self._state.metrics, self.job
        metrics.prompt_tokens.inc(len(job.prompt))
        metrics.cached_tokens.inc(self.num_cached_tokens)
        metrics.external_tokens.inc(self.num_external_tokens)
        metrics.generation_tokens.inc(self.num_generated_tokens)
        if job.plan.work is Work.TAKE_OVER and self.prefill_node is not None:
            metrics.handoffs.labels("local" if self.prefill_node == self._state.node_id else "remote").inc()
        if job.plan.work is not Work.PREFILL:  # that one's times are not the client's
            longest = max(choice.detokenizer.num_tokens for choice in self._choices)
            self.stopwatch.observe(metrics, longest, complete=self.finished)


def _merged(deltas: list[Delta]) -> list[Delta]:
    """One delta per sequence."""
    merged: dict[int, Delta] = {}
    for new in deltas:
        old = merged.get(new.index)
        if old is not None:
            new = Delta(new.index, old.text + new.text, old.tokens + new.tokens, new.finish_reason, new.stop_reason)
        merged[new.index] = new
    return list(merged.values())
