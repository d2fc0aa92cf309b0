"""The shape of answers of /v1/responses: OpenAI's response and its events.

`sequence_number` rises with each event, by more than one after a delta: it counts characters of deltas and other
events, so that it does not depend on how a stream was cut, and another node can go on with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.bodies.schema import decode_value
from pd_cluster.server.requests.response_shape import ResponseShape
from pd_cluster.server.shapes.answer_blocks import AnswerBlocks, blocks_of
from pd_http.dialect import CallForm
from pd_http.responses_tools import text_of_input
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.server.requests.answer_extras import AnswerExtras
    from pd_cluster.server.requests.choice import ChoiceOutput
    from pd_cluster.server.shapes.answer_blocks import AnswerBlock, BlockStep
    from pd_http.dialect import RawFields

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_CUSTOM_PREFIX = "ctc"
_EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text",
    "tool_choice", "tools", "top_p",
)  # fmt: skip


class ResponsesShape(ResponseShape):
    """A response has one choice. Everything that depends on its end is in the events of its last tokens."""

    def __init__(self, asked: RawFields, calls: Mapping[str, CallForm], extras: AnswerExtras) -> None:
        """`asked`: the fields of the body. `calls`: see `ChatRequest`."""
        self._id = extras.request_id
        self._calls = calls
        defaults = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}
        defaults["text"] = {"format": {"type": "text"}}
        echoed = {name: decode_value(bytes(asked[name]), Any, name) for name in _ECHOED if name in asked}
        given = {  # orjson writes no integer of more than 64 bits
            name: orjson.Fragment(msgspec.json.encode(value)) for name, value in echoed.items() if value is not None
        }
        self._response = (
            {"id": f"resp_{extras.request_id}", "object": "response", "created_at": extras.created}
            | {"model": extras.model, "background": False, "error": None, "previous_response_id": None, "store": False}
            | {"truncation": "disabled"} | dict.fromkeys(_ECHOED) | defaults | given
        )  # fmt: skip
        self._blocks = AnswerBlocks()
        self._sequence = 0

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        events = []
        if not self._sequence:
            fresh = self._response | _state("in_progress") | {"output": [], "usage": None}
            events += [self._event(f"response.{name}", response=fresh) for name in ("created", "in_progress")]
        for step in self._blocks.take(output.parts):
            events += self._step(step, "completed")
        if output.finish_reason is not None:
            status = _status(output)
            for step in self._blocks.close():
                events += self._step(step, status)
            whole = self._whole(self._blocks, status, usage)
            events.append(self._event(f"response.{status}", response=whole))
        return b"".join(events)

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        return self._whole(blocks_of(choices[0].parts), _status(choices[0]), usage)

    def _whole(self, blocks: AnswerBlocks, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        last = len(blocks.all) - 1
        output = [self._item(block, status if block.index == last else "completed") for block in blocks.all]
        return self._response | _state(status) | {"output": output, "usage": _usage(usage)}

    def _event(self, name: str, piece: str = "", /, **fields: Any) -> bytes:
        event = event_bytes({"type": name, "sequence_number": self._sequence, **fields}, name)
        self._sequence += len(piece) or 1
        return event

    def _step(self, step: BlockStep, status: str) -> list[bytes]:
        """`status`: of a block that ends."""
        block, name = step.block, f"response.{_EVENTS[step.block.kind]}"
        if (form := self._form(block)) is not None and form.is_custom:
            return self._custom_step(step, status)
        place: dict[str, Any] = {"output_index": block.index, "item_id": self._item_id(block)}
        if block.kind != "call":
            place["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if step.what == "grow":
            return [self._event(f"{name}.delta", step.piece, delta=step.piece, **place, **more)]
        item = self._item(block, status if step.what == "close" else "in_progress")
        parts = item.get("content", [])
        if step.what == "open":
            fresh = item | {"content": []} if parts else item
            added = [self._event("response.output_item.added", output_index=block.index, item=fresh)]
            return added + [self._event("response.content_part.added", part=part, **place) for part in parts]
        text = {"arguments": block.text, "name": item["name"]} if block.kind == "call" else {"text": block.text} | more
        done = [self._event(f"{name}.done", **place, **text)]
        done += [self._event("response.content_part.done", part=part, **place) for part in parts]
        return [*done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _custom_step(self, step: BlockStep, status: str) -> list[bytes]:
        """The input is a string in the arguments: it is given when it is whole."""
        if step.what == "grow":
            return []
        block = step.block
        item, index = self._item(block, status if step.what == "close" else "in_progress"), block.index
        if step.what == "open":
            return [self._event("response.output_item.added", output_index=index, item=item | {"input": ""})]
        place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        name, text = "response.custom_tool_call_input", item["input"]
        last = [self._event(f"{name}.delta", text, delta=text, **place)] if text else []
        done = self._event(f"{name}.done", input=text, **place)
        return [*last, done, self._event("response.output_item.done", output_index=index, item=item)]

    def _form(self, block: AnswerBlock) -> CallForm | None:
        """How the client has the function of a call, if not as a function of this name."""
        return self._calls.get(block.name) if block.kind == "call" else None

    def _item_id(self, block: AnswerBlock) -> str:
        form = self._form(block)
        prefix = _CUSTOM_PREFIX if form is not None and form.is_custom else _PREFIXES[block.kind]
        return f"{prefix}_{self._id}_{block.index}"

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            if status == "completed" and not block.has_whole_arguments:
                item["status"] = "incomplete"
            form = self._form(block) or CallForm(block.name)
            kind = "custom_tool_call" if form.is_custom else "function_call"
            named = {"type": kind, "call_id": block.id, "name": form.name}
            said = {"input": text_of_input(block.text)} if form.is_custom else {"arguments": block.text}
            return item | named | said | ({"namespace": form.namespace} if form.namespace else {})
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}]
            return item | {"type": "reasoning", "summary": [], "content": content}
        part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
        return item | {"type": "message", "role": "assistant", "content": [part]}


def _status(output: ChoiceOutput) -> str:
    return "incomplete" if output.finish_reason is FinishReason.LENGTH else "completed"


def _state(status: str) -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {"status": status, "incomplete_details": details}


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """None: of a replay."""
    if usage is None:
        return None
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
