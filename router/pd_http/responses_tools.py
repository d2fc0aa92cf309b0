"""Tools of OpenAI's responses as functions of chat, and the choice among them.

A tool that takes text (`custom`) is a function with one argument. A function of a `namespace` is a function with both
names in its own. The answer gives both back in the client's form (`CallForm`). All other tools are left out: OpenAI's
servers run them, or they have no schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pd_http.dialect import CallForm, check_entries, refusal
from pd_http.errors import InvalidRequest
from pd_http.left_out import known, shape_of
from pd_http.responses_items import flat_name

if TYPE_CHECKING:
    from pd_http.left_out import LeftOut

_ARGUMENT = "input"  # of a tool that takes text
_TEXT = {
    "type": "object", "properties": {_ARGUMENT: {"type": "string"}}, "required": [_ARGUMENT],
    "additionalProperties": False,
}  # fmt: skip
_CHOICES = ("none", "auto", "required")


class _Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str
    description: str | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class FunctionTool(_Tool):
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    syntax: str = ""
    definition: str = ""


class CustomTool(_Tool):
    format: TextFormat | None = None


class NamespaceTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


_KINDS: dict[str, type[msgspec.Struct]] = {
    "function": FunctionTool, "custom": CustomTool, "namespace": NamespaceTool
}  # fmt: skip


def text_of_input(arguments: str) -> str:
    """What a call of a tool that takes text says; where the model wrote other arguments than asked for, all of them."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return arguments
    text = given.get(_ARGUMENT)
    return text if isinstance(text, str) and len(given) == 1 else arguments


class ResponsesTools:
    """The tools of one request. `shown`: as chat has them. `calls`: how their calls are written in the answer."""

    def __init__(self, left_out: LeftOut) -> None:
        self.shown: list[dict[str, Any]] = []
        self.calls: dict[str, CallForm] = {}
        self._left_out = left_out
        self._absent: set[str] = set()  # names and types of tools that are left out
        self._in_namespaces: dict[str, list[str]] = {}  # names of functions, by namespace
        self._alike: dict[str, list[str]] = {}  # the same, by the name in the namespace

    def take(self, tools: list[Any], place: str, namespace: str = "", about: str = "") -> None:
        """Add tools. `about`: what the first of them says of its namespace. Raises InvalidRequest."""
        check_entries([tools], "tools")
        for i, one in enumerate(tools):
            tool = self._read(one, f"{place}[{i}]")
            if isinstance(tool, NamespaceTool) and not namespace:
                self.take(tool.tools, f"{place}[{i}].tools", tool.name, tool.description or "")
            elif isinstance(tool, FunctionTool | CustomTool) and self._can_be_called(tool):
                self._add(tool, namespace, about)
                about = ""
            else:
                kind = one.get("type")
                self._absent |= {str(one.get("name") or kind), str(kind)}
                is_of_programs = isinstance(tool, FunctionTool | CustomTool)
                self._left_out.add("tool", "tools[].allowed_callers" if is_of_programs else f"tools.{kind}")

    def take_more(self, tools: list[Any]) -> None:
        """Add tools that items of the input brought, but for those that are known."""
        if not tools:
            return
        fresh = ResponsesTools(self._left_out)
        fresh.take(tools, "input.tools")
        for tool in fresh.shown:
            name = tool["function"]["name"]
            if name not in self.calls:
                self._show(tool, name, fresh.calls[name])
        self._absent |= fresh._absent

    def choice(self, given: Any) -> Any:
        """Chat's `tool_choice`. Raises InvalidRequest for one that requires what is not served."""
        if given is None or (given == "auto" and not self.shown):
            return None
        if given == "required" and self._absent and not self.shown:
            raise self._refused(", ".join(sorted(self._absent)))
        if isinstance(given, str) and given in _CHOICES:
            return given
        if not isinstance(given, dict):
            raise InvalidRequest(f"tool_choice must be {', '.join(_CHOICES)} or an object", "tool_choice")
        if given.get("type") == "allowed_tools":
            return self._allowed(given)
        names = self._named(given)
        if not names:
            raise self._refused(str(given.get("name") or given.get("type")))
        return {"type": "function", "function": {"name": names[0]}}

    def _allowed(self, given: dict[str, Any]) -> Any:
        listed = given.get("tools")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise InvalidRequest("tool_choice.tools must be a list of tools", "tool_choice")
        check_entries([listed], "tool_choice.tools")
        mode = given.get("mode", "auto")
        named = {(str(one.get("type")), str(one.get("namespace")), str(one.get("name"))): one for one in listed}
        names = dict.fromkeys(name for one in named.values() for name in self._named(one))
        if not names and mode == "required":
            raise self._refused(", ".join(str(one.get("name") or one.get("type")) for one in listed) or "no tool")
        if not names:
            return "none"
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def _named(self, tool: dict[str, Any]) -> list[str]:
        """The functions that an entry of `tool_choice` stands for: one, or all of a namespace."""
        kind, name, namespace = tool.get("type"), tool.get("name"), tool.get("namespace")
        if kind == "namespace":
            return self._in_namespaces.get(str(name), [])
        if kind not in ("function", "custom") or not isinstance(name, str):
            return []
        if (flat := flat_name(name, namespace if isinstance(namespace, str) else None)) in self.calls:
            return [flat]
        alike = self._alike.get(name, [])
        return alike if len(alike) == 1 else []

    def _refused(self, names: str) -> InvalidRequest:
        why = "which this server does not serve" if self._absent else "which is not in tools"
        return InvalidRequest(f"tool_choice requires {names}, {why}", "tool_choice", "unsupported_value")

    def _read(self, one: Any, place: str) -> msgspec.Struct | None:
        """None: a tool of another kind."""
        if not isinstance(one, dict) or not isinstance(one.get("type"), str):
            raise InvalidRequest(f"{place} must be a tool with a type", "tools", "invalid_type")
        struct = _KINDS.get(one["type"])
        try:
            return (
                None
                if struct is None
                else msgspec.convert(known(one, shape_of(struct), "tools[]", self._left_out), struct)
            )
        except (msgspec.ValidationError, RecursionError) as error:
            raise refusal(str(error), place) from error

    def _can_be_called(self, tool: FunctionTool | CustomTool) -> bool:
        if tool.defer_loading:
            self._left_out.add("member", "tools[].defer_loading")  # shown at once: nothing here searches tools
        return not tool.allowed_callers or "direct" in tool.allowed_callers

    def _add(self, tool: FunctionTool | CustomTool, namespace: str, about: str) -> None:
        name, is_custom = flat_name(tool.name, namespace), isinstance(tool, CustomTool)
        texts = [about, tool.description, self._format(tool.format) if isinstance(tool, CustomTool) else ""]
        function = {
            "name": name,
            "description": "\n\n".join(filter(None, texts)) or tool.description,
            "parameters": tool.parameters if isinstance(tool, FunctionTool) else _TEXT,
            "strict": tool.strict if isinstance(tool, FunctionTool) else None,
        }
        known_ones = {key: value for key, value in function.items() if value is not None}
        self._show({"type": "function", "function": known_ones}, name, CallForm(tool.name, namespace, is_custom))

    def _show(self, tool: dict[str, Any], name: str, form: CallForm) -> None:
        self.shown.append(tool)
        self.calls[name] = form
        self._in_namespaces.setdefault(form.namespace, []).append(name)
        self._alike.setdefault(form.name, []).append(name)

    def _format(self, form: TextFormat | None) -> str:
        """A grammar is shown to the model, and named: the input is not held to it."""
        if form is None or form.type == "text":
            return ""
        self._left_out.add("member", "tools.custom.format")
        return f"The input follows this {form.syntax} {form.type}:\n{form.definition}"
