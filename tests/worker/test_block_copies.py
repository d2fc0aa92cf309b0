"""Copies on write that depend on each other run one after the other."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.scheduling.batch import BlockCopies
from pd_cluster.worker.kv_cache import KVCache, independent
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs
from pd_kernels.backends import TORCH

NUM_BLOCKS = 8
LAYOUT = BlockLayout((KVGroup(KVKind.FULL, (0,), (1, 1, 2, 16, 4), "float32", 16),))


def last_first(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """A launch may copy its pairs in any order, and this does so in the worst one."""
    for pair in reversed(pairs.tolist()):
        TORCH.copy_blocks(source, target, torch.tensor([pair]))


@given(st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)), max_size=12))
def test_copies_on_write_are_as_in_order(pairs: list[tuple[int, int]]) -> None:
    cache = KVCache.allocate(LAYOUT, KvSlabs.of_blocks(LAYOUT, NUM_BLOCKS), 0, torch.device("cpu"))
    [tensor] = cache.tensors
    tensor[:] = torch.arange(NUM_BLOCKS + 1.0).view(-1, *[1] * (tensor.dim() - 1))
    expected = list(range(NUM_BLOCKS + 1))
    for source, target in pairs:
        expected[target] = expected[source]
    cache.run_copies(
        BlockCopies(copy_on_write=tuple((0, *pair) for pair in pairs)), replace(TORCH, copy_blocks=last_first)
    )
    blocks = tensor.flatten(1)
    assert torch.equal(blocks, torch.tensor(expected, dtype=torch.float32)[:, None].expand_as(blocks))


def test_a_block_that_a_preemption_freed_takes_a_launch_of_its_own() -> None:
    parts = independent([(0, 6, 19), (0, 22, 6), (0, 3, 4)], [30])
    assert parts == [[(0, 6, 19)], [(0, 22, 6), (0, 3, 4)]]
    together = [(0, 1, 2), (0, 3, 4), (0, 1, 5)]
    assert independent(together, [30]) == [together]
    assert independent([], [30]) == []


def test_groups_copy_together_where_they_use_different_slabs() -> None:
    assert independent([(0, 0, 1), (1, 4, 5), (0, 2, 3)], [4, 4]) == [[(0, 0, 1), (1, 4, 5), (0, 2, 3)]]
    assert independent([(0, 0, 4), (1, 8, 1)], [4, 4]) == [[(0, 0, 4)], [(1, 8, 1)]], "slab 0 changes hands"
    assert independent([(0, 0, 4), (1, 1, 8)], [4, 4]) == [[(0, 0, 4), (1, 1, 8)]], "both read slab 0"
    assert independent([(0, 0, 1), (1, 1, 2)], [1, 1]) == [[(0, 0, 1)], [(1, 1, 2)]], "a slab has one block"
