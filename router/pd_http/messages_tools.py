"""Tools of Anthropic's messages as functions of chat, and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd_http.errors import InvalidRequest
from pd_http.messages_blocks import MessagesObject

if TYPE_CHECKING:
    from pd_http.left_out import LeftOut


class MessagesTool(MessagesObject):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    eager_input_streaming: Any = None  # arguments are streamed in any case


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ForeignTools:
    """The tools of a request that are not served: Anthropic's servers run them, or its models know their schema."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self._names: set[str] = set()

    def served(self, tool: Any) -> Any:
        """The tool, or None."""
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is None or kind == "custom":
            return tool
        self._left_out.add("tool", f"tools.{kind}")
        self._names.add(str(tool.get("name")))
        return None

    def check_choice(self, choice: Any, tools: list[dict[str, Any]]) -> None:
        """Raises InvalidRequest if a tool that is left out must be called. `choice`, `tools`: as chat has them."""
        absent = self._names - {tool["function"]["name"] for tool in tools}
        name = choice["function"]["name"] if isinstance(choice, dict) else None
        if name in absent or (choice == "required" and absent and not tools):
            told = name or ", ".join(sorted(absent))
            raise InvalidRequest(
                f"tool_choice requires {told}, which this server does not run", "tool_choice", "unsupported_value"
            )


def chat_tools(tools: list[MessagesTool | None], left_out: LeftOut) -> list[dict[str, Any]]:
    """Tools that would be loaded later are shown at once: the search for them is a tool of Anthropic's servers."""
    served = []
    for one in tools:
        if one is None:
            continue
        if one.defer_loading:
            left_out.add("member", "tools[].defer_loading")
        if one.allowed_callers and "direct" not in one.allowed_callers:
            left_out.add("tool", "tools[].allowed_callers")  # programs alone may call it, and none run here
        else:
            served.append(_tool(one))
    return served


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": known if tool.strict is None else known | {"strict": tool.strict}}


def chat_choice(choice: MessagesToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if (choice.name is None) is (choice.type == "tool"):
        raise InvalidRequest('tool_choice.name goes with type "tool"', "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    said = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
    return {"tool_choice": said, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}
