"""The response template of a tool format, and what several formats have in theirs."""

from __future__ import annotations

from typing import Any

NAME = r"(?P<name>[\w.-]{1,256})"  # patterns are bounded, because text that may match one is held back
THINK = {"open": "<think>", "close": "</think>"}
# `function` of a call is the parsed text of its region, or has that text as its arguments
IS_CALL = {"type": "function", "function": "{content}"}
IS_ARGUMENTS = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def response_template(
    anchor: str | list[str], calls: dict[str, Any], reasoning: dict[str, Any] | None, *, hidden: str = ""
) -> dict[str, Any]:
    """`hidden`: a marker between regions that is no content."""
    fields = {"reasoning_content": {"content": "text"} | reasoning} if reasoning else {}
    call = {"content": "json", "transform": IS_CALL, "repeats": True} | calls
    content = {"content": "text"} | ({"close": hidden} if hidden else {})
    return {"start_anchor": anchor, "fields": fields | {"tool_calls": call, "content": content}}
