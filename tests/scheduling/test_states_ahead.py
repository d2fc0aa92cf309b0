"""How many states are saved before they are evicted: a long prompt takes the memory of many at once."""

from __future__ import annotations

import pytest

from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.checkpoints import GRID, kept, most_taken
from pd_connectors.protocol.layout import KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs
from tests.scheduling.kv_groups import STATE

SIZE, PER_SLAB = 64, 50  # tokens; blocks of keys and values that are as large as a state, as of Qwen3.6-35B-A3B
NUM_SLABS = 480  # 31 GB of states of 65 MB


def group(kind: KVKind, units: int) -> KVGroup:
    return KVGroup(kind, (0,), (1, 1, 2, SIZE, 4 * units), "float32", SIZE, 0)


GROUPS = (group(KVKind.FULL, 1), group(KVKind.STATE, PER_SLAB))


class Node:
    """Prompts one after the other, in steps of 8,192 tokens of 110 ms beside streams."""

    def __init__(self) -> None:
        self.blocks = BlockManager(
            GROUPS, KvSlabs(NUM_SLABS, 0, (PER_SLAB, 1)), num_host_blocks=4 * NUM_SLABS, host_cache=True
        )
        self.blocks.copies.step_tokens = 8192
        self.blocks.host.gb_s = GROUPS[1].block_bytes / 2.6e-3 / 1e9
        self.lost: list[int] = []  # groups
        for pool in self.blocks.pools:
            pool.on_evicted = lambda block_hash, _, index=pool.index: self._note(index, block_hash)  # type: ignore[misc]

    def _note(self, index: int, block_hash: bytes) -> None:
        if block_hash not in self.blocks.host.groups[index].cached:
            self.lost.append(index)

    def run(self, name: str, length: int) -> None:
        blocks, table = self.blocks, self.blocks.open_table()
        hashes = [f"{name}/{index}".encode() for index in range(length // SIZE)]
        assert blocks.states is not None
        needs = blocks.needs(table, 0, length)
        assert blocks.has_room(needs)
        blocks.grow(table, 0, length)
        for start in range(0, length, 8192):
            end = min(length, start + 8192)
            blocks.grow(table, start, end)
            blocks.states.plan(table, start, end, length, draws=end == length)
            saves, _ = blocks.copies.plan({}, step_s=0.11 * (end - start) / 8192, has_streams=True)
            blocks.publish(table, hashes[: end // SIZE])
            blocks.let_go(table, end)
            blocks.copies.note_saved(saves)
        blocks.close(table)


@pytest.mark.long
@pytest.mark.parametrize("length", [4096, 65536])
def test_a_prompt_of_64k_evicts_no_state_that_has_no_copy(length: int) -> None:
    """It takes 21 slabs when it enters, then eight states on the grid and the one at its end."""
    node = Node()
    for number in range(2 * NUM_SLABS * PER_SLAB * SIZE // (length + 2 * PER_SLAB * SIZE)):
        node.run(f"{number}", length)
    for number in range(60):
        node.run(f"short {number}", 4096)
    assert node.blocks.pools[1].num_evicted + node.blocks.pools[0].num_evicted > 0
    node.lost.clear()
    for number in range(3):
        node.run(f"long {number}", 65536)
    assert not node.lost
    node.blocks.check()


@pytest.mark.parametrize("num_tokens", [1, 64, GRID - 1, GRID, GRID + 1, 3 * GRID])
def test_a_step_keeps_no_more_states_than_it_is_told_to_take(num_tokens: int) -> None:
    most = most_taken(GROUPS[1], num_tokens)
    for start in (0, 1, GRID - 1, GRID, 2 * GRID - 64):
        end = start + num_tokens
        for num_prompt in (end, end + 1, end + GRID):
            assert len(kept(start, end, num_prompt, start + 64, SIZE)) + 2 <= most
    assert GROUPS[1].kind is STATE
