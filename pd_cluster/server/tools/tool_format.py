"""How a family of models writes tool calls and reasoning. Data only: the parser and the grammars read it.

A message with calls is, with the fields of `ToolFormat`:

    begin  head NAME middle ARGUMENTS tail  separator  head NAME middle ARGUMENTS tail  end

ARGUMENTS is one JSON object, or with `parameter` one element for each argument:

    before KEY between VALUE after
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Parameter(NamedTuple):
    """The texts around the key and the value of an argument. A text is written as it is, another value as JSON."""

    before: str
    between: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write tool calls. Every piece is the text that models of the format are trained on."""

    name: str  # of `--tool-format`
    model_types: tuple[str, ...]  # `model_type` in config.json
    signs: tuple[str, ...]  # a chat template that contains all of them is of this format
    template: Mapping[str, Any]  # a response template of transformers, which the parser follows
    head: str
    middle: str
    tail: str
    begin: str = ""  # before the first call
    separator: str | None = "\n"  # between two calls; None: a message has one call
    end: str = ""  # after the last call
    parameter: Parameter | None = None  # None: the arguments are one JSON object
    numbered: str = ""  # after NAME, before the number of the call; "": calls have no number
    bare_head: bool = False  # the parser takes a head that begins an answer for a call, also without `begin`
    reasoning_start: str = ""  # "": the format has no reasoning
    reasoning_end: str = ""
    content_start: str = ""  # before the content of an answer
    # Pieces of the texts above that are one token each in the models of the format. A tokenizer may lack them: then
    # they are plain text. Where it has them, only the token is a marker, and the same characters in text are not.
    tokens: tuple[str, ...] = ()
    short_ids: bool = False  # ids of calls have 9 letters and digits: Mistral's chat templates refuse others
