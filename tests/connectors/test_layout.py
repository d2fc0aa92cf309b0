"""KV layouts as values, and the plan of which rank reads which bytes from which rank."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.errors import LayoutMismatch
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup, KVKind
from pd_connectors.protocol.slices import SliceRead, plan_slices

FULL = KVGroup(KVKind.FULL, (0, 2), (8, 2, 2, 16, 4), "bfloat16", 16)
WINDOW = KVGroup(KVKind.WINDOW, (1,), (2, 1, 2, 16, 4), "bfloat16", 16, window=20)
LATENT = KVGroup(KVKind.LATENT, (3,), (1, 1, 16, 72), "bfloat16", 16, sharded=False)
STATE = KVGroup(KVKind.STATE, (4,), (4, 1, 128), "float32", 2048)
SIZES = (1, 2, 4, 8)


@pytest.mark.long
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
def test_every_byte_is_read_once_from_a_rank_that_holds_it(p_size: int, d_size: int, heads: list[int]) -> None:
    sharded = [KVGroup(KVKind.FULL, (i,), (n, 1, 2, 16, 4), "float16", 16) for i, n in enumerate(heads)]
    theirs, ours = (BlockLayout((*sharded, LATENT), size) for size in (p_size, d_size))
    plan = plan_slices(theirs, ours)
    for rank in range(d_size):
        for index, group in enumerate(ours.groups):
            unit = group.block_bytes // group.shape[0]  # a head's bytes
            own = group.heads_of(rank, d_size)
            covered: list[int] = []  # heads, in the order of our block
            for part in (part for part in plan if (part.local_rank, part.group) == (rank, index)):
                held = group.heads_of(part.remote_rank, p_size)
                assert part.local_offset == len(covered) * unit, "contiguous, from the block's start"
                assert part.num_bytes > 0
                assert part.num_bytes % unit == part.remote_offset % unit == 0
                assert part.remote_offset + part.num_bytes <= len(held) * unit, "within the remote rank's block"
                first = held.start + part.remote_offset // unit
                covered += range(first, first + part.num_bytes // unit)
            assert covered == list(own)


@pytest.mark.long
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_readers_of_the_same_heads_spread_over_the_ranks_that_hold_them(p_size: int, d_size: int, heads: int) -> None:
    group = KVGroup(KVKind.FULL, (0,), (heads, 1, 2, 16, 4), "float16", 16)
    for groups in ((group,), (LATENT,)):
        plan = plan_slices(BlockLayout(groups, p_size), BlockLayout(groups, d_size))
        sources = Counter(part.remote_rank for part in plan)
        assert max(sources.values()) <= max(1, -(-len(plan) // min(p_size, len(sources))))


def test_one_rank_on_both_sides_reads_whole_blocks() -> None:
    layout = BlockLayout((FULL, WINDOW, LATENT))
    expected = tuple(SliceRead(0, 0, index, 0, 0, group.block_bytes) for index, group in enumerate(layout.groups))
    assert plan_slices(layout, layout) == expected


def test_two_of_four_ranks_are_enough_for_two_heads() -> None:
    group = msgspec.structs.replace(FULL, shape=(2, 2, 2, 16, 4))
    plan = plan_slices(BlockLayout((group,), 4), BlockLayout((group,), 1))
    assert [(part.remote_rank, part.local_offset) for part in plan] == [(0, 0), (2, group.block_bytes // 2)]


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (16, 12)])
def test_heads_that_cannot_be_split_evenly_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(LayoutMismatch, match="8 KV heads cannot be split over"):
        plan_slices(BlockLayout((FULL,), sizes[0]), BlockLayout((FULL,), sizes[1]))


def test_sizes_and_digest() -> None:
    layout = BlockLayout((FULL, WINDOW))
    assert (FULL.block_bytes, WINDOW.block_bytes) == (8 * 2 * 2 * 16 * 4 * 2, 2 * 1 * 2 * 16 * 4 * 2)
    assert (layout.block_size, layout.block_bytes) == (16, FULL.block_bytes + WINDOW.block_bytes)
    assert BlockLayout((FULL,)).block_size == 16
    assert len(layout.digest()) == 16
    assert layout.digest() == BlockLayout((FULL, WINDOW), tp_size=4).digest()
    assert len({BlockLayout(groups).digest() for groups in ((FULL,), (WINDOW,), (FULL, WINDOW), (WINDOW, FULL))}) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 32}, "block_size is 32 tokens, ours 16"),
        ({"dtype": "float16"}, "the peer's KV is float16, ours bfloat16: start both nodes with the same dtype"),
        ({"window": 128}, "the peer's KV groups are"),
        ({"layers": (0, 1)}, "the peer's KV groups are"),
    ],
)
def test_other_groups_are_refused_with_the_difference(change: dict[str, object], words: str) -> None:
    other = msgspec.structs.replace(FULL, **change)
    with pytest.raises(LayoutMismatch, match=words):
        plan_slices(BlockLayout((other,)), BlockLayout((FULL,)))
    with pytest.raises(LayoutMismatch, match="the peer's"):
        plan_slices(BlockLayout((FULL, WINDOW)), BlockLayout((FULL,)))


def test_a_run_names_consecutive_prompt_blocks() -> None:
    run = BlockRun(2, (7, 5, 9))
    assert run.span == range(2, 5)
    assert (run.ids_of(range(3, 5)), run.ids_of(range(2, 2))) == ((5, 9), ())


def test_what_a_handoff_moves() -> None:
    assert [FULL.handed_over(40, computed) for computed in (0, 15, 16, 39, 40)] == [*map(range, (0, 0, 1, 2, 3))]
    assert FULL.handed_over(40) == WINDOW.handed_over(40) == LATENT.handed_over(40) == range(3)
    assert [STATE.handed_over(40, computed) for computed in (0, 39, 40)] == [range(0), range(0), range(1)]


@pytest.mark.parametrize(("num_tokens", "first"), [(0, 0), (19, 0), (34, 0), (35, 1), (51, 2)])
def test_the_first_block_that_later_tokens_see(num_tokens: int, first: int) -> None:
    """A token at position p sees the `window` positions up to p."""
    assert WINDOW.first_block(num_tokens) == first
    assert FULL.first_block(num_tokens) == LATENT.first_block(num_tokens) == 0
