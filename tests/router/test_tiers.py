"""What lies below a device's cache: its price in the sum of seconds, its place in the index, and mixed releases."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.feed import HOST, FeedDelta, FeedMessage, FeedSnapshot, NodeLoad, StoredBlock
from pd_connectors.protocol.stream_codec import StreamParser, encode_message
from pd_connectors.protocol.text_chain import AS_ALWAYS
from pd_router.calls.body import RequestBody
from pd_router.nodes.adapter_table import AdapterTable
from pd_router.nodes.answer_lengths import AnswerLengths
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_feed import SLICE_BLOCKS, NodeFeed
from pd_router.nodes.prefix_index import PrefixIndex, _LowerPlace, _Place, _Step
from pd_router.policy.cost import Costs
from pd_router.policy.prompt_facts import PromptFacts, prompt_facts
from tests.router.test_choice import NOW_S, chosen, table, tell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_router.nodes.node_table import NodeTable
    from pd_router.policy.cost_policy import CostRoute

HOST_TOKEN_S = 2.5e-6  # 128 KiB at 53 GB/s


def reading_s(num_tokens: int, cached: int, lower: int, host_token_s: float) -> float:
    """Of one node that tells this price."""
    (node,) = table(0, 1).nodes
    tell(node, host_token_s=host_token_s)
    prompt = PromptFacts(0, cached={node: cached}, num_tokens=num_tokens, lower={node: lower} if lower else {})
    return Costs(prompt, (node,), NOW_S).reading_s(node)


@pytest.mark.long
@given(
    num_tokens=st.integers(2, 60_000), cached_share=st.floats(0, 1, exclude_max=True), lower_share=st.floats(0, 1),
    host_token_s=st.sampled_from([0.0, 1e-7, HOST_TOKEN_S, 1e-4, 1.0]),
)  # fmt: skip
def test_what_is_loaded_costs_its_seconds_and_never_more_than_to_compute_it(
    num_tokens: int, cached_share: float, lower_share: float, host_token_s: float
) -> None:
    cached = int(num_tokens * cached_share)
    lower = int(cached * lower_share)
    seconds = reading_s(num_tokens, cached, lower, host_token_s)
    on_device, computed = reading_s(num_tokens, cached, 0, 0.0), reading_s(num_tokens, cached - lower, 0, 0.0)
    slack_s = 1e-9 + 1e-9 * computed
    assert on_device - slack_s <= seconds <= computed + slack_s
    if host_token_s:
        assert seconds <= on_device + lower * host_token_s + slack_s
        if seconds < computed - slack_s:
            assert seconds == pytest.approx(on_device + lower * host_token_s)
    else:  # a node that does not know its price
        assert seconds == pytest.approx(computed)


def test_a_prompt_goes_where_it_lies_in_host_memory_rather_than_where_it_is_computed() -> None:
    nodes = table()
    p0, p1 = nodes.nodes[:2]
    for node in nodes.nodes:
        tell(node, host_token_s=HOST_TOKEN_S)

    def choice(cached: dict[Node, int], lower: dict[Node, int]) -> CostRoute:
        return chosen(nodes, 9000, cached=cached, lower=lower)

    below, on_device = choice({p1: 8000}, {p1: 8000}), choice({p1: 8000}, {})
    assert below.prefills[0] is p1
    loading_s = below.costs.reading_s(p1) - on_device.costs.reading_s(p1)
    assert loading_s == pytest.approx(8000 * HOST_TOKEN_S)
    predictions = below.predicted_s(p1, NOW_S), on_device.predicted_s(p1, NOW_S)
    assert predictions[0] == pytest.approx((predictions[1] or 0.0) + loading_s), "the prediction has it too"
    both = {p0: 8000, p1: 8000}
    assert choice(both, {p1: 8000}).prefills[0] is p0
    assert choice(both, {p0: 4001, p1: 4000}).prefills[0] is p1
    tell(p1, host_token_s=HOST_TOKEN_S, queued_tokens=6000)
    assert choice({p1: 8000}, {p1: 8000}).prefills[0] is p1
    tell(p1, host_token_s=1.0, queued_tokens=1000)
    assert choice({p1: 8000}, {p1: 8000}).prefills[0] is p0, "loading so slowly is computing"


def test_a_pace_that_shrinks_beside_streams_bounds_what_is_computed_and_not_what_is_loaded() -> None:
    """`most_token_s` is in place of the pace of the tokens to compute; the load is added to it."""
    _, d = table(1, 1).nodes
    tell(d, num_running=40, step_keys=1000, host_token_s=HOST_TOKEN_S)
    cached, lower = {d: 30_000}, {d: 20_000}
    facts = [PromptFacts(0, cached=cached, num_tokens=31_000, lower=below) for below in ({}, lower)]
    on_device, below = (Costs(one, (d,), NOW_S).reading_s(d) for one in facts)
    assert below - on_device == pytest.approx(20_000 * HOST_TOKEN_S)


# --- the index


def chain_of(body: RequestBody) -> Sequence[int]:
    return body.text_chain(b"key", AS_ALWAYS)


def facts_of(index: PrefixIndex[Node], body: RequestBody) -> PromptFacts:
    nodes = cast("NodeTable", SimpleNamespace(prefixes=index, answers=AnswerLengths(), adapters=AdapterTable()))
    return prompt_facts(body, nodes, b"key")


def apply(feed: NodeFeed, message: FeedMessage) -> None:
    for _ in feed.apply(message):
        pass


def test_what_the_device_lacks_of_a_prompt_is_what_follows_its_last_boundary_there() -> None:
    index: PrefixIndex[Node] = PrefixIndex()
    node, other = (Node(url=name, role=Role.PREFILL, node_id=name) for name in "ab")
    body = RequestBody(json.dumps({"prompt": "x" * 9000}).encode())
    steps = chain_of(body)
    stored = tuple(StoredBlock(at, step, 128 * (at + 1)) for at, step in enumerate(steps))
    last = len(stored) - 1
    for one in (node, other):
        apply(feed := NodeFeed(index, one), FeedSnapshot(1, 1, NodeLoad(), stored))
    assert (facts_of(index, body).cached[node], facts_of(index, body).lower) == (128 * (last + 1), {})
    apply(feed, FeedDelta(2, NodeLoad(), moved=((last, HOST), (last - 1, 7), (999, HOST))))
    assert facts_of(index, body).cached == dict.fromkeys((node, other), 128 * (last + 1))
    assert facts_of(index, body).lower == {other: 256}, "also of a tier that this release does not know"
    apply(feed, FeedDelta(3, NodeLoad(), (last,), moved=((last, HOST), (last - 1, 0))))
    assert (facts_of(index, body).cached[other], facts_of(index, body).lower) == (128 * last, {})
    moved = tuple((at, HOST) for at in range(last))
    apply(feed, FeedDelta(4, NodeLoad(), moved=moved))
    assert facts_of(index, body).lower == {other: 128 * last}
    assert facts_of(index, body).cached[node] == 128 * (last + 1)
    apply(feed, FeedSnapshot(2, 1, NodeLoad(), stored))
    assert (facts_of(index, body).lower, index.num_lower) == ({}, 0), "a snapshot says it anew"


class _Counting(PrefixIndex[Node]):
    """Notes how many blocks it is given since `given` was emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def store(self, node: Node, blocks: Iterable[StoredBlock]) -> None:
        self.given.append(len(tuple(blocks)))
        super().store(node, blocks)

    def evict(self, node: Node, blocks: Iterable[int]) -> None:
        self.given.append(len(tuple(blocks)))
        super().evict(node, blocks)

    def move(self, node: Node, moved: Iterable[tuple[int, int]]) -> None:
        before = len(self.given)
        super().move(node, moved)
        self.given[before:] = [len(tuple(moved))]


@pytest.mark.parametrize("counts", [(0, 0, 2500), (700, 700, 700), (0, 1000, 1), (2100, 0, 1), (3, 3, 3)])
def test_other_tasks_run_between_slices_of_all_that_a_message_says(counts: tuple[int, int, int]) -> None:
    num_evicted, num_stored, num_moved = counts
    index, node = _Counting(), Node(url="a", role=Role.PREFILL, node_id="a")
    feed = NodeFeed(index, node)
    stored = tuple(StoredBlock(at, at, 16) for at in range(num_evicted + num_stored + num_moved))
    apply(feed, FeedSnapshot(1, 1, NodeLoad(), stored[: num_evicted + num_moved]))
    evicted = tuple(range(num_evicted))
    moved = tuple((at, HOST) for at in range(num_evicted, num_evicted + num_moved))
    slices, steps = [], feed.apply(FeedDelta(2, NodeLoad(), evicted, stored[num_evicted + num_moved :], moved=moved))
    index.given.clear()
    for _ in steps:
        slices.append(sum(index.given))
        index.given.clear()
    slices.append(sum(index.given))
    assert max(slices) <= SLICE_BLOCKS
    assert sum(slices) == sum(counts)
    assert len(slices) == max(1, -(-sum(counts) // SLICE_BLOCKS)), "a small message is taken at once"
    assert (index.num_blocks(node), index.num_lower) == (num_stored + num_moved, num_moved)


def test_a_name_costs_no_memory_for_its_tier() -> None:
    step = _Step(1)
    assert sys.getsizeof(_LowerPlace(step, 16, 1)) == sys.getsizeof(_Place(step, 16, 1)) == 16 + 3 * 8


# --- mixed releases


class OldBlock(msgspec.Struct, frozen=True, array_like=True):
    block: int
    step: int
    num_tokens: int


class OldSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The first fields of the release before tiers; the others did not change."""

    epoch: int
    number: int
    load: msgspec.Raw
    stored: tuple[OldBlock, ...] = ()


class OldDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    number: int
    load: msgspec.Raw
    evicted: tuple[int, ...] = ()
    stored: tuple[OldBlock, ...] = ()
    charges: tuple[int, ...] = ()
    role: str = ""
    role_changes: int = 0
    is_last: bool = False
    is_frozen: bool = False


def test_a_router_of_the_release_before_takes_all_for_the_devices() -> None:
    parser: StreamParser[OldSnapshot | OldDelta] = StreamParser(OldSnapshot | OldDelta)
    stored = StoredBlock(1, 2, 64, HOST)
    load = NodeLoad(host_token_s=HOST_TOKEN_S)
    messages = FeedSnapshot(1, 1, load, (stored,)), FeedDelta(2, load, (5,), (stored,), moved=((1, HOST),))
    snapshot, delta = parser.feed(b"".join(map(encode_message, messages)))
    assert snapshot.stored == delta.stored == (OldBlock(1, 2, 64),)


def test_all_that_a_node_of_the_release_before_names_is_on_its_device() -> None:
    index: PrefixIndex[Node] = PrefixIndex()
    node = Node(url="old", role=Role.PREFILL, node_id="old")
    feed, parser = NodeFeed(index, node), StreamParser[FeedMessage](FeedMessage)
    known = NodeLoad.__struct_fields__.index("host_token_s")
    load = msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.astuple(NodeLoad())[:known]))
    old = OldSnapshot(1, 1, load, (OldBlock(1, 50, 64),)), OldDelta(2, load, (), (OldBlock(2, 51, 128),))
    for message in parser.feed(b"".join(map(encode_message, old))):
        apply(feed, message)
    assert index.hits([50, 51]) == index.hits_on_device([50, 51]) == {node: 128}
    assert node.view.load is not None
    assert (index.num_lower, node.view.load) == (0, NodeLoad())
