"""A model's chat templates: conversations as the text of a prompt."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace
from datetime import datetime
from string import ascii_letters
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.server.text.message_adapter import adapt
from pd_cluster.server.text.template_probes import find_traits
from pd_cluster.server.text.template_traits import TemplateTraits
from pd_connectors.protocol.text_chain import begins_with_system

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pd_connectors.protocol.text_chain import LastTurn

    Message = dict[str, Any]

# Seconds of the CPU for all that is found out about a model's templates, 0.03 to 0.15 for those of trl and of Mistral.
# What is not found out by then counts as taken as it is
PROBE_S = 1.0
TOOL_USE = "tool_use"  # the name of the template that transformers takes for requests with tools
_QUERY, _DOCUMENT = (re.compile(f"""['"]{role}['"]""") for role in ("query", "document"))
# Directives of strftime: those in a template's text, and those that it may put together or be given
_DIRECTIVE = re.compile(r"%[-_^#\d]*[EO]?[A-Za-z]")
_DIRECTIVES = {f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in set(ascii_letters) - {*"EO"}}
# Before a template that is to write the date of another time: transformers lets it ask for the present only, and what
# it asks for may be in a variable. A directive that is in neither of the two above is of the present all the same. The
# line's end is a block's, which Jinja drops
_STRFTIME_AT = """\
{%- set pd_strftime_now = strftime_now -%}
{%- macro strftime_now(format) -%}
{%- for part in format.split("%%") -%}
{%- set written = namespace(text=part) -%}
{%- for name, value in pd_dates.items() -%}{%- set written.text = written.text.replace(name, value) -%}{%- endfor -%}
{{- "%" if not loop.first }}{{ pd_strftime_now(written.text) if "%" in written.text else written.text -}}
{%- endfor -%}
{%- endmacro %}
"""
# Of a format, which need not stand in the call: any text of the template may be one
_TIME_OF_DAY = re.compile(r"(?<!\{)%[-_^#\d]*[EO]?[HIMSTRXPcfklprs]")
_SWITCHES = ("enable_thinking", "thinking")  # arguments that change what templates take, as far as any is known to
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "tq", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_TOOL_NAME, _QUESTION = "Zqtool", "Zqask"
_Variant = tuple[bool, bool | None]  # with tools; thinking as `_SWITCHES` say


class ChatTemplate:
    """The chat templates of a Hugging Face tokenizer. They are programs. Use it from one thread."""

    def __init__(self, tokenizer: Any, clock: Callable[[], float] = time.thread_time) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._probe_s = PROBE_S  # left
        self._traits: dict[_Variant, TemplateTraits] = {}
        given = tokenizer.chat_template or {}
        named = {} if isinstance(given, str) else given
        # All of the model's, first the one for requests with tools. They are searched here, not for each request
        self.texts = tuple(dict.fromkeys(filter(None, (self._chosen([PROBE_TOOL]), self.text, *named.values()))))
        # Whether the chat template renders a query and a document, which are messages with these roles
        self.asks_about_documents = bool(_QUERY.search(self.text) and _DOCUMENT.search(self.text))
        # Whether a template may write the day's date, so that a prompt has other tokens on another day; and the time of
        # day, so that no two prompts begin alike
        self.writes_date = any("strftime_now" in text for text in self.texts)
        self.writes_time = self.writes_date and any(map(_TIME_OF_DAY.search, self.texts))
        self._has_switches = any(name in text for name in _SWITCHES for text in self.texts)

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def text(self) -> str:
        """The one for requests without tools; "" for none."""
        return self._chosen(None)

    @property
    def writes_tools(self) -> bool:
        """Whether the model is shown the tools of a request: DeepSeek-V3's template lists none."""
        return self._with_tools.writes_tools

    @property
    def last_turn(self) -> LastTurn:
        return self._with_tools.last_turn

    @property
    def _with_tools(self) -> TemplateTraits:
        return self._traits.get((True, None), TemplateTraits())

    def written_contents(self, messages: Sequence[Message]) -> list[str]:
        """The contents as prompts have them, in order; "" for the system's where that moves with the last question."""
        contents = [message.get("content") or "" for message in messages]
        if self._with_tools.results_in_json:
            for number, message in enumerate(messages):
                if message["role"] == "tool":
                    contents[number] = json.dumps(contents[number], ensure_ascii=False)[1:-1]
        if self.last_turn.system and begins_with_system(messages):
            contents[0] = ""
        return contents

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Message] | None,
        options: dict[str, Any],
        at_s: float | None = None,
    ) -> str:
        """The prompt's text. `at_s`: Unix seconds for a template that writes the date; None: now. May raise."""
        asks = self.asks_about_documents and any(one["role"] in ("query", "document") for one in messages)
        fitting = messages if asks else adapt(messages, self.traits(options, has_tools=bool(tools)))
        return self._written(fitting, tools, options, at_s)

    def find_all_traits(self) -> TemplateTraits:
        """Find out what all templates take before the first request. Returns what is found for requests with tools.

        Raises StartupError for a template that is not Jinja.
        """
        if self.exists:
            for text in self.texts:
                _check_syntax(text, self._tokenizer, "the model's chat template")
            for thinks, has_tools in itertools.product((None, True, False), (False, True)):
                self.traits({} if thinks is None else {_SWITCHES[0]: thinks}, has_tools=has_tools)
        return self._with_tools

    def traits(self, options: dict[str, Any], *, has_tools: bool) -> TemplateTraits:
        """What the template for these requests takes. Arguments other than the switches of thinking count as absent."""
        thinks = None
        if self._has_switches and options.keys() & _SWITCHES:
            thinks = next((bool(options[name]) for name in _SWITCHES if options.get(name) is not None), None)
        variant = (has_tools, thinks)
        if variant not in self._traits:
            self._traits[variant] = self._found(*variant)
        return self._traits[variant]

    def generation_prompt(self, options: dict[str, Any]) -> str:
        """What the template writes after the last message for these options; "" when it cannot tell."""
        messages = [{"role": "user", "content": "a"}]
        plain = options | {"add_generation_prompt": False, "continue_final_message": False}
        try:
            before = self._written(messages, None, plain)
            whole = self._written(messages, None, plain | {"add_generation_prompt": True})
        except Exception:  # templates are programs, which may raise anything
            return ""
        return whole.removeprefix(before)

    def _found(self, has_tools: bool, thinks: bool | None) -> TemplateTraits:
        begun_s = self._clock()
        tools = [PROBE_TOOL] if has_tools else None
        options = {"add_generation_prompt": True} | ({} if thinks is None else dict.fromkeys(_SWITCHES, thinks))
        traits = find_traits(
            lambda messages: self._written(messages, tools, options),
            lambda: self._clock() - begun_s < self._probe_s,
            None if thinks is None else self.traits({}, has_tools=has_tools),
        )
        if has_tools:
            traits = replace(traits, writes_tools=self._lists_tools(traits, options))
        self._probe_s -= self._clock() - begun_s
        return traits

    def _lists_tools(self, traits: TemplateTraits, options: dict[str, Any]) -> bool:
        parameters = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": _TOOL_NAME, "description": "a", "parameters": parameters}}
        try:
            written = self._written(adapt([{"role": "user", "content": _QUESTION}], traits), [tool], options)
        except Exception:  # templates are programs: this one may want another conversation
            return True
        return _TOOL_NAME in written or _QUESTION not in written

    def _chosen(self, tools: list[Message] | None) -> str:
        """As transformers chooses among named templates; the first where none is named `default`."""
        given = self._tokenizer.chat_template or ""
        if isinstance(given, str):
            return given
        name = TOOL_USE if tools and TOOL_USE in given else "default"
        return str(given.get(name) or next(iter(given.values())))

    def _written(
        self,
        messages: Sequence[Message],
        tools: list[Message] | None,
        options: dict[str, Any],
        at_s: float | None = None,
    ) -> str:
        template = self._chosen(tools)
        if at_s is not None and "strftime_now" in template:
            options = options | {"pd_dates": _dates(at_s, template)}
            template = _STRFTIME_AT + template
        if all(message.get("content", "") is not None for message in messages):
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, chat_template=template, **options
                )
            )
        # `apply_chat_template` leaves out members that are null, and some templates ask for them
        from transformers.utils.chat_template_utils import render_jinja_template

        options = self._tokenizer.special_tokens_map | options
        return str(render_jinja_template([list(messages)], tools=tools, chat_template=template, **options)[0][0])


def _dates(at_s: float, text: str) -> dict[str, str]:
    """What each directive writes at that time, those in `text` among them. Some of them strftime leaves as they are."""
    at = datetime.fromtimestamp(at_s)
    written = {name: at.strftime(name) for name in _DIRECTIVES.union(_DIRECTIVE.findall(text))}
    return {name: value for name, value in written.items() if "%" not in value}


def template_in(path: Path, tokenizer: Any) -> str:
    """The chat template in this file. Raises StartupError for one that cannot be read or is not Jinja."""
    try:
        template = path.expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: ~ without a home
        raise StartupError(f"--chat-template {path}: {error}") from error
    _check_syntax(template, tokenizer, f"--chat-template {path}")
    return template


def _check_syntax(template: str, tokenizer: Any, name: str) -> None:
    from jinja2 import TemplateSyntaxError  # a requirement of transformers' chat templates

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise StartupError(f"{name}: {error}") from error
    except Exception:  # templates are programs: this conversation may be one that it refuses
        return
