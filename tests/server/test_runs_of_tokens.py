"""Answers of which a step tells several tokens: they are those of single tokens, in fewer events."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.messages import FinishReason, SequenceTokens, TokensOut
from pd_http.node_report import REPORT_HEADER, decode_report
from tests.cut_streams import CHAT, COMPLETIONS, Case, check_cuts, data_of, same_bytes
from tests.http.answer import PROMPT, post
from tests.server.cut_nodes import IM_END, LONG, SCRIPTED, Pair, chat, completion
from tests.server.fake_engine import FakeEngine, Line
from tests.server.live_server import running
from tests.server.sse import post_events

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

CASES = [
    *SCRIPTED,
    chat("a stop string that a run begins, and one that it has whole", LONG, "Hello there", stop=["llo", "er"]),
    completion("a stop string after which the run ends the answer", "Naïve.", "Naïve. So.", stop=["."], logprobs=2),
    completion("least tokens", LONG, "there there there", stop=["there"], min_tokens=9, echo=True, logprobs=1),
]


@pytest.fixture(autouse=True)
def _at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers say when they were created."""
    monkeypatch.setattr("time.time", lambda: 1.8e9)


def drawn(seed: int) -> Callable[[], int]:
    draw = random.Random(seed)
    return lambda: draw.choice((1, 2, 3, 9))


def told(data: bytes) -> list[Any]:
    """What a stream's events tell, wherever one ends and the next begins."""
    merged: dict[str, Any] = {}
    others: list[Any] = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        text = block.splitlines()[-1].removeprefix("data: ")
        if text == "[DONE]":
            others.append(text)
            continue
        event = json.loads(text)
        for name in ("sequence_number", "obfuscation"):
            event.pop(name, None)
        if event.get("type") == "message_start":
            event["message"].pop("usage")  # of its first tokens
        if choices := event.pop("choices", ()):
            event.pop("usage", None)  # of every chunk; the last one has no choices
        for choice in choices:
            _merge(merged, f"choice {choice.pop('index')}", choice)
        if "delta" in event and event["type"] != "message_delta":
            _merge(merged, str((event["type"], event.get("index"), event.get("output_index"))), event["delta"])
        else:
            others += [event] if event not in others else []
    return [merged, others]


def _merge(merged: dict[str, Any], place: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _merge(merged, f"{place}.{name}", inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "index" in value[0]:
        for one in value:
            _merge(merged, f"{place}.{one['index']}", one)
    elif isinstance(value, list):
        merged[place] = merged.get(place, []) + value
    elif isinstance(value, str):
        merged[place] = merged.get(place, "") + value
    elif value is not None:
        merged[place] = value


def test_what_a_stream_tells_does_not_depend_on_its_events() -> None:
    def events(*values: Any) -> bytes:
        return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)

    def say(text: str) -> Any:
        return {"id": "a", "choices": [{"index": 0, "text": text, "logprobs": {"tokens": list(text)}}]}

    assert told(events(say("ab"))) == told(events(say("a"), say("b")))
    assert told(events(say("ab"))) != told(events(say("b"), say("a")))


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(one, id=one[0].name) for one in CASES])
async def test_runs_tell_the_answer_of_single_tokens(case: tuple[Case, tuple[str, ...], bool]) -> None:
    ask, texts, end = case
    async with Pair(texts, end=end) as pair:
        single = await pair.first(ask.path, ask.body)
        wanted = told(data_of(single))
    for seed in range(2):
        async with Pair(texts, end=end, num_tokens=drawn(seed)) as pair:
            messages = await pair.first(ask.path, ask.body)
        assert len(messages) < len(single)
        assert told(data_of(messages)) == wanted, seed


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(one, id=one[0].name) for one in CASES])
async def test_an_answer_in_runs_that_is_cut_goes_on(case: tuple[Case, tuple[str, ...], bool]) -> None:
    """Each run of the node that goes on is as long as the first node's: the bytes are the same."""
    ask, texts, end = case
    async with Pair(texts, end=end, num_tokens=lambda: 3) as pair:
        assert await check_cuts(ask, pair.first, pair.second, same=same_bytes) > 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_run_is_one_event_with_the_log_probabilities_of_each_token(path: str) -> None:
    runs = ((100,), (101, 102, 103), (104, IM_END))

    async def script(line: Line) -> None:
        for run in runs:
            ends = run is runs[-1]
            sampled = tuple(line.engine.sampled(one, line.request) for one in run)
            finish, stop = (FinishReason.STOP, IM_END) if ends else (None, None)
            line.push(TokensOut(line.request.request_id, (SequenceTokens(0, sampled, finish, stop),), ends))
            await line.taken()

    prompt: dict[str, Any] = {"prompt": "a", "logprobs": 2}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    body = prompt | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with running(FakeEngine(script)) as node:
        events = await post_events(node.session, f"{node.url}{path}", body)
    choices = [choice for _, data in events if data != "[DONE]" for choice in data["choices"]]
    shown = [choice for choice in choices if choice.get("token_ids")]
    assert [tuple(choice["token_ids"]) for choice in shown] == list(runs)
    for run, choice in zip(runs, shown, strict=True):
        logprobs = choice["logprobs"]
        each = logprobs["content"] if path == CHAT else logprobs["top_logprobs"]
        assert len(each) == len(run)
        assert all(len(one["top_logprobs"] if path == CHAT else one) >= 2 for one in each)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert events[-2][1]["usage"]["completion_tokens"] == sum(map(len, runs))


async def test_the_router_is_told_what_was_drafted_of_all_prompts() -> None:
    async def script(line: Line) -> None:
        for told, ends in ((9, False), (30, True)):
            sampled = (line.engine.sampled(100, line.request),)
            new = SequenceTokens(0, sampled, FinishReason.LENGTH if ends else None)
            line.push(TokensOut(line.request.request_id, (new,), ends, num_drafts=told, num_accepted_drafts=told // 3))

    async with running(FakeEngine(script)) as node:
        answer = await post(node, COMPLETIONS, PROMPT | {"prompt": ["a", "b"]}, headers={REPORT_HEADER: "1"})
        report = decode_report(answer.headers[REPORT_HEADER].encode())
    assert report is not None
    assert (report.num_output_tokens, report.num_drafts, report.num_accepted_drafts) == (4, 60, 20)
