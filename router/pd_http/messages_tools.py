"""Tools of Anthropic's messages as functions of chat, and the choice among them."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_http.client_tools import ClientTool, ClientTools, chat_function
from pd_http.errors import InvalidRequest

_CHOICES = {"auto": "auto", "any": "required", "required": "required", "none": "none"}  # chat's word too


class MessagesTool(ClientTool):
    input_schema: dict[str, Any] | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None  # arguments are streamed in any case


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesTools(ClientTools):
    def take(self, tools: list[dict[str, Any]]) -> None:
        """Raises InvalidRequest."""
        for i, one in enumerate(tools):
            if one.get("type") not in (None, "custom"):
                self._leave_out(one)
            elif self._can_be_called(tool := self._read(one, MessagesTool, f"tools[{i}]")):
                self.shown.append(chat_function(tool, tool.input_schema))

    def choice(self, choice: MessagesToolChoice | None) -> dict[str, Any]:
        """Chat's fields. Raises InvalidRequest for a choice that requires what is not served."""
        if choice is None:
            return {}
        one_at_a_time = {"parallel_tool_calls": False if choice.disable_parallel_tool_use else None}
        if choice.type in ("tool", "function"):
            if choice.name is None:
                raise InvalidRequest('tool_choice.name goes with type "tool"', "tool_choice")
            if choice.name in self._absent - {tool["function"]["name"] for tool in self.shown}:
                raise self._refused(choice.name)
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}} | one_at_a_time
        if choice.type not in _CHOICES or choice.name is not None:
            raise InvalidRequest(
                'tool_choice.type must be auto, any, none or, with a name, tool', "tool_choice", "unsupported_value"
            )  # fmt: skip
        if (chat := _CHOICES[choice.type]) == "required" and self._absent and not self.shown:
            raise self._refused()
        return {"tool_choice": chat} | one_at_a_time


def choice_of_messages(given: Any) -> Any:
    """Chat's forms of a choice in the form of this API: a word, and the function's name in an object of its own."""
    if isinstance(given, str):
        return {"type": given}
    if isinstance(given, dict) and isinstance(function := given.get("function"), dict):
        return {"name": function.get("name")} | {name: one for name, one in given.items() if name != "function"}
    return given
