"""The grammar of an assistant's message: reasoning, then calls of tools or the content. Lark text for llguidance.

    message: reasoning? (calls | content)

llguidance takes every added token of the form `<...>` for a special one, which text never matches. So a marker that is
one token is written as that token's id, and any other as its characters.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.server.bodies.tool_use import inlined
from pd_cluster.server.grammar.json_schema import BINDING, STRUCTURE, guided, pruned
from pd_cluster.server.tools.known_formats import FORMATS
from pd_cluster.server.tools.xml_reader import json_types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_cluster.server.tools.tool_format import Parameter, ToolFormat

_ANY_TEXT = "/(?s:.+)/"
MAX_KEY_CHARS = 256  # of a parameter between tags, as the patterns of the formats
_BREAK = r"/\n{1,2}/"  # between reasoning and what follows
_TEXT = {"type": "string"}
_FOLLOWED = {"type", "properties", "required", "additionalProperties"}  # keywords about XML arguments


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a message may be. `functions`: pairs of a name and the schema of the arguments."""

    tool_format: str  # a key of FORMATS
    functions: tuple[tuple[str, dict[str, Any]], ...] = ()
    required: bool = False  # calls, and no content
    parallel: bool = True  # several calls
    # names of functions of which no `oneOf` is read as `anyOf`, and no unknown format is left out
    strict: tuple[str, ...] = ()
    thinking: str = "no"  # "no", "may" begin, or "open": the prompt has begun it


def write_message(form: MessageForm, content: str, token_ids: Mapping[str, int]) -> str:
    """The grammar of the form. `content`: the grammar of the content in llguidance's language, "" for any text.

    `token_ids`: of the tokenizer's added tokens. Raises ValueError for a schema that the format cannot write.
    """
    return _Writer(FORMATS[form.tool_format], token_ids).message(form, content)


class _Writer:
    def __init__(self, tool_format: ToolFormat, token_ids: Mapping[str, int]) -> None:
        self._format = tool_format
        self._ids = {text: token_ids[text] for text in tool_format.tokens if text in token_ids}
        self._rules: list[str] = []

    def message(self, form: MessageForm, content: str) -> str:
        said = [] if form.required else [self._content(content)]
        if form.functions:
            said.append(self._calls(form, any_text=not (content or form.required)))
        start = f"start: {self._reasoning(form.thinking)} ({' | '.join(said)})"
        return "\n".join([start, *self._rules]) + "\n"

    def _rule(self, name: str, text: str) -> str:
        self._rules.append(f"{name}: {text}")
        return name.split("[")[0]

    def _literal(self, text: str) -> str:
        """The text with its markers: those that are one token by their ids."""
        pieces = re.split("|".join(map(re.escape, self._ids)), text) if self._ids else [text]
        found = re.findall("|".join(map(re.escape, self._ids)), text) if self._ids else []
        written = []
        for piece, marker in zip(pieces, [*found, ""], strict=True):
            written += [_quoted(piece)] if piece else []
            written += [f"<[{self._ids[marker]}]>"] if marker else []
        return " ".join(written)

    def _text_until(self, name: str, end: str) -> str:
        """Any text, and the end, which it does not contain."""
        marker = end.strip()  # as the parser ends a text; in answers a line break is not needed before it
        if marker in self._ids:
            return f"{self._rule(name.upper(), _ANY_TEXT)}? {self._literal(end)}"
        text = self._rule(f"{name}[suffix={_quoted(marker)}]", "/(?s:.*)/")
        return f"{text} {self._literal(end[end.index(marker) + len(marker) :])}"

    def _reasoning(self, thinking: str) -> str:
        start, end = self._format.reasoning_start, self._format.reasoning_end
        if thinking == "no" or not start:
            return ""
        marker = next((token for token in self._ids if end.startswith(token)), end)
        rest = self._literal(end[len(marker) :]) or f"{self._rule('BREAK', _BREAK)}?"
        thought = f"{self._text_until('thought', marker)} {rest}"
        return thought if thinking == "open" else f"({self._literal(start)} {thought})?"

    def _content(self, content: str) -> str:
        start = self._literal(self._format.content_start) if self._format.content_start else ""
        if not content:
            return f"{start} {self._rule('TEXT', self._plain_text())}"
        form = _nested(content)
        if content.startswith('{"grammars"'):  # llguidance's own form of what it has written
            written = json.loads(content)["grammars"][0]
            schema = written["json_schema"]
            form = _nested(written["lark_grammar"]) if schema is None else f"%json {json.dumps(schema)}"
        return f"{start} {self._rule('content', form)}"

    def _opening(self) -> str:
        """The marker with which calls begin, "" if they have none."""
        begin = (self._format.begin + self._format.head).lstrip()
        return next((token for token in self._format.tokens if begin.startswith(token)), "")

    def _plain_text(self) -> str:
        """Text that the parser does not take for the beginning of a call."""
        opening = self._opening()
        text = _ANY_TEXT
        if self._format.bare_head:
            text += rf" & ~/\s*{re.escape(self._format.head)}(?s:.*)/"
        if opening in self._ids:
            return text
        if opening:
            return f"{text} & ~/(?s:.*){re.escape(opening)}(?s:.*)/"
        return r"/[^\s;{](?s:.*)/"  # such a call is the whole message, from its brace on

    def _calls(self, form: MessageForm, *, any_text: bool) -> str:
        one = self._format
        if not (any_text or form.required or self._opening()):
            raise ValueError(f"the format {one.name} cannot tell a call from an answer of another form")
        names = [self._call(i, name, form) for i, (name, _) in enumerate(form.functions)]
        call = self._rule("call", " | ".join(names))
        calls = call
        if form.parallel and one.separator is not None:
            calls = f"{call} ({self._literal(one.separator)} {call})*"
        after_text = any_text and self._opening() in self._ids and not one.content_start
        # a text takes the line break before the first call: lexemes are as long as they can be
        begin = f"TEXT? {self._literal(one.begin.lstrip())}" if after_text else self._literal(one.begin)
        return f"{begin} {calls} {self._literal(one.end)}"

    def _call(self, index: int, name: str, form: MessageForm) -> str:
        one, given, strict = self._format, form.functions[index][1], name in form.strict
        schema = guided(pruned(given, strict=strict), given.get("x-guidance"), coerces_one_of=not strict)
        number = self._rule(f"NUMBER{index}", "/[0-9]{1,4}/") if one.numbered else ""
        begun = f"{self._literal(one.head + name + one.numbered)} {number} {self._literal(one.middle)}"
        if one.parameter is not None:
            arguments = self._parameters(index, schema, one.parameter, strict=strict)
        else:
            arguments = self._json(f"arguments{index}", schema)
        return self._rule(f"call{index}", f"{begun} {arguments} {self._literal(one.tail)}")

    def _json(self, name: str, schema: dict[str, Any]) -> str:
        return self._rule(name, f"%json {json.dumps(schema)}")

    def _parameters(self, index: int, schema: dict[str, Any], tags: Parameter, *, strict: bool) -> str:
        """The arguments as elements in the schema's order; any, if it names none and allows them."""
        names_none = not (schema.get("properties") or schema.get("required"))
        others = schema.get("additionalProperties", True)
        odd = schema.keys() & BINDING.keys() - _FOLLOWED
        if names_none and others not in (True, False, {}, _TEXT):  # without a name a value is read as text
            odd |= {"additionalProperties"}
        if odd:
            raise ValueError(f"the format {self._format.name} cannot follow {sorted(odd)[0]} of a tool's parameters")
        odd_in_keys = r"<>\n" + tags.between[0]
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        if names_none and others is not False:
            key = self._rule(f"KEY{index}", f"/[^{odd_in_keys}]{{1,64}}/")
            element = f"{self._literal(tags.before)} {key} {self._literal(tags.between)}"
            return f"({element} {self._text_until(f'value{index}', tags.after)})*"
        written, properties, required = [], schema.get("properties", {}), schema.get("required", ())
        properties = properties | {key: {} for key in required if key not in properties}
        for number, (key, value) in enumerate(properties.items()):
            if re.search(f"[{odd_in_keys}]", key) or not 0 < len(key) <= MAX_KEY_CHARS:
                raise ValueError(f"the format {self._format.name} cannot write the parameter {key!r}")
            tag = self._literal(tags.before + key + tags.between)
            element = f"{tag} {self._value(f'value{index}_{number}', value, shared, tags.after, strict=strict)}"
            written.append(element if key in required else f"({element})?")
        return " ".join(written)

    def _value(self, name: str, schema: Any, shared: dict[str, Any], end: str, *, strict: bool) -> str:
        """A value and the end of its element. Text is written as it is, other values as JSON.

        The format of a text is a note unless the function is strict.
        """
        forms = _branches(inlined(schema, shared))
        if not any("string" in (json_types(form) or {"string"}) for form in forms):
            return f"{self._json(name, (schema if isinstance(schema, dict) else {}) | shared)} {self._literal(end)}"
        if all(texts := [_texts(form) for form in forms]):
            choices = dict.fromkeys(text for some in texts for text in some)
            return f"{self._rule(name, ' | '.join(map(_quoted, choices)))} {self._literal(end)}"
        for form in forms:
            if odd := form.keys() - STRUCTURE - ({"type"} if strict else {"type", "format"}):
                raise ValueError(f"the format {self._format.name} cannot follow {sorted(odd)[0]} beside text")
        return self._text_until(name, end)


def _branches(schema: Any) -> list[dict[str, Any]]:
    """The alternatives of a schema, each of one type."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(schema.get("type"), list):
        return [schema | {"type": one} for one in schema["type"]]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return [form for one in schema[key] for form in _branches(one)]
    return [schema]


def _texts(form: dict[str, Any]) -> list[str]:
    """The texts of a form of few values; none of a form of many, or of one that text cannot tell apart."""
    values = form.get("enum", [form["const"]] if "const" in form else [])
    if form.get("type") == "null":
        return ["null"]
    if form.get("type") == "string":
        return [one for one in values if isinstance(one, str)]
    is_told = isinstance(values, list) and all(one is None or isinstance(one, str) for one in values)
    return ["null" if one is None else one for one in values] if is_told else []


def _nested(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _quoted(text: str) -> str:
    """A string of Lark, which refuses a bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
