"""What a node tells of a request's tokens counts as far as the request's body allows it."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pd_connectors.protocol.stream_codec import encode_message
from pd_http.dialects import dialect_of
from pd_http.frames import FRAMES_TYPE, ChoiceProgress, Frame, StreamEnd
from pd_http.node_report import REPORT_HEADER, NodeReport, encode_report
from pd_router.calls.body import RequestBody
from tests.router.fake_nodes import FakeNode, running
from tests.router.framed_streams import HEAD, VERSION
from tests.router.router_process import serving
from tests.router.test_admission import BODY, SECRETS, keys, line, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.fake_nodes import Script, Seen

__all__ = ["keys"]
HUGE = 1 << 62
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "fields", "most_length", "most"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5}, inf, 5),
        (COMPLETIONS, {"prompt": "a, b", "max_tokens": 5, "n": 3}, inf, 15),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 5, "n": 3}, inf, 30),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 5}, inf, 15),  # commas: no less than the prompts
        (COMPLETIONS, {"prompt": "a"}, 4096, 4096),
        (COMPLETIONS, {"prompt": "a", "n": 2}, 4096, 8192),
        (COMPLETIONS, {"prompt": "a"}, inf, HUGE),
        # What engines read differently, or the router does not read, is no bound
        (CHAT, {"messages": [{}, {}], "max_tokens": 5, "max_completion_tokens": 7}, inf, 7),
        (CHAT, {"messages": [], "max_completion_tokens": 7}, inf, 7),
        (CHAT, {"messages": [], "max_output_tokens": 1}, inf, HUGE),
        (CHAT, {"messages": [], "max_tokens": 5.0}, inf, HUGE),
        (CHAT, {"messages": [], "max_tokens": None, "max_completion_tokens": 7}, inf, 7),
        (CHAT, {"messages": [], "max_tokens": 5, "n": 2.0}, inf, 5 * 128),
        (CHAT, {"messages": [], "max_tokens": 5, "n": None}, inf, 5),
        (CHAT, {"messages": [], "max_tokens": 5, "n": -4}, inf, 5),
        (CHAT, {"messages": [], "max_tokens": -5}, inf, HUGE),
        (CHAT, {"messages": [], "max_tokens": 5, "n": 1, "best_of": 4}, inf, 20),
        (MESSAGES, {"messages": [], "max_tokens": 5}, inf, 5),
        (RESPONSES, {"input": ["a", "b"], "max_output_tokens": 5, "max_tokens": 1}, inf, 5),
        (RESPONSES, {"input": [], "max_completion_tokens": 1}, inf, HUGE),
    ],
)
def test_answers_have_the_tokens_that_the_body_allows(
    path: str, fields: dict[str, Any], most_length: float, most: int
) -> None:
    body = RequestBody(json.dumps(fields).encode(), dialect_of(path))
    assert body.allowed((0, HUGE), most_length) == (0, most)
    assert body.allowed((0, most), most_length) == (0, most)
    assert body.allowed((-HUGE, -1), most_length) == (0, 0)


def test_prompts_have_the_tokens_that_the_body_has_bytes_for() -> None:
    one = RequestBody(b'{"prompt": "a"}')
    assert one.allowed((HUGE, 0), inf) == (15 + 4096, 0)
    assert one.allowed((HUGE, 0), 100) == (100, 0)
    ranked = RequestBody(b'{"query": "a", "documents": ["b", "c"]}')  # the query counts with each document
    assert ranked.allowed((HUGE, 0), 100) == (200, 0)
    assert ranked.allowed((150, 0), 100) == (150, 0)


async def whole(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"usage": {"prompt_tokens": -HUGE, "completion_tokens": HUGE}})


async def reported(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    report = encode_report(NodeReport("demo", HUGE, -5, HUGE)).decode()
    return web.json_response({}, headers={REPORT_HEADER: report})


async def framed(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    end = StreamEnd(b"data: [DONE]\n\n", NodeReport("demo", -1, HUGE, HUGE))
    messages = (HEAD, Frame((ChoiceProgress(0, (1,), 1, "stop"),), b"data: a\n\n"), end)
    return web.Response(
        body=b"".join(map(encode_message, messages)), headers={"content-type": FRAMES_TYPE, "x-pd-decode": "d0"}
    )


@pytest.mark.anyio
@pytest.mark.parametrize("script", [whole, reported, framed])
async def test_a_false_report_is_counted_and_costs_what_is_possible(
    keys: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    write(keys, line("one", tokens_per_minute=60_000))
    node = FakeNode("decode", script, node_id="d0")
    node.stream_version = VERSION
    body = BODY | {"max_tokens": 100, "stream": script is framed}
    headers = {"authorization": f"Bearer {SECRETS['one']}"}
    async with running(node), serving(decode=[node], api_keys=str(keys)) as router:
        for _ in range(5):
            async with router.session.post(router.url + COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200
                await response.read()
        await router.idle()
        assert router.count("pd_router_reports_clamped_total", node="d0") == 5
        assert caplog.text.count("d0 tells") == 5
        if script is not whole:
            assert router.count("pd_router_generation_tokens_total", model="demo") == 500
            assert 0 <= router.count("pd_router_cached_tokens_total", model="demo") <= 5 * 4200
        assert router.services.table.answers.expected("demo") == 256, "each was cut by its client's limit"
        assert router.services.admission is not None
        limits = router.services.admission._limits["one"]
        assert limits.running == 0
        assert 500 <= limits._used_tokens <= 5 * 4300
