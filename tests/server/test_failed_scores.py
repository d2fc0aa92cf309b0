"""Log-probabilities of prompts beside nodes that fail: which node is asked, what is counted, what is computed once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from pd_cluster.protocol.messages import NeedsPrefill, PrefillLocally, PromptLogprobs, TicketOpened, Work
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import running
from tests.server.merged_nodes import (
    ASKED,
    COMPLETIONS,
    PROMPT,
    SAID,
    STEP_TOKENS,
    alone,
    asked,
    computes,
    entries_of,
    pair,
    rests,
    says_all,
    works,
)
from tests.server.test_decode_leg import decode_node, fallbacks, make_offer
from tests.server.test_silent_peers import raw_node, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.live_server import Node

pytestmark = pytest.mark.anyio


def handoffs(node: Node, prefill: str) -> float:
    return node.metric(f'pd_handoffs_total{{prefill="{prefill}"}}')


async def asked_in_vain(d: Node, url: str) -> tuple[int, str]:
    """The status and the code of a refusal."""
    body = ASKED | {"kv_transfer_params": {"do_remote_prefill": True, "offer": make_offer(url)}}
    async with asyncio.timeout(WAIT_S), d.session.post(d.url + COMPLETIONS, json=body) as response:
        return response.status, (await response.json())["error"]["code"]


# D cannot compute


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("frozen", "it stands still", "engine_frozen"), ("is_alive", False, "engine_unavailable")],
)
async def test_a_node_without_an_engine_asks_no_prefill_node(
    name: str, value: object, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops while the request is checked and tokenized."""
    async with pair() as (p, d):
        # the last thing that is made of a request before its prompts are admitted
        stops = AsyncMock(side_effect=lambda *_: setattr(d.engine, name, value))
        monkeypatch.setattr("pd_cluster.server.endpoints._shape", stops)
        assert await asked_in_vain(d, p.url) == (503, code)
        assert p.engine.requests == []
        await rests(d)


# P dies behind the KV


@pytest.fixture
async def dying_url() -> AsyncIterator[str]:
    """Of a P that says half of the log-probabilities and is gone, while another process serves its /health."""
    engine = FakeEngine(computes, engine_id="engine-of-p")
    async with running(engine, node_id="p") as p:

        async def dies(request: web.Request) -> web.StreamResponse:
            if request.path == "/health":
                return web.json_response({"status": "starting"})
            headers = {"x-pd-ticket": "stream"}
            async with p.session.post(p.url + request.path, data=await request.read(), headers=headers) as one:
                events = (await one.read()).split(b"\n\n")
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"\n\n".join([*events[:2], b""]))
            return response

        runner = await raw_node(dies)
        yield url_of(runner)
        await runner.cleanup()


@pytest.mark.long
@pytest.mark.usefixtures("small_events")
async def test_a_node_that_dies_behind_its_kv_has_died(dying_url: str) -> None:
    async with decode_node(computes, min_remote_tokens=1) as d:
        assert await asked(d, COMPLETIONS, ASKED, dying_url) == await alone(COMPLETIONS, ASKED)
        assert (fallbacks(d, "peer_died"), fallbacks(d, "no_prompt_logprobs")) == (1, 1)
        assert (handoffs(d, "remote"), handoffs(d, "local")) == (1, 0), "D read the prompt again, and loaded its KV"


@pytest.mark.usefixtures("small_events")
async def test_a_request_that_kills_nodes_behind_their_kv_is_not_read_here(dying_url: str) -> None:
    async with decode_node(computes, min_remote_tokens=1, max_node_deaths=1) as d:
        assert await asked_in_vain(d, dying_url) == (500, "nodes_died")
        assert works(d) == [Work.TAKE_OVER]
        assert (fallbacks(d, "peer_died"), fallbacks(d, "nodes_died")) == (1, 1)
        await rests(d)


# D computes the prompt


async def test_a_prompt_that_no_node_takes_is_a_local_handoff() -> None:
    async with pair() as (p, d):
        await asked(d, COMPLETIONS, ASKED, "http://127.0.0.1:9")
        assert (handoffs(d, "local"), handoffs(d, "remote")) == (1, 0)
        await asked(d, COMPLETIONS, ASKED, p.url)
        assert (handoffs(d, "local"), handoffs(d, "remote")) == (1, 1)


async def opens_only(line: Line) -> None:
    """P opens a lease, tells the scores of a step, and computes no more."""
    line.push(TicketOpened(line.request.request_id, line.ticket()))
    half = entries_of(line.request.prompt_token_ids, 2)[:STEP_TOKENS]
    line.push(PromptLogprobs(line.request.request_id, 1, half))


@pytest.mark.long
async def test_a_load_that_fails_late_costs_one_computation() -> None:
    """The engine is told what is asked about the prompt that it has to compute."""
    loses = partial(computes, failures=["lease_ended: p says so"])
    async with pair(opens_only, loses) as (p, d):
        assert await asked(d, COMPLETIONS, ASKED, p.url) == await alone(COMPLETIONS, ASKED)
        [answer] = [message for message in d.engine.sent if isinstance(message, PrefillLocally)]
        assert answer.outputs == PromptOutputs(logprobs=2)
        assert works(d) == [Work.TAKE_OVER]
        assert (fallbacks(d, "lease_ended"), fallbacks(d, "no_prompt_logprobs")) == (1, 0)
        assert (handoffs(d, "local"), handoffs(d, "remote")) == (1, 0)


@pytest.mark.long
async def test_a_load_that_fails_behind_the_first_token_is_read_again() -> None:
    """The engine has told the token, and answers no question about the prompt any more."""

    async def loses(line: Line) -> None:
        if line.request.work is Work.READ:
            await computes(line)
            return
        line.tokens(SAID[:1])
        line.push(NeedsPrefill(line.request.request_id, 0, "lease_ended: p says so"))
        assert isinstance(await line.heard(), PrefillLocally)
        says_all(line, SAID[1:])

    async with pair(opens_only, loses) as (p, d):
        assert await asked(d, COMPLETIONS, ASKED, p.url) == await alone(COMPLETIONS, ASKED)
        assert works(d) == [Work.TAKE_OVER, Work.READ]
        assert len(d.engine.requests[1].prompt_token_ids) == len(PROMPT)


@pytest.mark.long
async def test_nothing_is_asked_about_a_prompt_without_scores() -> None:
    loses = partial(computes, failures=["", "lease_ended: p says so"])
    async with pair(opens_only, loses) as (p, d):
        body = {"prompt": PROMPT, "max_tokens": 3}
        assert await asked(d, COMPLETIONS, body, p.url) == await alone(COMPLETIONS, body)
        [answer] = [message for message in d.engine.sent if isinstance(message, PrefillLocally)]
        assert answer.outputs is None
