"""A response template of transformers (`transformers.utils.chat_parsing`): which text begins and ends which field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson
import regex

from pd_cluster.errors import StartupError
from pd_cluster.server.text.detokenizer import MARK
from pd_cluster.server.tools.xml_reader import argument_tags

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pd_cluster.server.tools.xml_reader import ArgumentTags

_ARGUMENTS = {"name": "{name}", "arguments": "{content}"}  # else what is between tags is read as a whole
_ANCHORS = ("open", "open_pattern", "close", "close_pattern")


class Anchor(NamedTuple):
    """What opens or closes a region."""

    field: Any  # of transformers' template
    pattern: Any  # of the module `regex`, which knows partial matches
    may_grow: bool  # more text may make a match longer


class ResponseTemplate:
    """A template with the marker tokens of a vocabulary. Raises StartupError for a template that cannot be read."""

    def __init__(self, spec: Mapping[str, Any], added_tokens: Mapping[str, int], *, short_ids: bool = False) -> None:
        from transformers.utils.chat_parsing.content_parsers import process_field
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.process_field = process_field
        self.short_ids = short_ids
        # other added tokens, such as blanks, would be found inside of patterns
        markers = {text: one for text, one in added_tokens.items() if text[0] in "<[" and text[-1] in ">]"}
        self._ids: dict[str, set[int]] = {}  # marker tokens by field
        spelled = sorted({form for text in markers for form in (text, re.escape(text))}, key=len, reverse=True)
        self._marker = re.compile(r"(?<!\(\?P)(?:" + "|".join(map(re.escape, spelled)) + ")") if spelled else None
        self._added = markers | {re.escape(text): one for text, one in markers.items()}
        try:
            top = {name: self._marked(value, "") for name, value in spec.items() if name.startswith("start_anchor")}
            fields = {name: self._marked_field(name, one) for name, one in spec["fields"].items()}
            loaded = load_response_template(dict(spec) | top | {"fields": fields})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StartupError(
                f"the response template cannot be read: {error!r}; without one: --tool-format none"
            ) from error
        self.start = loaded.start_anchor_re
        self.fields: dict[str, Any] = loaded.fields
        self.tags = {name: self._tags(one) for name, one in loaded.fields.items()}  # None: a field that has none
        self.all_markers = self.markers([*fields, ""])

    def markers(self, fields: Iterable[str]) -> frozenset[int]:
        """The tokens that are markers of these fields."""
        return frozenset(one for name in fields for one in self._ids.get(name, ()))

    def anchor(self, field: Any, end: str) -> Anchor:
        """The anchor at the end ("open" or "close") of a field's regions."""
        is_literal = getattr(field, f"{end}_literals") is not None
        may_grow = not is_literal or getattr(field, f"{end}_literal_can_extend")
        return Anchor(field, getattr(field, f"{end}_re"), may_grow)

    def token_anchor(self, field: Any) -> Anchor:
        """What opens a field's regions and begins with a marker token."""
        return Anchor(field, regex.compile(f"(?={MARK})(?:{field.open_re.pattern})", field.open_re.flags), True)

    def _marked_field(self, name: str, field: Mapping[str, Any]) -> dict[str, Any]:
        marked = {key: self._marked(value, name) for key, value in field.items() if key in _ANCHORS}
        # tokens inside of a region, such as quotation marks, must be in its text
        self._marked(orjson.dumps(field.get("content_args")).decode().replace('\\"', '"'), name)
        return dict(field) | marked

    def _tags(self, field: Any) -> ArgumentTags | None:
        pattern, transform = field.content_args.get("tag_pattern"), field.transform
        is_usual = isinstance(transform, dict) and transform.get("function") == _ARGUMENTS
        is_known = field.content == "xml-inline" and field.content_args.keys() == {"tag_pattern"} and is_usual
        if not is_known or field.close_re is None or not isinstance(pattern, str):
            return None
        marked = self._marked(pattern, field.name)
        markers = [text for text, one in self._added.items() if one in self._ids.get(field.name, ())]
        return argument_tags(marked, field.close_re.pattern, markers)

    def _marked(self, anchor: Any, field: str) -> Any:
        """The literals or the pattern, with `MARK` before the text of each marker token."""
        if isinstance(anchor, list):
            return [self._marked(one, field) for one in anchor]
        if self._marker is None:
            return anchor

        def mark(match: re.Match[str]) -> str:
            self._ids.setdefault(field, set()).add(self._added[match[0]])
            return MARK + match[0]

        return self._marker.sub(mark, anchor)


def load_template(file: str) -> dict[str, Any]:
    """The content of a file. Raises StartupError."""
    try:
        spec: dict[str, Any] = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"--response-template {file} cannot be read: {error}") from error
    return spec
