"""The shape of answers of /v1/messages: Anthropic's message and its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.errors import PdError
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.requests.response_shape import ResponseShape
from pd_cluster.server.shapes.answer_blocks import AnswerBlocks, blocks_of
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.requests.answer_extras import AnswerExtras
    from pd_cluster.server.requests.choice import ChoiceOutput
    from pd_cluster.server.shapes.answer_blocks import AnswerBlock, BlockStep

_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
           "call": ("input_json_delta", "partial_json")}  # fmt: skip


class MessagesShape(ResponseShape):
    """A message has one choice. Everything that depends on its end is in the events of its last tokens."""

    def __init__(self, extras: AnswerExtras) -> None:
        message = {"id": f"msg_{extras.request_id}", "type": "message", "role": "assistant"}
        self._message = message | {"model": extras.model}
        self._begun = False
        self._blocks = AnswerBlocks()

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        events = [] if self._begun else [self._start(usage), _event("ping")]
        self._begun = True
        events += map(_step, self._blocks.take(output.parts))
        if output.finish_reason is not None:
            events += map(_step, self._blocks.close())
            delta = _stop(output, has_calls=self._blocks.has_calls)
            events += [_event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]
        return b"".join(events)

    def _start(self, usage: dict[str, Any] | None) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return _event("message_start", message=self._message | empty)

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        blocks = blocks_of(choices[0].parts)
        content = [_block(block) | _whole(block) for block in blocks.all]
        stop = _stop(choices[0], has_calls=blocks.has_calls)
        return self._message | {"content": content} | stop | {"usage": _usage(usage)}


def _event(name: str, /, **fields: Any) -> bytes:
    return event_bytes({"type": name, **fields}, name)


def _step(step: BlockStep) -> bytes:
    index = step.block.index
    if step.what == "open":
        return _event("content_block_start", index=index, content_block=_block(step.block))
    if step.what == "close":
        return _event("content_block_stop", index=index)
    kind, member = _DELTAS[step.block.kind]
    return _event("content_block_delta", index=index, delta={"type": kind, member: step.piece})


def _block(block: AnswerBlock) -> dict[str, Any]:
    """The block without its content."""
    if block.kind == "text":
        return {"type": "text", "text": ""}  # without `citations`: the AI SDK takes a list or none, no null
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _whole(block: AnswerBlock) -> dict[str, Any]:
    if block.kind != "call":
        return {_DELTAS[block.kind][1]: block.text}
    if not block.has_whole_arguments:
        raise PdError("the output parser gave arguments of a call that are not JSON")
    return {"input": orjson.Fragment(block.text or "{}")}  # as the model wrote them: orjson rounds long integers


def _stop(output: ChoiceOutput, *, has_calls: bool) -> dict[str, Any]:
    stop, reason = output.stop_reason, "end_turn"
    if output.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    elif has_calls and not output.has_cut_call:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Anthropic counts the cached tokens of the prompt apart. None: of a replay."""
    if usage is None:
        return {}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts: dict[str, Any] = {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
    if (thinking := usage.get("completion_tokens_details", {}).get("reasoning_tokens")) is not None:
        counts["output_tokens_details"] = {"thinking_tokens": thinking}
    return counts
