"""Blocks of Anthropic's messages: those that are served, and what becomes of all others.

A block that is not served is replaced by one that is, one for one, so that errors name the client's own places. It is
told by its members, not by a list of types: one with `tool_use_id` is a result, one with `id`, `name` and `input` is a
call. So a type that is new tomorrow is read as its like is today.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pd_http.readable import check_readable, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_http.left_out import LeftOut


# Members without use here are of type Any. Other members are named as ignored.
class MessagesObject(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    cache_control: Any = None  # prefixes are found by their tokens


class TextBlock(MessagesObject, tag_field="type", tag="text"):
    text: str
    citations: Any = None


class ThinkingBlock(MessagesObject, tag_field="type", tag="thinking"):
    thinking: str
    signature: Any = None  # this server signs nothing


class ToolUseBlock(MessagesObject, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any = {}  # an object, or whatever else the model once wrote
    caller: Any = None


class ToolResultBlock(MessagesObject, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ServerResultBlock(ToolResultBlock, tag_field="type", tag="server_tool_result"):
    """The result of a tool that a server ran: it stands in the assistant's turn, behind its call."""


class LeftOutBlock(MessagesObject, tag_field="type", tag="left_out"):
    """In the place of a block that cannot be shown."""


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ServerResultBlock | LeftOutBlock
BLOCKS: dict[str, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock, LeftOutBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, ServerResultBlock, LeftOutBlock),
    "system": (TextBlock, LeftOutBlock),
}
_SERVED = ("text", "thinking", "tool_use")
_WITH_TEXT = ("text", "content", "source", "tool_name")  # members that may hold what a block says


class ForeignBlocks:
    """Rewrites the blocks of one conversation. `turns`: as JSON has them."""

    def __init__(self, turns: list[Any], left_out: LeftOut) -> None:
        self._left_out = left_out
        blocks = [block for turn in turns if isinstance(turn, dict) for block in _dicts(turn.get("content"))]
        self._called = {str(block.get("id")) for block in blocks if _is_call(block)}
        self._answered = {str(block["tool_use_id"]) for block in blocks if "tool_use_id" in block}

    def rewritten(self, content: Any, place: str) -> Any:
        """The content of a turn, with blocks that are served alone. Raises InvalidRequest for media."""
        if not isinstance(content, list):
            return content
        return [self._block(one, f"{place}[{i}]") for i, one in enumerate(content)]

    def _block(self, block: Any, place: str) -> Any:
        if not isinstance(block, dict):
            return block
        kind = str(block.get("type"))
        if kind in _SERVED:
            return block
        if kind == "tool_result":
            return block | {"content": self._result(block.get("content"), f"{place}.content")}
        check_readable(block, place)
        if "tool_use_id" in block:
            text = readable(block.get("content"), f"{place}.content")
            if block["tool_use_id"] not in self._called:
                return {"type": "text", "text": text}
            told = {name: block[name] for name in ("tool_use_id", "is_error") if name in block}
            return {"type": "server_tool_result", "content": text} | told
        if _is_call(block) and block["id"] in self._answered:
            return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": block["input"]}
        shown = {name: one for name, one in block.items() if name not in ("id", "name", "input")}
        if not _is_call(block) and any(name in block for name in _WITH_TEXT) and (text := readable(shown, place)):
            return {"type": "text", "text": text}
        self._left_out.add("block", f"messages.{kind}")
        return {"type": "left_out"}

    def _result(self, content: Any, place: str) -> Any:
        """Texts of a result alone: all that it has is what a tool said."""
        if not isinstance(content, list):
            return content
        blocks = []
        for i, one in enumerate(content):
            if not isinstance(one, dict) or one.get("type") == "text":
                blocks.append(one)
            elif text := readable(one, f"{place}[{i}]"):
                blocks.append({"type": "text", "text": text})
            else:
                self._left_out.add("block", f"messages.{one.get('type')}")
        return blocks


def lists_of(turns: list[Any]) -> Iterator[Any]:
    """The turns, and what may be lists in them: contents, and those of results and documents."""
    yield turns
    for turn in turns:
        if isinstance(turn, dict):
            yield turn.get("content")
            yield from (block.get("content") for block in _dicts(turn.get("content")))


def _dicts(content: Any) -> list[dict[str, Any]]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _is_call(block: dict[str, Any]) -> bool:
    return {"id", "name", "input"} <= block.keys()
