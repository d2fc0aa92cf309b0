"""Finds out what a chat template takes, by rendering small conversations with marks in their texts.

Each trait is the first of its values under which all marks of a conversation are in the prompt, by `adapt` with what is
known so far. A template that renders no user message is used as it is. About 60 renderings, 20 to 60 ms, for templates
that take what comes; four times as many for those that take little.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd_cluster.server.text.message_adapter import adapt
from pd_cluster.server.text.template_traits import END, START, CallIds, Joint, NoContent, ResultForm, TemplateTraits
from pd_connectors.protocol.text_chain import LastTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Message = dict[str, Any]
    Render = Callable[[Sequence[Message]], str]

_IDS = ("call_Zq0123456789abcdef", "call_Zq0123456789abcdeg")  # as long as clients' ids
_KEY, _VALUE = "Zqkey", "Zqvalue"
_CUT = f'{{"{_KEY}": "{_VALUE}'  # arguments that were cut off
_USER_TURN = ("assistant", "user")
_LEADS: dict[str, tuple[str, ...]] = {  # what comes before a message, in a conversation that templates are made for
    START: (),
    "system": (),
    "developer": (),
    "user": (),
    "assistant": ("user",),
    "call": ("user",),
    "tool": ("user", "call"),
}
_TAILS: dict[str, tuple[str, ...]] = {  # and after it
    "system": ("user", *_USER_TURN),
    "developer": ("user", *_USER_TURN),
    "user": _USER_TURN,
    "assistant": ("user",),
    "call": ("tool", *_USER_TURN),
    "tool": _USER_TURN,
}
_AS_MODELS_WRITE = 2  # the best quality of arguments
_SYSTEMS = ("system", "developer")
# Pairs that stand in the conversations for other pairs come first
_USUAL = ((START, "system"), ("system", "user"), ("user", "assistant"), ("assistant", "user"), ("user", "call"))


def find_traits(
    render: Render, has_time: Callable[[], bool] = lambda: True, guess: TemplateTraits | None = None
) -> TemplateTraits:
    """The traits of the template that `render` renders. It may raise anything.

    `has_time`: whether another question may be asked; what is not found out then is taken as it is. `guess`: the traits
    for other arguments of the template, which are taken if they keep all marks for these.
    """
    probes = _Probes(render, has_time)
    if guess is not None and probes.fits(guess):
        return guess
    if not probes.find_content():
        return probes.traits
    probes.find_developer()
    probes.find_calls()
    probes.find_joints()
    probes.find_answers()
    probes.find_last_turn()
    return probes.traits


class _Probes:
    def __init__(self, render: Render, has_time: Callable[[], bool]) -> None:
        self._render = render
        self._has_time = has_time
        self.traits = TemplateTraits()

    def fits(self, guess: TemplateTraits) -> bool:
        """Whether all kinds of messages are kept in all orders, where each is in the conversation once."""
        return self._marks_kept(guess, _conversation(_walk(tuple(_TAILS))))

    def find_content(self) -> bool:
        """Templates of models with images may take parts alone, of which text is one. False: nothing is rendered."""
        forms = (replace(self.traits, content_as_parts=as_parts) for as_parts in (False, True))
        kept = next((form for form in forms if self._marks_kept(form, _conversation(["user"]))), None)
        self.traits = kept or replace(self.traits, shows_user_text=False)
        return kept is not None

    def find_developer(self) -> None:
        """A template that writes developers as it writes a role that does not exist knows none."""
        known, unknown = (self._written(_conversation([role, "user"])) for role in ("developer", "Zqrole"))
        is_known = "Zq0m" in (known or "")
        if known and unknown:
            is_known = is_known and unknown.lower().replace("zqrole", "developer") != known.lower()
        self.traits = replace(self.traits, has_developer=is_known)

    def find_calls(self) -> None:
        talk = _conversation(["user", "call", "tool", *_USER_TURN])
        best, traits = 0, self.traits
        for form in self._call_forms():
            if best == _AS_MODELS_WRITE or not self._has_time():
                break
            quality = self._quality(form, talk)
            best, traits = (quality, form) if quality > best else (best, traits)
        if not best and not self._has_time():
            return
        if not best:
            forms = _with_results(replace(self.traits, calls_as_text=True))
            self.traits = next((form for form in forms if self._marks_kept(form, talk)), self.traits)
            return
        self.traits = traits
        self._prefer(replace(traits, ids=CallIds.NAMED), _conversation(["user", "call", "user"]))

    def find_joints(self) -> None:
        kinds = [kind for kind in _TAILS if kind != "developer" or self.traits.has_developer]
        if self.traits.calls_as_text:
            kinds.remove("call")
        if self.traits.results is ResultForm.TEXT:
            kinds.remove("tool")
        is_free = self.keeps([*_walk(kinds), "user"], in_order=True)
        befores = [START] if is_free else [START, *kinds]
        # What becomes a user message needs to know what stands before one
        afters = sorted(kinds, key=("user", "assistant", "call", "tool", *_SYSTEMS).index)
        pairs = [*_USUAL, *((before, after) for after in afters for before in befores), *((one, END) for one in kinds)]
        for before, after in dict.fromkeys(pairs):
            if not self._has_time():
                return
            if before in (START, *kinds) and after in (*kinds, END):
                self._find_joint(before, after)

    def find_answers(self) -> None:
        """What an answer with calls may have: arguments that are no JSON, text, reasoning, several calls."""
        if self.traits.calls_as_text or not self._has_time():
            return
        cut = _conversation(["user", "call", "tool", *_USER_TURN], arguments=_CUT)
        written = self._written(cut)
        self.traits = replace(self.traits, takes_text=written is not None and _CUT in written)
        turn = ["user", "call", "tool", "assistant"]
        beside = _conversation([*turn, *turn, "user"], text="text")
        beside[1]["reasoning_content"] = "a"
        several = _conversation(["user", "call", "tool", "tool", *_USER_TURN], num_calls=2)
        self._prefer(replace(self.traits, text_beside_calls=False), beside)
        self._prefer(replace(self.traits, parallel_calls=False), several)

    def find_last_turn(self) -> None:
        """What stands elsewhere, or no more, when the next question has come; and how results are quoted."""
        if not self._has_time():
            return
        in_order = self._written(_conversation(["system", "user", *_USER_TURN])) or ""
        quoted = self._written([*_conversation(["user", "call"]), {**_conversation(["tool"])[0], "content": 'Zq"m'}])
        self.traits = replace(
            self.traits,
            results_in_json=json.dumps('Zq"m')[1:-1] in (quoted or ""),
            last_turn=LastTurn(
                tools=self._changes(["user"]),
                system=in_order.find("Zq0m") > in_order.find("Zq1m"),
                answers=self._changes(["user", "call", "tool"]),
                reasoning=self._changes(["user", "call", "tool"], reasoning_content="a"),
            ),
        )

    def _changes(self, roles: Sequence[str], **members: str) -> bool:
        """Whether a prompt up to the last of these messages changes when an answer and the next question follow.

        `members`: of messages with calls.
        """
        talks = [_conversation([*roles, *more]) for more in ((), _USER_TURN)]
        for message in itertools.chain(*talks):
            if "tool_calls" in message:
                message.update(members)
        asked, followed = map(self._written, talks)
        begin, mark, _ = (asked or "").partition(f"Zq{len(roles) - 1}m")
        return bool(mark) and followed is not None and not followed.startswith(begin + mark)

    def _prefer(self, other: TemplateTraits, conversation: Sequence[Message]) -> None:
        """Take other traits if they alone keep what is said."""
        if not self._marks_kept(self.traits, conversation) and self._marks_kept(other, conversation):
            self.traits = other

    def keeps(self, roles: Sequence[str], *, in_order: bool = False) -> bool:
        """Whether all marks of a conversation of these kinds are in the prompt."""
        return self._marks_kept(self.traits, _conversation(roles), in_order=in_order)

    def _find_joint(self, before: str, after: str) -> None:
        # Where a template writes the first system message is its affair. One further on stays where it is
        in_order = after in _SYSTEMS and before not in (START, *_SYSTEMS)
        talks = [_conversation(roles) for roles in self._talks(before, after, in_order=in_order)]

        def keeps(traits: TemplateTraits) -> bool:
            return all(self._marks_kept(traits, talk, in_order=in_order) for talk in talks)

        taken = self.traits
        # The system's text inside a conversation must not need what one at its beginning needs after it
        bare = {pair: joint for pair, joint in taken.joints.items() if not (in_order and pair[0] == after)}
        if not talks or keeps(replace(taken, joints=bare)):
            return
        for joint in _joints(before, after):
            traits = replace(taken, joints={**taken.joints, (before, after): joint})
            if keeps(traits):
                self.traits = traits
                return
        written = self._written(talks[0])
        own = f"Zq{len(talks[0]) - len(_TAILS.get(after, ())) - 1}"
        if written is not None and own not in written:
            self.traits = replace(taken, joints={**taken.joints, (before, after): Joint.REFUSED})

    def _talks(self, before: str, after: str, *, in_order: bool) -> Iterator[list[str]]:
        """Conversations in which one kind follows another."""
        lead = [*_LEADS[before], *([] if before == START else [before])]
        if after == END:
            if before in (*_SYSTEMS, "call"):
                yield lead
            return
        if in_order and (START, "system") not in self.traits.joints:
            lead = ["system", *lead]
        yield [*lead, after, *_TAILS[after]]
        if (before, after) == (START, "system"):  # some write it into the last question, if that is the last message
            yield from ([after, *one] for one in (["user", "assistant"], ["user", "call", "tool"]) if self.keeps(one))
        if in_order:  # templates that count turns may take it for an answer
            yield [*lead, after, "assistant", "user"]
        elif before in (START, *_SYSTEMS) and after in ("assistant", "call", "tool"):  # some templates need a question
            yield [*lead, after, *(["tool"] if after == "call" else [])]

    def _call_forms(self) -> Iterator[TemplateTraits]:
        """Forms of calls, the best first."""
        for ids, empty, text in itertools.product((CallIds.AS_SENT, CallIds.SHORT), NoContent, (False, True)):
            form = replace(self.traits, ids=ids, no_content=empty, arguments_as_text=text)
            yield from _with_results(form)

    def _quality(self, form: TemplateTraits, conversation: Sequence[Message]) -> int:
        """1: arguments are quoted once more, or Python's; 0: something is missing."""
        written = self._written(conversation, form)
        if written is None or not all(mark in written for mark in _marks(conversation)):
            return 0
        return 1 if f'\\"{_KEY}' in written or f"'{_KEY}'" in written else _AS_MODELS_WRITE

    def _marks_kept(self, traits: TemplateTraits, messages: Sequence[Message], *, in_order: bool = False) -> bool:
        written = self._written(messages, traits)
        if written is None:
            return False
        places = [written.find(mark) for mark in _marks(messages)]
        followers = places[1:] if messages[0]["role"] in _SYSTEMS else places  # the first may stand anywhere
        return -1 not in places and (not in_order or followers == sorted(followers))

    def _written(self, messages: Sequence[Message], traits: TemplateTraits | None = None) -> str | None:
        try:
            return self._render(adapt(messages, traits or self.traits))
        except Exception:  # templates are programs: a refusal is an answer
            return None


def _joints(before: str, after: str) -> Iterator[Joint]:
    """What may help between two kinds, the least change first."""
    if after == END:
        yield Joint.AFTER_USER
        return
    if after in _SYSTEMS:
        if before in _SYSTEMS:
            yield Joint.JOINED
        yield Joint.AS_USER
    elif after == "tool":
        yield Joint.AS_USER
        yield Joint.AFTER_USER
    elif after == "user":
        yield Joint.JOINED if before == "user" else Joint.AFTER_ASSISTANT
    else:
        if before == "assistant":
            yield Joint.JOINED
        yield Joint.AFTER_USER


def _walk(kinds: Sequence[str]) -> list[str]:
    """Kinds in an order that has each pair of neighbours."""
    walk = []
    for index, kind in enumerate(kinds):
        walk += [kind, *(one for later in kinds[index + 1 :] for one in (kind, later)), kind]
    return walk


def _with_results(form: TemplateTraits) -> Iterator[TemplateTraits]:
    for results in ResultForm:
        yield replace(form, results=results)


def _conversation(roles: Sequence[str], *, arguments: Any = None, text: str = "", num_calls: int = 1) -> list[Message]:
    """Messages of these kinds, each with a mark. `text`: beside calls."""
    messages: list[Message] = []
    results = itertools.cycle(_IDS[:num_calls])
    for index, role in enumerate(roles):
        if role == "call":
            shown = {_KEY: _VALUE} if arguments is None else arguments
            calls = [
                {"id": one, "type": "function", "function": {"name": f"Zq{index}c{number}m", "arguments": shown}}
                for number, one in enumerate(_IDS[:num_calls])
            ]
            content = f"Zq{index}{text}m" if text else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        elif role == "tool":
            messages.append({"role": "tool", "content": f"Zq{index}m", "tool_call_id": next(results)})
        else:
            messages.append({"role": role, "content": f"Zq{index}m"})
    return messages


def _marks(messages: Sequence[Message]) -> list[str]:
    marks = []
    for message in messages:
        calls = message.get("tool_calls", ())
        marks += [message["content"]] if message["content"] else []
        marks += [call["function"]["name"] for call in calls] + ([_KEY, _VALUE] if calls else [])
    return marks
