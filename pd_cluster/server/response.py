"""From jobs to the client's bytes. Chat and completions differ only in their `ResponseShape`."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pd_http.sse import SSE_DONE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pd_cluster.protocol.messages import FinishReason
    from pd_cluster.server.generation_stream import Delta, GenerationStream
    from pd_cluster.server.schema import StreamOptions
    from pd_cluster.server.state import NodeState
    from pd_connectors.protocol.messages import SampledToken
    from pd_http.reply import Reply


@dataclass(slots=True)
class Collected:
    """A whole choice, for answers that are not streamed."""

    text: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class ResponseShape(Protocol):
    """How one API writes its answers. Holds what one request's stream has said so far."""

    def chunk(self, index: int, delta: Delta, usage: dict[str, Any] | None = None) -> bytes:
        """The server-sent events of a delta of choice `index`; b"" when there is nothing to show. `usage`: so far."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event before [DONE], for clients that asked for it."""

    def body(self, choices: Sequence[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""


def usage_of(generations: Sequence[GenerationStream]) -> dict[str, Any]:
    """OpenAI's `usage`. A prompt counts once, whatever n is."""
    prompt = sum(len(one.job.prompt) for one in generations)
    completion = sum(one.num_generated_tokens for one in generations)
    cached = sum(one.num_cached_tokens for one in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_of(generations: Sequence[GenerationStream]) -> dict[str, float]:
    """What the request waited for, by phase (engine.messages.Timeline), in ms.

    Of one prompt: several have no one answer. Empty when a stop string ended it, which the engine learns later.
    """
    timeline = generations[0].timeline if len(generations) == 1 else None
    if timeline is None:
        return {}
    return {name: round(seconds * 1e3, 3) for name, seconds in timeline.phases().items()}


def node_headers(state: NodeState, generations: Sequence[GenerationStream]) -> dict[str, str]:
    """Who computed the prompt and who generated. Of several prompts, those are named for which it is settled."""
    prefill = dict.fromkeys(one.prefill_node for one in generations if one.prefill_node is not None)
    return {"x-pd-prefill": ",".join(prefill), "x-pd-decode": state.node_id}


async def answer_stream(
    state: NodeState,
    reply: Reply,
    generations: Sequence[GenerationStream],
    shape: ResponseShape,
    options: StreamOptions | None,
) -> None:
    """Server-sent events. Headers wait for the first tokens: only then is it settled who prefilled."""
    async with AsyncExitStack() as stack:
        for generation in generations:
            await stack.enter_async_context(generation)
        async with aclosing(_interleaved(generations)) as deltas:
            async for first_index, some in deltas:
                if not reply.started:
                    await reply.start_events(node_headers(state, generations))
                usage = usage_of(generations) if options is not None and options.continuous_usage_stats else None
                await reply.write(b"".join(shape.chunk(first_index + delta.index, delta, usage) for delta in some))
        last = b""
        if options is not None and options.include_usage:
            usage = usage_of(generations)
            if options.include_timings:
                usage["timings"] = timings_of(generations)
            last = shape.usage_chunk(usage)
        await reply.end(last + SSE_DONE)
        for generation in generations:
            await generation.settle()


async def answer_whole(
    state: NodeState, reply: Reply, generations: Sequence[GenerationStream], shape: ResponseShape
) -> None:
    """One JSON body."""
    async with AsyncExitStack() as stack:
        for generation in generations:
            await stack.enter_async_context(generation)
        choices = await collect(generations)
        await reply.json(200, shape.body(choices, usage_of(generations)), node_headers(state, generations))
        for generation in generations:
            await generation.settle()


async def collect(generations: Sequence[GenerationStream]) -> list[Collected]:
    """Every choice, complete; prompts in order, the n of each together."""
    choices = [Collected() for one in generations for _ in range(one.job.sampling.n)]
    async with aclosing(_interleaved(generations)) as deltas:
        async for first_index, some in deltas:
            for delta in some:
                choices[first_index + delta.index].add(delta)
    return choices


async def _interleaved(generations: Sequence[GenerationStream]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """(index of the generation's first choice, its deltas), as they come from all of them."""
    if len(generations) == 1:
        async for deltas in generations[0]:
            yield 0, deltas
        return
    queue: asyncio.Queue[tuple[int, list[Delta]] | None] = asyncio.Queue()

    async def pump(first_index: int, generation: GenerationStream) -> None:
        async for deltas in generation:
            queue.put_nowait((first_index, deltas))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                first_index = 0
                for generation in generations:
                    group.create_task(pump(first_index, generation))
                    first_index += generation.job.sampling.n
        finally:
            queue.put_nowait(None)

    pumping = asyncio.create_task(pump_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        try:
            await pumping
        except* Exception as group:
            raise group.exceptions[0] from None
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
