"""Tools of OpenAI's responses as functions of chat, and the choice among them.

A tool that takes text (`custom`) is a function with one argument. A function of a `namespace` is a function with both
names in its own. The answer gives both back in the client's form (`CallForm`). All other tools are left out: OpenAI's
servers run them, or they have no schema.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from pd_http.client_tools import ClientTool, ClientTools, chat_function
from pd_http.dialect import CallForm
from pd_http.errors import InvalidRequest
from pd_http.responses_items import flat_name

if TYPE_CHECKING:
    from pd_http.left_out import LeftOut

_ARGUMENT = "input"  # of a tool that takes text
_MAX_HEAD_CHARS = 64  # of what stands before the text
# Its beginning, up to an escape that is cut
_CUT_INPUT = re.compile(
    r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*)"
)
_TEXT = {
    "type": "object", "properties": {_ARGUMENT: {"type": "string"}}, "required": [_ARGUMENT],
    "additionalProperties": False,
}  # fmt: skip
_CHOICES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}  # Anthropic's word too


class FunctionTool(ClientTool):
    parameters: dict[str, Any] | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    syntax: str = ""
    definition: str = ""


class CustomTool(ClientTool):
    format: TextFormat | None = None


_CALLABLE: dict[str, type[FunctionTool | CustomTool]] = {"function": FunctionTool, "custom": CustomTool}


class NamespaceTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


def text_of_input(arguments: str) -> str:
    """What a call of a tool that takes text says; where the model wrote other arguments than asked for, all of them.

    Arguments that the token limit cut have the beginning of the text.
    """
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _text_of_cut(arguments)
    text = given.get(_ARGUMENT)
    return text if isinstance(text, str) and len(given) == 1 else arguments


def _text_of_cut(arguments: str) -> str:
    if len(arguments) < _MAX_HEAD_CHARS and '{"input":'.startswith("".join(arguments.split())):
        return ""
    begun = _CUT_INPUT.match(arguments)
    try:
        return arguments if begun is None else msgspec.json.decode(f'"{begun[1]}"', type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return arguments


class ResponsesTools(ClientTools):
    """`calls`: how calls of the functions in `shown` are written in the answer."""

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__(left_out)
        self.calls: dict[str, CallForm] = {}
        self._functions: dict[str, dict[str, Any]] = {}

    def take(
        self, tools: list[Any], place: str = "tools", *, namespace: str = "", about: str = "", brought: bool = False
    ) -> None:
        """Add tools. `about`: what the first of them says of its namespace. Raises InvalidRequest.

        `brought`: by items of the input, which may repeat tools. Another one of a name that is taken is left out.
        """
        for i, one in enumerate(tools):
            kind, at = one.get("type") if isinstance(one, dict) else None, f"{place}[{i}]"
            if not isinstance(kind, str):
                raise InvalidRequest(f"{at} must be a tool with a type", "tools", "invalid_type")
            if kind == "namespace" and not namespace:
                inner = self._read(one, NamespaceTool, at)
                self.take(
                    inner.tools, f"{at}.tools", namespace=inner.name, about=inner.description or "", brought=brought
                )
            elif kind in _CALLABLE:
                tool = self._read(one, _CALLABLE[kind], at)
                if self._can_be_called(tool):
                    self._add(tool, namespace, about, brought)
                    about = ""
            else:
                self._leave_out(one)

    def choice(self, given: Any) -> Any:
        """Chat's `tool_choice`. Raises InvalidRequest for one that requires what is not served."""
        if isinstance(given, dict) and given.get("type") in _CHOICES:
            given = given["type"]
        if given is None or (given == "auto" and not self.shown):
            return None
        if isinstance(given, str) and given in _CHOICES:
            if (chat := _CHOICES[given]) == "required" and self._absent and not self.shown:
                raise self._refused()
            return chat
        if not isinstance(given, dict):
            raise InvalidRequest("tool_choice must be none, auto, required or an object", "tool_choice")
        groups: dict[tuple[str, str], list[str]] = {}  # names of functions, by name or namespace of the client
        for name, form in self.calls.items():
            groups.setdefault(("name", form.name), []).append(name)
            groups.setdefault(("namespace", form.namespace), []).append(name)
        if given.get("type") == "allowed_tools":
            allowed = given.get("allowed_tools")
            return self._allowed(allowed if isinstance(allowed, dict) else given, groups)
        names = self._named(given, groups)
        if not names:
            raise self._refused(_name_of(given) or str(given.get("type")))
        return _of_function(names[0])

    def _allowed(self, given: dict[str, Any], groups: dict[tuple[str, str], list[str]]) -> Any:
        listed, mode = given.get("tools"), given.get("mode", "auto")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise InvalidRequest("tool_choice.tools must be a list of tools", "tool_choice")
        names = dict.fromkeys(name for one in listed for name in self._named(one, groups))
        if not names and mode == "required":
            raise self._refused(", ".join(_name_of(one) or str(one.get("type")) for one in listed))
        if not names and not self.shown:
            return None
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_of_function, names)]}}

    def _named(self, tool: dict[str, Any], groups: dict[tuple[str, str], list[str]]) -> list[str]:
        """The functions that an entry of `tool_choice` stands for: one, or all of a namespace."""
        kind, name, namespace = tool.get("type"), _name_of(tool), tool.get("namespace")
        if kind == "namespace":
            return groups.get(("namespace", name), [])
        if kind not in ("function", "custom", "tool"):
            return []
        if (flat := flat_name(name, namespace if isinstance(namespace, str) else None)) in self.calls:
            return [flat]
        alike = groups.get(("name", name), [])
        return alike if len(alike) == 1 else []

    def _add(self, tool: FunctionTool | CustomTool, namespace: str, about: str, brought: bool) -> None:
        name, is_custom = flat_name(tool.name, namespace), isinstance(tool, CustomTool)
        form = CallForm(tool.name, namespace, is_custom)
        texts = [about, tool.description, self._format(tool.format) if isinstance(tool, CustomTool) else ""]
        shown = msgspec.structs.replace(
            tool, name=name, description="\n\n".join(filter(None, texts)) or tool.description
        )
        parameters = tool.parameters if isinstance(tool, FunctionTool) else _TEXT
        if brought and name in self.calls:
            same = {"description": shown.description, "parameters": parameters}
            if self.calls[name] != form or any(self._functions[name].get(key) != one for key, one in same.items()):
                self._left_out.add("tool", f"tools.{tool.type}")
            return
        self.shown.append(chat_function(shown, parameters))
        self._functions[name] = self.shown[-1]["function"]
        self.calls[name] = form

    def _format(self, form: TextFormat | None) -> str:
        """A grammar is shown to the model, and named: the input is not held to it."""
        if form is None or form.type == "text":
            return ""
        self._left_out.add("member", "tools.custom.format")
        return f"The input follows this {form.syntax} {form.type}:\n{form.definition}"


def _name_of(tool: dict[str, Any]) -> str:
    """Of an entry of `tool_choice`, also in chat's form."""
    inner = tool.get("function", tool.get("custom"))
    name = tool.get("name", inner.get("name") if isinstance(inner, dict) else None)
    return name if isinstance(name, str) else ""


def _of_function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
