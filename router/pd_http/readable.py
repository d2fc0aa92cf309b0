"""The text of a value that another server or a tool wrote: a search result, the output of a program, a document."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_http.errors import InvalidRequest

_MAX_LEVELS = 8  # deeper values are written as JSON: each level copies the text below it
# Types of what is no text, in any API
MEDIA = frozenset(
    ("audio", "base64", "computer_screenshot", "file", "image", "image_file", "image_url", "input_audio", "input_file",
     "input_image", "input_video", "url", "video", "video_url")
)  # fmt: skip
# Members that tell a reader nothing
_OPAQUE = frozenset(
    ("cache_control", "caller", "call_id", "citations", "file_id", "id", "index", "media_type", "signature",
     "tool_use_id", "type")
)  # fmt: skip


def check_readable(value: Any, place: str) -> None:
    """Raises InvalidRequest for an object that is of a type of media."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        param = place.split("[")[0].split(".")[0]
        raise InvalidRequest(f"{place}.type: {kind!r} is not supported: this server takes text only, no images, "
                             "audio or files", param, "unsupported_value")  # fmt: skip


def readable(value: Any, place: str, levels: int = _MAX_LEVELS) -> str:
    """The texts of a value, by lines; those of several members with their names. Raises InvalidRequest for media.

    Encrypted members, and those that only the API's own servers can read, are not text.
    """
    if isinstance(value, str):
        return value
    if value is None or value == [] or value == {}:
        return ""
    check_readable(value, place)
    if not isinstance(value, list | dict) or not levels:
        return msgspec.json.encode(value).decode()
    if isinstance(value, list):
        return "\n".join(filter(None, (readable(one, place, levels - 1) for one in value)))
    if isinstance(value.get("text"), str):
        return str(value["text"])
    texts = {
        name: readable(one, f"{place}.{name}", levels - 1)
        for name, one in value.items()
        if name not in _OPAQUE and not name.startswith("encrypted")
    }
    told = {name: text for name, text in texts.items() if text}
    return "".join(told.values()) if len(told) == 1 else "\n".join(f"{name}: {text}" for name, text in told.items())
