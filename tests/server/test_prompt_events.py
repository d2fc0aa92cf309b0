"""What P tells D about a prompt, and what D takes of it."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import orjson
import pytest

from pd_cluster.protocol.messages import (
    FinishReason,
    PromptLogprobs,
    TicketOpened,
    Work,
)
from pd_cluster.protocol.prompt_outputs import PromptPart, PromptToken
from pd_cluster.server import prompt_events
from pd_cluster.server.prompt_events import PromptListener
from pd_cluster.server.prompt_scores import PromptAsk, PromptScores
from pd_connectors.protocol.messages import TopLogprob
from pd_connectors.protocol.ticket import sign
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import KEY, running
from tests.server.merged_nodes import ASKED, COMPLETIONS, PROMPT, SAID, alone, asked, computes, entries_of, pair, works
from tests.server.sse import next_event, post_events
from tests.server.test_decode_leg import make_offer
from tests.server.test_prefill_endpoint import FOREIGN, STREAM

pytestmark = pytest.mark.anyio


# what P tells is checked

RIGHT = entries_of(PROMPT, 2)
WRONG: dict[str, list[tuple[int, tuple[PromptToken, ...]]]] = {
    "a position is missing": [(1, RIGHT[:4]), (6, RIGHT[5:])],
    "a position comes twice": [(1, RIGHT[:4]), (4, RIGHT[3:])],
    "the order is another": [(5, RIGHT[4:]), (1, RIGHT[:4])],
    "another prompt": [(1, entries_of([*PROMPT[:-1], 9], 2))],
    "an entry behind the last": [(1, (*RIGHT, RIGHT[-1]))],
    "it begins with the first token": [(0, (PromptToken(PROMPT[0], -1.0, 1, RIGHT[0].top), *RIGHT))],
    "fewer alternatives": [(1, RIGHT[:10]), (11, (msgspec.structs.replace(RIGHT[10], top=RIGHT[10].top[:1]),))],
    "no token of the vocabulary": [
        (1, (msgspec.structs.replace(RIGHT[0], top=(TopLogprob(-1, 0.0),) * 2), *RIGHT[1:]))
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_entries_are_not_shown(wrong: str) -> None:
    async def lies(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        for start, entries in WRONG[wrong]:
            line.push(PromptLogprobs(line.request.request_id, start, entries))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async with pair(lies) as (p, d):
        assert await asked(d, COMPLETIONS, ASKED, p.url) == await alone(COMPLETIONS, ASKED)
        assert works(d) == [Work.TAKE_OVER, Work.READ]


class Letters:
    def token_bytes(self, token_id: int) -> bytes:
        return b"%c" % (97 + token_id % 26)

    def is_special(self, token_id: int) -> bool:
        return False


def part_data(raw: bytes) -> bytes:
    return orjson.dumps({"part": b64encode(raw).decode()})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"{}", b'{"part": 3}', b'{"part": "%"}', part_data(b""), part_data(b"\xc1"),
        part_data(msgspec.msgpack.encode({"start": "1"})), part_data(msgspec.msgpack.encode({"entries": [[1]]})),
    ],
)  # fmt: skip
def test_events_that_cannot_be_read_end_the_listening(data: bytes) -> None:
    scores = PromptScores(PromptAsk(2, None), Letters(), PROMPT)
    listener = PromptListener(scores, 2, 3072)
    events = list(prompt_events.prompt_events(PromptLogprobs("r", 1, RIGHT)))
    good = [event.partition(b"data: ")[2] for event in events]
    listener.hear(data)
    assert listener.is_done
    for one in good:
        listener.hear(one)
    assert not scores.is_complete
    again = PromptListener(scores, 2, 3072)
    for one in good:
        again.hear(one)
    assert (scores.is_complete, again.is_done) == (True, True)


def test_a_part_keeps_every_value(small_events: None) -> None:
    events = list(prompt_events.prompt_events(PromptLogprobs("r", 1, RIGHT)))
    read = [orjson.loads(event.partition(b"data: ")[2])["part"] for event in events]
    parts = [msgspec.msgpack.decode(b64decode(one), type=PromptPart) for one in read]
    assert [part.start for part in parts] == [1, 4, 7, 10]
    assert tuple(entry for part in parts for entry in part.entries) == RIGHT


# P's side


async def test_p_tells_each_step_before_the_next_has_ended() -> None:
    async def steps(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        await line.taken()
        line.push(PromptLogprobs(line.request.request_id, 1, RIGHT[:5]))
        await line.engine.released.wait()
        line.push(PromptLogprobs(line.request.request_id, 6, RIGHT[5:]))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async with running(FakeEngine(steps)) as p:
        body = {"prompt": PROMPT, "kv_transfer_params": FOREIGN | {"prompt_logprobs": 2}}
        buffer = bytearray()
        async with p.session.post(p.url + COMPLETIONS, json=body, headers=STREAM) as response:
            async with asyncio.timeout(WAIT_S):
                names = [(await next_event(response, buffer))[0] for _ in range(2)]
                p.engine.released.set()
                names += [(await next_event(response, buffer))[0] for _ in range(2)]
        assert names == ["ticket", "prompt", "prompt", "done"]


@pytest.mark.parametrize("num", [-1, 21])
async def test_p_refuses_what_d_would_refuse(num: int) -> None:
    async with running(FakeEngine(computes)) as p:
        body = {"prompt": PROMPT, "kv_transfer_params": FOREIGN | {"prompt_logprobs": num}}
        async with p.session.post(p.url + COMPLETIONS, json=body, headers=STREAM) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "prompt_logprobs")
        assert p.engine.requests == []


async def test_p_refuses_more_log_probabilities_than_an_answer_may_have() -> None:
    async with running(FakeEngine(computes)) as p:
        params = FOREIGN | {"prompt_logprobs": 20, "sampling": {"max_tokens": 3, "n": 128}}
        body = {"prompt": [7] * 1000, "kv_transfer_params": params}
        async with p.session.post(p.url + COMPLETIONS, json=body, headers=STREAM) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "prompt_logprobs"), error
        assert p.engine.requests == []


async def test_legs_of_other_routers_compute_no_log_probabilities() -> None:
    """They send the client's fields to both nodes. D shows the prompt's, and nothing else can be done with P's."""
    async with running(FakeEngine(computes)) as p:
        body: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}
        for headers, more in (({}, {}), (STREAM, {}), ({}, {"prompt_logprobs": 2})):
            body["kv_transfer_params"] = FOREIGN | more
            async with p.session.post(p.url + COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200
        assert [request.outputs for request in p.engine.requests] == [None] * 3
        body["kv_transfer_params"] = FOREIGN
        events = await post_events(p.session, p.url + COMPLETIONS, body, STREAM)
        assert [name for name, _ in events] == ["ticket", "done"]


async def test_a_ticket_beside_an_offer_is_left_for_one_with_scores() -> None:
    async with pair() as (p, d):
        ticket = sign(KEY, p.engine.make_ticket(PROMPT))
        params = {"do_remote_prefill": True, "ticket": ticket, "offer": make_offer(p.url)}
        async with d.session.post(d.url + COMPLETIONS, json=ASKED | {"kv_transfer_params": params}) as response:
            assert response.status == 200
        assert works(p) == [Work.PREFILL]
        assert d.engine.requests[0].ticket is not None
