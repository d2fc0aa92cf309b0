"""What the KV of Gemma 3 27B takes, and how many streams fit, beside sequences that are put into slabs one by one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.memory import (
    BLOCK_SIZE,
    H200_BYTES,
    LEAST_STREAMS,
    MOST_HELD,
    MOST_MOVED,
    MOST_STREAMS,
    byte_rows,
    kv_room,
    main,
    room_rows,
    streams,
)
from benchmarks.shapes import CONFIGS
from pd_cluster.models.registry import resolve_spec
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.sequence_room import decode_blocks
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    import pytest

GEMMA = resolve_spec(Path(), CONFIGS["gemma3-27b"])
GROUPS = GEMMA.kv_groups(BLOCK_SIZE, "bfloat16")


def test_long_sequences_of_gemma_hold_and_move_a_fifth() -> None:
    found = {(length, part.name): part for length, part in byte_rows(GROUPS)}
    long = found[32_768, "all"]
    assert long.held / long.whole <= MOST_HELD
    assert long.moved / long.whole <= MOST_MOVED
    short = found[1024, "all"]
    assert short.held == short.whole
    window = found[32_768, "window of 1,024, 52 layers"]
    block = 52 * 2 * 16 * 128 * BLOCK_SIZE * 2
    assert (window.held, window.moved) == (17 * block, 17 * block), "after the first token of the answer"


def test_more_long_streams_of_gemma_fit_on_a_gpu() -> None:
    for length, before, now in room_rows(GROUPS, *kv_room(GEMMA, H200_BYTES)):
        assert now >= LEAST_STREAMS[length] * before > 0


def test_no_more_streams_are_told_than_a_node_runs() -> None:
    num_bytes, most = kv_room(GEMMA, 2 * H200_BYTES)
    assert min(next(room_rows(GROUPS, num_bytes, MOST_STREAMS))[1:]) > most
    assert next(room_rows(GROUPS, num_bytes, most)) == (1024, most, most)


def two_groups(layers: tuple[int, int], window: int) -> list[KVGroup]:
    """FULL and WINDOW, with so many layers, in blocks of 4 tokens."""
    kinds = ((KVKind.FULL, 0), (KVKind.WINDOW, window))
    return [
        KVGroup(kind, tuple(range(count)), (2, count, 2, 4, 8), "float32", 4, size)
        for count, (kind, size) in zip(layers, kinds, strict=True)
    ]


@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 40), st.integers(1, 60), st.integers(2, 30))
def test_as_many_streams_fit_as_can_be_put_into_slabs(
    layers: tuple[int, int], window: int, num_tokens: int, num_blocks: int
) -> None:
    groups = two_groups(layers, window)
    slabs = KvSlabs.of_blocks(BlockLayout(tuple(groups)), num_blocks)
    assert streams(groups, slabs, num_tokens) == put_into(slabs, groups, num_tokens)


def put_into(slabs: KvSlabs, groups: list[KVGroup], num_tokens: int) -> int:
    """Sequences that find blocks, one after the other. The first one is prefilled while the others decode."""
    room, unowned, count = [0] * len(groups), slabs.num_slabs, 0  # room: free blocks in slabs that a group owns
    while True:
        for index, group in enumerate(groups):
            room[index] -= decode_blocks(group, num_tokens) if count else -(-num_tokens // group.block_size)
            while room[index] < 0:
                room[index] += slabs.per_slab[index]
                unowned -= 1
        if unowned < 0:
            return count
        count += 1


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 40), st.integers(1, 60), st.integers(2, 30))
def test_as_many_streams_fit_as_the_block_manager_gives_blocks_to(
    layers: tuple[int, int], window: int, num_tokens: int, num_blocks: int
) -> None:
    """One after the other is prefilled and then decodes, as long as another prompt finds room.

    At the end of a block, a sequence has none of a window of one token until it computes the next. It counts as one.
    """
    groups = two_groups(layers, window)
    assume(all(group.first_block(num_tokens) * group.block_size < num_tokens for group in groups))
    slabs = KvSlabs.of_blocks(BlockLayout(tuple(groups)), num_blocks)
    blocks = BlockManager(groups, slabs, prefix_caching=False)
    count, table = 0, blocks.open_table()
    while blocks.can_grow(table, 0, num_tokens):
        blocks.grow(table, 0, num_tokens)
        blocks.let_go(table, num_tokens)
        count, table = count + 1, blocks.open_table()
    assert streams(groups, slabs, num_tokens) == count


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "window of 1,024, 52 layers" in told
    assert "streams at once" in told
