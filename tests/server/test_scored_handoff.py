"""Log-probabilities of prompts beside tickets and offers: the node that answers computes the prompt itself."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_connectors.protocol.ticket import sign
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import KEY, running
from tests.server.scored_nodes import ASKED, CHAT, COMPLETIONS, PROMPT, alone, asked, computes, pair, rests, works
from tests.server.sse import post_events
from tests.server.test_decode_leg import make_offer
from tests.server.test_prefill_endpoint import FOREIGN, STREAM

pytestmark = pytest.mark.anyio


MESSAGES = [{"role": "user", "content": "Hello there."}]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 3}),
        (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 0, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": PROMPT, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}),
        (COMPLETIONS, ASKED),
        (COMPLETIONS, ASKED | {"n": 2}),
        (COMPLETIONS, ASKED | {"prompt": "Hello there, Où."}),
        (COMPLETIONS, ASKED | {"prompt": [7]}),
        (COMPLETIONS, ASKED | {"prompt": [PROMPT, PROMPT[3:], [7, 8]], "n": 2}),
        (COMPLETIONS, ASKED | {"n": 2, "use_beam_search": True, "logprobs": None, "echo": False, "stream": False}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 2, "max_tokens": 3}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1, "logprobs": True, "n": 2, "return_token_ids": True}),
    ],
)
async def test_a_node_with_an_offer_answers_as_one_without(path: str, body: dict[str, Any], stream: bool) -> None:
    body = {"stream": stream} | body
    expected = await alone(path, body)
    async with pair() as (p, d):
        found = await asked(d, path, body, p.url)
        await rests(d)
    if len(d.engine.requests) == 1:
        assert found == expected
    else:  # their chunks come in any order
        assert sorted(map(orjson.dumps, found)) == sorted(map(orjson.dumps, expected))
    assert works(p) == []
    num_top = max(body.get("prompt_logprobs") or 0, body["logprobs"] if body.get("echo") else 0)
    for request in d.engine.requests:
        assert (request.work, request.ticket) == (Work.GENERATE, None)
        assert request.outputs == PromptOutputs(logprobs=num_top)


@pytest.mark.parametrize("policy", ["any", "local", "remote", "fail"])
async def test_a_ticket_brings_no_log_probabilities(policy: str) -> None:
    """A foreign router's request for them is answered, also where only failed loads could lead to a local prefill."""
    async with pair(on_load_failure=policy) as (p, d):
        ticket = sign(KEY, p.engine.make_ticket(PROMPT))
        params = {"do_remote_prefill": True, "ticket": ticket, "offer": make_offer(p.url)}
        assert await asked(d, COMPLETIONS, ASKED | {"kv_transfer_params": params}) == await alone(COMPLETIONS, ASKED)
        assert (works(p), works(d)) == ([], [Work.GENERATE])


async def test_prefill_legs_compute_no_log_probabilities() -> None:
    """Foreign routers send the client's fields to both nodes, and a decode node of an older release asks for them."""
    async with running(FakeEngine(computes)) as p:
        body: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}
        for headers, more in (({}, {}), (STREAM, {}), (STREAM, {"prompt_logprobs": 2})):
            body["kv_transfer_params"] = FOREIGN | more
            async with p.session.post(p.url + COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200
        assert [request.outputs for request in p.engine.requests] == [None] * 3
        body["kv_transfer_params"] = FOREIGN
        events = await post_events(p.session, p.url + COMPLETIONS, body, STREAM)
        assert [name for name, _ in events] == ["ticket", "done"]
