"""Requests with answers that are cut, and two nodes over scripted engines that give the same answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pd_cluster
from pd_cluster.config import ModelConfig, NodeConfig, ServerConfig
from pd_cluster.protocol.messages import (
    Abort,
    FinishReason,
    PromptLogprobs,
    SequenceTokens,
    Timeline,
    TokensOut,
)
from pd_cluster.protocol.prompt_outputs import PromptToken
from pd_cluster.server.app import create_app
from pd_cluster.server.state import NodeState
from pd_http.dialects import MESSAGES, RESPONSES
from tests.cut_streams import CHAT, COMPLETIONS, Case, asking
from tests.server import shared_routes
from tests.server.fake_engine import FakeEngine, Line, Script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

shared_routes.share()

PACKAGE = Path(pd_cluster.__file__).parent
IM_END = 2
FIRST_CACHED, SECOND_CACHED = 2, 1  # prompt tokens: usage says what the first node had cached
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USAGE = {"include_usage": True}


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def chat(name: str, *texts: str, end: bool = True, **more: Any) -> tuple[Case, tuple[str, ...], bool]:
    """The texts are those of the choices; `end`: they end with EOS, else by their length."""
    body = {"messages": ASKED, "stream": True, "n": len(texts), "stream_options": USAGE} | more
    return Case(name, CHAT, body), texts, end


def completion(name: str, *texts: str, end: bool = True, **more: Any) -> tuple[Case, tuple[str, ...], bool]:
    body = {"prompt": "Où", "max_tokens": 200, "stream": True, "n": len(texts), "stream_options": USAGE} | more
    return Case(name, COMPLETIONS, body), texts, end


def message(name: str, text: str, *, end: bool = True, **more: Any) -> tuple[Case, tuple[str, ...], bool]:
    tool = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    body = {"messages": ASKED, "stream": True, "max_tokens": 200, "tools": [tool]} | more
    return Case(name, MESSAGES, body), (text,), end


def response(name: str, text: str, *, end: bool = True, **more: Any) -> tuple[Case, tuple[str, ...], bool]:
    tool = {"type": "function", **TOOL["function"]}
    body = {"input": ASKED, "stream": True, "max_output_tokens": 200, "tools": [tool]} | more
    return Case(name, RESPONSES, body), (text,), end


# Tools that the answer gives back in another form than a function's
GROUPED = [
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "mcp__s", "tools": [{"type": "function", "name": "look"}]},
]
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "é\\n🙂 end"}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "mcp__s__look", "arguments": {"at": "x"}}\n</tool_call>'
LONG, SHORT = "Où est 🙂? Hello there, über.", "Naïve."
PREDICTED = "Où est 🙂! Hello there, über. Naïve."
SCRIPTED = [
    chat("usage in every chunk", LONG, SHORT, stream_options=USAGE | {"continuous_usage_stats": True}),
    chat("half a character at the end", "🙂🙂", "é", end=False),
    chat("stop strings", LONG, "Hello, there", LONG + " the", stop=["there, ", "zz", "the!"]),
    chat("a stop string that is shown", LONG, stop="there", include_stop_str_in_output=True, min_tokens=9),
    chat("logprobs", LONG, SHORT, logprobs=True, top_logprobs=2, return_token_ids=True),
    chat("calls", f"I see. {call('Paris')}\n{call('Oslo')}", call("Lima"), tools=[TOOL]),
    chat("a call that is cut off", call("Paris")[:-30], call("Oslo") + "!", end=False, tools=[TOOL]),
    chat("text like a call", "<tool_call>none</tool_call> so", tools=[TOOL]),
    chat("reasoning", "<think>why so</think>because", "<think>é</think>\n\n🙂", tools=[TOOL]),
    chat("reasoning that is dropped", "<think>why so</think>because", include_reasoning=False),
    chat("a prediction", LONG, f"{SHORT} {LONG}", prediction={"type": "content", "content": PREDICTED}),
    completion("text", LONG, SHORT, echo=True, return_token_ids=True),
    completion("logprobs of completions", LONG, SHORT, logprobs=2, stop=["über!"]),
    completion("logprobs of the prompt", LONG, SHORT, prompt_logprobs=1, echo=True, logprobs=1),
    completion("no usage", LONG, end=False, stream_options=None),
    message("a message with calls", f"<think>why so</think>I see. {call('Paris')}\n{call('Oslo')}"),
    message("a message with a stop sequence", LONG, stop_sequences=["there, "]),
    message("a message that is cut off", call("Paris")[:-30], end=False),
    response("a response with calls of other forms", f"Go. {PATCH}\n{LOOK}", tools=GROUPED),
    response("a call of a tool of text that is cut off", PATCH[:-25], end=False, tools=GROUPED),
    response("a response with calls", f"<think>why so</think>I see. {call('Paris')}\n{call('Oslo')}"),
    response("a response that is cut off", LONG, end=False),
]

# Three prompts of which each has two choices, and ends before the next one does
PROMPTS = [[200, 201], [202, 203, 204], [205, 206, 207, 208]]
SEVERAL = completion(
    "several prompts", "é", "🙂!", LONG[:9], SHORT, LONG, LONG + " the",
    prompt=PROMPTS, n=2, echo=True, return_token_ids=True, stop=["there, "],
)  # fmt: skip


def tool_state(engine: Any, node_id: str, model: str = "tool_model", tool_format: str = "auto") -> NodeState:
    config = NodeConfig(
        model=ModelConfig(model=str(PACKAGE / model), served_model_name=("m",)),
        server=ServerConfig(node_id=node_id, tool_format=tool_format),
    )
    return _loaded(model, config, engine)


@cache
def _first_state(model: str, config: NodeConfig) -> NodeState:
    return NodeState.load(config, FakeEngine(says_nothing))


def _loaded(model: str, config: NodeConfig, engine: Any) -> NodeState:
    """The files of a model are read once."""
    base = _first_state(model, replace(config, server=ServerConfig(tool_format=config.server.tool_format)))
    return NodeState(
        config=config,
        engine=engine,
        tokenizer=base.tokenizer,
        key=base.key,
        defaults=base.defaults,
        output_parser=base.output_parser,
        tool_format=base.tool_format,
    )


async def says_nothing(line: Line) -> None:
    raise AssertionError("the engine is not needed")


def answering(
    answers: Sequence[Sequence[int]], *, end: bool, num_cached: int, num_tokens: Callable[[], int] = lambda: 1
) -> Script:
    """Sequence k says `answers[k]`, one token a step, after what it is known to have said. One message a step.

    `num_tokens`: how many a sequence says in its next step, at most, where that is not one.

    The sequences of PROMPTS[i] are those from 2i on.
    """

    async def script(line: Line) -> None:
        request = line.request
        if request.outputs is not None:
            entries = tuple(PromptToken(token_id, -0.5, 1) for token_id in request.prompt_token_ids[1:])
            line.push(PromptLogprobs(request.request_id, 1, entries))
        numbers: Sequence[int] = request.sequence_numbers or range(request.sampling.n)
        if request.prompt_token_ids in PROMPTS:
            numbers = [2 * PROMPTS.index(request.prompt_token_ids) + number for number in numbers]
        known = request.known or ((),) * len(numbers)
        left = {i: list(answers[number])[len(known[i]) :] for i, number in enumerate(numbers)}
        for i, number in enumerate(numbers):
            assert tuple(answers[number][: len(known[i])]) == known[i]
        stopped: set[int] = set()
        while left:
            said = []
            for i in list(left):
                if i in stopped:
                    said.append(SequenceTokens(i, (), FinishReason.STOP))
                    del left[i]
                    continue
                tokens = tuple(line.engine.sampled(one, request) for one in left[i][: num_tokens()])
                del left[i][: len(tokens)]
                finish = None if left[i] else FinishReason.STOP if end else FinishReason.LENGTH
                said.append(SequenceTokens(i, tokens, finish, IM_END if finish is FinishReason.STOP else None))
                if finish is not None:
                    del left[i]
            timeline = None if left else Timeline(queue_s=0.001)
            line.push(TokensOut(request.request_id, tuple(said), not left, num_cached, timeline=timeline))
            await line.taken()
            while not line.from_api.empty():
                message = line.from_api.get_nowait()
                if isinstance(message, Abort):
                    assert message.index is not None
                    stopped.add(message.index)

    return script


class Pair:
    """Two nodes over scripted engines that give the same answers."""

    def __init__(
        self, texts: Sequence[str], *, end: bool, num_tokens: Callable[[], int] = lambda: 1, tool_format: str = "auto"
    ) -> None:
        """`num_tokens`: see `answering`."""
        tokenizer = tool_state(FakeEngine(says_nothing), "tokenizer").tokenizer
        answers = [[*tokenizer._encode(text, False), *([IM_END] if end else [])] for text in texts]
        if not end:
            answers = [ids[:-1] if text.endswith("🙂") else ids for text, ids in zip(texts, answers, strict=True)]
        self.engines = [
            FakeEngine(answering(answers, end=end, num_cached=num, num_tokens=num_tokens))
            for num in (FIRST_CACHED, SECOND_CACHED)
        ]
        states = [tool_state(engine, f"node{i}", tool_format=tool_format) for i, engine in enumerate(self.engines)]
        self.apps = [create_app(state) for state in states]
        self.first, self.second = (asking(app) for app in self.apps)

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for engine in self.engines:
            await engine.close()
