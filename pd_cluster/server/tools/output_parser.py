"""The seam for reasoning and tool calls: an output parser splits the text of a chat answer into parts.

    token ids -> Detokenizer -> text -> OutputParser -> parts -> ResponseShape -> bytes

A node has at most one parser: `--output-parser package.module:Class`, else that of a response template
(`template_parser.py`). Without one the text is the content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pd_cluster.server.text.detokenizer import Vocabulary

Content = str  # a plain string, so that answers without a parser create no object for it


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning: `reasoning_content` of a chat answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of one tool call. The first piece has `id` and `name`; `arguments` of all pieces join to JSON text."""

    index: int  # of the call in the message, from 0
    arguments: str = ""
    id: str = ""
    name: str = ""


Part = Content | Reasoning | ToolCall


def num_chars(part: Part) -> int:
    """Characters of a part that clients see: of content, of reasoning, or of a call's name and arguments."""
    if isinstance(part, str):
        return len(part)
    return len(part.text) if isinstance(part, Reasoning) else len(part.name) + len(part.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """What a request asks of its answer's parts."""

    # The JSON schema of the arguments by name of each tool that may be called; {}: what looks like a call is content
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel_calls: bool = True  # False: of several calls only the first is shown
    # Pieces of a call are shown before its end. What follows may then break the call, see `TemplateParser`.
    streamed: bool = False
    # "drop": it is not shown (`include_reasoning: false`); "content": it stays in the content as the model wrote it
    # (`separate_reasoning: false`)
    reasoning: Literal["separate", "drop", "content"] = "separate"


DEFAULT_OPTIONS = ParserOptions()


@dataclass(frozen=True, slots=True)
class ParserContext:
    """The argument of a parser's constructor. Each choice of a request has a parser of its own."""

    vocabulary: Vocabulary
    prompt: Sequence[int]  # token ids; a chat template may have opened the reasoning
    options: ParserOptions = DEFAULT_OPTIONS
    call_ids: str = ""  # a text of which ids of calls are made: the same wherever this choice is continued


class OutputParser(Protocol):
    """Splits the text of one choice into parts. It is given one token at a time, and the rest of the text at the end.

    The state must depend on the text and the token ids so far, not on how they were cut into calls of `push`. To
    continue a stream of another node, all that is known is passed to one `push`, and the returned parts are dropped.
    """

    reads_special_tokens: bool  # True: special tokens are in `text`, and the parser removes them from the content
    # Optional attributes. `markers`: token ids, special or not, of which the text is shown and preceded by
    # `detokenizer.MARK`, so that the same characters are not taken for the token. `num_reasoning_tokens`: so far.
    # `has_cut_call`: a call of which pieces were returned did not end; then `finish_reason` is not "tool_calls".

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Part]:
        """Add new text and new tokens. Returns the parts that have become certain.

        `text` may lag behind `token_ids`, because possible stop strings and unfinished characters are held back.
        """

    def flush(self) -> Sequence[Part]:
        """Returns the remaining parts, when no more text comes. Called once."""


ParserFactory = Callable[[ParserContext], OutputParser]


def load_parser(path: str) -> ParserFactory | None:
    """The parser class `package.module:Class`; None for "". Raises StartupError."""
    if not path:
        return None
    flag = f"--output-parser {path}"
    module_name, colon, class_name = path.partition(":")
    if not (colon and module_name and class_name):
        raise StartupError(f"{flag}: expected package.module:Class")
    try:
        factory: ParserFactory = getattr(import_module(module_name), class_name)
    except Exception as error:  # the module is not ours: its import may raise anything
        raise StartupError(f"{flag} cannot be imported: {error!r}") from error
    if missing := [name for name in ("reads_special_tokens", "push", "flush") if not hasattr(factory, name)]:
        raise StartupError(f"{flag} lacks {', '.join(missing)} of pd_cluster.server.tools.output_parser.OutputParser")
    return factory
