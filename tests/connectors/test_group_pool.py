"""Pools of caches with groups of every kind: what a prefix needs, what is asked for, and what comes in part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connectors.base import CachedBlock, LoadSpec, PrefixFound, PrefixLoaded
from pd_connectors.prefix_plan import GroupBlock, PrefixPlan
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup
from pd_connectors.store import ObjectName, Sealer
from tests.connectors.layouts import FULL, LATENT, LAYOUTS, STATE, WINDOW, full_layout
from tests.connectors.pool_bench import POOL_CONTEXT, MemoryStore, Node, Shelf, hashes_of, nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_HASHES = 6
END = NUM_HASHES * 16
HASHES = hashes_of(NUM_HASHES)


class RecordingStore(MemoryStore):
    """Keeps every question."""

    def __init__(self, shelf: Shelf, asked: list[list[ObjectName]]) -> None:
        super().__init__(shelf)
        self._asked = asked

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        self._asked.append(list(names))
        return super().contains(names)


def every_block(layout: BlockLayout) -> list[GroupBlock]:
    return [GroupBlock(g, block) for g, group in enumerate(layout.groups) for block in range(END // group.block_size)]


def store_all(node: Node, layout: BlockLayout) -> None:
    """Block i of each group lies in its block 2 * i + 1."""
    plan = PrefixPlan(layout)
    node.pool.store([CachedBlock(plan.hash_of(at, HASHES), 2 * at.block + 1, at.group) for at in every_block(layout)])
    node.wait_sent()


def first_blocks(layout: BlockLayout, have: int) -> tuple[int, ...]:
    """Of an engine that has the prompt up to `have`."""
    return tuple(have // group.block_size for group in layout.groups)


def runs(layout: BlockLayout, end: int, firsts: Sequence[int]) -> tuple[BlockRun, ...]:
    """Into block i of each group, what an engine asks for that has the blocks before these."""
    needed = [PrefixPlan(layout).needed(group, end, first) for group, first in enumerate(firsts)]
    return tuple(BlockRun(span.start, tuple(span)) for span in needed)


def recall(node: Node, layout: BlockLayout, name: str, have: int = 0) -> tuple[int, int]:
    """Tokens found, and loaded."""
    firsts = first_blocks(layout, have)
    node.pool.find(name, HASHES, firsts)
    found, event = 0, node.event()
    if isinstance(event, PrefixFound):
        found = event.num_tokens
        assert node.pool.load(LoadSpec(name, runs(layout, found, firsts), found))
        event = node.event()
    assert isinstance(event, PrefixLoaded)
    return found, event.num_tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prefix_is_read_without_blocks_that_no_later_token_reads(name: str) -> None:
    layout, shelf = BlockLayout(LAYOUTS[name].required), Shelf()
    asked: list[list[ObjectName]] = []
    context = replace(POOL_CONTEXT, layout=layout)
    with nodes(partial(RecordingStore, shelf, asked), context, context) as (p, d):
        store_all(p, layout)
        asked.clear()
        before = [cache.clone() for cache in d.caches]
        assert recall(d, layout, "r") == (END, END)
        num_bytes, plan = 0, PrefixPlan(layout)
        needed = [plan.needed(group, END, 0) for group in range(len(layout.groups))]
        for span, ours, theirs, old, group in zip(needed, d.caches, p.caches, before, layout.groups, strict=True):
            others = [block for block in range(ours.shape[0]) if block not in span]
            assert torch.equal(ours[list(span)], theirs[[2 * block + 1 for block in span]])
            assert torch.equal(ours[others], old[others])
            num_bytes += len(span) * group.block_bytes
        assert (d.stat("pool_read_bytes_total"), d.stat("pool_hit_tokens_total")) == (num_bytes, END)
        hashes = [{plan.hash_of(GroupBlock(g, block), HASHES) for block in span} for g, span in enumerate(needed)]
        assert {(one.group, one.hash) for names in asked for one in names} == {
            (group, one) for group, own in enumerate(hashes) for one in own
        }
        assert d.misses() == {}


def remove(shelf: Shelf, layout: BlockLayout, group: int, block: int) -> None:
    """One of the block's objects is evicted."""
    sealer = Sealer(replace(POOL_CONTEXT, layout=layout))
    del shelf.objects[sealer.names(PrefixPlan(layout).hash_of(GroupBlock(group, block), HASHES), group)[-1]]


def test_the_largest_boundary_is_found_that_every_group_accepts() -> None:
    layout, shelf = LAYOUTS["windowed"], Shelf()
    context = replace(POOL_CONTEXT, layout=layout)
    with nodes(lambda: MemoryStore(shelf), context) as (node,):
        store_all(node, layout)
        remove(shelf, layout, 1, 0)
        assert recall(node, layout, "dead at the end") == (96, 96)
        remove(shelf, layout, 1, 5)
        assert recall(node, layout, "the last window") == (80, 80)
        remove(shelf, layout, 0, 3)
        assert recall(node, layout, "full attention") == (48, 48)
        remove(shelf, layout, 1, 1)
        assert recall(node, layout, "no window is whole") == (0, 0)
        assert recall(node, layout, "what the engine has", have=32) == (48, 48)
        assert node.misses() == {"absent": 4}


def test_what_is_lost_on_the_way_leaves_a_prefix_only_where_it_can_be_continued() -> None:
    """Of a window only the last blocks are read, so without them no prefix is whole."""
    for name, left in (("windowed", 0), ("full", 64)):
        layout, shelf = LAYOUTS[name], Shelf()
        context = replace(POOL_CONTEXT, layout=layout)
        with nodes(partial(MemoryStore, shelf), context) as (node,):
            store_all(node, layout)
            none = first_blocks(layout, 0)
            node.pool.find("r", HASHES, none)
            assert node.event() == PrefixFound("r", END)
            remove(shelf, layout, len(layout.groups) - 1, 4)
            assert node.pool.load(LoadSpec("r", runs(layout, END, none), END))
            assert node.event() == PrefixLoaded("r", left)
            assert node.misses() == {"lost": 1}
            num_whole = 5 if name == "windowed" else 4  # up to the object that was lost
            assert node.stat("pool_read_bytes_total") == num_whole * FULL.block_bytes
            assert node.stat("pool_hit_tokens_total") == left


@pytest.mark.parametrize(
    ("name", "firsts", "cached", "hit"),
    [("windowed", (6, 0), 96, 96), ("windowed", (6, 2), 96, 64), ("windowed", (2, 2), 48, 64), ("full", (2,), 48, 48)],
)
def test_a_hit_counts_from_where_it_ended_without_the_pool(
    name: str, firsts: tuple[int, ...], cached: int, hit: int
) -> None:
    """The engine has all FULL blocks up to `cached`, some since it asked, but its windows were evicted."""
    layout, shelf = LAYOUTS[name], Shelf()
    with nodes(partial(MemoryStore, shelf), replace(POOL_CONTEXT, layout=layout)) as (node,):
        store_all(node, layout)
        node.pool.find("r", HASHES, firsts)
        assert node.event() == PrefixFound("r", END)
        _, *others = runs(layout, END, firsts)
        rest = range(cached // 16, NUM_HASHES)
        assert node.pool.load(LoadSpec("r", (BlockRun(rest.start, tuple(rest)), *others), END))
        assert node.event() == PrefixLoaded("r", END)
        assert node.stat("pool_hit_tokens_total") == hit


def test_a_pool_is_not_asked_for_the_full_blocks_of_an_engine_that_lost_its_windows_alone() -> None:
    """512 FULL blocks are there, and of the window the last 16 are needed: 16 questions in place of 528."""
    window = msgspec.structs.replace(WINDOW, window=16 * 16)
    layout, hashes, asked = BlockLayout((FULL, window)), hashes_of(512), list[list[ObjectName]]()
    sealer = Sealer(replace(POOL_CONTEXT, layout=layout))
    shelf = Shelf({name: bytearray() for one in hashes for group in (0, 1) for name in sealer.names(one, group)})
    with nodes(partial(RecordingStore, shelf, asked), replace(POOL_CONTEXT, layout=layout)) as (node,):
        node.pool.find("r", hashes, (512, 0))
        assert node.event() == PrefixFound("r", 512 * 16)
        node.pool.cancel("r")
        assert isinstance(node.event(), PrefixLoaded)
    blocks = {(name.group, name.hash) for names in asked for name in names}
    assert blocks == {(1, one) for one in hashes[-16:]}


@pytest.mark.parametrize("num_stored", [0, 3, 8, 9, 100])
def test_the_questions_for_one_group_of_full_attention(num_stored: int) -> None:
    """First 8 blocks, then 64 at a time; of each block the first head, and the other one where the first one is."""
    asked: list[list[ObjectName]] = []
    hashes, sealer = hashes_of(100), Sealer(POOL_CONTEXT)
    shelf = Shelf({name: bytearray() for one in hashes[:num_stored] for name in sealer.names(one)})
    with nodes(partial(RecordingStore, shelf, asked), POOL_CONTEXT) as (node,):
        node.pool.find("r", hashes, (0,))
        event = node.event()
        assert (event.num_tokens if isinstance(event, PrefixFound) else 0) == 16 * num_stored
        node.pool.cancel("r")
    expected, start = [], 0
    while start < 100 and start <= num_stored:
        batch = hashes[start : start + (64 if start else 8)]
        expected.append([sealer.names(one)[0] for one in batch])
        if there := batch[: max(0, num_stored - start)]:
            expected.append([sealer.names(one)[1] for one in there])
        start += len(batch)
    assert asked == expected


GROUPS = (FULL, WINDOW, LATENT, STATE, msgspec.structs.replace(WINDOW, window=70))


@pytest.mark.long
@given(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=3, unique=True), st.data())
@settings(deadline=None)
def test_a_search_finds_what_a_model_finds(groups: list[KVGroup], data: st.DataObject) -> None:
    """Whatever is stored, and whatever each group has here: in few questions, and none in vain."""
    plan = PrefixPlan(BlockLayout(tuple(groups)))
    end = plan.end(16)
    have = data.draw(st.sampled_from(range(0, end, plan.boundary)))
    firsts = [data.draw(st.integers(have // kind.block_size, end // kind.block_size)) for kind in groups]
    have = plan.begin(firsts)
    every = [GroupBlock(g, block) for g, kind in enumerate(groups) for block in range(end // kind.block_size)]
    stored = set(every) - set(data.draw(st.lists(st.sampled_from(every), max_size=4)))
    own = {
        GroupBlock(g, block)
        for g, (kind, first) in enumerate(zip(groups, firsts, strict=True))
        for block in range(kind.first_block(have), first)
    }
    questions: list[list[GroupBlock]] = []

    def are_there(blocks: list[GroupBlock]) -> list[bool]:
        questions.append(blocks)
        return [one in stored for one in blocks]

    def is_whole(at: int) -> bool:
        return all(
            GroupBlock(g, block) in stored | own
            for g, kind in enumerate(groups)
            for block in range(kind.first_block(at), at // kind.block_size)
        )

    found = plan.search(end, firsts, are_there)
    assert found == max(at for at in range(have, end + 1, plan.boundary) if at == have or is_whole(at))
    asked = [one for question in questions for one in question]
    assert len(asked) == len(set(asked)), "twice"
    assert own.isdisjoint(asked), "the engine has it"
    assert all(questions)
    assert len(questions) <= 4


@pytest.mark.long
@given(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=3, unique=True), st.data())
@settings(deadline=None)
def test_what_is_loaded_in_part_can_be_continued(groups: list[KVGroup], data: st.DataObject) -> None:
    layout = BlockLayout(tuple(groups))
    plan = PrefixPlan(layout)
    end = plan.end(16)
    have = data.draw(st.sampled_from(range(0, end, plan.boundary)))
    firsts = [data.draw(st.integers(have // kind.block_size, end // kind.block_size)) for kind in groups]
    order = plan.in_order(runs(layout, end, firsts), end)
    assert [one.end for one in order] == sorted(one.end for one in order)
    num_read = data.draw(st.integers(0, len(order)))
    got = {one.at for one in order[:num_read]}
    loaded = plan.loaded(order, num_read, end)
    assert loaded in ((0, end) if plan.partial else range(plan.begin(firsts), end + 1, plan.boundary))
    assert all(one.at in got for one in order if one.end <= loaded), "what was named up to there is whole"


def test_the_rest_of_a_chain_that_no_boundary_ends_is_not_asked_for() -> None:
    plan = PrefixPlan(LAYOUTS["hybrid"])
    assert (plan.boundary, plan.end(5)) == (32, 64)
    assert PrefixPlan(full_layout()).end(5) == 80
