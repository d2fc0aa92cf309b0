"""Reasoning and tool calls in answers, by a response template of transformers (`transformers.utils.chat_parsing`).

transformers' own parser gives a call when it has ended, without the text of its markers. This one gives its arguments
in pieces, and the text of what turns out to be no call. It reads templates with the classes of transformers.

Text between regions is content. White space beside a marker is dropped where it would begin or end a text.
A call is shown if its text is complete and valid, also when its closing marker has not come; else all of its text is
content. In a stream pieces are shown earlier and stay shown: what follows them is then content.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pd_cluster.server.text.detokenizer import MARK, Detokenizer
from pd_cluster.server.tools.call_reader import JsonReader, WholeReader
from pd_cluster.server.tools.output_parser import Reasoning, ToolCall
from pd_cluster.server.tools.response_template import ResponseTemplate, load_template
from pd_cluster.server.tools.xml_reader import XmlReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.server.text.detokenizer import Vocabulary
    from pd_cluster.server.text.tokenizer import Tokenizer
    from pd_cluster.server.tools.call_reader import CallPiece, CallReader
    from pd_cluster.server.tools.output_parser import ParserContext, ParserFactory, Part
    from pd_cluster.server.tools.response_template import Anchor
    from pd_cluster.server.tools.tool_format import ToolFormat

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"
_MAX_SPACE = 256  # characters that are held back because a marker may follow
_PREFIX_TOKENS = (64, 2048)  # last tokens of the prompt in which the start of the answer is searched


class _Trimmed:
    """Text of one kind, without the white space that stands between it and a marker."""

    def __init__(self) -> None:
        self._space = ""
        self._has_text = False
        self._after_marker = False

    def marker(self, *, join: str = "") -> None:
        """A marker precedes what follows. `join`: separates it from text before, if white space does not."""
        self._after_marker = True
        if self._has_text and not self._space:
            self._space = join

    def add(self, text: str) -> str:
        """The text that is certain."""
        text = self._space + text.replace(MARK, "")
        shown = text if text.isspace() and len(text) > _MAX_SPACE else text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return ""
        if self._after_marker and not self._has_text:
            shown = shown.lstrip()
        self._has_text, self._after_marker = True, False
        return shown

    def rest(self) -> str:
        return "" if self._after_marker else self._space


@dataclass(slots=True)
class _Region:
    """The region that is open."""

    field: Any  # of transformers' template
    closings: Sequence[Anchor]  # one, or none; of reasoning also the marker of calls
    reader: CallReader | None = None  # of a call
    opening: str = ""  # the text of its marker, while no piece of the call is shown
    before: _Region | None = None  # reasoning that the call has ended, if it is one
    num_tokens: int = 0  # of the text since then


class TemplateParser:
    """The `OutputParser` of a response template."""

    reads_special_tokens = False

    def __init__(self, template: ResponseTemplate, context: ParserContext) -> None:
        options = self._options = context.options
        self._template, self._call_ids = template, context.call_ids
        hidden = set() if options.tools else {_CALLS}
        hidden |= set(_REASONING) if options.reasoning == "content" else set()
        self._fields = [one for name, one in template.fields.items() if name not in hidden]
        opened = [one for one in self._fields if one.open_re is not None]
        self._anchors = [template.anchor(one, "open") for one in opened]
        # what closes text between regions is a marker that is not shown
        self._anchors += [template.anchor(one, "close") for one in self._fields if one not in opened and one.close_re]
        self.markers = template.markers([one.name for one in self._fields])
        self.num_reasoning_tokens = 0
        self.has_cut_call = False
        self._after_call = False  # a hidden marker is hidden here
        self._region: _Region | None = None
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._num_calls = 0
        self._buffer, self._position = "", 0  # text from `position` on is not read; `^` matches at 0
        self._is_live = False  # the prompt's part of a call is not shown, so a call that it opens is shown as a whole
        self._read(_prefix(template, context.vocabulary, context.prompt))
        self._is_live, self._num_calls = options.streamed, 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """See `OutputParser`."""
        if self._region is not None and self._region.field.name in _REASONING:
            self.num_reasoning_tokens += len(token_ids)
        elif self._region is not None:
            self._region.num_tokens += len(token_ids)
        return self._read(text) if text else []

    def flush(self) -> list[Part]:
        """See `OutputParser`."""
        region = self._region
        if region is not None and region.reader is not None and region.reader.ended:
            self._buffer = self._buffer[: self._position]  # the beginning of its closing marker
        parts = self._read("", final=True)
        region = self._region
        if region is not None and region.reader is not None and not region.reader.ended:
            self._fail(region, region.reader, "", parts)
        in_reasoning = region is not None and region.field.name in _REASONING
        self._show((self._reasoning if in_reasoning else self._content).rest(), parts, is_reasoning=in_reasoning)
        return parts

    def _read(self, text: str, *, final: bool = False) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        # a template that is not ours may have markers without width: the bound is above what others need
        for _ in range(4 * len(self._buffer) + 4):
            if not self._advance(parts, final=final):
                break
        return parts

    def _advance(self, parts: list[Part], *, final: bool) -> bool:
        """Read up to the next marker, or to text that may become one. Returns whether there is more to read."""
        region = self._region
        anchors = self._anchors if region is None else region.closings
        field, match, end = self._find(anchors, final=final)
        if region is not None and region.reader is not None:
            return self._read_call(region, region.reader, match, end, parts)
        is_reasoning = region is not None and region.field.name in _REASONING
        kind = self._reasoning if is_reasoning else self._content
        self._show(kind.add(self._buffer[self._position : end]), parts, is_reasoning=is_reasoning)
        if match is None:
            self._position = end
            self._forget(1)  # `^` matches after markers only
            return False
        self._position = match.end()
        if field.open_re is not None and (region is None or field is not region.field):
            self._open(field, match)
            return True
        if region is None and not self._after_call:
            self._show(self._content.add(match[0]), parts)
            return True
        kind.marker()
        self._content.marker()
        self._after_call = False
        return self._end()

    def _find(self, anchors: Sequence[Anchor], *, final: bool) -> tuple[Any, Any, int]:
        """(field, match, its start) of the first marker; (None, None, the end of the text that is certain)."""
        certain = len(self._buffer)
        best: tuple[Any, Any, int] | None = None
        for field, pattern, may_grow in anchors:
            match = pattern.search(self._buffer, self._position, partial=not final)
            if match is None:
                continue
            start = match.start()
            if match.partial or (may_grow and not final and match.end() == len(self._buffer)):
                certain = min(certain, start)
            elif best is None or (start, -match.end()) < (best[2], -best[1].end()):
                best = (field, match, start)
        return best if best is not None and best[2] < certain else (None, None, certain)

    def _open(self, field: Any, match: Any) -> None:
        closings = [self._template.anchor(field, "close")] if field.close_re else []
        if field.name in _REASONING:
            closings += [self._template.token_anchor(one) for one in self._fields if one.name == _CALLS and one.open_re]
        self._region = _Region(field, closings, before=self._region)
        if field.name == _CALLS:
            self._region.reader, self._region.opening = self._reader(field, match), match[0]
        elif field.name in _REASONING:
            self._content.marker()
            self._reasoning.marker(join="\n")
        else:
            self._content.marker(join="\n")

    def _reader(self, field: Any, match: Any) -> CallReader:
        captures = {key: value.replace(MARK, "") for key, value in match.groupdict().items() if value is not None}
        name, args = captures.get("name", ""), field.content_args
        if field.content == "json" and not args and captures.keys() <= {"name"} and _is_usual(field.transform, name):
            return JsonReader(name, live=self._is_live)
        if name and (tags := self._template.tags[field.name]):
            return XmlReader(name, self._properties(name), tags, live=self._is_live)
        return WholeReader(lambda text: self._template.process_field(text, field, captures))

    def _properties(self, name: str) -> Mapping[str, Any]:
        """The schemas of the tool's arguments; empty when they are not known."""
        found = self._options.tools.get(name, {}).get("properties")
        return found if isinstance(found, dict) else {}

    def _read_call(self, region: _Region, reader: CallReader, match: Any, end: int, parts: list[Part]) -> bool:
        if self._position < end:
            num_read, pieces = reader.read(self._buffer[self._position : end])
            self._position += num_read
            self._show_calls(region, pieces, parts)
            if reader.broken:
                return self._fail(region, reader, "", parts)
            if reader.ended and not region.closings:
                return self._end()
            if self._position < end:
                return True
        if match is None:
            self._forget(1)
            return False
        if reader.is_text(match[0]) and MARK not in match[0]:
            # characters of a string that look like the marker
            num_read, pieces = reader.read(self._buffer[end : max(match.end(), end + 1)])
            self._position += num_read
            self._show_calls(region, pieces, parts)
            return num_read > 0
        self._position = match.end()
        self._show_calls(region, reader.close(), parts)
        return self._fail(region, reader, match[0], parts) if reader.broken else self._end()

    def _show_calls(self, region: _Region, pieces: Sequence[CallPiece], parts: list[Part]) -> None:
        for name, arguments in pieces:
            region.opening = ""
            if name:
                self._content.marker()
                self._reasoning.marker()
                self._num_calls += 1
                self._after_call, region.before = True, None
            index = self._num_calls - 1
            if index == 0 or self._options.parallel_calls:
                parts.append(ToolCall(index, arguments, self._call_id(index) if name else "", name))

    def _call_id(self, index: int) -> str:
        digest = blake2b(f"{self._call_ids}/{index}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self._template.short_ids else f"call_{digest}"

    def _end(self) -> bool:
        self._forget(0)
        self._region = None
        return True

    def _fail(self, region: _Region, reader: CallReader, closing: str, parts: list[Part]) -> bool:
        """The text of the region that is not shown is content."""
        text = region.opening + reader.raw + closing
        self.has_cut_call |= reader.is_partial
        if self._position == 0:  # a marker without width, and no text: it must not be found again
            text, self._position = self._buffer[:1], 1
        self._after_call, self._region = False, region.before
        is_reasoning = self._region is not None
        self._show((self._reasoning if is_reasoning else self._content).add(text), parts, is_reasoning=is_reasoning)
        self.num_reasoning_tokens += region.num_tokens if is_reasoning else 0
        self._forget(1)
        return True

    def _forget(self, num_kept: int) -> None:
        """Drop the text that has been read, but `num_kept` characters."""
        start = max(0, self._position - num_kept)
        self._buffer, self._position = self._buffer[start:], self._position - start

    def _show(self, text: str, parts: list[Part], *, is_reasoning: bool = False) -> None:
        if text and not is_reasoning:
            self._after_call &= text.isspace()
            parts.append(text)
        elif text and self._options.reasoning == "separate":
            parts.append(Reasoning(text))


def template_parser(
    tokenizer: Tokenizer, tool_format: ToolFormat | None, file: str, *, enabled: bool
) -> ParserFactory | None:
    """The parser of a node: by the template in `file`, else the model's own, else that of the format.

    None if there is none, or it is not enabled and no file is given. Raises StartupError.
    """
    spec: Mapping[str, Any] | None = None
    if file:
        spec = load_template(file)
    elif enabled:
        spec = tokenizer.response_template or (None if tool_format is None else tool_format.template)
    if spec is None:
        return None
    short_ids = tool_format is not None and tool_format.short_ids
    return partial(TemplateParser, ResponseTemplate(spec, tokenizer.added_tokens, short_ids=short_ids))


def _is_usual(transform: Any, name: str) -> bool:
    """Whether the region's JSON is a function with its name and arguments, or the arguments of `name`."""
    function = transform.get("function") if isinstance(transform, dict) else None
    return function == "{content}" or (bool(name) and function == {"name": "{name}", "arguments": "{content}"})


def _prefix(template: ResponseTemplate, vocabulary: Vocabulary, prompt: Sequence[int]) -> str:
    """The part of the answer that the prompt has; "" when its start is not found."""
    for length in _PREFIX_TOKENS:
        detokenizer = Detokenizer(vocabulary, skip_special=False, markers=template.all_markers)
        text = "".join(map(detokenizer.push, prompt[-length:])) + detokenizer.flush()
        starts = [match.end() for match in template.start.finditer(text)]
        if starts:
            return text[starts[-1] :]
        if length >= len(prompt):
            break
    return ""
