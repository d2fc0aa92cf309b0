"""Tools of APIs that have other kinds beside functions: what is served of them, and what is left out and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pd_http.dialect import refusal
from pd_http.errors import InvalidRequest
from pd_http.left_out import known, shape_of

if TYPE_CHECKING:
    from pd_http.left_out import LeftOut

Tool = TypeVar("Tool", bound=msgspec.Struct)


class ClientTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ClientTools:
    """The tools of one request. `shown`: as chat has them."""

    def __init__(self, left_out: LeftOut) -> None:
        self.shown: list[dict[str, Any]] = []
        self._left_out = left_out
        self._absent: set[str] = set()  # names and types of tools that are left out

    def _read(self, one: Any, kind: type[Tool], place: str) -> Tool:
        """Raises InvalidRequest that names the wrong place."""
        try:
            try:
                return msgspec.convert(one, kind)
            except msgspec.ValidationError:
                return msgspec.convert(known(one, shape_of(kind), "tools[]", self._left_out), kind)
        except (msgspec.ValidationError, RecursionError) as error:
            raise refusal(str(error), place) from error

    def _can_be_called(self, tool: ClientTool) -> bool:
        """Not by programs alone, since none run here. Tools that would be loaded later are shown at once."""
        if tool.defer_loading:
            self._left_out.add("member", "tools[].defer_loading")
        if not tool.allowed_callers or "direct" in tool.allowed_callers:
            return True
        self._left_out.add("tool", "tools[].allowed_callers")
        self._absent.add(tool.name)
        return False

    def _leave_out(self, one: dict[str, Any]) -> None:
        """A tool that its API's servers run, or that has no schema."""
        kind = str(one["type"])
        self._absent.add(str(one.get("name") or kind))
        self._left_out.add("tool", f"tools.{kind}")

    def _refused(self, names: str = "") -> InvalidRequest:
        """For a choice that requires these functions; all that are left out, if it names none."""
        told = names or ", ".join(sorted(self._absent)) or "a tool"
        why = "which this server does not serve" if self._absent else "which is not in tools"
        return InvalidRequest(f"tool_choice requires {told}, {why}", "tool_choice", "unsupported_value")


def chat_function(tool: ClientTool, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
