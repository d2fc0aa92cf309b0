"""What a chat request says about reasoning before the answer, as arguments of the chat template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.server.bodies.schema import ChatBody

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SAME_EFFORTS = {"max": "xhigh", "ultra": "xhigh"}  # other names of the most
# The names that chat templates give to the switch (Qwen3, DeepSeek V3.1) and to the amount (gpt-oss)
_ARGUMENTS = re.compile(r"\b(enable_thinking|thinking|reasoning_effort)\b")


def reasoning_options(body: ChatBody) -> dict[str, Any]:
    """The arguments that `reasoning_effort` and `enable_thinking` stand for. Raises InvalidRequest.

    A chat template that knows only on and off gets on for each effort but "none".
    """
    thinks, effort = body.enable_thinking, body.reasoning_effort
    effort = _SAME_EFFORTS.get(effort or "", effort)
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequest(f"reasoning_effort must be one of {', '.join(_EFFORTS)}", "reasoning_effort")
    if effort is not None:
        if thinks not in (None, effort != "none"):
            raise InvalidRequest(f"reasoning_effort {effort} excludes this enable_thinking", "enable_thinking")
        thinks = effort != "none"
    options: dict[str, Any] = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return options if effort is None else options | {"reasoning_effort": effort}


def unread_reasoning_fields(body: ChatBody, chat_templates: Iterable[str]) -> set[str]:
    """The fields of the body that none of these chat templates reads."""
    given = {name for name in ("reasoning_effort", "enable_thinking") if getattr(body, name) is not None}
    return set() if any(_ARGUMENTS.search(text) for text in chat_templates) else given
