"""Blocks of Anthropic's messages: those that are served, and what becomes of all others.

A block that is not served is replaced by one that is, one for one, so that errors name the client's own places: by a
text without characters, where it says nothing. It is
told by its members, not by a list of types: one with `tool_use_id` is a result, one with `id`, `name` and `input` is a
call. So a type that is new tomorrow is read as its like is today.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pd_http.readable import says_anything, text_of_block, texts_of

if TYPE_CHECKING:
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


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCKS: dict[str, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock),
    "system": (TextBlock,),
}
_OF_RESULT = ("caller", "is_error", "tool_use_id", "type")  # members of a result that are not what it says


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
            return "" if content is None else content
        return [self._block(one, f"{place}[{i}]") for i, one in enumerate(content)]

    def _block(self, block: Any, place: str) -> Any:
        if not isinstance(block, dict):
            return block
        kind = str(block.get("type"))
        if kind in ("text", "thinking"):
            return block | {kind: ""} if block.get(kind, "") is None else block
        if kind == "tool_use":
            return block
        if kind == "tool_result":
            texts = texts_of(block.get("content"), f"{place}.content")
            return block | {"content": "\n".join(filter(None, texts))}
        if "tool_use_id" in block:
            text = text_of_block({name: one for name, one in block.items() if name not in _OF_RESULT}, place)
            if (call_id := str(block["tool_use_id"])) in self._called:
                told = {"type": "tool_result", "tool_use_id": call_id, "content": text}
                return told | ({"is_error": True} if block.get("is_error") is True else {})
        elif _is_call(block):
            if (call_id := str(block["id"])) in self._answered:
                return {"type": "tool_use", "id": call_id, "name": block["name"], "input": block.get("input", {})}
            text = ""
        else:
            text = text_of_block(block, place)
            text = text if says_anything(block) else ""
        if not text:
            self._left_out.add("block", f"messages.{kind}")
        return {"type": "text", "text": text}


def _dicts(content: Any) -> list[dict[str, Any]]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _is_call(block: dict[str, Any]) -> bool:
    return {"id", "name"} <= block.keys() and ("input" in block or str(block.get("type")).endswith("_use"))
