"""Reasoning and tool calls: each format as models write it, in any pieces, cut anywhere, malformed, spelled out."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest

from pd_cluster.config import TOOL_FORMATS, ModelConfig, NodeConfig, ServerConfig
from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.params.sampling import TextOptions
from pd_cluster.server.requests.answer_extras import AnswerExtras
from pd_cluster.server.requests.choice import Choice, ChoiceOutput
from pd_cluster.server.requests.generation_request import GenerationRequest
from pd_cluster.server.shapes.chat import ChatShape
from pd_cluster.server.state import NodeState
from pd_cluster.server.text.detokenizer import MARK
from pd_cluster.server.tools.known_formats import FORMATS, find_format
from pd_cluster.server.tools.output_parser import ParserContext, ParserOptions, Part, Reasoning, ToolCall
from pd_cluster.server.tools.response_template import ResponseTemplate
from pd_cluster.server.tools.template_parser import TemplateParser
from pd_cluster.server.tools.tool_format import ToolFormat
from pd_connectors.protocol.messages import SampledToken
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import MODEL_DIR, running
from tests.server.test_detokenizer import Bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HERMES = FORMATS["hermes"]
TOOLS: Mapping[str, Any] = {
    "find": {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "text": {"type": "string"},
            "where": {"type": "object"},
            "deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
    },
    "stop.now": {"type": "object"},
}
ARGUMENTS = {
    "text": 'say "a" {b} [c] \\ é 🙂\n  indented </tool_call> <b>\n',
    "count": -3,
    "where": {"a": [{"b": "}\\"}], "c": "]"},
    "deep": True,
}
CALLS = [("find", ARGUMENTS), ("stop.now", {}), ("find", {"text": ""})]


def written(form: ToolFormat, calls: Sequence[tuple[str, Any]], *, thought: str = "", before: str = "") -> str:
    """The message as a model of this format writes it."""
    text = f"{form.reasoning_start}{thought}{form.reasoning_end}" if thought and form.reasoning_start else ""
    numbers = [f"{form.numbered}{number}" if form.numbered else "" for number in range(len(calls))]
    each = [
        f"{form.head}{name}{number}{form.middle}{_arguments(form, given)}{form.tail}"
        for number, (name, given) in zip(numbers, calls, strict=True)
    ]
    if form.separator is None:
        each = each[:1]
    return text + before + (form.begin + (form.separator or "").join(each) + form.end if each else "")


def _arguments(form: ToolFormat, given: Mapping[str, Any]) -> str:
    if form.parameter is None:
        return _json(given)
    before, between, after = form.parameter
    values = {key: value if isinstance(value, str) else _json(value) for key, value in given.items()}
    return "".join(f"{before}{key}{between}{value}{after}" for key, value in values.items())


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def parser(
    form: ToolFormat | dict[str, Any], *, tokens: bool = False, prompt: str = "", **options: Any
) -> TemplateParser:
    """A parser; `tokens`: the vocabulary has the format's markers as tokens. `prompt`: its text."""
    spec = form if isinstance(form, dict) else form.template
    added = {text: i for i, text in enumerate(form.tokens)} if tokens and isinstance(form, ToolFormat) else {}
    short_ids = isinstance(form, ToolFormat) and form.short_ids
    vocabulary = Bytes([*(text.encode() for text in added), prompt.encode()])
    options = {"tools": TOOLS} | options
    template = ResponseTemplate(spec, added, short_ids=short_ids)
    return TemplateParser(template, ParserContext(vocabulary, [len(added)], ParserOptions(**options), "id"))


def marked(form: ToolFormat, text: str) -> str:
    """What the detokenizer gives for this text, where the markers are tokens."""
    for token in sorted(form.tokens, key=len, reverse=True):
        text = text.replace(token, MARK + token)
    return text


def parsed(by: TemplateParser, pieces: Sequence[str]) -> list[Part]:
    """All parts; neighbours of one kind as one."""
    merged: list[Part] = []
    for part in [*(part for piece in pieces for part in by.push(piece, ())), *by.flush()]:
        match merged[-1] if merged else None, part:
            case (str() as last, str()):
                merged[-1] = last + part
            case (Reasoning() as last, Reasoning()):
                merged[-1] = Reasoning(last.text + part.text)
            case (ToolCall() as last, ToolCall()) if last.index == part.index:
                merged[-1] = ToolCall(last.index, last.arguments + part.arguments, last.id, last.name)
            case _:
                merged.append(part)
    return merged


def calls_of(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    return [(one.name, msgspec.json.decode(one.arguments)) for one in parts if isinstance(one, ToolCall)]


def pieces_of(text: str, rng: random.Random) -> list[str]:
    most = rng.choice((1, 4, 30))
    cuts = [0]
    while cuts[-1] < len(text):
        cuts.append(cuts[-1] + rng.randint(1, most))
    return [text[start:end] for start, end in pairwise(cuts)]


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_any_pieces_give_the_same_parts(form: ToolFormat) -> None:
    """Streamed or not, with markers as tokens or as text: 100 random cuts for each format."""
    rng = random.Random(15)
    before = "" if form.separator is None or form.name == "llama3_json" else "Let me see.\n\n"
    said = written(form, CALLS, thought="Two  things.\n", before=before)
    no_call = "Just {text}.\n" if form.separator is not None else "<|channel|>final<|message|>Just {text}."
    for text in (said, written(form, (), before=no_call)):
        for tokens in (False, True):
            # as text, `</tool_call>` in a string of the arguments is no marker; as a token it is
            given = marked(form, text).replace(f" {MARK}</tool_call> <b>", " </tool_call> <b>") if tokens else text
            whole = parsed(parser(form, tokens=tokens), [given])
            for i in range(25):
                made = parser(form, tokens=tokens, streamed=bool(i % 2))
                assert parsed(made, pieces_of(given, rng)) == whole
            if text is not said:
                assert [one.rstrip() for one in whole if isinstance(one, str)] == ["Just {text}."]
                continue
            assert calls_of(whole) == (CALLS if form.separator is not None else CALLS[:1])
            rest = [Reasoning("Two  things.")] * bool(form.reasoning_start) + [before.rstrip()] * bool(before)
            assert [one for one in whole if not isinstance(one, ToolCall)] == rest
            assert {len(one.id) for one in whole if isinstance(one, ToolCall)} == {9 if form.short_ids else 29}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_call_that_is_cut_off_is_content_and_never_half_a_call(form: ToolFormat) -> None:
    text = written(form, [("find", {"text": "a }", "count": 12})], before="")
    seen = set()
    for cut in range(1, len(text)):
        whole = parsed(parser(form), [text[:cut]])
        streamed = parsed(parser(form, streamed=True), [text[:cut]])
        if calls := calls_of(whole):
            assert calls == [("find", {"text": "a }", "count": 12})]
            assert streamed == whole, "the same, and in the same words"
            end = form.end.lstrip()
            assert all(end.startswith(one) for one in whole if isinstance(one, str)), "no half of a marker"
        else:
            assert whole == [text[:cut]], "nothing is lost"
            shown = [one for one in streamed if isinstance(one, ToolCall)]
            arguments = [one.arguments for one in parsed(parser(form), [text]) if isinstance(one, ToolCall)]
            assert not shown or arguments[0].startswith(shown[0].arguments)
            seen.add(len(shown))
    assert seen == {0, 1}, "a stream shows pieces before the call has ended"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Use <tool_call> like this.", None),
        ("<tool_call>\nnot JSON\n</tool_call>", None),
        ('a <tool_call>{"name": "f"', None),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"arguments": {"a": 1,}, "name": "f"}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> b', None),
        ('<tool_call>{"name": "f", "arguments": {"a": }</tool_call>', None),
        ('<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call> b', "}</tool_call> b"),
    ],
)
def test_what_is_no_call_is_content_unchanged(text: str, content: str | None) -> None:
    rng = random.Random(1)
    for pieces in ([text], list(text), pieces_of(text, rng)):
        parts = parsed(parser(HERMES), pieces)
        assert "".join(one for one in parts if isinstance(one, str)) == (text if content is None else content)
        assert calls_of(parts) == ([] if content is None else [("f", {})])


def test_in_a_stream_the_pieces_of_a_malformed_call_stay_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> b'
    assert parsed(parser(HERMES, streamed=True), list(text)) == [
        ToolCall(0, '{"a": 1,}', "call_" + parser(HERMES)._call_id(0)[5:], "f"),
        "}</tool_call> b",
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral"])
@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_ends_inside_a_shown_call_does_not_say_that_a_tool_is_called(name: str, streamed: bool) -> None:
    """A stop string, or the model, may end it. The pieces of a stream then join to no JSON."""
    form = FORMATS[name]
    text = written(form, [("find", {"text": "one"}), ("find", {"text": "two"})])
    for cut in range(1, len(text) + 1):
        made = parser(form, streamed=streamed)
        parts = parsed(made, list(text[:cut]))
        out = ChoiceOutput(0, parts, [], FinishReason.STOP, has_cut_call=made.has_cut_call)
        shape = ChatShape(AnswerExtras(request_id="id", model="demo", vocabulary=Bytes([b"a"]), created=0))
        (choice,) = shape.body([out], {})["choices"]
        if choice["finish_reason"] == "tool_calls":
            assert calls_of(parts)
        else:
            assert streamed or not calls_of(parts)
    assert choice["finish_reason"] == "tool_calls"


def test_ids_of_calls_differ_between_requests_of_one_id_and_length() -> None:
    template = ResponseTemplate(HERMES.template, {})
    ids = set()
    for prompt in ([1, 2], [2, 1], [1, 2]):
        text = TextOptions(parser=partial(TemplateParser, template), parser_options=ParserOptions(tools=TOOLS))
        request = GenerationRequest("engine", "client", prompt, SamplingParams(max_tokens=9), text)
        call = written(HERMES, [("find", {})])
        vocabulary = Bytes([call.encode(), b"a", b"b"])
        out = Choice(0, request, vocabulary).extend(SequenceTokens(0, (SampledToken(0),), FinishReason.STOP))
        ids |= {part.id for part in out.parts if isinstance(part, ToolCall) and part.id}
    assert len(ids) == 2


@pytest.mark.parametrize("odd", [{"type": 5}, {"type": {"a": 1}}, {"anyOf": 5}, {"oneOf": {"x": 1}}, {"anyOf": [7]}])
def test_a_schema_that_is_none_does_not_break_the_reading_of_xml(odd: Any) -> None:
    tools = {"find": {"type": "object", "properties": {"a": odd}}}
    text = written(FORMATS["qwen3_coder"], [("find", {"a": "x"})])
    assert calls_of(parsed(parser(FORMATS["qwen3_coder"], tools=tools), [text])) == [("find", {"a": "x"})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": [1 ]}, "name": "f"}', '{"a": [1 ]}'),
        ('{"type": "function", "name": "f", "parameters": {"a":1}}', '{"a":1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null, "id": 7}', "{}"),
        ('{ "name" : "f" , "arguments" : { "a" : "\\u00e9\\ud83d\\ude42" } }', '{ "a" : "\\u00e9\\ud83d\\ude42" }'),
        ('[{"name": "f", "arguments": {"a":1}}]', '{"a":1}'),
    ],
)
def test_arguments_are_the_text_that_the_model_wrote(text: str, arguments: str) -> None:
    for streamed in (False, True):
        parts = parsed(parser(HERMES, streamed=streamed), list(f"\n<tool_call>\n{text}\n</tool_call>\n"))
        assert [(one.name, one.arguments) for one in parts if isinstance(one, ToolCall)] == [("f", arguments)]
        assert len(parts) == 1, "white space beside a call is not shown"


def test_arguments_come_in_pieces_before_the_call_ends() -> None:
    for form in (HERMES, FORMATS["qwen3_coder"], FORMATS["gpt_oss"]):
        made = parser(form, streamed=True)
        text = written(form, [("find", {"text": "one two three"})])
        shown = [part for char in text for part in made.push(char, ()) if isinstance(part, ToolCall)]
        assert (shown[0].name, shown[0].arguments, shown[0].id[:5]) == ("find", "", "call_")
        assert len(shown) > len("one two three")
        assert not any(part.id or part.name for part in shown[1:])


def test_markers_spelled_out_are_text_where_the_vocabulary_has_them_as_tokens() -> None:
    spelled = written(HERMES, [("find", {})], thought="no", before="See: ")
    assert parsed(parser(HERMES, tokens=True), list(spelled)) == [spelled]
    text = f'{MARK}<tool_call>{{"name": "find", "arguments": {{"text": "</tool_call>"}}}}{MARK}</tool_call>'
    assert calls_of(parsed(parser(HERMES, tokens=True), list(text))) == [("find", {"text": "</tool_call>"})]
    stray = f"a{MARK}</tool_call>b"
    assert parsed(parser(HERMES, tokens=True), list(stray)) == ["a</tool_call>b"]


def test_without_tools_a_call_is_content_and_reasoning_is_not() -> None:
    call = written(HERMES, [("find", {})])
    assert parsed(parser(HERMES, tools={}), ["<think>\nwhy\n</think>\n\n" + call]) == [Reasoning("why"), call]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("separate", [Reasoning("a\nb"), "c"]),
        ("drop", ["c"]),
        ("content", ["<think>\na\nb\n</think>\n\nc"]),
    ],
)
def test_reasoning_is_shown_apart_or_not_at_all_or_as_content(mode: str, expected: list[Part]) -> None:
    assert parsed(parser(HERMES, reasoning=mode), list("<think>\na\nb\n</think>\n\nc")) == expected


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        ("<think>\n", "a\n</think>\n\nb", [Reasoning("a"), "b"]),
        ("<think>\n\n</think>\n\n", "b\n", ["b\n"]),
        ("<think>\n", "a", [Reasoning("a")]),
        ("", "b <think>", ["b"]),
        ("It is", " so", [" so"]),
    ],
)
def test_the_prompt_may_have_begun_the_answer(opened: str, text: str, expected: list[Part]) -> None:
    prompt = f"<|im_start|>user\n<tool_call><think><|im_end|>\n<|im_start|>assistant\n{opened}"
    assert parsed(parser(HERMES, prompt=prompt), list(text)) == expected


def test_several_calls_have_their_index_and_only_the_first_is_shown_if_the_client_says_so() -> None:
    text = written(FORMATS["mistral"], CALLS)
    parts = parsed(parser(FORMATS["mistral"]), [text])
    assert [one.index for one in parts if isinstance(one, ToolCall)] == [0, 1, 2]
    assert len({one.id for one in parts if isinstance(one, ToolCall)}) == 3
    assert parsed(parser(FORMATS["mistral"], parallel_calls=False), list(text)) == parts[:1]
    cut = parsed(parser(FORMATS["mistral"]), [text[:-40]])
    assert [type(one) for one in cut] == [ToolCall, ToolCall, str], "calls before the one that was cut off are shown"


def test_words_around_calls_and_messages_of_harmony() -> None:
    assert parsed(parser(HERMES), ["A\n" + written(HERMES, [("find", {})]) + "\nB\n"]) == [
        "A",
        ToolCall(0, "{}", parser(HERMES)._call_id(0), "find"),
        "\n\nB\n",
    ]
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done."
    assert parsed(parser(FORMATS["gpt_oss"]), list(said)) == ["I look.\nDone."]
    recipient = '<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{"count": 1}<|call|>'
    assert calls_of(parsed(parser(FORMATS["gpt_oss"]), list(recipient))) == [("find", {"count": 1})]


def test_an_object_of_a_llama_that_is_no_call_is_content_at_once() -> None:
    made = parser(FORMATS["llama3_json"], streamed=True)
    assert made.push(' {"city', ()) == [' {"city'], "not only when the object has ended"
    assert made.push('": "Paris"}', ()) == ['": "Paris"}']


LINES = {
    "start_anchor": "assistant:",
    "fields": {
        "thinking": {"open_pattern": r"\(\s*", "close": ")"},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+)\n",
            "close": "\nEND",
            "content": "kv-lines",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": "<stop>"},
    },
}


def test_a_template_of_another_form_gives_its_calls_when_they_have_ended() -> None:
    text = "( why )Hm\nCALL find\ntext: x\nEND<stop>"
    for pieces in ([text], list(text)):
        parts = parsed(parser(LINES, streamed=True), pieces)
        assert parts[:2] == [Reasoning("why"), "Hm"]
        assert calls_of(parts) == [("find", {"text": "x"})]
    calls = {"open": "<", "close": ">", "content": "int", "transform": {"x": "{no}"}}
    assert parsed(parser(LINES | {"fields": {"tool_calls": calls}}), ["<a>"]) == ["<a>"]
    endless = {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}
    assert parsed(parser(LINES | {"fields": {"thinking": endless}}), ["xa"])[0] == "x"


@pytest.mark.long
def test_a_template_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    for content in ("{", '{"fields": {}}', '{"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}}'):
        file = tmp_path / "template.json"
        file.write_text(content)
        config = NodeConfig(model=ModelConfig(model=str(MODEL_DIR)), server=ServerConfig(response_template=str(file)))
        with pytest.raises(StartupError, match="template"):
            NodeState.load(config, FakeEngine(says([])))


def test_the_format_is_that_of_the_chat_template() -> None:
    assert tuple(FORMATS) == TOOL_FORMATS
    for form in FORMATS.values():
        assert find_format("", ["x".join(form.signs)]) is form
        assert find_format("gpt2", (), form.name) is form
        assert all(find_format(model_type, ()) is form for model_type in form.model_types)
        assert find_format(form.model_types[0], (), "none") is None
        assert find_format(form.model_types[0], ["{{ messages }}"]) is None
        assert find_format("", ["x".join(form.signs), "{{ messages }}"]) is form
        assert find_format("", ["{{ messages }}", "x".join(form.signs)]) is form
        assert all(token in "".join(_texts(form)) for token in form.tokens)


def _texts(form: ToolFormat) -> list[str]:
    pieces = [form.begin, form.head, form.middle, form.tail, form.end, form.reasoning_start, form.reasoning_end]
    return [*pieces, str(form.template).replace("\\", "")]


def test_a_choice_counts_reasoning_hides_other_special_tokens_and_can_be_replayed() -> None:
    pieces = [*HERMES.tokens, "<|end|>", *map(chr, range(32, 127))]
    vocabulary = Bytes([one.encode() for one in pieces], special=frozenset(range(len(HERMES.tokens) + 1)))
    template = ResponseTemplate(HERMES.template, {text: i for i, text in enumerate(HERMES.tokens)})
    text = TextOptions(("STOP",), parser=partial(TemplateParser, template))
    request = GenerationRequest("engine", "client", [len(HERMES.tokens)], SamplingParams(max_tokens=100), text)
    ids = [pieces.index("<think>"), *map(pieces.index, "why"), pieces.index("</think>"), pieces.index("<|end|>")]
    ids += [*map(pieces.index, "So STO<tool_call>"), pieces.index("<tool_call>")]
    whole, stepwise = Choice(0, request, vocabulary), Choice(0, request, vocabulary)
    out = whole.replay(ids)
    steps = [stepwise.extend(SequenceTokens(0, (SampledToken(one, 0.0),))) for one in ids]
    assert [part for step in steps for part in step.parts] == out.parts
    end = whole.extend(SequenceTokens(0, (), FinishReason.LENGTH))
    shown = [*out.parts, *end.parts]
    assert "".join(one for one in shown if isinstance(one, str)) == "So STO<tool_call>"
    assert "".join(one.text for one in shown if isinstance(one, Reasoning)) == "why"
    assert whole.num_reasoning_tokens == stepwise.num_reasoning_tokens == len("why") + 1


@pytest.mark.long
@pytest.mark.anyio
async def test_chat_answers_have_reasoning_under_both_names_and_its_tokens_in_the_usage() -> None:
    async with running(FakeEngine(says([]))) as node:
        node.state.output_parser = partial(TemplateParser, ResponseTemplate(HERMES.template, {}))
        ids = await node.state.tokenizer.encode("<think>why so</think>because", max_tokens=4096)
        node.engine.script = says(ids, FinishReason.STOP)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(model="demo", messages=messages)
            async with client.chat.completions.stream(
                model="demo", messages=messages, stream_options={"include_usage": True}
            ) as stream:
                streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        message = answer.choices[0].message.to_dict()
        assert message["content"] == "because"
        assert message["reasoning"] == message["reasoning_content"] == "why so"
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert 3 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens


def test_an_answer_of_calls_only_has_no_content() -> None:
    parts = parsed(parser(HERMES), [written(HERMES, CALLS)])
    out = ChoiceOutput(0, parts, [], FinishReason.STOP)
    shape = ChatShape(AnswerExtras(request_id="id", model="demo", vocabulary=Bytes([b"a"]), created=0))
    (choice,) = shape.body([out], {})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
