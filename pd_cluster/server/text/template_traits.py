"""What a chat template takes: the roles and their order, and the forms of calls and of their results."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING

from pd_connectors.protocol.text_chain import AS_ALWAYS, LastTurn

if TYPE_CHECKING:
    from collections.abc import Mapping

# Before the first message and after the last one, in `TemplateTraits.joints`. Else the kinds of messages: their roles,
# and "call" for one of the assistant with calls
START, END = "start", "end"


class NoContent(Enum):
    """How the content of a message with calls is left out."""

    ABSENT = "absent"
    EMPTY = "empty"
    NULL = "null"  # templates that ask whether `content is none`


class CallIds(Enum):
    """What the ids of calls are."""

    AS_SENT = "as sent"
    SHORT = "of nine characters"  # letters and digits
    NAMED = "functions.NAME:INDEX"  # of templates that write no name beside them


class ResultForm(Enum):
    """How the result of a tool is written."""

    PLAIN = "plain"
    NAMED = "with the name of the function"
    TEXT = "in a user message"


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

    shows_user_text: bool = True  # else no form of a user message that was tried is in the prompt
    content_as_parts: bool = False  # content is a list of parts of type text
    has_developer: bool = True  # else developers speak as the system
    writes_tools: bool = True
    calls_as_text: bool = False  # the template writes no calls
    arguments_as_text: bool = False  # JSON text, not an object
    takes_text: bool = True  # arguments that are no object as their text
    no_content: NoContent = NoContent.ABSENT
    ids: CallIds = CallIds.AS_SENT
    results: ResultForm = ResultForm.PLAIN
    text_beside_calls: bool = True  # else a message of its own
    parallel_calls: bool = True  # else a message for each call
    results_in_json: bool = False  # the results of tools are JSON strings in the prompt
    last_turn: LastTurn = AS_ALWAYS
    joints: Mapping[tuple[str, str], Joint] = field(default_factory=dict)  # pairs that are not taken as they are

    def __str__(self) -> str:
        """What differs from the defaults."""
        given = [(one.name, getattr(self, one.name), one.default) for one in fields(self) if one.name != "joints"]
        said = [f"{name}: {getattr(value, 'value', value)}" for name, value, default in given if value != default]
        said += [f"{after} after {before}: {joint.value}" for (before, after), joint in self.joints.items()]
        return ", ".join(said) or "takes all messages as they are"
