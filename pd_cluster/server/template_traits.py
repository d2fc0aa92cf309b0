"""What a chat template takes: the roles and their order, and the forms of calls and of their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Before the first message and behind the last one, in `TemplateTraits.joints`. Else the kinds of messages: their roles,
# and "call" for one of the assistant with calls
START, END = "start", "end"


class NoContent(Enum):
    """How the content of a message with calls is left out."""

    ABSENT = "absent"
    EMPTY = "empty"
    NULL = "null"  # templates that ask whether `content is none`


class ResultForm(Enum):
    """How the result of a tool is written."""

    PLAIN = "plain"
    NAMED = "named"  # with the name of the function
    TEXT = "text"  # in a user message


class Joint(Enum):
    """What a template needs between two neighbours."""

    JOINED = "joined"  # one message with both texts
    AS_USER = "as user"  # the second one as a user message: the template drops or refuses its role here
    AFTER_USER = "after user"  # an empty user message between them
    AFTER_ASSISTANT = "after assistant"
    REFUSED = "refused"  # the template drops one of them in every form that was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """The defaults stand for a template that takes all messages as they are."""

    content_as_parts: bool = False  # content is a list of parts of type text
    has_developer: bool = True  # else developers speak as the system
    writes_tools: bool = True
    calls_as_text: bool = False  # the template writes no calls
    arguments_as_text: bool = False  # JSON text, not an object
    takes_text: bool = True  # arguments that are no object as their text
    no_content: NoContent = NoContent.ABSENT
    short_ids: bool = False  # ids of calls have nine letters and digits
    results: ResultForm = ResultForm.PLAIN
    text_beside_calls: bool = True  # else a message of its own
    parallel_calls: bool = True  # else a message for each call
    joints: Mapping[tuple[str, str], Joint] = field(default_factory=dict)  # pairs that are not taken as they are

    def __str__(self) -> str:
        return ", ".join(self._words()) or "takes all messages as they are"

    def _words(self) -> Iterator[str]:
        if self.content_as_parts:
            yield "content as parts"
        if not self.has_developer:
            yield "developer as system"
        if not self.writes_tools:
            yield "no list of tools"
        if self.calls_as_text:
            yield "calls as text"
        elif self.arguments_as_text:
            yield "arguments as text"
        if self.short_ids:
            yield "ids of nine characters"
        if self.results is not ResultForm.PLAIN:
            yield "results with their name" if self.results is ResultForm.NAMED else "results as user messages"
        if not self.text_beside_calls:
            yield "text and calls apart"
        if not self.parallel_calls:
            yield "one call a message"
        for (before, after), joint in self.joints.items():
            if "developer" not in (before, after):
                yield f"{after} {'after ' + before if before != START else 'first'}: {joint.value}"
