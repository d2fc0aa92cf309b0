"""Streams that lose their decode node: another one goes on, and the client gets each byte once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest

from pd_connectors.protocol.feed import CHARGE_HEADER, PREFILL_CHARGE_HEADER
from pd_connectors.protocol.stream_codec import encode_message
from pd_connectors.protocol.ticket import Offer, verify
from pd_http.frames import FRAMES_HEADER, ChoiceProgress, Frame
from pd_router.requests.continued_stream import OUTLIVED_TOKENS
from tests.deadlines import HANG_S
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Seen, running
from tests.router.framed_nodes import ERROR_EVENT, End, FramedScript, foreign, framed_nodes
from tests.router.framed_streams import HEAD, ScriptedStream, make_stream
from tests.router.router_process import KEY, Router, serving, until

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.usefixtures("sure_checks")]
STREAM = make_stream(3, num_choices=2)
FRAME_ENDS = [sum(map(len, STREAM.messages()[1:][:count])) for count in range(len(STREAM.messages()))]
MIDDLE = FRAME_ENDS[4]
HEAD_BYTES = len(encode_message(HEAD))
LENIENT: dict[str, Any] = {
    "eject_after": 1 << 20,
    "max_node_deaths": 99,
    "continue_wait_s": 0.0,
    "probe_timeout_s": HANG_S,
}
QUICK: dict[str, Any] = {"health_interval_s": 0.02}


async def ask(router: Router) -> tuple[bytes, bool]:
    """(the body, whether it came to its end)"""
    body = bytearray()
    url, asked = router.url + "/v1/completions", {"model": "demo", "prompt": "x", "stream": True, "n": 2}
    async with asyncio.timeout(fakes.WAIT_S), router.session.post(url, json=asked) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        try:
            async for chunk in answer.content.iter_any():
                body += chunk
        except aiohttp.ClientError:
            return bytes(body), False
    return bytes(body), True


def outcomes(router: Router) -> dict[str, float]:
    """Of continuations that were counted."""
    names = ("continued", "no_node", "final", "no_frames", "nodes_died")
    counts = {name: router.count("pd_router_continuations_total", outcome=name) for name in names}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_cut_at_any_byte_is_not_seen(num_choices: int) -> None:
    """After each frame, inside each, and twice in one stream."""
    stream = make_stream(num_choices, num_choices=num_choices)
    sizes = [len(message) for message in stream.messages()[1:]]
    ends = [sum(sizes[:count]) for count in range(len(sizes))]
    cuts = [at + inside for at, size in zip(ends, sizes, strict=True) for inside in (0, 3, size - 1)]
    script = FramedScript(stream)
    nodes = framed_nodes(script, 3)  # a node is asked again only when another one has written a frame
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        for number, cut in enumerate(cuts):
            script.cuts = [(cut, End.BREAKS)] + [(sizes[-1] // 2, End.BREAKS)] * (number % 2)
            script.counts.clear()
            assert await ask(router) == (stream.text, True)
            assert script.counts[0] == sum(end <= cut for end in ends) - 1
            assert len(script.counts) == 1 + number % 2
        assert outcomes(router) == {"continued": len(cuts) + len(cuts) // 2}
        await router.idle()


@pytest.mark.parametrize("end", [End.BREAKS, End.GIVES_UP, End.ENGINE_DIED, End.SECOND_HEAD])
async def test_each_failure_of_a_node_is_continued(end: End) -> None:
    script = FramedScript(STREAM, [(MIDDLE + 5, end)])
    if end is not End.BREAKS:
        script.cuts = [(MIDDLE, end)]
    nodes = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        assert await ask(router) == (STREAM.text, True)
        assert script.counts == [4]
        assert [len(node.seen) for node in nodes] == [1, 1]
        await router.idle()


@pytest.mark.parametrize("illness", ["silent", "engine"])
async def test_a_frozen_node_is_cut_off_before_another_goes_on(illness: str) -> None:
    script = FramedScript(STREAM, [(MIDDLE, End.STANDS)])
    nodes = frozen, _ = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT | QUICK) as router:
        answer = asyncio.ensure_future(ask(router))
        await frozen.wait_seen(1)
        frozen.is_silent, frozen.is_frozen = illness == "silent", illness == "engine"
        assert await answer == (STREAM.text, True)
        await asyncio.wait_for(frozen.seen[0].gone.wait(), fakes.WAIT_S)
        assert router.count("pd_router_legs_moved_total", leg="stream", node="d0", kind="frozen") == 1


async def test_a_node_that_is_well_and_silent_is_left_at_the_limit() -> None:
    script = FramedScript(STREAM, [(MIDDLE, End.STANDS)])
    nodes = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT, idle_timeout_s=0.2) as router:
        assert await ask(router) == (STREAM.text, True)
        assert router.count("pd_router_waits_expired_total", wait="stream", node="d0") == 1


async def test_a_stream_that_its_client_does_not_read_goes_on_elsewhere() -> None:
    """More than all buffers hold: what d0 could not send comes from d1."""
    stream = ScriptedStream(
        tuple(Frame((ChoiceProgress(0, (number,), 1 << 20),), b"%d" % number * (1 << 20)) for number in range(1, 24))
    )
    script = FramedScript(stream)
    nodes = frozen, other = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT | QUICK, idle_timeout_s=60.0) as router:
        async with (
            asyncio.timeout(fakes.WAIT_S),
            router.session.post(router.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer,
        ):
            await frozen.wait_seen(1)
            frozen.is_silent = True
            await other.wait_seen(1)
            assert await answer.read() == stream.text
        assert 0 < script.counts[0] < len(stream.frames)


async def test_a_frozen_node_without_an_heir_may_recover() -> None:
    """The stream stays where it is until another node can take it, and goes there then."""
    script = FramedScript(STREAM, [(MIDDLE, End.STANDS)])
    frozen, other = nodes = framed_nodes(script)
    other.is_up = False
    async with running(*nodes), serving(decode=nodes, **LENIENT | QUICK) as router:
        answer = asyncio.ensure_future(ask(router))
        await frozen.wait_seen(1)
        frozen.is_silent = True
        await until(lambda: router.services.table.nodes[0].liveness.down)
        checks = other.num_checks
        await until(lambda: other.num_checks > checks + 2)
        assert not frozen.seen[0].gone.is_set()
        other.is_up = True
        assert await answer == (STREAM.text, True)


@pytest.mark.parametrize("end", [End.REFUSES, End.TIME_IS_UP])
async def test_what_every_node_would_say_is_passed_on(end: End) -> None:
    script = FramedScript(STREAM, [(MIDDLE, end)])
    nodes = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        body, is_whole = await ask(router)
        assert body == b"".join(frame.data for frame in STREAM.frames[:4]) + ERROR_EVENT
        assert is_whole
        assert outcomes(router) == {"final": 1}
        assert not nodes[1].seen


@pytest.mark.parametrize("end", [End.BREAKS, End.GIVES_UP])
async def test_with_no_node_left_the_client_is_told(end: End) -> None:
    script = FramedScript(STREAM, [(MIDDLE + (3 if end is End.BREAKS else 0), end)])
    nodes = framed_nodes(script, 3)
    nodes[1].stream_version = "version-2"
    nodes[2].stream_version, nodes[2].script = None, foreign
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        body, is_whole = await ask(router)
        had = b"".join(frame.data for frame in STREAM.frames[:4])
        assert body.startswith(had)
        if end is End.BREAKS:
            error = orjson.loads(body[len(had) :].strip().removeprefix(b"data: "))["error"]
            assert error["code"] == "stream_interrupted"
            assert not is_whole
        else:
            assert body[len(had) :] == ERROR_EVENT
        assert outcomes(router) == {"no_node": 1}
        assert not nodes[1].seen
        assert not nodes[2].seen
        await router.idle()


async def test_a_prefill_node_goes_on_where_the_other_decode_nodes_write_another_stream() -> None:
    """While versions are replaced: the decode node that is left is of the next one."""
    script = FramedScript(STREAM, [(MIDDLE, End.BREAKS)])
    old, new = framed_nodes(script)
    new.stream_version, new.script = "version-2", fakes.refuse(503)

    async def read_or_go_on(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (script if FRAMES_HEADER in seen.headers else fakes.prefill)(node, request, seen)

    prefill = FakeNode("prefill", read_or_go_on)
    prefill.stream_version = old.stream_version
    async with running(old, new, prefill), serving([prefill], [old, new], **LENIENT) as router:
        assert await ask(router) == (STREAM.text, True)
        assert outcomes(router) == {"continued": 1}
        assert "continuation" in prefill.seen[-1].body["kv_transfer_params"]


async def test_a_stream_waits_for_a_node_that_starts_again() -> None:
    """Both nodes of a cluster drain in turn. A node that has failed it is asked after a restart, or after frames."""
    cuts = [(FRAME_ENDS[1], End.GIVES_UP), (0, End.GIVES_UP), (FRAME_ENDS[1], End.GIVES_UP)]
    script = FramedScript(STREAM, cuts)
    nodes = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT | QUICK | {"continue_wait_s": 60.0}) as router:
        nodes[1].is_up = False
        await until(lambda: not router.services.table.nodes[1].reachable)
        answer = asyncio.ensure_future(ask(router))
        await until(lambda: router.count("pd_router_leg_failures_total", leg="stream", node="d0", kind="refused"))
        nodes[1].is_up = True
        await until(lambda: script.counts)
        assert script.counts == [1], "it has no frame of d1: neither is asked again before d0 has restarted"
        nodes[0].epoch += 1
        assert await answer == (STREAM.text, True)
        assert [len(node.seen) for node in nodes] == [2, 2]
        assert script.counts == [1, 1, 2]


async def test_the_next_candidate_is_asked_when_one_cannot_continue() -> None:
    script = FramedScript(STREAM, [(MIDDLE, End.BREAKS)])
    nodes = framed_nodes(script, 4)

    async def cannot(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        return fakes.error(409, "cannot_continue")

    nodes[1].script, nodes[2].script = cannot, fakes.refuse(503)
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        assert await ask(router) == (STREAM.text, True)
        assert [len(node.seen) for node in nodes] == [1, 1, 1, 1]
        assert outcomes(router) == {"continued": 1}


async def test_a_node_with_a_full_queue_is_asked_again() -> None:
    script = FramedScript(STREAM, [(MIDDLE, End.BREAKS)])
    nodes = framed_nodes(script)

    async def is_full_at_first(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        return fakes.error(503, "overloaded") if len(node.seen) < 4 else await script(node, request, seen)

    nodes[1].script = is_full_at_first
    async with running(*nodes), serving(decode=nodes, **LENIENT | {"continue_wait_s": 60.0}) as router:
        assert await ask(router) == (STREAM.text, True)
        assert len(nodes[1].seen) == 4
        assert outcomes(router) == {"continued": 1}


async def test_a_request_that_kills_the_nodes_that_continue_it_ends() -> None:
    script = FramedScript(STREAM, [(FRAME_ENDS[2], End.BREAKS)] * 4)

    async def restarts(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        node.epoch += 1
        return await script(node, request, seen)

    nodes = framed_nodes(script, 4)
    for node in nodes:
        node.script = restarts
    async with running(*nodes), serving(decode=nodes, **LENIENT | {"max_node_deaths": 2}) as router:
        body, _ = await ask(router)
        assert orjson.loads(body.splitlines()[-4].removeprefix(b"data: "))["error"]["code"] == "nodes_died"
        assert sum(len(node.seen) for node in nodes) == 2
        assert outcomes(router) == {"continued": 1, "nodes_died": 1}


@pytest.mark.parametrize(("num_choices", "dies"), [(1, False), (2, False), (4, True)])
async def test_a_long_stream_outlives_any_number_of_nodes(num_choices: int, *, dies: bool) -> None:
    """Each node writes more than the place of the death before it: the request is not the cause.

    The body asks for two choices. Four are of two prompts: then so many tokens are not enough.
    """
    count = 2 * OUTLIVED_TOKENS // num_choices
    frames = [
        Frame(
            tuple(ChoiceProgress(index, tuple(range(count)), 1) for index in range(num_choices)),
            b"data: %d\n\n" % number,
        )
        for number in range(5)
    ]
    stream = ScriptedStream(tuple(frames))
    script = FramedScript(stream, [(len(encode_message(frames[0])), End.BREAKS)] * 4)

    async def restarts(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        node.epoch += 1
        return await script(node, request, seen)

    nodes = framed_nodes(script)
    for node in nodes:
        node.script = restarts
    async with running(*nodes), serving(decode=nodes, **LENIENT | {"max_node_deaths": 2}) as router:
        if dies:
            assert b"nodes_died" in (await ask(router))[0]
        else:
            assert await ask(router) == (stream.text, True)
            assert script.counts == [1, 2, 3, 4]


async def test_other_engines_are_not_asked_for_frames() -> None:
    node = FakeNode("decode", foreign)
    async with running(node), serving(decode=[node], **LENIENT) as router:
        assert await ask(router) == (fakes.WHOLE_STREAM, True)


async def test_an_answer_that_is_not_streamed_is_not_framed() -> None:
    node = FakeNode("decode", foreign)
    node.stream_version = "version-1"
    async with (
        running(node),
        serving(decode=[node], **LENIENT) as router,
        router.session.post(router.url + "/v1/completions", json={"prompt": "x"}) as answer,
    ):
        assert (await answer.json())["object"] == "chat.completion"


async def test_a_stream_without_a_head_begins_anew() -> None:
    script = FramedScript(STREAM, [(-HEAD_BYTES + 7, End.BREAKS)])
    nodes = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        assert await ask(router) == (STREAM.text, True)
        assert not script.counts
        assert not outcomes(router)


@pytest.mark.parametrize(
    ("end", "status", "num_asked"),
    [(End.REFUSES, 400, 1), (End.TIME_IS_UP, 504, 1), (End.GIVES_UP, 503, 2), (End.ENGINE_DIED, 503, 2)],
)
async def test_a_failure_instead_of_a_head_keeps_its_status(end: End, status: int, num_asked: int) -> None:
    """The client has no byte yet, so it gets an answer with that status, if no other node can serve."""
    script = FramedScript(STREAM, [(-HEAD_BYTES, end)] * 2)
    nodes = framed_nodes(script)
    async with running(*nodes), serving(decode=nodes, **LENIENT) as router:
        asked = {"model": "demo", "prompt": "x", "stream": True, "n": 2}
        async with router.session.post(router.url + "/v1/completions", json=asked) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (status, "as_scripted")
        assert sum(len(node.seen) for node in nodes) == num_asked
        await router.idle()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_prefill_nodes_are_offered_to_the_node_that_goes_on(num_choices: int) -> None:
    """It asks them for KV, if one choice goes on. The charge on the first has a name, for that node's feed."""
    stream = make_stream(3, num_choices=num_choices)
    script = FramedScript(stream, [(sum(map(len, stream.messages()[1:3])), End.BREAKS)])
    p = FakeNode("prefill", fakes.prefill, node_id="p")
    nodes = framed_nodes(script)
    url, asked = "/v1/completions", {"model": "demo", "prompt": "x", "stream": True, "n": num_choices}
    async with running(p, *nodes), serving(prefill=[p], decode=nodes, **LENIENT) as router:
        async with (
            asyncio.timeout(fakes.WAIT_S),
            router.session.post(router.url + url, json=asked) as got,
        ):
            assert await got.read() == stream.text
        [seen] = [one for node in nodes for one in node.seen if "continuation" in one.body["kv_transfer_params"]]
        params = seen.body["kv_transfer_params"]
        if num_choices == 1:
            assert params["do_remote_prefill"]
            assert verify(KEY, params["offer"], Offer, time.time()).prefill_urls == (p.url,)
            assert seen.headers[PREFILL_CHARGE_HEADER] != seen.headers[CHARGE_HEADER]
        else:
            assert set(params) == {"continuation"}
            assert PREFILL_CHARGE_HEADER not in seen.headers
        await router.idle()
