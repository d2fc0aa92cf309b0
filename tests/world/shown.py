"""What of a client's body must be in the prompt, and what `x-pd-ignored` says is not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.world.bodies import Marked, marks

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP = re.compile(r"(\w[\w-]*)|\[(\d+)\]")


def not_shown(body: dict[str, Any], prompt: str, ignored: str) -> list[Marked]:
    """The texts of `body` that `prompt` lacks and the header `ignored` does not name."""
    named = {name.strip() for name in ignored.split(",")}
    return [one for one in marks(body) if not _is_in(one, prompt) and named.isdisjoint(_names(body, one.path))]


def _is_in(one: Marked, prompt: str) -> bool:
    if not one.path.endswith(".name"):
        return one.text in prompt
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(one.text)}(?![A-Za-z0-9_])", prompt) is not None


def _names(body: dict[str, Any], path: str) -> Iterator[str]:
    """How the header may name the place: its field, the type of an object around it, and a member of that object."""
    value: Any = body
    field = ""
    for key, index in _STEP.findall(path):
        if not field:
            field = key
            yield field
        if isinstance(value, dict):
            if kind := value.get("type"):
                yield f"{field}.{kind}"
                yield f"{field}.{kind}.{key}"
            yield f"{field}[].{key}"
        value = value[int(index)] if index else value[key]
