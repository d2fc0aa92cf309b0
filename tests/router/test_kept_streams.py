"""Prefill nodes that go on with the prompts that they read, because the decode nodes would be late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd_connectors.protocol.feed import FeedSnapshot, NodeLoad
from pd_router.admission.node_room import NodeRoom
from pd_router.config import HandoffOrder
from pd_router.policy.charge import Charge
from tests.http.answer import CHAT, COMPLETIONS, HI, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.framed_nodes import End, FramedScript, framed_nodes
from tests.router.framed_streams import make_stream
from tests.router.router_process import Router, serving, until
from tests.router.test_choice import NOW_S, chosen, table, tell
from tests.router.test_feed_follower import FakeFeed

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable

TPOT_S = 0.010


def rooms(nodes: NodeTable, *stream_rooms: int, **load: Any) -> tuple[Node, ...]:
    """Every node tells a target, and room for so many streams more."""
    for node, stream_room in zip(nodes.nodes, stream_rooms, strict=True):
        tell(node, tpot_s=TPOT_S, stream_room=stream_room, **load)
    return nodes.nodes


# --- the choice


def test_a_prefill_node_keeps_a_stream_that_decode_nodes_would_be_late_with() -> None:
    nodes = table(1, 2)
    p, *_ = rooms(nodes, 3, 0, 0)
    choice = chosen(nodes)
    assert (choice.text, choice.best(choice.decodes, NOW_S)) == ("direct; reason=decode-late", p)
    assert choice.otherwise is not None
    assert choice.otherwise.text == "p-first; reason=default"
    assert chosen(nodes, decode_on_prefill="never").reason == "default"
    assert chosen(nodes, asked=HandoffOrder.P_FIRST).reason == "header"
    assert chosen(nodes, on_prefill_failure="fail").reason == "decode-late", "a prefill node reads the prompt"
    assert chosen(nodes, num_sequences=3).reason == "decode-late"
    assert chosen(nodes, num_sequences=4).reason == "default", "they would be late there too"


@pytest.mark.parametrize("stream_rooms", [(3, 0, 1), (0, 0, 0)])
def test_a_stream_is_handed_over_if_a_decode_node_has_time_or_no_node(stream_rooms: tuple[int, ...]) -> None:
    nodes = table(1, 2)
    _, _, d = rooms(nodes, *stream_rooms)
    choice = chosen(nodes)
    assert choice.text == "p-first; reason=default"
    assert stream_rooms[2] == 0 or choice.best(choice.decodes, NOW_S) is d


def late(node: Node, num_streams: int, late_room: int = 9) -> None:
    tell(node, tpot_s=TPOT_S, stream_room=0, late_room=late_room, num_running=num_streams)


def test_where_all_are_late_fewer_streams_are() -> None:
    nodes = table(1, 2)
    p, full, fuller = nodes.nodes
    late(full, 20)
    late(fuller, 30)
    for num_streams, late_room, is_kept in ((19, 1, True), (20, 1, False), (5, 0, False), (0, 9, True)):
        late(p, num_streams, late_room)
        assert (chosen(nodes).reason == "decode-late") == is_kept
    late(p, 18, 2)
    assert chosen(nodes, num_sequences=2).reason == "decode-late"
    assert chosen(nodes, num_sequences=3).reason == "default"
    with Charge(p, lambda: NOW_S, sequences=1, prompt_tokens=10):
        assert chosen(nodes, num_sequences=2).reason == "default", "one of the two places is promised"
    tell(full, tpot_s=TPOT_S, stream_room=1, num_running=20)
    assert chosen(nodes).reason == "default", "a decode node has time"
    tell(p, num_running=5)
    late(full, 20)
    assert chosen(nodes).reason == "default", "P tells no target"


def test_late_streams_gather_on_one_prefill_node() -> None:
    nodes = table(3, 1)
    few, many, too_many, d = nodes.nodes
    late(d, 20)
    for node, num_streams in ((few, 10), (many, 15), (too_many, 20)):
        late(node, num_streams)
    choice = chosen(nodes)
    assert (choice.decodes, choice.best(choice.decodes, NOW_S)) == ((many,), many)
    with Charge(many, lambda: NOW_S, prompt_tokens=50_000):
        assert chosen(nodes).decodes == (few,), "it would answer much later"
    tell(many, tpot_s=TPOT_S, late_room=9, num_running=15, num_slots=15)
    assert chosen(nodes).decodes == (few,), "it has no slot"
    tell(few, tpot_s=TPOT_S, stream_room=1, num_running=10)
    choice = chosen(nodes)
    assert (choice.decodes, choice.best(choice.decodes, NOW_S)) == ((few,), few)
    tell(few, tpot_s=TPOT_S, num_running=10)
    few.kv_version, d.kv_version = "a/1", "b/1"
    assert choice.best([few], NOW_S) is None, "the decode node is another since then"


def test_several_prompts_are_handed_over() -> None:
    """A body has any number of them, which the router does not count."""
    nodes = table(1, 1)
    rooms(nodes, 1, 0)
    assert chosen(nodes, is_several=True).text == "d-first; reason=several-prompts"


@pytest.mark.parametrize("settings", [{"prefill_on_decode": "never"}, {"on_prefill_failure": "fail"}, {}])
def test_no_decode_node_reads_the_prompt_when_the_keeper_fails(settings: dict[str, Any]) -> None:
    nodes = table(2, 1)
    keeper, busy, d = rooms(nodes, 3, 0, 0)
    with Charge(keeper, lambda: NOW_S, prompt_tokens=50_000), Charge(busy, lambda: NOW_S, prompt_tokens=50_000):
        choice = chosen(nodes, **settings)
        assert (choice.reason, choice.decodes) == ("decode-late", (keeper,))
        assert choice.best([d], NOW_S) is None, "it has been asked; what is left are the nodes that decode"


def test_without_targets_nothing_changes() -> None:
    nodes = table(1, 1)
    p, d = nodes.nodes
    tell(p)
    tell(d, num_running=60)
    assert chosen(nodes).reason == "default"
    tell(d, num_running=60, tpot_s=TPOT_S)
    assert chosen(nodes).reason == "default", "P tells no target"
    tell(p, tpot_s=TPOT_S, stream_room=1)
    assert chosen(nodes).reason == "decode-late"
    d.view.forget()
    assert chosen(nodes).reason == "default", "D's feed is lost"


def test_what_the_router_has_sent_since_takes_room() -> None:
    nodes = table(1, 1)
    p, d = rooms(nodes, 1, 1)
    with Charge(d, lambda: NOW_S, sequences=1):
        assert chosen(nodes).reason == "decode-late"
        with Charge(p, lambda: NOW_S, sequences=1, prompt_tokens=10):
            assert chosen(nodes).reason == "default"
    assert chosen(nodes).reason == "default"


def test_a_late_decode_node_costs_what_its_streams_lose() -> None:
    """Of two decode nodes the one with more streams, which are short ones, has time left."""
    nodes = table(1, 2)
    p, late, timely = nodes.nodes
    tell(p)
    tell(late, tpot_s=TPOT_S, stream_room=0, num_running=20)
    tell(timely, tpot_s=TPOT_S, stream_room=4, num_running=30)
    choice = chosen(nodes)
    assert choice.best(choice.decodes, NOW_S) is timely
    tell(late, tpot_s=TPOT_S, stream_room=1, num_running=20)
    assert choice.best(choice.decodes, NOW_S) is late


def test_of_several_prefill_nodes_the_one_that_answers_soonest_keeps_it() -> None:
    nodes = table(3, 1)
    busy, full, free, _ = rooms(nodes, 5, 5, 5, 0)
    tell(full, tpot_s=TPOT_S, stream_room=5, num_running=64)
    with Charge(busy, lambda: NOW_S, prompt_tokens=5000):
        choice = chosen(nodes)
        assert choice.best(choice.decodes, NOW_S) is free
        free.reachable = False
        assert choice.best(choice.decodes, NOW_S) is busy


def test_streams_that_prefill_nodes_keep_take_no_room_of_decode_nodes() -> None:
    """The router's admission lets others through meanwhile."""
    nodes = table(1, 1)
    p, _ = rooms(nodes, 3, 0)
    room = NodeRoom(nodes)
    free = room.of(None).sequences
    room.take(None, 2, 0.0)
    with Charge(p, lambda: NOW_S, sequences=2):
        room.look_again()
        assert room.of(None).sequences == free


# --- requests


async def heard(router: Router) -> None:
    """Until the router has heard it from the nodes' feeds."""
    views = [node.view for node in router.services.table.nodes]
    await until(lambda: [view.ledger.total.stream_room for view in views] == [4, 0])


def telling(role: str, script: Any, stream_room: int) -> FakeNode:
    node = FakeNode(role, script)
    node.feed = feed(stream_room)
    return node


def feed(stream_room: int) -> FakeFeed:
    return FakeFeed(FeedSnapshot(7, 1, NodeLoad(num_slots=64, tpot_s=TPOT_S, stream_room=stream_room)))


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_node_that_reads_the_prompt_answers(stream: bool) -> None:
    p, d = telling("prefill", fakes.decode, 4), telling("decode", fakes.decode, 0)
    async with running(p, d), serving([p], [d]) as router:
        await heard(router)
        got = await post(router, CHAT, HI, stream=stream)
        assert (got.status, got.route) == (200, "direct; reason=decode-late")
        assert got.prefilled_by == got.decoded_by == "fake-prefill"
        assert not stream or got.body == fakes.WHOLE_STREAM
        assert "kv_transfer_params" not in p.seen[0].body
        assert d.seen == []
        await router.idle()


@pytest.mark.anyio
async def test_a_stream_that_no_prefill_node_keeps_is_handed_over() -> None:
    async def refuses_alone(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
        script = fakes.prefill if "kv_transfer_params" in seen.body else fakes.refuse(503)
        return await script(node, request, seen)

    p, d = telling("prefill", refuses_alone, 4), telling("decode", fakes.decode, 0)
    async with running(p, d), serving([p], [d]) as router:
        await heard(router)
        got = await post(router, CHAT, HI, stream=True)
        assert (got.status, got.route, got.body) == (200, "p-first; reason=default", fakes.WHOLE_STREAM)
        assert got.decoded_by == "fake-decode"
        await router.idle()


@pytest.mark.anyio
@pytest.mark.parametrize("end", [End.BREAKS, End.GIVES_UP])
async def test_a_decode_node_goes_on_with_a_kept_stream(end: End) -> None:
    stream = make_stream(3)
    script = FramedScript(stream, [(sum(map(len, stream.messages()[1:3])), end)])
    p, d = framed_nodes(script)
    p.role, p.feed, d.feed = "prefill", feed(4), feed(0)
    async with running(p, d), serving([p], [d], continue_wait_s=0.0) as router:
        await heard(router)
        got = await post(router, COMPLETIONS, PROMPT, stream=True)
        assert (got.status, got.route, got.body) == (200, "direct; reason=decode-late", stream.text)
        assert (len(p.seen), len(d.seen), script.counts) == (1, 1, [2])
        await router.idle()
