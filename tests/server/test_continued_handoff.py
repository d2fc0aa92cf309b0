"""A cut stream that goes on at D: which tokens it asks a P for, and what D does alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.config import HandoffConfig
from pd_cluster.protocol.messages import FinishReason, PrefillLocally, RequestFailed, UseTicket, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.app import create_app
from pd_connectors.protocol.ticket import Offer, sign
from pd_http.errors import ENGINE_DIED
from pd_http.frames import StreamEnd
from tests.cut_streams import COMPLETIONS, asking, continuation_of, continuing, data_of, same_content
from tests.server.fake_engine import FAR, FakeEngine, Line, decodes, says
from tests.server.live_server import KEY, Node, running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_http.frames import AnyFrame

pytestmark = pytest.mark.anyio

PROMPT, ANSWER, NUM_KNOWN = [200, 201, 202], [300, 301, 302, 303, 304], 2
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 5,
    "stream": True,
    "temperature": 0.5,
    "cache_salt": "s",
    "priority": 3,
}


async def token_by_token(line: Line) -> None:
    """Each token of the answer in a frame of its own."""
    n, last = line.request.sampling.n, len(ANSWER) - 1
    for position, token_id in enumerate(ANSWER):
        for index in range(n):
            finish = FinishReason.LENGTH if position == last else None
            line.tokens([token_id], index=index, finish=finish, finished=position == last and index == n - 1)
            await line.taken()


async def begin(node: Node, body: dict[str, Any]) -> Sequence[AnyFrame]:
    """The whole answer, of which a test takes the first frames."""
    return await asking(create_app(node.state))(COMPLETIONS, body)


async def go_on(node: Node, body: dict[str, Any], messages: Sequence[AnyFrame], *urls: str, key: bytes = KEY) -> bytes:
    """The bytes of the rest, from a node that may ask those of the offer."""
    asked = continuing(body, continuation_of(messages))
    asked["kv_transfer_params"] |= {"do_remote_prefill": True, "offer": sign(key, Offer(urls, FAR))}
    rest = await asking(create_app(node.state))(COMPLETIONS, asked)
    assert isinstance(rest[-1], StreamEnd)
    assert rest[0] == messages[0]
    return data_of(rest)


def engine_of_d(n: int = 1, ids: Sequence[int] = ANSWER) -> FakeEngine:
    return FakeEngine(decodes(ids, n=n), engine_id="engine-of-d")


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 2}, {"echo": True, "logprobs": 1}])
async def test_p_computes_the_prompt_with_the_known_tokens_but_the_last(more: dict[str, Any]) -> None:
    """Log-probabilities of the prompt came with the beginning: no node finds them out again."""
    body = BODY | more
    async with (
        running(FakeEngine(token_by_token), node_id="d0") as first,
        running(FakeEngine(says([5]), engine_id="engine-of-p"), node_id="p") as p,
        running(engine_of_d(ids=ANSWER[NUM_KNOWN:]), node_id="d1") as second,
    ):
        messages = await begin(first, body)
        rest = await go_on(second, body, messages[: 1 + NUM_KNOWN], p.url)
        same_content(data_of(messages[: 1 + NUM_KNOWN]) + rest, data_of(messages))
        [asked], [request], use = p.engine.requests, second.engine.requests, second.engine.sent[0]
    assert (asked.work, asked.prompt_token_ids, asked.salt) == (Work.PREFILL, PROMPT + ANSWER[: NUM_KNOWN - 1], "s")
    assert asked.outputs is request.outputs is None
    assert asked.sampling == SamplingParams(max_tokens=1, temperature=0.0), "nothing uses what P draws"
    assert asked.priority == request.priority == -1, "before what has not begun, on both nodes"
    assert (request.work, request.prompt_token_ids) == (Work.TAKE_OVER, PROMPT)
    assert request.known == (tuple(ANSWER[:NUM_KNOWN]),)
    assert isinstance(use, UseTicket)


@pytest.mark.long_cases
@pytest.mark.parametrize("policy", ["any", "local", "remote", "fail"])
async def test_a_stream_goes_on_without_p_whatever_the_policy(policy: str) -> None:
    """The policies are for prompts: an answer that has begun does not end because no P can be reached."""
    async with (
        running(FakeEngine(token_by_token), node_id="d0") as first,
        running(engine_of_d(ids=ANSWER[1:]), node_id="d1", handoff=HandoffConfig(on_load_failure=policy)) as second,
    ):
        messages = await begin(first, BODY)
        rest = await go_on(second, BODY, messages[:2], "http://127.0.0.1:9")
        same_content(data_of(messages[:2]) + rest, data_of(messages))
        assert isinstance(second.engine.sent[0], PrefillLocally)
        assert second.metric('pd_handoff_fallbacks_total{reason="peer_unreachable"}') == 1


@pytest.mark.long
async def test_of_several_choices_this_node_computes_all() -> None:
    body = BODY | {"n": 2}
    async with (
        running(FakeEngine(token_by_token), node_id="d0") as first,
        running(FakeEngine(says([5])), node_id="p") as p,
        running(FakeEngine(says(ANSWER[2:])), node_id="d1") as second,
    ):
        messages = await begin(first, body)
        await go_on(second, body, messages[:5], p.url)
        assert (second.engine.requests[0].work, p.engine.requests) == (Work.GENERATE, [])


@pytest.mark.long
async def test_no_p_of_an_untrusted_offer_is_asked() -> None:
    async with (
        running(FakeEngine(token_by_token), node_id="d0") as first,
        running(FakeEngine(says([5])), node_id="p") as p,
        running(FakeEngine(says(ANSWER[1:])), node_id="d1") as second,
    ):
        messages = await begin(first, BODY)
        rest = await go_on(second, BODY, messages[:2], p.url, key=b"x" * 32)
        same_content(data_of(messages[:2]) + rest, data_of(messages))
        assert (second.engine.requests[0].work, p.engine.requests) == (Work.GENERATE, [])
        assert second.metric('pd_handoff_fallbacks_total{reason="offer_bad_signature"}') == 1


async def dies(line: Line) -> None:
    """P's engine ends before it gives a ticket."""
    line.push(RequestFailed(line.request.request_id, "EngineUnavailable", "it died", code=ENGINE_DIED))


@pytest.mark.long
async def test_a_stream_goes_on_alone_when_a_prefill_node_died_of_it() -> None:
    """One at most dies at each node that goes on. The stream does not end by it, as a request without tokens does."""
    async with (
        running(FakeEngine(token_by_token), node_id="d0") as first,
        running(FakeEngine(dies), node_id="p0") as dead,
        running(FakeEngine(says([5])), node_id="p1") as spared,
        running(engine_of_d(ids=ANSWER[1:]), node_id="d1", handoff=HandoffConfig(max_node_deaths=1)) as second,
    ):
        messages = await begin(first, BODY)
        rest = await go_on(second, BODY, messages[:2], dead.url, spared.url)
        same_content(data_of(messages[:2]) + rest, data_of(messages))
        assert isinstance(second.engine.sent[0], PrefillLocally)
        assert second.metric('pd_handoff_fallbacks_total{reason="peer_died"}') == 1
        assert spared.engine.requests == []


@pytest.mark.long
@pytest.mark.parametrize("policy", ["any", "local", "remote", "fail"])
async def test_a_load_that_fails_because_its_prefill_node_died(policy: str) -> None:
    handoff = HandoffConfig(on_load_failure=policy, max_node_deaths=1)
    engine = FakeEngine(decodes(ANSWER[1:], failures=["peer_restarted: another epoch"]))
    async with (
        running(FakeEngine(token_by_token), node_id="d0") as first,
        running(FakeEngine(says([5])), node_id="p0") as dead,
        running(FakeEngine(says([5])), node_id="p1") as spared,
        running(engine, node_id="d1", handoff=handoff) as second,
    ):
        messages = await begin(first, BODY)
        rest = await go_on(second, BODY, messages[:2], dead.url, spared.url)
        same_content(data_of(messages[:2]) + rest, data_of(messages))
        assert [type(one) for one in second.engine.sent] == [UseTicket, PrefillLocally]
        assert (len(dead.engine.requests), spared.engine.requests) == (1, [])
