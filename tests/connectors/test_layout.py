"""KV layouts as values, and the plan of which rank reads which bytes from which rank."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.errors import LayoutMismatch
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup, KVKind
from pd_connectors.protocol.slices import SliceRead, plan_slices, slices_between

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
    assert FULL.handed_over(40) == LATENT.handed_over(40) == range(3)
    assert [WINDOW.handed_over(64, computed) for computed in (0, 16, 32, 64)] == [
        range(1, 1),
        range(1, 1),
        range(1, 2),
        range(1, 4),
    ]
    assert [STATE.handed_over(40, computed) for computed in (0, 39, 40)] == [range(0), range(0), range(1)]
    assert [STATE.handed_over(n) for n in (2048, 2049, 4096)] == [range(1), range(1, 2), range(1, 2)]


@pytest.mark.parametrize(("position", "first"), [(0, 0), (34, 0), (35, 1), (50, 1), (51, 2), (340, 20)])
def test_the_first_block_that_later_tokens_see(position: int, first: int) -> None:
    """A window of 20 tokens, its own among them, over blocks of 16."""
    assert WINDOW.first_block(position) == first
    assert FULL.first_block(position) == LATENT.first_block(position) == 0


@pytest.mark.parametrize(("position", "first"), [(0, 0), (1, 0), (2048, 0), (2049, 1), (4097, 2)])
def test_a_state_is_continued_from_the_block_of_the_token_before(position: int, first: int) -> None:
    assert STATE.first_block(position) == first


GROUPS = st.builds(
    KVGroup,
    st.sampled_from(KVKind),
    st.just((0,)),
    st.just((1, 1, 2, 16, 4)),
    st.just("float16"),
    st.sampled_from((1, 16, 32, 48)),
    st.integers(1, 200),
)


def read_by(group: KVGroup, position: int) -> set[int]:
    """The blocks that the token at `position` reads, from what each kind is."""
    match group.kind:
        case KVKind.WINDOW:
            tokens = range(max(0, position - group.window + 1), position + 1)
        case KVKind.STATE:  # the state after the token before, which the step leaves in the block of its own token
            tokens = range(max(0, position - 1), position)
        case _:
            tokens = range(position + 1)
    return {token // group.block_size for token in tokens}


@pytest.mark.long
@given(GROUPS, st.integers(0, 400), st.integers(0, 300))
def test_no_token_reads_a_dead_block(group: KVGroup, position: int, later: int) -> None:
    first = group.first_block(position)
    assert min(read_by(group, position + later), default=first) >= first
    if position:
        assert min(read_by(group, position)) == first, "and none is kept for nothing"


@pytest.mark.long
@given(GROUPS, st.integers(1, 400), st.data())
def test_what_is_handed_over_only_grows(group: KVGroup, num_tokens: int, data: st.DataObject) -> None:
    """And begins at the same block, whatever is computed. At its end a reader has what the next token reads."""
    less = data.draw(st.integers(0, num_tokens))
    more = data.draw(st.integers(less, num_tokens))
    before, then, whole = (group.handed_over(num_tokens, computed) for computed in (less, more, None))
    assert before.start == then.start == whole.start
    assert before.stop <= then.stop <= whole.stop
    assert all((block + 1) * group.block_size <= less or less == num_tokens for block in before), "they are final"
    last = (num_tokens - 1) // group.block_size * group.block_size
    for position in (num_tokens,) if group.kind is KVKind.STATE else (num_tokens, num_tokens - 1, last):
        held = {block for block in read_by(group, position) if block * group.block_size < num_tokens}
        assert held <= set(whole)


DRAFTS = msgspec.structs.replace(FULL, layers=(9,), optional=True)


def test_an_optional_group_need_not_be_the_peers() -> None:
    with_drafts, without = BlockLayout((FULL, WINDOW, DRAFTS)), BlockLayout((FULL, WINDOW))
    other = BlockLayout((FULL, WINDOW, msgspec.structs.replace(DRAFTS, dtype="float16")))
    assert with_drafts.digest() == without.digest()
    for ours, theirs, num_common in (
        (with_drafts, with_drafts, 3),
        (with_drafts, without, 2),
        (without, with_drafts, 2),
        (with_drafts, other, 2),
    ):
        assert ours.num_common(theirs) == num_common
        assert [part.group for part in plan_slices(theirs, ours)] == list(range(num_common))
    assert [part.group for part in slices_between(0, 1, with_drafts, 0, num_groups=2)] == [0, 1]
    with pytest.raises(ValueError, match="optional come last"):
        BlockLayout((DRAFTS, FULL))
    with pytest.raises(LayoutMismatch, match="block_size is 16 tokens, ours 16/16"):
        with_drafts.num_common(BlockLayout((FULL, DRAFTS)))


def test_sizes_of_groups_with_different_blocks() -> None:
    layout = BlockLayout((STATE, msgspec.structs.replace(FULL, block_size=48), WINDOW))
    assert (layout.block_size, layout.boundary) == (16, 6144)
