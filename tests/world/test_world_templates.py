"""Published chat templates x sequences of roles x tools: what a message says is in the prompt, or it is refused.

Each text of a conversation has a mark, and so have the arguments of each call. The node renders the conversation as it
does for a request; a mark that the prompt lacks is a message that the model never sees.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.text.chat_template import ChatTemplate
from pd_cluster.server.text.normal_messages import normal_messages
from pd_cluster.server.tools.known_formats import find_format
from pd_cluster.server.tools.response_template import ResponseTemplate
from tests.server.test_template_parser import calls_of, parsed, parser
from tests.shallow_model import DEMO_MODEL
from tests.world.packages import BY_NAME, world_folder
from tests.world.published_models import PUBLISHED, need

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Message = dict[str, Any]
MISTRAL = "mistral_templates"

# One letter for each part of a conversation: system, developer, user, assistant, a call with its result, the same with
# text beside it, two calls at once with their results, calls with arguments that are cut or no object
PARTS = "SDUACTPB"
MUST_BE_TAKEN = ("U", "SU", "DU", "SDU", "SSU", "UU", "SUU", "UAU", "SUAU", "SUAUAU", "UAAU", "UACAU", "USU", "UASU")
MUST_BE_TAKEN_WITH_TOOLS = ("UC", "UCA", "UCAU", "UTAU", "UPAU", "UBAU", "SUCCAU", "DUCPAU", "UCAUCA", "UCU", "UCSU")
NUM_LONG = 200
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up",
        "parameters": {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]},
    },
}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False, "thinking": False}, {"enable_thinking": True})


class Conversation:
    """The messages of a sequence of parts, and the marks of all that they say."""

    def __init__(self, parts: str) -> None:
        self.marks: list[str] = []
        self.messages: list[Message] = []
        self._num_calls = 0
        for part in parts:
            getattr(self, f"_add_{part}")()

    def _mark(self, kind: str) -> str:
        self.marks.append(f"{kind}mark{len(self.marks)}x")
        return self.marks[-1]

    def _add_S(self) -> None:
        self.messages.append({"role": "system", "content": self._mark("system")})

    def _add_D(self) -> None:
        self.messages.append({"role": "developer", "content": self._mark("developer")})

    def _add_U(self) -> None:
        parts = [{"type": "text", "text": self._mark("user")}, {"type": "text", "text": self._mark("part")}]
        self.messages.append({"role": "user", "content": parts})

    def _add_A(self) -> None:
        self.messages.append({"role": "assistant", "content": self._mark("assistant"), "tool_calls": []})

    def _add_C(self) -> None:
        self._calls(None, json.dumps({"of": self._mark("argument")}))

    def _add_T(self) -> None:
        self._calls(self._mark("beside"), json.dumps({"of": [self._mark("argument")], "n": 1}))

    def _add_P(self) -> None:
        self._calls("", *(json.dumps({"of": self._mark("argument")}) for _ in range(2)))

    def _add_B(self) -> None:
        broken = (f'{{"of": "{self._mark("cut")}', f'["{self._mark("list")}"]', f'"{self._mark("text")}"', "")
        for arguments in broken:
            self._calls(None, arguments)

    def _calls(self, content: str | None, *arguments: str) -> None:
        ids = [f"call{self._num_calls + index:05d}" for index in range(len(arguments))]
        self._num_calls += len(arguments)
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "look", "arguments": text}}
            for call_id, text in zip(ids, arguments, strict=True)
        ]
        self.messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        for call_id in ids:
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": self._mark("result")})


def lost_marks(template: ChatTemplate, parts: str, tools: list[Message] | None, options: Message) -> list[str] | None:
    """Marks that the prompt lacks; None: the request is refused."""
    conversation = Conversation(parts)
    try:
        messages = normal_messages(conversation.messages)
        text = template.render(messages, tools, {"add_generation_prompt": True} | options)
    except InvalidRequest:
        return None
    except Exception as error:  # what a template raises is the 400 of its own words
        logger.debug("%s is refused: %s", parts, error)
        return None
    return [mark for mark in conversation.marks if mark not in text]


def sequences() -> Iterator[str]:
    """All of up to three parts, and longer ones at random."""
    for length in (1, 2, 3):
        yield from map("".join, itertools.product(PARTS, repeat=length))
    rng = random.Random(33)
    for _ in range(NUM_LONG):
        yield "".join(rng.choices(PARTS, k=rng.randint(4, 9)))


def named_templates() -> dict[str, tuple[str, Path | None]]:
    """Source and file of each by its name; None: that of the tokenizer's config."""
    found: dict[str, tuple[str, Path | None]] = {}
    folder = BY_NAME["trl"].folder / "trl" / "chat_templates"
    for path in sorted(folder.glob("*.jinja")) or [folder / "trl.jinja"]:
        found[path.stem] = ("trl", path)
    for version in ("v1", "v2", "v3", "v7", "v11", "v13", "v15"):
        name = f"mistral_{version}"
        found[name] = (MISTRAL, world_folder() / MISTRAL / f"{name}.jinja")
    for model in PUBLISHED:
        if model.template is None and model.name not in ("llama2", "deepseek_v4"):
            found[f"own {model.name}"] = (model.source, None)
    return found


TEMPLATES = named_templates()


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    source, path = TEMPLATES[request.param]
    need(source)
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_MODEL), local_files_only=True)
    tokenizer.bos_token = "[INST]"  # the demo model's has none, and some templates write it
    if path is None:
        (model,) = (one for one in PUBLISHED if f"own {one.name}" == request.param)
        told = json.loads((model.tokenizer_folder / "tokenizer_config.json").read_text())
        tokenizer.chat_template = told["chat_template"]
    else:
        tokenizer.chat_template = path.read_text()
    return ChatTemplate(tokenizer)


def test_nothing_is_lost(template: ChatTemplate) -> None:
    lost: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for parts, tools in itertools.product(sequences(), (None, [TOOL])):
        for options in OPTIONS if len(parts) < 3 else OPTIONS[:1]:
            found = lost_marks(template, parts, tools, options)
            counts["refused" if found is None else "lost" if found else "taken"] += 1
            if found:
                lost[f"{parts} {'tools' if tools else ''} {options or ''}"] = found
    assert lost == {}, (len(lost), counts)


def test_what_clients_send_is_taken(template: ChatTemplate) -> None:
    """Sequences that agents and chat pages send are neither refused nor shortened."""
    wanted: Sequence[tuple[str, list[Message] | None]] = [
        *((parts, None) for parts in MUST_BE_TAKEN),
        *((parts, [TOOL]) for parts in (*MUST_BE_TAKEN, *MUST_BE_TAKEN_WITH_TOOLS)),
    ]
    found = {(parts, bool(tools)): lost_marks(template, parts, tools, {}) for parts, tools in wanted}
    assert {parts: lost for parts, lost in found.items() if lost != []} == {}


def test_a_past_call_is_parsed_back(template: ChatTemplate) -> None:
    """By the format that the template shows. What ends the message is not read."""
    form = find_format("", template.texts)
    if form is None:
        pytest.skip("shows no format of calls")
    given = {"of": 'a "b" é\n</tool_call> 🙂', "n": 2, "more": {"deep": [True, None]}}
    properties = {"of": {"type": "string"}, "n": {"type": "integer"}, "more": {"type": "object"}}
    function: Any = TOOL["function"]
    tools = [{"type": "function", "function": {**function, "parameters": {"properties": properties}}}]
    call = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": json.dumps(given)}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    text = template.render(normal_messages(messages), tools, {})
    begins = [found.end() for found in ResponseTemplate(form.template, {}).start.finditer(text)]
    shown = {"look": {"type": "object", "properties": properties}}
    assert calls_of(parsed(parser(form, tools=shown), [text[begins[-1] :]])) == [("look", given)]
