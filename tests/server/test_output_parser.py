"""A third party's output parser behind the API, and streams that continue where another node stopped."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.config import ModelConfig, NodeConfig, ServerConfig
from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.params.sampling import TextOptions
from pd_cluster.server.requests.answer_extras import AnswerExtras
from pd_cluster.server.requests.choice import Choice, ChoiceOutput
from pd_cluster.server.requests.generation_request import GenerationRequest
from pd_cluster.server.shapes.chat import ChatShape
from pd_cluster.server.shapes.completions import CompletionShape
from pd_cluster.server.state import NodeState
from pd_cluster.server.tools.output_parser import ParserContext, Part, Reasoning, ToolCall, load_parser
from pd_connectors.protocol.messages import SampledToken
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import MODEL_DIR, running
from tests.server.sse import parse_events
from tests.server.test_detokenizer import Bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.requests.response_shape import ResponseShape

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARSER = f"{__name__}:BracketParser"


class BracketParser:
    """[reasoning], {name:arguments}, and content outside of brackets, which ends with "!"."""

    reads_special_tokens = True

    def __init__(self, context: ParserContext) -> None:
        self._inside, self._name, self._num_calls = "", "", 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        return [part for char in text for part in self._read(char)]

    def flush(self) -> list[Part]:
        return ["!"]

    def _read(self, char: str) -> list[Part]:
        index = self._num_calls - 1
        if char in "[]{}":
            self._inside, self._name = char, ""
            self._num_calls += char == "{"
        elif self._inside == "{" and char == ":":
            self._inside = ":"
            return [ToolCall(index, id=f"call_{index}", name=self._name)]
        elif self._inside == "{":
            self._name += char
        else:
            return [Reasoning(char) if self._inside == "[" else ToolCall(index, char) if self._inside == ":" else char]
        return []


@pytest.mark.long
@pytest.mark.anyio
async def test_a_parser_of_a_third_party_shapes_chat_answers_and_no_others() -> None:
    async with running(FakeEngine(says([]))) as node:
        node.state.output_parser = load_parser(PARSER)
        text = "[why]so{f:1}{g:ab}"
        ids = await node.state.tokenizer.encode(text, max_tokens=4096)
        node.engine.script = says(ids, FinishReason.STOP)
        async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(model="demo", messages=HI)
            async with client.chat.completions.stream(model="demo", messages=HI) as stream:
                streamed = await stream.get_final_completion()
            plain = await client.completions.create(model="demo", prompt="hi")
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == (text, "stop")
    for choice in (whole.choices[0], streamed.choices[0]):
        message = choice.message.to_dict()
        assert (message["content"], message["reasoning_content"], choice.finish_reason) == ("so!", "why", "tool_calls")
        calls: Any = message["tool_calls"]
        shown = [(one["id"], one["type"], one["function"]["name"], one["function"]["arguments"]) for one in calls]
        assert shown == [("call_0", "function", "f", "1"), ("call_1", "function", "g", "ab")]


def test_a_tool_call_is_streamed_in_pieces_with_its_name_once() -> None:
    shape = ChatShape(AnswerExtras(request_id="id", model="demo", vocabulary=WORDS, created=0))
    pieces = [[ToolCall(0, id="a", name="f")], [ToolCall(0, '{"x"'), ToolCall(0, ":1}"), ToolCall(1, id="b", name="g")]]
    chunks = [shape.chunk(0, ChoiceOutput(0, list(parts))) for parts in pieces]
    end = shape.chunk(0, ChoiceOutput(0, finish_reason=FinishReason.LENGTH))
    deltas = [data["choices"][0]["delta"] for chunk in chunks for _, data in parse_events(chunk.decode())]
    first = {"type": "function", "function": {"arguments": "", "name": "f"}}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "a"} | first]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '{"x":1}'}},
                {"index": 1, "id": "b", "type": "function", "function": {"arguments": "", "name": "g"}},
            ]
        },
    ]
    assert b'"finish_reason":"length"' in end, "a call that was cut off is no call"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("hermes", "expected package.module:Class"),
        ("nowhere:Class", "nowhere"),
        (f"{__name__}:Absent", "Absent"),
        (f"{__name__}:FakeEngine", "lacks reads_special_tokens, push, flush"),
    ],
)
def test_a_parser_that_cannot_be_used_stops_the_start(path: str, reason: str) -> None:
    config = NodeConfig(model=ModelConfig(model=str(MODEL_DIR)), server=ServerConfig(output_parser=path))
    with pytest.raises(StartupError, match=f"--output-parser {path}.*{reason}"):
        NodeState.load(config, FakeEngine(says([])))


PIECES = [*(char.encode() for char in "ab[]{}:"), *(bytes([byte]) for byte in "é".encode()), "🙂".encode()[:3], b"<s>"]
WORDS = Bytes(PIECES, special=frozenset({len(PIECES) - 1}))


@pytest.mark.long
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=24),
    split=st.integers(0, 24),
    stops=st.lists(st.text("ab[é", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 9),
    chat=st.booleans(),
    parser=st.sampled_from([None, BracketParser]),
)
def test_a_stream_that_is_replayed_continues_as_if_it_had_not_been_cut(
    ids: list[int], split: int, stops: list[str], min_tokens: int, chat: bool, parser: type[BracketParser] | None
) -> None:
    """Held characters, halves of characters, stop strings, the role, offsets of logprobs and open tool calls."""
    text = TextOptions(tuple(stops), parser=parser)
    sampling = SamplingParams(max_tokens=100, min_tokens=min_tokens, logprobs=0)
    request = GenerationRequest("engine", "client", [1], sampling, text)
    kind = ChatShape if chat else CompletionShape
    shape = kind(AnswerExtras(request_id="id", model="demo", vocabulary=WORDS, created=0, with_logprobs=True))
    other_shape = copy.deepcopy(shape)  # the same time of creation
    choice, other = Choice(0, request, WORDS), Choice(0, request, WORDS)

    def shown(by: Choice, through: ResponseShape, token_id: int, *, is_last: bool) -> bytes:
        finish = FinishReason.LENGTH if is_last else None
        return through.chunk(0, by.extend(SequenceTokens(0, (SampledToken(token_id, -0.5),), finish)))

    head, tail = ids[: split % len(ids)], ids[split % len(ids) :]
    for token_id in head:
        shown(choice, shape, token_id, is_last=False)
        if choice.finished:
            return
    if head:
        other_shape.chunk(0, other.replay(head))
    for position, token_id in enumerate(tail, 1):
        is_last = position == len(tail)
        expected = shown(choice, shape, token_id, is_last=is_last)
        assert shown(other, other_shape, token_id, is_last=is_last) == expected
        assert (other.finished, other.num_tokens) == (choice.finished, choice.num_tokens)
        if choice.finished:
            return
