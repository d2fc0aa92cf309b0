"""Nodes over scripted engines that tell the log-probabilities of prompts, and the answer of one such node."""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.protocol.messages import (
    FinishReason,
    PromptLogprobs,
    PromptRead,
    TicketOpened,
    Work,
)
from pd_cluster.protocol.prompt_outputs import PromptToken
from pd_connectors.protocol.messages import TopLogprob
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import running
from tests.server.sse import parse_events
from tests.server.test_decode_leg import decode_node, make_offer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.server.live_server import Node


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [300 + i for i in range(12)]
STEP_TOKENS = 5  # of a prompt in a step: three steps
SAID = [5, 6, 7]
ASKED: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 2, "echo": True, "logprobs": 1, "max_tokens": 3}


def entries_of(prompt: Sequence[int], num_top: int) -> tuple[PromptToken, ...]:
    """The entry of each position but 0. One alternative of a position has no chance at all."""
    return tuple(
        PromptToken(
            token_id, -position / 7, position, tuple(TopLogprob(j + 3, -j / 3 if j else -inf) for j in range(num_top))
        )
        for position, token_id in enumerate(prompt[1:], 1)
    )


def tell(line: Line) -> None:
    """What the engine tells about the prompt, step by step, if it is asked."""
    request = line.request
    if request.outputs is None or request.outputs.logprobs is None:
        return
    entries = entries_of(request.prompt_token_ids, request.outputs.logprobs)
    for first in range(0, len(entries), STEP_TOKENS):
        line.push(PromptLogprobs(request.request_id, 1 + first, entries[first : first + STEP_TOKENS]))


async def computes(line: Line) -> None:
    """An engine that computes the prompt itself: then the n sequences say SAID."""
    request = line.request
    if request.work is Work.PREFILL:
        line.push(TicketOpened(request.request_id, line.ticket()))
    tell(line)
    if request.work is Work.READ:
        line.push(PromptRead(request.request_id))
        return
    says_all(line, SAID[:1] if request.work is Work.PREFILL else SAID)


def says_all(line: Line, ids: Sequence[int]) -> None:
    """The sequences say these, one token a message, and end."""
    sampling = line.request.sampling
    n = sampling.num_first_tokens if line.request.work is Work.PREFILL else sampling.n
    for token_id in ids:
        for index in range(n):
            ends = token_id == ids[-1]
            last = ends and index == n - 1
            line.tokens([token_id], index=index, finish=FinishReason.LENGTH if ends else None, finished=last)


@contextlib.asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[Node, Node]]:
    """P and D."""
    engine = FakeEngine(computes, engine_id="engine-of-p")
    async with running(engine, node_id="p") as p, decode_node(computes, min_remote_tokens=1, **settings) as d:
        yield p, d


async def asked(node: Node, path: str, body: dict[str, Any], *urls: str) -> Any:
    """The answer without what is of one answer only; of a stream its chunks. `urls`: of the offer."""
    body = body | {"request_id": "same"}
    if urls:
        body["kv_transfer_params"] = {"do_remote_prefill": True, "offer": make_offer(*urls)}
    async with node.session.post(f"{node.url}{path}", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    chunks = (
        [data for _, data in parse_events(text) if data != "[DONE]"] if body.get("stream") else [orjson.loads(text)]
    )
    return [chunk | {"created": 0} for chunk in chunks]


async def alone(path: str, body: dict[str, Any]) -> Any:
    """The answer of one node that computes everything."""
    async with running(FakeEngine(computes)) as node:
        return await asked(node, path, body)


def works(node: Node) -> list[Work]:
    return [request.work for request in node.engine.requests]


async def rests(d: Node) -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*d.http_tasks())
    assert (d.state.num_in_flight, d.state.read_window.num_prompts, d.state.read_window.num_tokens) == (0, 0, 0)
