"""What a chat template writes of past calls is parsed back to them, and is what the grammar allows."""

from __future__ import annotations

import json
import random
import re
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.bodies.schema import ChatBody
from pd_cluster.server.bodies.tool_use import tool_use
from pd_cluster.server.grammar.grammar_source import chat_grammar_source
from pd_cluster.server.params.sampling import TextOptions
from pd_cluster.server.requests.choice import Choice
from pd_cluster.server.requests.generation_request import GenerationRequest
from pd_cluster.server.text.chat_template import ChatTemplate
from pd_cluster.server.text.detokenizer import MARK
from pd_cluster.server.text.normal_messages import normal_messages
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_cluster.server.tools.known_formats import FORMATS, find_format
from pd_cluster.server.tools.output_parser import ParserOptions, Reasoning, ToolCall
from pd_cluster.server.tools.response_template import ResponseTemplate
from pd_cluster.server.tools.template_parser import TemplateParser
from pd_connectors.protocol.messages import SampledToken
from tests.server.live_server import MODEL_DIR
from tests.server.lost_marks import lost_marks
from tests.server.test_detokenizer import Bytes
from tests.server.test_message_grammar import Model
from tests.server.test_template_parser import calls_of, marked, parsed, parser, pieces_of, written
from tests.server.written_calls import ENDS, TEMPLATES

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.server.tools.output_parser import Part
    from pd_cluster.server.tools.tool_format import ToolFormat

TEXT = {"type": "string"}
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": TEXT,
        "count": {"type": "integer"},
        "where": {"type": "object"},
        "maybe": {"anyOf": [TEXT, {"type": "null"}]},
        "sure": {"type": "boolean"},
        "list": {"type": "array"},
    },
}
ONE = {"enum": [1, 2.5, True]}
TOOLS: dict[str, Any] = {
    "find": FIND | {"properties": {**FIND["properties"], "one": ONE}},
    "stop.now": {"type": "object", "properties": {}},
}
HELD = "HELD"  # in its place is text with markers that are none
HOSTILE = 'a </parameter> "b" </invoke> \\ </arg_value> <arg_key>é</arg_key> </tool_call> 🙂 </function>'
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "find",
        {
            "text": f" {HELD}\n  <x>\n", "count": -3, "where": {"a": [{"b": '}\\"'}], "c": None}, "maybe": "nu ll",
            "sure": True, "list": [1, "two"], "one": 2.5,
        },
    ),
    ("stop.now", {}),
    ("find", {"text": "", "maybe": None}),
    ("find", {"text": "5", "where": {}, "maybe": "", "list": []}),
]  # fmt: skip


@cache
def chat_template(name: str) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    tokenizer.chat_template = TEMPLATES[name]
    return ChatTemplate(tokenizer)


def rendered(name: str, calls: Any = CALLS, thought: str = "Two  things.", content: str = "Let me see.") -> str:
    """The answer as the family's template writes it in a prompt, without what a prompt has begun it with."""
    chat, answer = chat_template(name), {"role": "assistant", "content": content, "reasoning_content": thought}
    functions = [{"name": called, "arguments": json.dumps(given)} for called, given in calls]
    told = [{"id": f"call_{i}", "type": "function", "function": one} for i, one in enumerate(functions)]
    messages = normal_messages([{"role": "user", "content": "hi"}, answer | ({"tool_calls": told} if told else {})])
    text = chat.render(messages, None, {"add_generation_prompt": False})
    _, anchor, said = text.partition(FORMATS[name].template["start_anchor"])
    assert anchor
    said = said.removesuffix(ENDS.get(name, ""))
    return said if thought else said.removeprefix("</think>")


def expected(calls: Any, thought: str, content: str) -> list[Part]:
    return [*([Reasoning(thought)] if thought else []), *([content] if content else [])]


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokens", [True, False])
def test_a_past_call_is_parsed_back_in_any_pieces(name: str, tokens: bool) -> None:
    """Values with closing tags, characters of several bytes, nothing, objects in objects."""
    form = FORMATS[name]
    hostile = json.loads(json.dumps(CALLS).replace(HELD, "x" if form.parameter is None else json.dumps(HOSTILE)[1:-1]))
    calls = [(called, given) for called, given in hostile]
    for thought, content in (("Two  things.", "Let me see."), ("", "")):
        text = rendered(name, thought=thought, content=content)
        text = (marked(form, text) if tokens else text).replace(HELD, "x" if form.parameter is None else HOSTILE)
        made = partial(parser, form, tokens=tokens, tools=TOOLS)
        whole = parsed(made(), [text])
        assert calls_of(whole) == calls
        assert [one for one in whole if not isinstance(one, ToolCall)] == expected(calls, thought, content)
        rng = random.Random(f"{name} {tokens}")
        assert parsed(made(streamed=True), list(text)) == whole
        for i in range(50):  # 200 for a format; few pieces, because each is read for itself
            cuts = [0, *sorted(rng.sample(range(len(text)), rng.choice((1, 4, 16)))), len(text)]
            assert parsed(made(streamed=bool(i % 2)), [text[a:b] for a, b in pairwise(cuts)]) == whole


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_and_no_message_is_lost(name: str) -> None:
    assert find_format("", [TEMPLATES[name]]) is FORMATS[name]
    assert lost_marks(AutoTokenizer.from_pretrained(str(MODEL_DIR)), TEMPLATES[name], 20) == []


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("llguidance")
    return Model(FORMATS[request.param], tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.long
def test_the_grammar_allows_what_the_template_writes_and_forces_it(model: Model) -> None:
    name = model.format.name
    calls = [(called, {key: one for key, one in given.items() if key != "one"}) for called, given in CALLS]
    functions = [("find", FIND), ("stop.now", {})]
    for thought, content in (("Why", ""), ("Why", "Text."), ("", ""), ("", "Text.")):
        for required in (True, False):
            grammar = model.write(
                functions=functions, required=required, strict=["find"], thinking="may" if thought else "no"
            )
            text, plain = (rendered(name, one, thought, words) for one, words in ((calls, content), ((), "Text.")))
            if not thought:  # prompts have written that there is none
                text, plain = (re.sub(r"^\n?<think></think>", "", one) for one in (text, plain))
            assert model.allows(grammar, text) is not (required and content != ""), (thought, content, required)
            assert not model.allows(grammar, text.replace("-3", "many"))
            assert model.allows(grammar, plain) is not required


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "without", "off"),
    [("glm45", "may", "no"), ("glm47", "open", "no"), ("minimax_m2", "open", "open"), ("kimi_k2", "may", "may")],
)
@pytest.mark.anyio
async def test_the_grammar_knows_whether_the_prompt_has_begun_the_reasoning(
    name: str, without: str, off: str, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    model = Model(FORMATS[name], tmp_path)
    model.tokenizer._tokenizer.chat_template = TEMPLATES[name]
    tokenizer = Tokenizer(model.tokenizer._tokenizer)
    tools = [{"type": "function", "function": {"name": "find", "parameters": FIND}}]
    body = ChatBody(messages=[], tools=tools, tool_choice="required")
    for options, thinking in (({}, without), ({"enable_thinking": False}, off)):
        source = await chat_grammar_source(body, tool_use(body), model.format, tokenizer, options)
        assert source is not None
        assert source.message is not None
        assert source.message.thinking == thinking


@pytest.mark.long
def test_an_answer_may_not_begin_with_a_call_that_only_the_parser_knows(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    model = Model(FORMATS["minimax_m2"], tmp_path)
    grammar = model.write(functions=[("find", FIND)], strict=["find"])
    bare = '<invoke name="find"><parameter name="count">many</parameter></invoke>'
    assert not model.allows(grammar, bare)
    assert not model.allows(grammar, f"\n\n{bare}")
    assert model.allows(grammar, f"Write {bare}")
    assert model.parse(model.encode(f"Write {bare}"), TOOLS)[2] == []


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_another_node_goes_on_after_any_token(name: str) -> None:
    """It has read the same tokens: what it shows next is what the first node would have shown."""
    form = FORMATS[name]
    said = marked(form, rendered(name, CALLS[:2])).split(MARK)
    pieces = [one for text in said for one in _tokens(form, text)]
    words = list(dict.fromkeys(pieces))
    vocabulary = Bytes([one.encode() for one in words])
    template = ResponseTemplate(form.template, {one: words.index(one) for one in form.tokens if one in words})
    options = ParserOptions(tools=TOOLS, streamed=True)
    text = TextOptions(parser=partial(TemplateParser, template), parser_options=options)
    request = GenerationRequest("engine", "client", [words.index("e")], SamplingParams(max_tokens=9999), text)
    ids = [words.index(one) for one in pieces]
    first, shown = Choice(0, request, vocabulary), list[Any]()
    for token_id in ids:
        shown.append(first.extend(SequenceTokens(0, (SampledToken(token_id),))).parts)
    last = first.extend(SequenceTokens(0, (), FinishReason.LENGTH)).parts
    assert [part.name for parts in shown for part in parts if isinstance(part, ToolCall) and part.name] == [
        "find",
        "stop.now",
    ]
    for cut in range(1, len(ids), 19):
        other = Choice(0, request, vocabulary)
        other.replay(ids[:cut])
        rest = other.extend(SequenceTokens(0, tuple(map(SampledToken, ids[cut:])), FinishReason.LENGTH)).parts
        assert rest == [part for parts in [*shown[cut:], last] for part in parts]


def _tokens(form: ToolFormat, text: str) -> list[str]:
    """The marker that a text begins with, and its characters."""
    found = next((one for one in sorted(form.tokens, key=len, reverse=True) if text.startswith(one)), "")
    return [*([found] if found else []), *text[len(found) :]]


# Outputs of models that were reported, and cases of other servers' parsers: format, answer, calls, content
NULLABLE = {"anyOf": [TEXT, {"type": "null"}]}
THEIRS: dict[str, Any] = {
    "note": {"type": "object", "properties": {"todos": {"type": "array"}, "maybe": NULLABLE, "text": TEXT}},
    "shell": {"type": "object"},
}
GLM_ARGUMENT = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
INVOKE = '<minimax:tool_call><invoke name="note"><parameter name="{}">{}</parameter></invoke></minimax:tool_call>'
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
FOREIGN: list[tuple[str, str, list[tuple[str, Any]], str]] = [
    ("glm47", " \n <tool_call>shell\n</tool_call>", [("shell", {})], ""),
    (
        "glm45",
        "<tool_call>note\n    <arg_key>text</arg_key>\n    <arg_value>TX</arg_value>\n    </tool_call>",
        [("note", {"text": "TX"})],
        "",
    ),
    (
        "glm45",
        "So: <tool_call>shell <arg_key>at</arg_key> <arg_value>x y</arg_value> </tool_call>",
        [("shell", {"at": "x y"})],
        "So:",
    ),
    # the opening tag of a value is missing
    (
        "glm47",
        "<tool_call>note<arg_key>text</arg_key>days left</arg_value></tool_call>",
        [("note", {"text": "days left"})],
        "",
    ),
    # JSON that is escaped once more
    (
        "glm47",
        "<tool_call>note" + GLM_ARGUMENT.format("todos", r"[{\"id\": \"a\\n\"}]") + "</tool_call>",
        [("note", {"todos": [{"id": "a\n"}]})],
        "",
    ),
    ("minimax_m2", INVOKE.format("maybe", "hi"), [("note", {"maybe": "hi"})], ""),
    ("minimax_m2", INVOKE.format("maybe", "null"), [("note", {"maybe": None})], ""),
    *(("minimax_m2", INVOKE.format("maybe", one), [("note", {"maybe": one})], "") for one in ("None", " null ")),
    # a closing tag in a string of JSON
    *(
        ("minimax_m2", INVOKE.format("todos", written), [("note", {"todos": json.loads(written)})], "")
        for written in (
            r'["</parameter></invoke>", "\"</parameter>\n<parameter name=\"a\">"]',
            r' [{"\\": "</parameter></invoke>"}]',
        )
    ),
    ("minimax_m2", INVOKE.format("todos", "it's \"so"), [("note", {"todos": "it's \"so"})], ""),
    ("minimax_m2", INVOKE.format("todos", "['\"']"), [("note", {"todos": "['\"']"})], ""),
    # any white space between arguments
    *(
        (
            "glm45",
            f"<tool_call>note{space}<arg_key>text</arg_key>{space[:9]}<arg_value>x</arg_value>{space}"
            f"<arg_key>maybe</arg_key><arg_value>y</arg_value>{space}</tool_call>",
            [("note", {"text": "x", "maybe": "y"})],
            "",
        )
        for space in (" " * 70, "\n" * 200)
    ),
    (
        "minimax_m2",
        INVOKE.format("text", "x</parameter>" + "\n" * 99 + '<parameter name="maybe">y').replace(
            "><par", ">" + " " * 99 + "<par"
        ),
        [("note", {"text": "x", "maybe": "y"})],
        "",
    ),
    ("minimax_m2", INVOKE.format("text", "has </parameter> in it"), [("note", {"text": "has </parameter> in it"})], ""),
    (
        "minimax_m2",
        INVOKE.format("text", "é </minimax:tool_call> ü"),
        [("note", {"text": "é </minimax:tool_call> ü"})],
        "",
    ),
    ("minimax_m2", INVOKE.format("a>b", "1"), [("note", {"a>b": "1"})], ""),
    ("minimax_m2", INVOKE.format("text", "x").removesuffix("</minimax:tool_call>"), [("note", {"text": "x"})], ""),
    (
        "qwen3_coder",
        "<tool_call>\n<function=note>\n<parameter=text>\na\n</parameter> b\n</parameter>\n</function>\n</tool_call>",
        [("note", {"text": "a\n</parameter> b"})],
        "",
    ),
    ("kimi_k2", SECTION.format("functions.shell:0 ", '{\n"a": 1} '), [("shell", {"a": 1})], ""),
    ("kimi_k2", SECTION.format("shell:12", "{}"), [("shell", {})], ""),
    ("kimi_k2", SECTION.format("functions_shell_1", "{}"), [("shell", {})], ""),
    # what cannot be told stays content, as it was written
    *(
        (name, text, [], text)
        for name, text in (
            ("glm47", "<tool_call>shellcommand</arg_key><arg_value>ls</arg_value></tool_call>"),
            ("glm47", "<tool_call>shell<tool_call>command</arg_key><arg_value>ls</arg_value></tool_call>"),
            ("glm47", '<tool_call>{"name": "shell", "arguments": {}}</tool_call>'),
            ("glm45", "<tool_call>shell\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>"),
            ("minimax_m2", 'invoke name="shell">\nparameter name="a">bparameter>\ninvoke>'),
            ("minimax_m2", 'Use <invoke name="shell"></invoke>\n<invoke name="shell"></invoke>'),
            ("kimi_k2", SECTION.format("functions.shell.0", "{}")),
            ("kimi_k2", SECTION.format("functions.shell.0", "{}") + "<|tool_calls_section_end|>"),
            ("kimi_k2", SECTION.format("shell:0", "") + "<|tool_calls_section_end|> So."),
            ("minimax_m2", INVOKE.format("", "x")),
            ("minimax_m2", "It writes </minimax:tool_call> last."),
            ("kimi_k2", SECTION.format("functions.shell:0", '{"a": "b"')),
        )
    ),
]


@pytest.mark.long_cases
@pytest.mark.parametrize(("name", "text", "calls", "content"), FOREIGN)
def test_answers_that_others_have_seen(name: str, text: str, calls: list[tuple[str, Any]], content: str) -> None:
    for tokens in (False, True):
        given = marked(FORMATS[name], text) if tokens else text
        for pieces in ([given], list(given)):
            whole = parsed(parser(FORMATS[name], tokens=tokens, tools=THEIRS), pieces)
            assert calls_of(whole) == calls
            assert "".join(one for one in whole if isinstance(one, str)) == content
        if calls:
            assert parsed(parser(FORMATS[name], tokens=tokens, tools=THEIRS, streamed=True), list(given)) == whole


CALL_OF = {
    name: written(FORMATS[name], [("note", {"text": "x"})])
    for name in ("hermes", "qwen3_coder", "glm47", "minimax_m2", "kimi_k2")
}


@pytest.mark.parametrize("name", CALL_OF)
def test_a_call_ends_reasoning_that_is_not_closed_where_its_marker_is_a_token(name: str) -> None:
    form, rng = FORMATS[name], random.Random(name)
    said = f"{form.reasoning_start}It has </x>.\n{CALL_OF[name]} Done."
    for text in (said, said.replace("It", f"A {form.tokens[0]} it")):
        given = marked(form, text.replace(form.tokens[0], "HELD", 1) if "A <" in text else text)
        if "A <" in text:  # a marker that begins no call is text
            given = given.replace("HELD", MARK + form.tokens[0])
        thought = text.removeprefix(form.reasoning_start).split(".\n")[0] + "."
        for streamed in (False, True):
            for pieces in ([given], list(given), pieces_of(given, rng)):
                parts = parsed(parser(form, tokens=True, tools=THEIRS, streamed=streamed), pieces)
                assert parts[0] == Reasoning(thought)
                assert calls_of(parts) == [("note", {"text": "x"})]
                assert parts[2:] == ["Done."]
        assert parsed(parser(form, tools=THEIRS), [text]) == [Reasoning(text.removeprefix(form.reasoning_start))]
        assert calls_of(parsed(parser(form, tokens=True, tools={}), [given])) == []


@pytest.mark.parametrize("name", CALL_OF)
def test_reasoning_is_counted_up_to_the_marker_of_the_call(name: str) -> None:
    form, call = FORMATS[name], marked(FORMATS[name], CALL_OF[name].lstrip())
    tokens = [f"{MARK}<think>", "so", " it", " is", *re.findall(f"{MARK}<.*?>|.", call, re.DOTALL)]
    head = len(
        re.findall(f"{MARK}<.*?>|.", marked(form, form.begin.lstrip() + form.head) + "note:0" + form.middle, re.DOTALL)
    )
    for ids, more in ((tokens, 0), ([*tokens[:4], f"{MARK}{form.tokens[0]}", "?", *tokens[4:]], 2)):
        made = parser(form, tokens=True, tools=THEIRS)
        shown = [*(part for one in ids for part in made.push(one, [0])), *made.flush()]
        assert [one.name for one in shown if isinstance(one, ToolCall) and one.name] == ["note"]
        assert 3 + more <= made.num_reasoning_tokens <= 3 + more + head
    made = parser(form, tokens=True, tools=THEIRS)
    for one in [*tokens[:4], f"{MARK}{form.tokens[0]}", "?", " no", " call"]:
        made.push(one, [0])
    made.flush()
    assert made.num_reasoning_tokens == 7, "what is no call stays reasoning"


def test_a_marker_in_a_value_breaks_the_call_where_the_tags_are_tokens() -> None:
    form = FORMATS["glm47"]
    begun = "<tool_call>note<arg_key>text</arg_key><arg_value>a"
    for other in ("<arg_key>b", "<arg_value>", "</arg_key>", "<tool_call>"):
        text = f"{begun}{other}c</arg_value></tool_call>"
        assert parsed(parser(form, tokens=True, tools=THEIRS), [marked(form, text)]) == [text]
    spelled = marked(form, f"{begun}OTHER</arg_value></tool_call>").replace("OTHER", "<arg_key>b</tool_call>")
    assert calls_of(parsed(parser(form, tokens=True, tools=THEIRS), list(spelled))) == [
        ("note", {"text": "a<arg_key>b</tool_call>"})
    ]
    again = f"{begun}{CALL_OF['glm47']}"
    assert calls_of(parsed(parser(form, tokens=True, tools=THEIRS), [marked(form, again)])) == [("note", {"text": "x"})]
    missing = marked(form, "<tool_call>note<arg_key>text</arg_key><b>x</b></arg_value></tool_call>")
    for pieces in ([missing], list(missing)):
        assert calls_of(parsed(parser(form, tokens=True, tools=THEIRS), pieces)) == [("note", {"text": "<b>x</b>"})]


@pytest.mark.long_cases
def test_a_list_of_many_closing_tags_is_read_once() -> None:
    value = json.dumps(["</parameter></invoke>" + '"'] * 1_000)
    text = INVOKE.format("todos", value)
    for pieces in ([text], [text[i : i + 999] for i in range(0, len(text), 999)]):
        assert calls_of(parsed(parser(FORMATS["minimax_m2"], tools=THEIRS), pieces)) == [
            ("note", {"todos": json.loads(value)})
        ]


def test_a_text_that_may_be_null_comes_in_pieces() -> None:
    made = parser(FORMATS["minimax_m2"], tools=THEIRS, streamed=True)
    shown = [part for char in INVOKE.format("maybe", "none of it") for part in made.push(char, ())]
    assert len(shown) > len("of it")


TAGS: dict[str, Any] = {
    "start_anchor": "assistant:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+):",
            "close": ":END",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>[^>]+)>(?P<value>.*?)</>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


@pytest.mark.parametrize(
    ("more", "transform", "name", "arguments"),
    [
        ({"value_parser": {"name": "json", "args": {"allow_non_json": True}}}, {}, "note", {"a": 5, "b": "x"}),
        ({}, {"name": "other"}, "other", {"a": "5", "b": "x"}),
        ({}, {"arguments": {"input": "{content}"}}, "note", {"input": {"a": "5", "b": "x"}}),
    ],
)
def test_what_another_template_says_of_tags_is_followed(more: Any, transform: Any, name: str, arguments: Any) -> None:
    calls = dict(TAGS["fields"]["tool_calls"])
    calls["content_args"] = calls["content_args"] | more
    calls["transform"] = {"function": calls["transform"]["function"] | transform}
    made = parser(TAGS | {"fields": {"tool_calls": calls, "content": {}}}, tools=THEIRS)
    assert calls_of(parsed(made, ["CALL note:<a>5</><b>x</>:END"])) == [(name, arguments)]


def test_tags_of_another_template_are_read_as_they_come() -> None:
    text = "CALL note:<text>a </> b :END</> <maybe>null</>:END"
    for streamed in (False, True):
        parts = parsed(parser(TAGS, tools=THEIRS, streamed=streamed), list(text))
        assert calls_of(parts) == [("note", {"text": "a </> b :END", "maybe": None})]
    made = parser(TAGS, tools=THEIRS, streamed=True)
    assert len([part for char in text for part in made.push(char, ())]) > len("a </> b")


@pytest.mark.parametrize("begun", ["CALL note:", "CALL note:<text>a</>"])
def test_a_tag_without_an_end_is_not_held_back_for_ever(begun: str) -> None:
    text = f"{begun}<{'k' * 2000}"
    made = parser(TAGS, tools=THEIRS)
    shown = [part for char in text for part in made.push(char, ())]
    assert "".join(one for one in shown if isinstance(one, str)) == text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"(?:<(?P<key>[^>]+)>(?P<value>.*?)</>)+", "<text>a</>"), (r"(?P<key>\w+)=(?P<value>\w*)", "text=a")],
)
def test_tags_that_are_not_of_two_parts_are_read_when_the_call_has_ended(pattern: str, text: str) -> None:
    calls = TAGS["fields"]["tool_calls"] | {"content_args": {"tag_pattern": pattern}}
    made = parser(TAGS | {"fields": {"tool_calls": calls, "content": {}}}, tools=THEIRS, streamed=True)
    assert calls_of(parsed(made, list(f"CALL note:{text}:END"))) == [("note", {"text": "a"})]
