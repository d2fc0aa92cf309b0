"""Turns generation streams into the bytes of an answer. Chat and completions differ only in their `ResponseShape`."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pd_cluster.server.bodies.schema import StreamOptions
from pd_cluster.server.requests.answer_extras import AnswerExtras, echo_texts
from pd_cluster.server.requests.choice import ChoiceOutput
from pd_cluster.server.requests.continuation import resume
from pd_cluster.server.requests.generation_request import digest_of
from pd_cluster.server.requests.generation_stream import GenerationStream
from pd_cluster.server.shapes.stream_writer import EventWriter, FrameWriter
from pd_http.frames import StreamHead
from pd_http.node_report import REPORT_HEADER, NodeReport, encode_report

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.requests.generation_ask import GenerationAsk
    from pd_cluster.server.requests.generation_request import GenerationRequest
    from pd_cluster.server.requests.response_shape import ResponseShape
    from pd_cluster.server.state import NodeState
    from pd_http.held_bytes import Share

NO_OPTIONS = StreamOptions()


def usage_of(streams: Sequence[GenerationStream]) -> dict[str, Any]:
    """OpenAI's `usage`. A prompt counts once, whatever n is."""
    prompt = sum(len(one.request.prompt) for one in streams)
    completion = sum(one.num_answer_tokens for one in streams)
    cached = sum(one.num_reported_cached_tokens for one in streams)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details: dict[str, int] = {}
    reasoning = [one.num_reasoning_tokens for one in streams]
    if None not in reasoning:
        details["reasoning_tokens"] = sum(filter(None, reasoning))
    if followed := [choice for one in streams for choice in one.followed]:
        details["accepted_prediction_tokens"] = sum(one.num_accepted for one in followed)
        details["rejected_prediction_tokens"] = sum(one.num_rejected for one in followed)
    return usage | {"completion_tokens_details": details} if details else usage


def _last_usage(streams: Sequence[GenerationStream], options: StreamOptions) -> dict[str, Any]:
    """The usage of the whole request, with the milliseconds of each phase (`protocol.messages.Timeline`) if asked for.

    Several prompts have no phases, because their timelines differ.
    """
    usage = usage_of(streams)
    if options.include_timings:
        usage["timings"] = {name: round(seconds * 1e3, 3) for name, seconds in _phases(streams).items()}
    return usage


def _phases(streams: Sequence[GenerationStream]) -> dict[str, float]:
    timeline = streams[0].timeline if len(streams) == 1 else None
    return {} if timeline is None else timeline.phases()


def report_of(state: NodeState, streams: Sequence[GenerationStream]) -> NodeReport:
    """What the router is told about the request."""
    usage = usage_of(streams)
    return NodeReport(
        model=streams[0].request.space.name or state.model_name,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
        first_s=min((one.stopwatch.first_s for one in streams if one.stopwatch.first_s), default=0.0),
        phases=_phases(streams),
        prefill_node=",".join(dict.fromkeys(one.prefill_node for one in streams if one.prefill_node is not None)),
        num_drafts=sum(one.num_drafts for one in streams),
        num_accepted_drafts=sum(one.num_accepted_drafts for one in streams),
    )


def node_headers(state: NodeState, streams: Sequence[GenerationStream]) -> dict[str, str]:
    """The nodes that computed the prompts and the node that generated. Prefill nodes not known yet are left out."""
    prefill = dict.fromkeys(one.prefill_node for one in streams if one.prefill_node is not None)
    return {"x-pd-prefill": ",".join(prefill), "x-pd-decode": state.node_id}


def stream_head(version: str, response_id: str, created: int, streams: Sequence[GenerationStream]) -> StreamHead:
    """The head of an answer. Beam searches cannot be continued at another node: they have no version."""
    request, usage = streams[0].request, usage_of(streams)
    return StreamHead(
        stream_version=version if request.sampling.beams is None else "",
        response_id=response_id,
        created=created,
        seed=request.seed,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"] if len(streams) == 1 else 0,
        prompt_digest=digest_of([one.request for one in streams]),
    )


async def answer(
    state: NodeState, caller: Caller, reply: CountedReply, ask: GenerationAsk, requests: Sequence[GenerationRequest]
) -> None:
    """Generate for the requests of `ask`, and answer it. Raises PdError."""
    options = ask.body.stream_options or NO_OPTIONS
    streams = [GenerationStream(state, request, caller.started_s) for request in requests]
    extras = await extras_of(state, caller, ask, streams)
    shape = ask.shape(extras)
    for number, stream in enumerate(streams if ask.known else ()):
        await resume(stream, number * stream.request.num_choices, shape)
    writer = EventWriter(reply)
    if caller.wants_frames and ask.body.stream:
        version = state.stream_version(state.ready)
        writer = FrameWriter(reply, partial(stream_head, version, caller.request_id, extras.created, streams))
    live = [one for one in _numbered(streams) if not one[1].finished]
    async with AsyncExitStack() as stack:
        for _, stream in live:
            await stack.enter_async_context(stream)
        if ask.body.stream:
            await _write_stream(state, writer, streams, live, shape, options)
        else:
            choices = await collect(streams, reply.share)
            usage, headers = _last_usage(streams, options), node_headers(state, streams)
            if caller.wants_report:
                headers[REPORT_HEADER] = encode_report(report_of(state, streams)).decode("latin-1")
            await reply.json(200, shape.body(choices, usage), headers)
        for _, stream in live:
            await stream.settle()


async def extras_of(
    state: NodeState, caller: Caller, ask: GenerationAsk, streams: Sequence[GenerationStream] = ()
) -> AnswerExtras:
    """What the answer to `ask` says beside the text of these streams."""
    body, prompts = ask.body, [one.request.prompt for one in streams]
    given = [None] * len(ask.echoes) if body.truncate_prompt_tokens is not None else ask.echoes
    return AnswerExtras(
        request_id=caller.request_id,
        model=ask.space.name or state.model_name,
        vocabulary=state.tokenizer,
        created=ask.known[0].created if ask.known else int(time.time()),
        body=body,
        with_logprobs=ask.with_logprobs,
        prompts=prompts if body.return_token_ids else (),
        echoes=await echo_texts(state.tokenizer, list(zip(given, prompts, strict=False))) if given else (),
        scores=[one.scores for one in streams if one.scores is not None],
    )


async def _write_stream(
    state: NodeState,
    writer: EventWriter,
    streams: Sequence[GenerationStream],
    live: Sequence[_Numbered],
    shape: ResponseShape,
    options: StreamOptions,
) -> None:
    """Server-sent events. The headers wait for the first tokens: the prefill node is not known earlier.

    Of a stream that another node has begun and all choices have ended, only the end is written, without the engine.
    """
    has_started, counts = False, shape.needs_usage or options.continuous_usage_stats
    async with aclosing(_interleaved(live)) as outputs:
        async for first_index, stream, some in outputs:
            if not has_started:
                has_started = True
                await writer.start(node_headers(state, streams))
            usage = usage_of(streams) if counts else None
            chunks = [shape.chunk(first_index + output.index, output, usage) for output in some]
            num_cached = stream.num_reported_cached_tokens if len(streams) > 1 else 0
            await writer.write(first_index, some, b"".join(chunks), num_cached)
    if not has_started:
        await writer.start(node_headers(state, streams))
    last = shape.usage_chunk(_last_usage(streams, options)) if options.include_usage else b""
    await writer.end(last + shape.end, report_of(state, streams))


async def collect(streams: Sequence[GenerationStream], share: Share) -> list[ChoiceOutput]:
    """Every choice, complete: prompts in order, the n choices of each prompt together. `share`: counts them as they
    come. Raises NoRoom, InvalidRequest."""
    sampling = streams[0].request.sampling
    token_bytes = sampling.step_bytes // sampling.n
    choices = [ChoiceOutput(i) for one in streams for i in range(one.request.num_choices)]
    async with aclosing(_interleaved(_numbered(streams))) as outputs:
        async for first_index, _, some in outputs:
            for output in some:
                share.grow(token_bytes * len(output.tokens))
                choices[first_index + output.index].add(output)
    return choices


_Numbered = tuple[int, GenerationStream]  # the index of its first choice in the answer
_Some = tuple[int, GenerationStream, list[ChoiceOutput]]


def _numbered(streams: Sequence[GenerationStream]) -> list[_Numbered]:
    ends = accumulate((one.request.num_choices for one in streams), initial=0)
    return list(zip(ends, streams, strict=False))


async def _interleaved(streams: Sequence[_Numbered]) -> AsyncGenerator[_Some, None]:
    """(index of the stream's first choice, the stream, its new outputs), in the order in which they come."""
    if len(streams) == 1:
        first_index, only = streams[0]
        async for outputs in only:
            yield first_index, only, outputs
        return
    queue: asyncio.Queue[_Some | None] = asyncio.Queue()
    room = asyncio.Semaphore(2 * len(streams))  # what the client does not read waits in the streams, which count it

    async def pump(first_index: int, stream: GenerationStream) -> None:
        async for outputs in stream:
            await room.acquire()
            queue.put_nowait((first_index, stream, outputs))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for first_index, stream in streams:
                    group.create_task(pump(first_index, stream))
        finally:
            queue.put_nowait(None)

    pumping = asyncio.create_task(pump_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
            room.release()
        try:
            await pumping
        except* Exception as group:
            raise group.exceptions[0] from None
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
