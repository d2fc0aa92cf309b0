"""The text of a value that another server or a tool wrote: a search result, the output of a program, a document.

Text is a string, or a block that has nothing but text. All else is its JSON: a member that says nothing to one reader
is the answer to another. What only the API's own servers can read (`encrypted_content`) is no part of it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pd_http.errors import InvalidRequest

_MAX_LEVELS = 8  # below them encrypted members stay
_MEDIA = re.compile(r"(?<![a-z])(?:image|audio|video|file|pdf|media|screenshot)(?![a-z])")
_MAX_TYPE_CHARS = 64
_OF_TOOLS = ("_call", "_output", "_result", "_use")  # ends of types that are named by what a tool does
_DATA = frozenset(
    ("audio", "base64", "blob", "bytes", "data", "file", "file_data", "file_id", "file_url", "image", "source", "url",
     "video")
)  # fmt: skip
_PICTURES = frozenset(("image_url", "inline_data", "inlineData"))
_AROUND = frozenset(("cache_control", "detail", "id", "type"))
_MIME = ("media_type", "mediaType", "mime_type", "mimeType")
_TEXT_MIME = re.compile(r"text/.*|application/(?:.*[+-])?(?:json|xml|javascript|yaml)(?:;.*)?")
_NOT_SHOWN = frozenset(("annotations", "cache_control", "citations", "logprobs", "prompt_cache_breakpoint"))
_BODIES = ("content", "text", "source")  # members that hold what a block says
# Members that say nothing by themselves
_OPAQUE = frozenset(("data", "file_id", "id", "name", "role", "signature", "status", "tool_use_id", "type"))


def check_text_only(block: Any, place: str) -> None:
    """Raises InvalidRequest for a block of media: an entry of a content list, or what stands in its place.

    Not for values below it: a tool may list files and addresses.
    """
    if not isinstance(block, dict):
        return
    source, resource = block.get("source"), block.get("resource")
    if (
        _is_media(block)
        or (isinstance(source, dict) and (source.get("type") in ("base64", "url", "file") or _is_media(source)))
        or (isinstance(resource, dict) and _is_media(resource))
    ):
        param = place.split("[")[0].split(".")[0]
        kind = str(block.get("type", "image"))[:_MAX_TYPE_CHARS]
        raise InvalidRequest(f"{place}.type: {kind!r} is not supported: this server takes text only, no images, "
                             "audio or files", param, "unsupported_value")  # fmt: skip


def _is_media(block: dict[str, Any]) -> bool:
    kind = block.get("type")
    if isinstance(kind, str) and len(kind) <= _MAX_TYPE_CHARS and _MEDIA.search(kind):
        if kind.endswith(_OF_TOOLS):
            return bool(block.get("result"))  # a picture that a tool drew
        held = block.keys() - _AROUND - ({"url"} if kind == "file" else set())  # lists of files have addresses
        return not held or kind in held or not (_DATA | _PICTURES).isdisjoint(held)
    if not _PICTURES.isdisjoint(block) and block.keys() <= _PICTURES | _AROUND:
        return True
    if isinstance(block.get("text"), str) or _DATA.isdisjoint(block):
        return False
    mimes = [block[name] for name in _MIME if isinstance(block.get(name), str)]
    return isinstance(block.get("blob"), str) or any(not _TEXT_MIME.fullmatch(mime[:128]) for mime in mimes)


def text_of(value: Any) -> str:
    """Of a value that is no list of blocks."""
    if isinstance(value, str):
        return value
    kept = _shown(value, _MAX_LEVELS)
    return "" if kept in (None, [], {}) else msgspec.json.encode(kept).decode()


def is_blocks(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(one, str | dict) for one in content)


def texts_of(content: Any, place: str, levels: int = _MAX_LEVELS) -> list[str]:
    """The texts of a content: a string, a block, a list of blocks, or whatever else a tool gave.

    Each level copies the text below it, so the lowest is JSON. Raises InvalidRequest for media.
    """
    if levels and isinstance(content, dict) and isinstance(content.get("type"), str):
        return [text_of_block(content, place, levels)]
    if levels and is_blocks(content):
        return [text_of_block(one, f"{place}[{i}]", levels) for i, one in enumerate(content)]
    check_text_only(content, place)
    return [text_of(content)]


def text_of_block(block: Any, place: str, levels: int = _MAX_LEVELS) -> str:
    """What the block says, after its other members, if it has any. Raises InvalidRequest for media."""
    if not isinstance(block, dict):
        return text_of(block)
    check_text_only(block, place)
    shown = {name: one for name, one in block.items() if one is not None and not _is_hidden(name)}
    bodies = [name for name in _BODIES if isinstance(shown.get(name), list | dict)]
    bodies += [name for name in _BODIES if name in shown]
    said = _said(shown.pop(bodies[0]), f"{place}.{bodies[0]}", levels - 1) if bodies else ""
    others = "" if shown.keys() <= {"type"} else text_of(shown)
    return "\n".join(filter(None, (others, said)))


def _said(body: Any, place: str, levels: int) -> str:
    """Of the member that holds what a block says. A source of text is like the content that it has."""
    if isinstance(body, dict) and body.keys() <= {"type", "media_type", "data", "content"}:
        body = body.get("content", body.get("data"))
    return "\n".join(filter(None, texts_of(body, place, levels)))


def says_anything(block: dict[str, Any]) -> bool:
    """Whether it has text, and not only names, ids, and what is encrypted."""
    return any(
        isinstance(one, str) or name in _BODIES
        for name, one in block.items()
        if one and name not in _OPAQUE and not _is_hidden(name)
    )


def _is_hidden(name: str) -> bool:
    return name in _NOT_SHOWN or name.startswith("encrypted")


def _shown(value: Any, levels: int) -> Any:
    if not levels or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [_shown(one, levels - 1) for one in value]
    return {
        name: _shown(one, levels - 1)
        for name, one in value.items()
        if name != "cache_control" and not name.startswith("encrypted")
    }
