"""No chat template drops a message: small templates of each kind that models are published with."""

from __future__ import annotations

import re
from datetime import datetime
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from pd_cluster.errors import StartupError
from pd_cluster.server.text.chat_template import ChatTemplate
from pd_cluster.server.text.message_adapter import adapt
from pd_cluster.server.text.normal_messages import normal_messages
from pd_cluster.server.text.template_traits import TemplateTraits
from tests.server.live_server import MODEL_DIR
from tests.server.lost_marks import OPTIONS, TOOL, lost_marks
from tests.server.small_templates import BODY, TEMPLATES, each, refuse, when

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(MODEL_DIR))


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> Callable[[str], ChatTemplate]:
    def made(name: str) -> ChatTemplate:
        tokenizer.chat_template = TEMPLATES.get(name, name)
        return ChatTemplate(tokenizer)

    return made


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost(name: str, tokenizer: Any) -> None:
    assert lost_marks(tokenizer, TEMPLATES[name]) == []


def test_a_template_that_drops_a_turn_refuses_it(chat: Callable[[str], ChatTemplate]) -> None:
    """In no form that was tried is the message in the prompt."""
    last_only = chat("{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}")
    user, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}
    assert last_only.render([user], None, OPTIONS) == "Hello"
    with pytest.raises(Exception, match="drops a message of kind assistant"):
        last_only.render([user, answer, user], None, OPTIONS)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def called(*arguments: Any, content: Any = None, names: str = "fgh") -> dict[str, Any]:
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": one}}
        for name, one in zip(names, arguments, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(name: str, content: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": content}


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("name", "messages", "prompt"),
    [
        ("drops developers", [said("developer", "d"), said("user", "u")], "<|system|>d\n<|user|>u\n"),
        ("takes all", [said("developer", "d"), said("user", "u")], "<|system|>d<|user|>u"),
        ("knows developers", [said("developer", "d"), said("user", "u")], "<|dev|>d<|user|>u\n"),
        ("no system", [said("developer", "d"), said("user", "u")], "<|user|>d\n\nu\n"),
        ("one system message", [said("system", "s"), said("system", "t"), said("user", "u")],
         "<|system|>s\nt\n<|user|>u\n"),
        # in its place: moved to the front it would change the whole prompt, and no prefix of it would be cached
        (
            "one system message",
            [said("system", "s"), said("user", "u"), said("assistant", "a"), said("system", "t"), said("user", "v")],
            "<|system|>s\n<|user|>u\n<|assistant|>a\n<|user|>t\n\nv\n",
        ),
        ("last system message", [said("system", "s"), said("user", "u"), said("system", "t")], "s<|user|>u\n\nt\n"),
        ("turns", [said("user", "u"), said("user", "v"), said("assistant", "a"), said("user", "w")],
         "<|user|>u\nv\n<|assistant|>a\n<|user|>w\n"),
        ("turns", [said("assistant", "a"), said("user", "u")], "<|user|>\n<|assistant|>a\n<|user|>u\n"),
        ("turns", [said("user", "u"), called("{}"), result("f")],
         '<|user|>u\n<|assistant|><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
         "<|user|><tool_response>\nr\n</tool_response>\n"),
        ("arguments are text", [said("user", "u"), called('{"a":1}', content=""), result("f")],
         '<|user|>u\n<call>f{"a":1}<|tool|>r\n'),
        ("arguments are text", [said("user", "u"), called('{"a": 1'), result("f")],
         '<|user|>u\n<call>f{"a": 1<|tool|>r\n'),
        ("calls where content is none", [said("user", "u"), called('{"a":1}', content=""), result("f")],
         '<|user|>u\n<call>f{"a":1}<|tool|>r\n'),
        ("calls where content is none", [said("user", "u"), called({"a": 1}, content="t"), result("f")],
         '<|user|>u\n<|assistant|>t\n<call>f{"a": 1}<|tool|>r\n'),
        ("arguments are both", [said("user", "u"), called('{"a":1}', "[1]", '"ls'), result("f")],
         '<|user|>u\n<call>f{"a": 1}<call>g[1]<call>h"ls<|tool|>r\n'),
        ("takes all", [said("user", "u"), called("[1]"), result("f")],
         '<|user|>u<|assistant|><call>f{"arguments": "[1]"}<|tool|>r'),
        ("takes all", [said("user", "u"), called(None, "", "null")],
         "<|user|>u<|assistant|><call>f{}<call>g{}<call>h{}"),
        ("one call", [said("user", "u"), called("{}", "{}"), result("g"), result("f", "s"), said("user", "v")],
         "<|user|>u\n<call>g{}<|tool|>r\n<call>f{}<|tool|>s\n<|user|>v\n"),
        ("one call", [said("user", "u"), called("{}", "{}"), said("user", "v")],
         "<|user|>u\n<call>f{}<call>g{}<|user|>v\n"),
        # results in the order of the calls, in another one, and one that is lost: each after its own call
        ("one call", [said("user", "u"), called("{}", content="t"), called("{}", names="g"), result("f"), result("g")],
         "<|user|>u\n<|assistant|>t\n<call>f{}<|tool|>r\n<call>g{}<|tool|>r\n"),
        ("one call", [said("user", "u"), called("{}"), called("{}", "{}", names="gh"), result("h"), result("f", "s"),
                      result("g", "t"), said("assistant", "a")],
         "<|user|>u\n<call>h{}<|tool|>r\n<call>f{}<|tool|>s\n<call>g{}<|tool|>t\n<|assistant|>a\n"),
        ("one call", [said("user", "u"), called("{}"), called("{}", names="g"), result("g"), called("{}", names="h"),
                      result("h", "s")],
         "<|user|>u\n<call>g{}<|tool|>r\n<call>f{}<call>h{}<|tool|>s\n"),
        ("one call", [said("user", "u"), called("{}", "{}", content="t"), result("g"), result("f", "s")],
         "<|user|>u\n<|assistant|>t\n<call>g{}<|tool|>r\n<call>f{}<|tool|>s\n"),
        ("one call", [said("user", "u"), called("{}", "{}", names="ff"), result("f"), result("f", "s")],
         "<|user|>u\n<call>f{}<|tool|>r\n<call>f{}<|tool|>s\n"),
        ("one call", [said("user", "u"), called("{}", "{}"), {"role": "tool", "name": "g", "content": "r"},
                      {"role": "tool", "content": "s"}],
         "<|user|>u\n<call>g{}<|tool|>r\n<call>f{}<|tool|>s\n"),
        ("results need a name", [said("user", "u"), called("{}"), result("f")], "<|user|>u\n<call>f{}fr"),
        ("asks for a question", [called("{}"), result("f")], "<|user|>\n<call>f{}<|tool|>r\n"),
        ("parts", [said("user", [{"type": "text", "text": "u"}])], "<|user|>u"),
    ],
)  # fmt: skip
def test_prompts(name: str, messages: list[Any], prompt: str, chat: Callable[[str], ChatTemplate]) -> None:
    written = chat(name).render(normal_messages(messages), None, {"add_generation_prompt": False})
    assert written.rstrip("\n") == prompt.rstrip("\n")


def test_ids_of_nine_characters_stay_apart_and_find_their_results(chat: Callable[[str], ChatTemplate]) -> None:
    template = each("{% for c in m.tool_calls or [] %}" + refuse("c.id | length != 9") + "{{ c.id }};{% endfor %}"
                    "{{ m.tool_call_id or '' }};" + BODY)  # fmt: skip
    messages = normal_messages([said("user", "u"), called("{}", "{}", names="fg"), result("g"), result("f")])
    of_f, of_g, result_of_g, result_of_f = re.findall("[0-9a-f]{9}", chat(template).render(messages, None, {}))
    assert (of_f, of_g) == (result_of_f, result_of_g)
    assert of_f != of_g
    kept = normal_messages([said("user", "u"), called("{}") | {"tool_calls": [
        {"id": "abcDEF123", "function": {"name": "f", "arguments": "{}"}}]}])  # fmt: skip
    assert "abcDEF123" in chat(template).render(kept, None, {})


@pytest.mark.long
def test_each_named_template_has_traits_of_its_own(tokenizer: Any) -> None:
    tokenizer.chat_template = {
        "default": TEMPLATES["no tools"],
        "tool_use": "{{ tools | tojson }}" + TEMPLATES["takes all"],
    }
    template = ChatTemplate(tokenizer)
    plain, with_tools = (template.traits({}, has_tools=has_tools) for has_tools in (False, True))
    assert (plain.calls_as_text, with_tools.calls_as_text) == (True, False)
    assert template.texts == (tokenizer.chat_template["tool_use"], tokenizer.chat_template["default"])
    assert lost_marks(tokenizer, tokenizer.chat_template, 30) == []


@pytest.mark.long
def test_a_template_may_take_other_messages_when_it_thinks(tokenizer: Any) -> None:
    template = when("enable_thinking is defined and enable_thinking", TEMPLATES["takes all"], TEMPLATES["turns"])
    assert lost_marks(tokenizer, template, 30) == []


def test_probing_ends_and_leaves_the_rest_as_it_is(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["turns"]
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.03
        return now_s

    template = ChatTemplate(tokenizer, clock)
    assert template.find_all_traits().joints == {}
    assert now_s < 1.5


def test_a_template_that_renders_no_question_is_used_as_it_is(chat: Callable[[str], ChatTemplate]) -> None:
    template = chat("{{ messages[0].query }}")
    assert str(template.find_all_traits()) == "shows_user_text: False"


@pytest.mark.parametrize("texts", ["{% if %}", {"default": TEMPLATES["turns"], "rag": "{% for %}"}])
def test_a_template_that_is_not_jinja_does_not_start(texts: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = texts
    with pytest.raises(StartupError, match="the model's chat template: "):
        ChatTemplate(tokenizer).find_all_traits()


def test_the_templates_are_not_searched_for_each_request(
    chat: Callable[[str], ChatTemplate], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = chat("takes all")
    template.find_all_traits()
    monkeypatch.setattr(ChatTemplate, "_chosen", lambda *_: pytest.fail("searched"))
    template.traits({"enable_thinking": True}, has_tools=True)
    assert not template.asks_about_documents


def test_ids_have_the_names_that_a_template_writes_nowhere_else(chat: Callable[[str], ChatTemplate]) -> None:
    """Each call has the index of all calls before it, and an id of this form stays."""
    own = {"id": "functions.look:7", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [said("user", "u"), called("{}", "{}", names="fg"), result("g"), result("f"), said("user", "v")]
    messages = [*asked, said("assistant", "") | {"tool_calls": [own]}, said("user", "w"), called("{}")]
    written = chat("names in ids").render(normal_messages(messages), None, {})
    ids = ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.look:7", "functions.f:3"]
    assert re.findall(r"functions\.\w+:\d", written) == ids


@pytest.mark.parametrize("at_s", [0.0, 86400.0 * 365])
def test_the_date_of_another_day_in_a_named_template(at_s: float, tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": "none", "tool_use": "{{ strftime_now('%Y') }} {{ messages[0].content }}"}
    template = ChatTemplate(tokenizer)
    assert template.writes_date
    assert template.render([said("user", "u")], [TOOL], {}, at_s) == f"{1970 + int(at_s > 0)} u"


@pytest.mark.long_cases
@pytest.mark.parametrize("date", ["strftime_now(day)", "strftime_now(format=day)"])
@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}a{% endif %}", "{{ '' }} \n\n"])
def test_the_date_of_another_day_where_the_form_is_in_a_variable(date: str, start: str, tokenizer: Any) -> None:
    """Whatever the template begins with, and also from a macro."""
    template = (
        "%s{%% set day = '%%-d%%%% %%b %%%%d' ~ ' %%Y' %%}{%% macro now() %%}<{{ %s }}>{%% endmacro %%}{{ now() }}"
    )
    texts = []
    at = datetime(1999, 2, 3, 4, 5)
    for text, at_s in ((template % (start, date), at.timestamp()), (f"{start}<3% Feb %d 1999>", None)):
        tokenizer.chat_template = text
        texts.append(ChatTemplate(tokenizer).render([said("user", "u")], None, {}, at_s))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "form", ["form", "'%' ~ 'Y-%' ~ 'm'", r"'\x25Y-\x25m'", "form[:2] ~ '-%m'", "['%Y', '%m'] | join('-')"]
)
def test_the_date_of_another_day_where_the_form_is_put_together(form: str, tokenizer: Any) -> None:
    tokenizer.chat_template = f"{{{{ strftime_now({form}) }}}}"
    at_s = datetime(1999, 2, 3).timestamp()
    assert ChatTemplate(tokenizer).render([said("user", "u")], None, {"form": "%Y-%m"}, at_s) == "1999-02"


def test_each_directive_of_another_day(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now(form) }}"
    at = datetime(1999, 2, 3, 4, 5, 6)
    names = [f"%{flag}{letter}" for letter in ascii_letters for flag in ("", *"-0_^#") if letter not in "EO"]
    form = f"%%d {'|'.join(names)} 100%% %%%d"
    rendered = ChatTemplate(tokenizer).render([said("user", "u")], None, {"form": form}, at.timestamp())
    assert rendered == at.strftime(form)


def test_a_directive_that_is_not_known_is_of_the_present(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%E' ~ 'Y %' ~ '6' ~ 'Y %b') }}"
    years = [datetime.now().strftime("%EY %6Y ")]
    rendered = ChatTemplate(tokenizer).render([said("user", "u")], None, {}, datetime(1999, 2, 3).timestamp())
    years.append(datetime.now().strftime("%EY %6Y "))
    assert rendered in [f"{year}Feb" for year in years]


def test_a_template_that_lists_no_tools_is_found(tokenizer: Any) -> None:
    for text, lists in ((TEMPLATES["takes all"], False), ("{{ tools | tojson }}" + TEMPLATES["takes all"], True)):
        tokenizer.chat_template = text
        template = ChatTemplate(tokenizer)
        template.find_all_traits()
        assert template.writes_tools is lists


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_found_in_steps_that_their_number_bounds(parallel: bool) -> None:
    """Results in reverse order: each id is compared a few times, and not with each call that waits."""
    compared = 0

    class Counted(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    num = 400
    function = {"name": "f", "arguments": {}}
    calls = [{"id": Counted(f"c{i}"), "type": "function", "function": function} for i in range(num)]
    results = [{"role": "tool", "tool_call_id": Counted(f"c{i}"), "content": "r"} for i in reversed(range(num))]
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    ]
    adapt(asked, TemplateTraits(parallel_calls=parallel))
    assert compared < 20 * num
