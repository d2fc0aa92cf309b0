"""The fields for structured output: what the engine gets for each, and a 400 for whatever cannot be held to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import psutil
import pytest

from benchmarks.hostile_grammars import HOSTILE
from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.grammar.grammar_checks import MAX_GRAMMAR_BYTES, MAX_WRITTEN_CHARS, GrammarChecks
from pd_cluster.server.grammar.grammar_process import CPU_LIMIT_S
from pd_cluster.server.grammar.grammar_source import GrammarSource
from pd_cluster.server.params.sampling import SAMPLING_PARAM, decode_sampling, encode_sampling
from pd_cluster.worker.grammars import NO_PACKAGE, NO_WAY_ON
from tests.models.small_tokenizers import TOKENIZERS
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import Node, running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
llguidance = pytest.importorskip("llguidance")

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b", "a"]}
ONE_OF = {"oneOf": [{"type": "string"}, {"maxLength": 3}]}  # both may hold
MANY_WORDS = {
    "type": "string",
    "maxLength": 5000,
    "pattern": "^(\\S+\\s+){0,99}\\S+$",
}  # takes 1.2 s a mask
OBJECT = '{"b":1,"a":"x"}'
SPACED = '{"b": 1, "a": "x"}'
SPREAD = ['{"b":  1,"a":"x"}', '{ "b":1,"a":"x"}', '{"b" :1,"a":"x"}', '{"b":1 ,"a":"x"}', '{"b":1,"a":"x" }']
ODD = {"type": "string", "format": "uuid4", "deprecated": True, "minimum": 3}  # it binds nothing but the type


def chat_format(**members: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n"} | members}}


# a field of a request, answers that it allows, answers that it does not
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ["{}", '{"x":[1,"y"]}', '{"x": [1, "y"]}'], ["[]", "1", "{", "{ }"]),
    (chat_format(schema=SCHEMA), [OBJECT, SPACED, '{"b": 1,"a":"x"}'], ["{}", '{"a":"x","b":1}', *SPREAD]),
    (chat_format(schema=SCHEMA, strict=True), [OBJECT], ["{}"]),
    (chat_format(schema=ONE_OF, strict=False), ['"abcd"', "1"], ['"']),
    (chat_format(), ["{}"], ["1"]),
    ({"structured_outputs": {"json": SCHEMA}}, [OBJECT], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": False}}, [OBJECT], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}", '{"a": [1, {}]}'], ["1", '{"a":  1}']),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, [OBJECT], [SPACED]),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']),
    (chat_format(schema=ODD), ['"x"'], ["1"]),
    ({"structured_outputs": {"json": ODD}}, ['"x"'], ["1"]),
    ({"guided_json": ODD}, ['"x"'], ["1"]),
    ({"json_schema": json.dumps(ODD)}, ['"x"'], ["1"]),
    ({"structured_outputs": {"regex": "a+b?"}}, ["a", "aab"], ["b", "ac"]),
    ({"structured_outputs": {"choice": ["yes", 'n"\\o\n', "日本"]}}, ["yes", 'n"\\o\n', "日本"], ["no", "yesyes"]),
    ({"guided_choice": ["\x00\x1f\x7f\x80\u2028"]}, ["\x00\x1f\x7f\x80\u2028"], ["\x7f"]),
    ({"structured_outputs": {"choice": [f"choice {i}" for i in range(3000)]}}, ["choice 2999"], ["choice 3000"]),
    ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, ["a", "bba"], ["b"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, ["a", "bba"], ["b"]),
    ({"guided_json": SCHEMA}, [OBJECT], ["{}"]),
    ({"guided_json_object": True}, ["{}"], ["1"]),
    ({"guided_regex": "[0-9]{2}"}, ["12"], ["1"]),
    ({"guided_choice": ["x"]}, ["x"], ["y"]),
    ({"guided_grammar": 'start: "a"'}, ["a"], ["b"]),
    ({"json_schema": json.dumps(SCHEMA)}, [OBJECT], ["{}"]),
    ({"regex": "a"}, ["a"], ["b"]),
    ({"ebnf": 'root ::= "a"+'}, ["aa"], ["b"]),
]
FREE = (
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"guided_json_object": False},
    {"regex": None},
)

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "yaml is not supported"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag is not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", "unknown field `schema`"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "response_format", "takes no"),
    (chat_format(shema=SCHEMA), "response_format", "unknown field `shema`"),
    (chat_format(schema=5), "response_format", "Expected"),
    (chat_format(schema={"type": "no such type"}), "response_format", "no such type"),
    (chat_format(schema=ONE_OF, strict=True), "response_format", "oneOf"),
    (chat_format(schema={"type": "string", "format": "uuid4"}, strict=True), "response_format", "uuid4"),
    (chat_format(schema={"x-guidance": {"misspelt": 1}}), "response_format", "unknown field `misspelt`"),
    (chat_format(schema={"x-guidance": "no object"}), "response_format", "x-guidance must be an object"),
    ({"guided_json": {"x-guidance": {"whitespace_flexible": 1}}}, "guided_json", "invalid type"),
    ({"guided_json": {"x-guidance": {"item_separator": "("}}}, "guided_json", "regex parse error"),
    (chat_format(schema={"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
    (chat_format(schema={"type": "string", "pattern": "^a$", "minLength": 3}), "response_format", "Unsatisfiable"),
    (chat_format(schema={"$ref": "http://localhost/schema"}), "response_format", "not present in a registry"),
    ({"structured_outputs": {}}, "structured_outputs", "not 0"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not 2"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag is not supported"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "misspelt": 1}}, "structured_outputs", "misspelt"),
    ({"structural_tag": "x"}, "structural_tag", "use structured_outputs"),
    ({"guided_json": "{"}, "guided_json", "EOF while parsing"),
    # Python 3.11 cannot read so much, 3.13 can
    ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json", "nested more than 128 levels deep"),
    ({"guided_json": '{"items":' * 140 + "{}" + "}" * 140}, "guided_json", "nested more than 128 levels deep"),
    ({"guided_json": "5"}, "guided_json", "object"),
    ({"guided_json": 5}, "guided_json", "Expected"),
    ({"guided_regex": "("}, "guided_regex", "invalid regex"),
    ({"guided_json": {"type": "string", "pattern": "(?=a)"}}, "guided_json", "look-around"),
    ({"guided_regex": "(a)\\1"}, "guided_regex", "backreferences are not supported"),
    ({"guided_regex": "[^\\s\\S]"}, "guided_regex", NO_WAY_ON),
    ({"guided_json": MANY_WORDS}, "guided_json", "exceeds the limits of the grammar: lexer error"),
    ({"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(400)}}}, "guided_json", "max is"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
    ({"guided_choice": "a"}, "guided_choice", "Expected"),
    ({"guided_grammar": "???"}, "guided_grammar", "Expected"),
    ({"guided_grammar": "start: <no_such_token>"}, "guided_grammar", "unknown special token"),
    ({"guided_grammar": "start: (("}, "guided_grammar", "Expected"),
    ({"ebnf": 'root ::= "a" b'}, "ebnf", "Rule 'b' not found"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex and ebnf exclude each other"),
    ({"regex": "a"} | chat_format(), "response_format", "regex and response_format exclude each other"),
]  # fmt: skip


async def ask(node: Node, wanted: dict[str, Any], path: str = "completions", **more: Any) -> tuple[int, dict[str, Any]]:
    base: dict[str, Any] = {"messages": HI} if path.startswith("chat") else {"prompt": "hi"}
    async with node.session.post(f"{node.url}/v1/{path}", json=base | wanted | more) as response:
        return response.status, await response.json()


def allows(grammar: str, text: str) -> bool:
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    return bool(matcher.consume_tokens(vocabulary.tokenize_str(text)) and matcher.is_accepting())


@pytest.mark.long
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_every_form_becomes_a_grammar(path: str) -> None:
    async with running(FakeEngine(says([5]))) as node:
        for wanted, right, wrong in FORMS:
            status, answer = await ask(node, wanted, path)
            assert status == 200, (wanted, answer)
            grammar = node.engine.requests[-1].sampling.grammar
            assert [text for text in right if not allows(grammar, text)] == [], wanted
            assert [text for text in wrong if allows(grammar, text)] == [], wanted
        for wanted in FREE:
            assert (await ask(node, wanted, path))[0] == 200
            assert node.engine.requests[-1].sampling.grammar == ""


@pytest.mark.long
async def test_other_apis_take_a_schema_as_not_strict_unless_they_say_so() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": ODD}}}
    output = {"format": {"type": "json_schema", "schema": form["schema"]}}
    asked: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("messages", {"messages": HI, "max_tokens": 9, "output_config": output}, 200),
        ("responses", {"input": "hi", "text": {"format": form}}, 200),
        ("responses", {"input": "hi", "text": {"format": form | {"strict": True}}}, 400),
    )
    async with running(FakeEngine(says([5]))) as node:
        for path, body, expected in asked:
            async with node.session.post(f"{node.url}/v1/{path}", json=body) as answer:
                said = await answer.text()
            assert answer.status == expected, said
            assert ("Unknown format: uuid4" in said) is (expected == 400)
        assert [allows(one.sampling.grammar, '{"a": "x"}') for one in node.engine.requests] == [True, True]


@pytest.mark.long
async def test_what_cannot_be_held_to_is_a_400_that_names_it() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for wanted, param, words in REFUSED:
            for path in ("chat/completions", "completions"):
                status, answer = await ask(node, wanted, path)
                assert status == 400, wanted
                assert answer["error"]["param"] == param, answer
                assert words in answer["error"]["message"], answer
                assert "\n" not in answer["error"]["message"]
        assert node.engine.requests == []


def checking_process() -> psutil.Process:
    """The child of this process that checks grammars."""
    [found] = [child for child in psutil.Process().children() if "grammar_process" in " ".join(child.cmdline())]
    return found


def cpu_s(parent: psutil.Process) -> float:
    """The CPU time of a process, of its forks, and of those that have ended."""
    ended = parent.cpu_times()
    alive = [one.cpu_times() for one in (parent, *parent.children())]
    return float(ended.children_user + ended.children_system + sum(one.user + one.system for one in alive))


@pytest.mark.long
async def test_hostile_grammars_are_served_or_refused() -> None:
    """Some of them end the fork that checks them; the next one has the vocabulary from its start on.

    A check takes 0.2 s of CPU at most: the kernel ends it. Five times as much leaves room for the reading of 64 KiB, a
    fork, and a processor that others share.
    """
    async with running(FakeEngine(says([5]))) as node:

        async def check_easy(at: int) -> int:
            """Have a grammar checked that no kept answer answers: then the start, of 0.3 s of CPU, has ended."""
            return (await ask(node, {"regex": f"a{{{at}}}"}))[0]

        assert await check_easy(1) == 200
        child = checking_process()
        for at, (name, (fields_of, is_refused)) in enumerate(HOSTILE.items(), start=2):
            wanted = fields_of(at)
            before_s = cpu_s(child)
            status, answer = await ask(node, wanted)
            assert cpu_s(child) - before_s < 5 * CPU_LIMIT_S, name
            assert status in {True: (400,), False: (200,), None: (200, 400)}[is_refused], (name, answer)
            assert await check_easy(at) == 200, name
        assert checking_process() == child, "no grammar ended the process that holds the vocabulary"


@pytest.mark.long
async def test_a_grammar_is_for_all_prompts_and_bounded() -> None:
    async with running(FakeEngine(says([5]))) as node:
        assert (await ask(node, {"regex": "ab"}, prompt=["a", "b", "c"], n=2))[0] == 200
        assert len({request.sampling.grammar for request in node.engine.requests}) == 1
        assert len(node.engine.requests) == 3
        for wanted, prompt in (("a" * (MAX_GRAMMAR_BYTES + 1), "a"), ("a" * 9000, ["a"] * 120)):
            status, answer = await ask(node, {"regex": wanted}, prompt=prompt)
            assert (status, answer["error"]["param"]) == (400, "regex")
            assert "bytes" in answer["error"]["message"]
        assert len(node.engine.requests) == 3


@pytest.mark.long
async def test_d_sends_its_grammar_to_p() -> None:
    """P checks it too: D is another node."""
    sampling = SamplingParams(max_tokens=9, grammar='start: "a"', n=2)
    assert decode_sampling(orjson.dumps(encode_sampling(sampling))) == sampling
    assert sampling.first_token_digest != SamplingParams(max_tokens=9, n=2).first_token_digest
    async with running(FakeEngine(says([5]))) as node:

        async def prefill(grammar: str) -> tuple[int, dict[str, Any]]:
            sent = msgspec.to_builtins(msgspec.structs.replace(sampling, grammar=grammar))
            return await ask(node, {"kv_transfer_params": {"do_remote_decode": True, "sampling": sent}})

        status, answer = await prefill(sampling.grammar)
        assert status == 200, answer
        assert node.engine.requests[-1].sampling.grammar == sampling.grammar
        assert node.engine.requests[-1].work is Work.PREFILL
        for wrong in ("start: (", "x" * (MAX_WRITTEN_CHARS + 1)):
            status, answer = await prefill(wrong)
            assert (status, answer["error"]["param"]) == (400, SAMPLING_PARAM)
        status, answer = await ask(node, {"regex": "b", "kv_transfer_params": {"do_remote_decode": True}})
        assert status == 200, "P-first: the client's own body"
        assert allows(node.engine.requests[-1].sampling.grammar, "b")


async def test_without_the_package_the_fields_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeEngine(says([5]))) as node:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for wanted in ({"regex": "a"}, {"response_format": {"type": "json_object"}}):
            status, answer = await ask(node, wanted)
            assert (status, answer["error"]["param"]) == (400, next(iter(wanted)))
            assert NO_PACKAGE in answer["error"]["message"]
        assert (await ask(node, {"response_format": {"type": "text"}}))[0] == 200


@pytest.mark.long
async def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    for text in (None, "{}"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        checks = GrammarChecks(tmp_path, 3072)
        with pytest.raises(InvalidRequest, match=r"^regex: this model's tokenizer\.json cannot be used for grammars"):
            await checks.grammar(GrammarSource("regex", "regex", "a"), 1)
        checks.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["byte level", "gemma", "gaps"])
async def test_a_model_with_more_or_fewer_rows_than_tokens_has_grammars(tmp_path: Path, kind: str) -> None:
    """The check needs an end, and must not take a row without a token for it."""
    TOKENIZERS[kind].save(str(tmp_path / "tokenizer.json"))
    num_tokens = max(TOKENIZERS[kind].get_vocab().values()) + 1
    for rows in (num_tokens + 267, num_tokens - 1):
        checks = GrammarChecks(tmp_path, rows)
        try:
            assert await checks.grammar(GrammarSource("choice", "choice", ["a,  b,    c"]), 1)
        finally:
            checks.close()
