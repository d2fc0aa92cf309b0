"""One generation request in the engine: messages of the engine in, outputs of the n choices out."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pd_cluster.errors import EngineUnavailable, PdError, error_named
from pd_cluster.protocol.messages import (
    Abort,
    FinishReason,
    NeedsPrefill,
    PromptLogprobs,
    PromptRead,
    RequestFailed,
    SequenceTokens,
    TicketOpened,
    TokensOut,
    Work,
)
from pd_cluster.server.node.stopwatch import Stopwatch
from pd_cluster.server.requests.choice import Choice
from pd_cluster.server.requests.prompt_scores import PromptScores
from pd_cluster.server.requests.takeover_policy import PrefillSearch
from pd_http.held_bytes import Share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.engine.client import RequestMessage, RequestStream
    from pd_cluster.protocol.messages import Timeline
    from pd_cluster.server.requests.choice import ChoiceOutput
    from pd_cluster.server.requests.generation_request import GenerationRequest
    from pd_cluster.server.state import NodeState
    from pd_connectors.protocol.ticket import Ticket

logger = logging.getLogger("pd_cluster.server")

SETTLE_DEADLINE_S = 5.0  # after a stop string: until the engine says that it has stopped


class GenerationStream:
    """`async with` admits the request (raises EngineUnavailable). Iterate once.

    Leaving the block early aborts the request and closes the connection to the prefill node.
    """

    def __init__(self, state: NodeState, request: GenerationRequest, started_s: float) -> None:
        self._state = state
        self.request = request
        self._started_s = started_s
        self.stopwatch = Stopwatch(started_s)
        self.scores = None if request.ask is None else PromptScores(request.ask, state.tokenizer, request.prompt)
        self._search = PrefillSearch(state, request)
        self._choices = [Choice(i, request, state.tokenizer) for i in range(request.num_choices)]
        self.followed = [one.followed for one in self._choices if one.followed is not None]
        self._live = request.live  # by index of the engine
        known = () if request.known is None else request.known.choices
        self._num_known_tokens = sum(len(choice.token_ids) for choice in known)
        self._stream: RequestStream | None = None
        self._failure: PdError | None = None  # raised after the tokens before it are delivered
        self.ticket: Ticket | None = None  # PREFILL: for D
        self.num_cached_tokens = 0
        self._num_peer_cached_tokens = 0  # of the prefill node that it was loaded from
        self.num_external_tokens = 0
        self.num_drafts = self.num_accepted_drafts = 0  # by this node
        self.timeline: Timeline | None = None  # once the engine has told it

    @property
    def prefill_node(self) -> str | None:
        """The node that computes the prompt; None: not known yet."""
        return self._search.prefill_node

    def choice(self, index: int) -> Choice:
        """One of the n, to bring it to the state in which another node left it, before the request is admitted."""
        return self._choices[index]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all choices so far, known ones too."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_reported_cached_tokens(self) -> int:
        """The cached tokens of the client's usage, on the node that began the answer or on its prefill node.

        None are where the log-probabilities of the prompt are shown: every position was computed for them.
        """
        known = self.request.known
        if known is not None and known.num_cached_tokens is not None:
            return known.num_cached_tokens
        if self.scores is not None:
            return 0
        return max(self.num_cached_tokens, self._num_peer_cached_tokens)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None: no parser that counts them."""
        counts = [one.num_reasoning_tokens for one in self._choices]
        return None if None in counts else sum(filter(None, counts))

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    async def __aenter__(self) -> GenerationStream:
        add = self.request.to_engine(self._state.config, self._started_s)
        self._stream = self._state.engine.open(add)
        self._stream.unread = Share(self._state.held)
        self._stream.step_bytes = 3 * self.request.sampling.step_bytes  # three times: they leave as one event each
        if self.request.charge is not None:
            self.request.charge.include()
        self._state.adapters.begin_request(self.request.space.name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._state.adapters.end_request(self.request.space.name)
        try:
            self._count()
        finally:
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

    async def __anext__(self) -> list[ChoiceOutput]:
        """New outputs, until every choice has ended. When several steps wait, one list covers them.

        A list of a PREFILL may be empty: it means that `ticket` is set. Raises PdError when the engine or the handoff
        fails.
        """
        stream = self._admitted
        while not self.finished:
            if self._failure is not None:
                raise self._failure
            message = await anext(stream, None)
            if message is None:
                raise EngineUnavailable("the engine ended the request early")
            ready = [message, *stream.drain_ready()]
            outputs: list[ChoiceOutput] = []
            try:
                for one in ready:
                    outputs.extend(await self._take(one))
            except PdError as error:
                self._failure = error
            if outputs or isinstance(message, TicketOpened):
                outputs = _merged(outputs) if len(ready) > 1 else outputs
                self.stopwatch.delivered([len(one.tokens) for one in outputs], self._choices[0].num_tokens)
                return outputs
        raise StopAsyncIteration

    async def settle(self) -> None:
        """Wait for the engine's terminal reply. Call it when the client has its answer."""
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                async for message in self._admitted:
                    await self._take(message)
        except (TimeoutError, PdError) as error:
            if isinstance(error, TimeoutError):
                self._state.metrics.waits.labels("settle").inc()
            logger.warning("request %s: the engine did not confirm its end: %r", self.request.request_id, error)

    async def _take(self, message: RequestMessage) -> Iterable[ChoiceOutput]:
        match message:
            case TokensOut():
                self._search.has_tokens()
                self.num_cached_tokens = max(self.num_cached_tokens, message.num_cached_tokens)
                self.num_external_tokens = max(self.num_external_tokens, message.num_external_tokens)
                self._num_peer_cached_tokens = message.num_peer_cached_tokens
                self.num_drafts, self.num_accepted_drafts = message.num_drafts, message.num_accepted_drafts
                self.timeline = self.timeline or message.timeline
                return [output for new in message.sequences if (output := self._extend(new)) is not None]
            case PromptLogprobs():
                if self.scores is not None:
                    await self.scores.take(message.start, message.entries)
            case PromptRead():
                self._search.has_tokens()
                self.num_cached_tokens = message.num_cached_tokens
                self.timeline = message.timeline
                return [self._choices[0].extend(SequenceTokens(0, (), FinishReason.LENGTH))]
            case TicketOpened():
                self.ticket = message.ticket
            case NeedsPrefill():
                self._state.engine.send(await self._search.answer(message))
            case RequestFailed():
                raise error_named(message.error, message.message, message.param, message.code)
        return ()

    def _extend(self, new: SequenceTokens) -> ChoiceOutput | None:
        choice = self._choices[self._live[new.index]]
        if choice.finished:
            return None  # a step that was under way when the stop string was found
        if new.finish_reason is FinishReason.ABORT:
            raise EngineUnavailable("the engine aborted the request")
        output = choice.extend(new)
        if choice.met_stop_string and new.finish_reason is None:
            self._state.engine.send(Abort(self.request.request_id, new.index, FinishReason.STOP))
        return output

    def _count(self) -> None:
        metrics, request = self._state.metrics, self.request
        work = request.kv_source.work
        metrics.count_prompt(work, len(request.prompt), self.num_cached_tokens)
        metrics.external_tokens.inc(self.num_external_tokens)
        if self.timeline is not None:
            metrics.observe_timeline(work, self.timeline)
        if work is not Work.PREFILL:  # P's first token is counted where the client gets it
            metrics.generation_tokens.inc(self.num_answer_tokens - self._num_known_tokens)
        if work is Work.TAKE_OVER and self.prefill_node is not None:
            metrics.handoffs.labels("local" if self.prefill_node == self._state.node_id else "remote").inc()
        # the client does not see the times of a prefill leg, and of a continued answer not the first
        if work is not Work.PREFILL and request.known is None:
            longest = max(choice.num_tokens for choice in self._choices)
            self.stopwatch.observe(metrics, longest, complete=self.finished)


def _merged(outputs: list[ChoiceOutput]) -> list[ChoiceOutput]:
    """One output per choice."""
    merged: dict[int, ChoiceOutput] = {}
    for output in outputs:
        first = merged.setdefault(output.index, output)
        if first is not output:
            first.add(output)
    return list(merged.values())
