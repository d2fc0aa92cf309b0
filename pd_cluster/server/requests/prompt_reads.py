"""Prompts that are only read. The inputs of one HTTP request are one group, and enter the engine a few at a time."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from pd_cluster.errors import EngineUnavailable, Overloaded, error_named
from pd_cluster.protocol.messages import AddRequest, PromptRead, RequestFailed, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.requests.prompt_space import space_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from pd_cluster.protocol.prompt_outputs import PromptOutputs
    from pd_cluster.server.bodies.schema import PromptFields
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.node.read_window import ReadWindow
    from pd_cluster.server.requests.prompt_space import PromptSpace
    from pd_cluster.server.state import NodeState

Result = TypeVar("Result")


class Reads(NamedTuple, Generic[Result]):
    """What was made of each prompt, in order, and the tokens of all."""

    results: list[Result]
    num_tokens: int
    num_cached: int

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.num_tokens,
            "total_tokens": self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


async def read_prompts(
    state: NodeState,
    caller: Caller,
    body: PromptFields,
    prompts: Sequence[array[int]],
    outputs: PromptOutputs,
    make: Callable[[int, PromptRead], Result],
) -> Reads[Result]:
    """Read token ids, and `make` a result of each answer and its index when it comes. One that fails ends the others.

    `prompts`: arrays, because those of one request may have millions of tokens, and wait for their turn.

    Cancelling it takes the prompts back from the engine. Raises PdError.
    """
    window, space = state.read_window, space_of(state.adapters, body)
    if window.num_waiting >= state.config.scheduler.max_waiting:
        raise Overloaded(f"{window.num_waiting} requests about prompts are waiting")
    num_cached = 0

    async def read(index: int, prompt: array[int]) -> Result:
        nonlocal num_cached
        answer = await _read_one(state, caller, body, space, prompt, outputs)
        num_cached += answer.num_cached_tokens
        return make(index, answer)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for index, prompt in enumerate(prompts):
                await window.take(len(prompt))
                task = group.create_task(read(index, prompt))
                task.add_done_callback(partial(_give_back, window, len(prompt)))
                tasks.append(task)
            caller.charge.include()  # not earlier: the engine's load has the prompts of the window only
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return Reads([task.result() for task in tasks], sum(map(len, prompts)), num_cached)


def _give_back(window: ReadWindow, num_tokens: int, _: object) -> None:
    """For the end of a task: the coroutine of one that is cancelled early never runs."""
    window.give(num_tokens)


async def _read_one(
    state: NodeState, caller: Caller, body: PromptFields, space: PromptSpace, prompt: array[int], outputs: PromptOutputs
) -> PromptRead:
    request = AddRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt.tolist(),
        sampling=SamplingParams(max_tokens=1),
        work=Work.READ,
        priority=body.priority or 0 if state.config.scheduler.priorities else 0,
        salt=space.text,
        adapter=space.adapter,
        received_s=caller.started_s,
        group=caller.group,
        outputs=outputs,
    )
    async with state.engine.open(request) as stream:
        async for message in stream:
            if isinstance(message, RequestFailed):
                raise error_named(message.error, message.message, message.param, message.code)
            if isinstance(message, PromptRead):
                state.metrics.count_prompt(Work.READ, len(prompt), message.num_cached_tokens)
                if message.timeline is not None:
                    state.metrics.observe_timeline(Work.READ, message.timeline)
                return message
    raise EngineUnavailable("the engine aborted the request")
