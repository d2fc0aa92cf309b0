"""The grammars of messages with calls: what a model may write under them is what the parser reads back."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.bodies.schema import ChatBody
from pd_cluster.server.bodies.tool_use import Function, ToolUse
from pd_cluster.server.grammar.grammar_process import write
from pd_cluster.server.grammar.grammar_source import parser_options
from pd_cluster.server.params.sampling import TextOptions
from pd_cluster.server.requests.choice import Choice
from pd_cluster.server.requests.generation_request import GenerationRequest
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_cluster.server.tools.known_formats import FORMATS
from pd_cluster.server.tools.output_parser import Reasoning, ToolCall
from pd_cluster.server.tools.template_parser import template_parser
from pd_cluster.worker.grammar_vocabulary import GrammarTokens
from pd_cluster.worker.grammars import GrammarState, compile_grammar
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.server.tools.tool_format import ToolFormat

llguidance = pytest.importorskip("llguidance")

EOS = "<|eos|>"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hours": {"type": "array", "items": {"type": "integer", "maximum": 23, "minimum": 0}, "maxItems": 2},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "number", "minimum": 0, "maximum": 100}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


class Model:
    """A vocabulary of all bytes and a format's markers, with its parser."""

    def __init__(self, tool_format: ToolFormat, directory: Path, *, markers: bool = True) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        fast = Fast(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([EOS])
        fast.add_tokens([AddedToken(text, normalized=False) for text in (tool_format.tokens if markers else ())])
        fast.save(str(directory / "tokenizer.json"))
        self.tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=EOS))
        self.format = tool_format
        self._fast = fast
        self.ids = {token.content: i for i, token in fast.get_added_tokens_decoder().items()}
        self.eos = self.ids[EOS]
        tokens = GrammarTokens.read(directory / "tokenizer.json", self.tokenizer.vocab_size)
        self._vocabulary = tokens.vocabulary([self.eos]).tokenizer
        self._executor = llguidance.LLExecutor(1)
        self._compiled: dict[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text).ids)

    def write(self, content: tuple[str, str] = ("", ""), **form: Any) -> str:
        message = {"tool_format": self.format.name} | form
        return write(*content, [], coerces_one_of=False, message=message, token_ids=self.ids)

    def state(self, grammar: str) -> GrammarState:
        if grammar not in self._compiled:
            self._compiled[grammar] = compile_grammar(self._vocabulary, self._executor, grammar)
        state = GrammarState(self._compiled[grammar].deep_copy())
        assert not state.error, (state.error, grammar)
        return state

    def allows(self, grammar: str, text: str) -> bool:
        """Whether the text, as this vocabulary has it, is a whole output."""
        state, ids = self.state(grammar), self.encode(text)
        return state.matcher.try_consume_tokens(ids) == len(ids) and state.is_accepting

    def walk(self, grammar: str, rng: random.Random) -> list[int]:
        """A random output: any allowed token, and now and then the end of a long text."""
        state, output = self.state(grammar), list[int]()
        closings = [self.encode(text) for text in ("</think>", "[/THINK]", "<|end|>", "\n</parameter>\n", '"', "}")]
        closings += self.tags()
        while not state.matcher.is_stopped() and len(output) < 2000:
            mask = state.matcher.compute_logit_bias()
            allowed = [token_id for token_id, bias in enumerate(mask) if bias]
            if self.eos in allowed and rng.random() < 0.5:
                break
            next_ids = [rng.choice(allowed)]
            if len(allowed) > 100 and rng.random() < (0.3 if self.format.parameter else 0.2):
                closing = rng.choice(closings)
                if state.matcher.deep_copy().try_consume_tokens(closing) == len(closing):
                    next_ids = closing
            state.advance(next_ids)
            assert not state.error
            output += [token_id for token_id in next_ids if token_id != self.eos]
        assert state.is_accepting, "the walk did not end"
        return output

    def tags(self) -> list[list[int]]:
        """What ends a value, a call or a value before the next, as tokens and as characters of a text."""
        if self.format.parameter is None:
            return []
        (before, between, after), tail = self.format.parameter, self.format.tail
        texts = [after, after.strip(), after + tail, after.strip() + tail.strip(), tail, after + self.format.head]
        texts += [after + before + "i" + between, before]
        return [
            ids for text in texts for ids in (self.encode(text), [one for char in text for one in self.encode(char)])
        ]

    def parse(self, output: list[int], tools: dict[str, Any], prompt: str = "") -> tuple[str, str, list[ToolCall]]:
        """Content, reasoning and calls."""
        use = ToolUse(functions=tuple(Function(name, schema, strict=False) for name, schema in tools.items()))
        options = parser_options(ChatBody(messages=[]), use)
        factory = template_parser(self.tokenizer, self.format, "", enabled=True)
        text = TextOptions(parser=factory, parser_options=options)
        anchors = self.format.template["start_anchor"]
        start = self.encode((anchors if isinstance(anchors, str) else anchors[0]) + prompt)
        choice = Choice(0, GenerationRequest("r", "c", start, SamplingParams(max_tokens=4096), text), self.tokenizer)
        tokens = tuple(SampledToken(token_id) for token_id in output)
        parts = choice.extend(SequenceTokens(0, tokens, finish_reason=FinishReason.STOP)).parts
        calls: dict[int, ToolCall] = {}
        for part in parts:
            if isinstance(part, ToolCall):
                before = calls.get(part.index, ToolCall(part.index))
                joined = before.arguments + part.arguments
                calls[part.index] = ToolCall(part.index, joined, before.id or part.id, before.name or part.name)
        said = "".join(part for part in parts if isinstance(part, str))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        return said, thought, list(calls.values())


@pytest.fixture(scope="module", params=FORMATS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(FORMATS[request.param], tmp_path_factory.mktemp("tokenizer"))


def schemas(tool_format: ToolFormat) -> dict[str, Any]:
    """The tools; a text of XML takes no maximal length."""
    weather = json.loads(json.dumps(WEATHER))
    if tool_format.parameter is not None:
        del weather["properties"]["city"]["maxLength"]
    return {"get_weather": weather, "add-2": ADD, "stop": EMPTY}


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("thinking", ["no", "may", "open"])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_parse_back(model: Model, thinking: str, parallel: bool) -> None:
    tools = schemas(model.format)
    grammar = model.write(functions=list(tools.items()), required=True, parallel=parallel, thinking=thinking)
    rng, opened = random.Random(f"{thinking} {parallel}"), model.format.reasoning_start if thinking == "open" else ""
    for _ in range(6):
        output = model.walk(grammar, rng)
        content, thought, calls = model.parse(output, tools, opened)
        text = "".join(model.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in output)
        assert not content.strip(), text
        assert (len(calls) == 1) if not parallel or model.format.separator is None else calls, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tools[call.name])
        if thinking == "no":
            assert not thought


ANYTHING = {
    "type": "object",
    "properties": {
        "t": {"type": "string"},
        "l": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "o": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "n": {"type": "number"}},
            "additionalProperties": False,
        },
        "n": {"type": ["string", "null"]},
        "i": {"type": "integer"},
        "d": {"type": "number"},
        "c": {"const": 5},
        "e": {"enum": ["a", None, ""]},
        "u": {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["t", "l", "e", "u", "c"],
    "additionalProperties": False,
}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.parameter])
@pytest.mark.parametrize("markers", [True, False])
def test_texts_and_strings_of_json_may_have_any_tag_that_the_grammar_allows(
    name: str, markers: bool, tmp_path: Path
) -> None:
    model, tools = Model(FORMATS[name], tmp_path, markers=markers), {"f": ANYTHING, "stop": EMPTY}
    grammar = model.write(functions=list(tools.items()), required=True, strict=["f"], parallel=True)
    rng = random.Random(f"{name} {markers}")
    for _ in range(10):
        output = model.walk(grammar, rng)
        content, _, calls = model.parse(output, tools)
        text = "".join(model.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in output)
        assert calls, text
        assert not content.strip(), text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tools[call.name])


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "glm47", "minimax_m2"])
def test_a_number_of_a_call_may_be_larger_than_a_float(name: str, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    model = Model(FORMATS[name], tmp_path)
    one = '{"a": 1e400}' if FORMATS[name].parameter is None else {"a": "1e400"}
    text = a_call(model.format, "f", one)
    assert model.allows(model.write(functions=[("f", schema)], required=True), text)
    ((called),) = model.parse(model.encode(text), {"f": schema})[2]
    assert called.arguments == '{"a": 1e400}'


@pytest.mark.long_cases
def test_free_text_or_strict_calls(model: Model) -> None:
    grammar = model.write(functions=[("add", ADD)])
    one = model.format
    call = a_call(one, "add", '{"a": 1.5, "b": true}' if one.parameter is None else {"a": "1.5", "b": "true"})
    wrong = call.replace("1.5", "many")
    assert model.allows(grammar, call)
    assert not model.allows(grammar, wrong)
    assert model.allows(grammar, f"{one.content_start}Hello {{ }}.")
    assert not model.allows(grammar, "")
    content, _, calls = model.parse(model.encode(call), {"add": ADD})
    assert (content, [one.name for one in calls]) == ("", ["add"])


@pytest.mark.long_cases
def test_content_of_a_form_or_calls(model: Model) -> None:
    start = model.format.content_start
    if model.format.name == "llama3_json":
        with pytest.raises(ValueError, match="cannot tell a call from an answer"):
            model.write(("json_object", "true"), functions=[("add", EMPTY)])
        return
    for content, right, wrong in (
        (("json_object", "true"), '{"x":1}', "text"),
        (("json_object", "true"), '{"x": [1, 2]}', '{"x":  1}'),
        (("json", '{"type": "object", "format": "x"}'), '{"x": [1, {"y": 2}]}', '{ "x":1}'),
        (("json", '{"type": "object", "x-guidance": {"whitespace_flexible": true}}'), '{ "x" : 1 }', "[]"),
        (("regex", "ab+"), "abb", "a"),
        (("grammar", 'start: "yes" | "no"'), "yes", "maybe"),
    ):
        grammar = model.write(content, functions=[("add", EMPTY)], thinking="may")
        assert model.allows(grammar, start + right), content
        assert not model.allows(grammar, start + wrong), content
        if model.format.reasoning_start:
            thought = f"{model.format.reasoning_start}hm{model.format.reasoning_end}"
            assert model.allows(grammar, thought + start + right), content


def a_call(one: ToolFormat, name: str, arguments: str | dict[str, str]) -> str:
    """The text of a call; of XML: with the arguments as one parameter, or with the texts of several."""
    if one.parameter is not None:
        before, between, after = one.parameter
        texts = {"a": arguments} if isinstance(arguments, str) else arguments
        arguments = "".join(f"{before}{key}{between}{text}{after}" for key, text in texts.items())
    number = f"{one.numbered}0" if one.numbered else ""
    return f"{one.begin}{one.head}{name}{number}{one.middle}{arguments}{one.tail}{one.end}"


@pytest.mark.long_cases
def test_one_blank_or_none_in_arguments(model: Model) -> None:
    """In what a schema leaves free, too. The client's own `x-guidance` comes before this."""
    wrong = ('{"b":  1}', '{ "b": 1}', '{"b" : 1}', '{"b": 1 }', '{"b": [1 , 2]}', '{"b": {"c":  1}}', '{"b":\n1}')
    free = {"type": "object", "properties": {"b": {}}}
    for strict in ([], ["f"]):
        for schema in (free, {"type": "object"}):
            if model.format.parameter is not None:
                schema = {"type": "object", "properties": {"a": schema}}
            grammar = model.write(functions=[("f", schema)], required=True, strict=strict)
            for arguments in ('{"b": [1, 2], "c": {"d": []}}', '{"b":[1,2],"c":{"d":[]}}'):
                assert model.allows(grammar, a_call(model.format, "f", arguments))
            assert [one for one in wrong if model.allows(grammar, a_call(model.format, "f", one))] == []
            theirs = schema | {"x-guidance": {"whitespace_flexible": True}}
            grammar = model.write(functions=[("f", theirs)], required=True, strict=strict)
            assert [one for one in wrong if not model.allows(grammar, a_call(model.format, "f", one))] == []


NOTED = {
    "$schema": "http://json-schema.org/schema#", "title": "F", "type": "object", "x-mcp": True, "uniqueItems": True,
    "properties": {
        "a": {"type": "string", "format": "uuid4", "minLength": 0, "pattern": "", "maximum": 3, "deprecated": True},
        "b": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null", "title": "none"}], "nullable": True},
        "c": {"type": "integer", "format": "int32", "maximum": 9, "x-order": 1},
    },
    "required": ["a", "b", "c"], "additionalProperties": False, "propertyNames": {"type": "string"},
    "$defs": {"text": {"type": "string", "contentEncoding": "base64", "example": "x", "maxLength": None}},
}  # fmt: skip


def test_notes_of_a_tool_s_schema_are_no_reason_to_refuse_it(model: Model) -> None:
    arguments: Any = '{"a": "", "b": null, "c": 9}'
    wrong: Any = arguments.replace("9", "10")
    if model.format.parameter is not None:
        arguments, wrong = ({"a": "1", "b": "x", "c": text} for text in ("9", "10"))
    grammar = model.write(functions=[("f", NOTED)], required=True)
    assert model.allows(grammar, a_call(model.format, "f", arguments))
    assert not model.allows(grammar, a_call(model.format, "f", wrong))
    kept = json.loads(json.dumps(NOTED).replace("uuid4", "uuid"))
    kept["properties"]["a"].pop("pattern")
    del kept["$defs"]["text"]["maxLength"]
    for schema, why in ((NOTED, "uuid4|format"), (kept | {"dependentRequired": {"a": ["d"]}}, "dependentRequired")):
        with pytest.raises((ValueError, AssertionError), match=why):
            model.state(model.write(functions=[("f", schema)], required=True, strict=["f"]))


@pytest.mark.long_cases
@pytest.mark.parametrize(
    "name",
    ["hermes", "qwen3_coder", "glm45", "glm47", "minimax_m2", "mistral", "deepseek_v3", "kimi_k2", "llama3_json"],
)
def test_markers_of_a_tokenizer_that_lacks_them(name: str, tmp_path: Path) -> None:
    """They are text then, and a free text does not contain them."""
    model = Model(FORMATS[name], tmp_path, markers=False)
    tools = schemas(model.format)
    for required in (True, False):
        grammar = model.write(functions=list(tools.items()), required=required, thinking="open" if required else "no")
        output = model.walk(grammar, random.Random(3))
        content, _, calls = model.parse(output, tools, model.format.reasoning_start if required else "")
        assert bool(calls) if required else not calls or not content
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tools[call.name])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "cannot follow pattern beside text"),
        ({"anyOf": [{"required": ["a"]}]}, "cannot follow anyOf of a tool's parameters"),
        ({"minProperties": 1}, "cannot follow minProperties of a tool's parameters"),
        ({"additionalProperties": {"type": "integer"}}, "cannot follow additionalProperties of a tool's parameters"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, "cannot follow enum beside text"),
        ({"properties": {"a>": {"type": "string"}}}, "cannot write the parameter 'a>'"),
        ({"properties": {"": {"type": "string"}}}, "cannot write the parameter ''"),
        ({"required": ["k" * 257]}, "cannot write the parameter 'kkk"),
    ],
)
def test_xml_refuses_what_it_cannot_hold_to(schema: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = Model(FORMATS["qwen3_coder"], tmp_path)
    with pytest.raises(ValueError, match=why):
        model.write(functions=[("f", schema)], required=True)


def test_the_format_of_an_xml_text_is_a_note_unless_the_function_is_strict(tmp_path: Path) -> None:
    model = Model(FORMATS["qwen3_coder"], tmp_path)
    schema = {"properties": {"a": {"type": "string", "format": "date"}}}
    grammar = model.write(functions=[("f", schema)], required=True)
    assert model.allows(grammar, a_call(model.format, "f", "any day"))
    with pytest.raises(ValueError, match="cannot follow format beside text"):
        model.write(functions=[("f", schema)], required=True, strict=["f"])


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 5}, "5", "6"),
        ({"enum": [1, 2, 3]}, "3", "4"),
        ({"enum": ["a", None]}, "null", "b"),
        ({"allOf": [{"type": "integer"}]}, "7", "x"),
    ],
)
def test_xml_of_values_without_a_type(schema: dict[str, Any], right: str, wrong: str, tmp_path: Path) -> None:
    model = Model(FORMATS["minimax_m2"], tmp_path)
    tools = {"f": {"properties": {"a": schema}, "required": ["a"]}}
    grammar = model.write(functions=list(tools.items()), required=True)
    assert not model.allows(grammar, a_call(model.format, "f", {"a": wrong}))
    text = a_call(model.format, "f", {"a": right})
    assert model.allows(grammar, text)
    (parsed,) = model.parse(model.encode(text), tools)[2]
    assert parsed.arguments == f'{{"a": {right}}}'


def test_xml_of_few_values(tmp_path: Path) -> None:
    """As Pydantic writes an optional enumeration."""
    model = Model(FORMATS["qwen3_coder"], tmp_path)
    some = {"enum": ["x", "y"], "type": "string", "title": "E"}
    for schema in (
        {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}], "default": None},
        {"type": ["string", "null"], "enum": ["x", "y", None]},
    ):
        parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"e": some}}
        grammar = model.write(functions=[("f", parameters)], required=True)
        for text, allowed in (("x", True), ("null", True), ("z", False), ("", False)):
            assert model.allows(grammar, a_call(model.format, "f", text)) is allowed
    (parsed,) = model.parse(model.encode(a_call(model.format, "f", "null")), {"f": parameters})[2]
    assert json.loads(parsed.arguments) == {"a": None}


def test_xml_of_a_tool_that_names_no_parameters_takes_any(tmp_path: Path) -> None:
    """So are free tools beside a strict one, or beside a form of the content."""
    model = Model(FORMATS["qwen3_coder"], tmp_path)
    call = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
    some = "<parameter=a b>\n1 < 2\nx\n</parameter>\n<parameter=c>\ntrue\n</parameter>\n"
    for schema, allowed in (({"type": "object"}, True), (EMPTY, False)):
        grammar = model.write(functions=[("f", schema)], required=True)
        assert model.allows(grammar, call.format(""))
        assert model.allows(grammar, call.format(some)) is allowed
    text = model.encode(call.format(some))
    (parsed,) = model.parse(text, {"f": {"type": "object"}})[2]
    assert json.loads(parsed.arguments) == {"a b": "1 < 2\nx", "c": "true"}
    grammar = model.write(functions=[("f", {"type": "object", "required": ["a"]})], required=True)
    assert not model.allows(grammar, call.format(""))
    assert model.allows(grammar, call.format("<parameter=a>\nx\n</parameter>\n"))


def test_only_strict_functions_take_one_of_at_its_word(tmp_path: Path) -> None:
    model = Model(FORMATS["hermes"], tmp_path)
    overlapping = {"type": "object", "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    model.state(model.write(functions=[("f", overlapping)], required=True))
    strict = model.write(functions=[("f", overlapping)], required=True, strict=["f"])
    assert "oneOf" in GrammarState(compile_grammar(model._vocabulary, model._executor, strict)).error
