"""Reads of one load by group: windows, states and full attention side by side, each with its own run of blocks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pd_connectors.base import LoadSpec
from pd_connectors.block_reads import BlockReads, PostRead
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup, KVKind
from pd_connectors.protocol.messages import LeaseRef, LeaseState
from pd_connectors.pull_limits import PullLimits

FULL = KVGroup(KVKind.FULL, (0,), (1, 1, 2, 16, 1), "float32", 16)
STATE = KVGroup(KVKind.STATE, (1,), (4, 1, 8), "float32", 2048)
LAYOUT = BlockLayout((FULL, STATE))
SPEC = LoadSpec(
    "load", (BlockRun(1, (21, 22)), BlockRun(0, (7,))), 40
)  # block 0 is cached; the state is another pool's


def state(num_tokens: int, *runs: BlockRun) -> LeaseState:
    return LeaseState(LeaseRef("P", 1, "l"), 0, num_tokens + 1, num_tokens, runs)


def reads(limits: PullLimits | None = None) -> BlockReads:
    started = BlockReads(LAYOUT, limits or PullLimits())
    started.start(SPEC)
    return started


def test_each_group_is_read_as_far_as_it_is_final() -> None:
    """Whole blocks of a part of the prompt; the last block and the state with its end."""
    load = reads()
    assert load.post(state(0)) == []
    assert load.post(state(32, BlockRun(0, (1, 2)), BlockRun(0, ()))) == [PostRead(0, ((2,), ()), ((21,), ()))]
    assert load.post(state(40, BlockRun(0, (1, 2, 3)), BlockRun(0, (9,)))) == [PostRead(1, ((3,), (9,)), ((22,), (7,)))]
    assert load.num_blocks_in_flight == 3
    assert load.ended(0, is_good=True)
    assert load.has_read, "though nothing of the state is in"
    assert not load.ended(0, is_good=True), "once"
    assert not load.is_done
    assert load.ended(1, is_good=True)
    assert load.is_done
    assert load.group_bytes == (2 * FULL.block_bytes, STATE.block_bytes)


def test_the_limits_hold_for_each_group() -> None:
    load = reads(PullLimits(max_blocks_per_read=1, max_reads=1))
    whole = state(40, BlockRun(0, (1, 2, 3)), BlockRun(0, (9,)))
    assert load.post(whole) == [PostRead(0, ((2,), (9,)), ((21,), (7,)))]
    assert load.post(whole) == []
    load.ended(0, is_good=True)
    assert load.post(whole) == [PostRead(1, ((3,), ()), ((22,), ()))]


def test_what_a_failed_read_brought_is_not_counted() -> None:
    load = reads()
    load.post(state(40, BlockRun(0, (1, 2, 3)), BlockRun(0, (9,))))
    load.ended(0, is_good=False)
    assert not load.has_read
    assert load.group_bytes == (0, 0)


@pytest.mark.parametrize(
    "runs",
    [
        (BlockRun(0, (1, 2, 3)),),
        (BlockRun(0, (1, 2, 3)), BlockRun(0, ())),
        (BlockRun(0, (1, 2)), BlockRun(0, (9,))),
        (BlockRun(2, (3,)), BlockRun(0, (9,))),
    ],
    ids=["a group less", "no state", "a block less", "begins too late"],
)
def test_an_announcement_that_lacks_blocks_is_refused(runs: tuple[BlockRun, ...]) -> None:
    with pytest.raises(ValueError, match="the prefill node announced"):
        reads().post(state(40, *runs))


def test_blocks_before_ours_need_not_be_announced() -> None:
    """Of a window group P hands over its last blocks only."""
    load = reads()
    assert load.post(state(40, BlockRun(1, (2, 3)), BlockRun(0, (9,)))) == [
        PostRead(0, ((2, 3), (9,)), ((21, 22), (7,)))
    ]


def test_a_group_of_which_we_need_only_later_blocks_waits_for_them() -> None:
    load = BlockReads(BlockLayout((FULL, FULL)), PullLimits())
    load.start(LoadSpec("load", (BlockRun(0, (20, 21, 22)), BlockRun(2, (7,))), 40))
    assert load.post(state(16, BlockRun(0, (1,)), BlockRun(0, (1,)))) == [PostRead(0, ((1,), ()), ((20,), ()))]
    whole = BlockRun(0, (1, 2, 3))
    assert load.post(state(40, whole, whole)) == [PostRead(1, ((2, 3), (3,)), ((21, 22), (7,)))]


def test_of_a_window_only_its_blocks_are_read_when_they_are_final() -> None:
    """P has not got to the window yet, then it has; we have its first block already."""
    window = KVGroup(KVKind.WINDOW, (1,), (1, 1, 2, 16, 1), "float32", 16, window=33)
    load = BlockReads(BlockLayout((FULL, window)), PullLimits())
    load.start(LoadSpec("load", (BlockRun(0, (20, 21, 22, 23)), BlockRun(2, (7, 8))), 64))
    assert window.handed_over(64) == range(1, 4)
    whole = BlockRun(0, (1, 2, 3, 4))
    assert load.post(state(16, BlockRun(0, (1,)), BlockRun(1, ()))) == [PostRead(0, ((1,), ()), ((20,), ()))]
    assert load.post(state(32, BlockRun(0, (1, 2)), BlockRun(1, (9,)))) == [PostRead(1, ((2,), ()), ((21,), ()))]
    assert load.post(state(64, whole, BlockRun(1, (9, 6, 5)))) == [PostRead(2, ((3, 4), (6, 5)), ((22, 23), (7, 8)))]
    for number in range(3):
        load.ended(number, is_good=True)
    assert load.is_done
    assert load.group_bytes == (4 * FULL.block_bytes, 2 * window.block_bytes)


def test_a_group_that_the_peer_lacks_is_left_alone() -> None:
    load = BlockReads(BlockLayout((FULL, replace(FULL, optional=True))), PullLimits())
    load.start(LoadSpec("load", (BlockRun(0, (20, 21)), BlockRun(0, (7, 8))), 32), 1)
    assert load.wants_blocks
    assert load.post(state(32, BlockRun(0, (1, 2)))) == [PostRead(0, ((1, 2), ()), ((20, 21), ()))]
    load.ended(0, is_good=True)
    assert load.is_done
    assert load.group_bytes == (2 * FULL.block_bytes, 0)
    load.start(LoadSpec("load", (BlockRun(2, ()), BlockRun(0, (7, 8))), 32), 1)
    assert not load.wants_blocks
    assert load.is_done


def test_a_group_that_only_the_peer_has_is_not_read() -> None:
    load = BlockReads(BlockLayout((FULL,)), PullLimits())
    load.start(LoadSpec("load", (BlockRun(0, (20, 21)),), 32))
    announced = state(32, BlockRun(0, (1, 2)), BlockRun(0, (5, 6)))
    assert load.post(announced) == [PostRead(0, ((1, 2),), ((20, 21),))]
