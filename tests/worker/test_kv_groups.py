"""How a model's layers become groups of KV blocks, and groups tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.models.directory import read_json
from pd_cluster.models.registry import resolve_spec
from pd_cluster.scheduling.batch import BlockCopies
from pd_cluster.worker.kv_cache import KVCache
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs
from pd_kernels.backends import TORCH

if TYPE_CHECKING:
    from pd_cluster.models.spec import ModelSpec
    from tests.worker.conftest import ModelStore

CPU = torch.device("cpu")


@pytest.fixture
def spec(models: ModelStore) -> ModelSpec:
    directory = models.get("qwen3").directory
    return resolve_spec(directory, read_json(directory / "config.json"))


def test_a_model_of_one_window_has_one_group(spec: ModelSpec) -> None:
    shape = (spec.num_kv_heads, 3, 2, 16, spec.head_dim)
    assert spec.kv_groups(16, "float32") == (KVGroup(KVKind.FULL, (0, 1, 2), shape, "float32", 16),)
    (windowed,) = replace(spec, windows=(8, 8, 8)).kv_groups(16, "float32")
    assert (windowed.kind, windowed.window, windowed.shape) == (KVKind.WINDOW, 8, shape)


@pytest.fixture
def layout(spec: ModelSpec) -> BlockLayout:
    return BlockLayout(replace(spec, windows=(8, 0, 8)).kv_groups(16, "float32"))


def allocated(layout: BlockLayout, num_blocks: int = 3) -> tuple[KVCache, list[range]]:
    """A cache, and the blocks of each group if they own the slabs in turn."""
    slabs = KvSlabs.of_blocks(layout, num_blocks)
    ends = [0, *accumulate(-(-num_blocks // count) for count in slabs.per_slab)]
    assert ends[-1] == slabs.num_slabs
    owned = [range(a * n, b * n) for (a, b), n in zip(pairwise(ends), slabs.per_slab, strict=True)]
    return KVCache.allocate(layout, slabs, 4, CPU), owned


def numbers(block: torch.Tensor) -> list[float]:
    """The different numbers of a block."""
    return sorted(set(block.flatten().tolist()))


def test_one_group_has_the_memory_as_one_contiguous_tensor(spec: ModelSpec) -> None:
    layout = BlockLayout(spec.kv_groups(16, "float32"))
    cache = KVCache.allocate(layout, KvSlabs.of_blocks(layout, 5), 0, CPU)
    [tensor], [described] = cache.tensors, cache.describe().tensors
    assert tensor.is_contiguous()
    assert (len(tensor), len(described), tensor.nbytes) == (6, 5, cache.memory.nbytes)
    assert tensor.data_ptr() == cache.memory.data_ptr() == described.data_ptr()


def test_layers_of_another_window_lie_in_another_tensor(layout: BlockLayout) -> None:
    """Groups that own different slabs do not overwrite each other."""
    assert [(group.layers, group.window) for group in layout.groups] == [((0, 2), 8), ((1,), 0)]
    cache, owned = allocated(layout)
    for layer, (keys, values) in cache.layer_caches.items():
        blocks = owned[layer % 2]
        keys[blocks.start : blocks.stop] = layer + 1
        values[blocks.start : blocks.stop] = -layer - 1
    for tensor, blocks, expected in zip(cache.tensors, owned, [[[1, -1], [3, -3]], [[2, -2]]], strict=True):
        for block in blocks:
            assert tensor[block, 0, :, :, 0, 0].tolist() == expected
    for group, (tensor, described) in enumerate(zip(cache.tensors, cache.describe().tensors, strict=True)):
        assert len(described) == cache.slabs.num_blocks(group) == cache.padding_block(group)
        assert described.stride() == tensor.stride()
        assert tensor[0].is_contiguous()
        padding = tensor[cache.padding_block(group)]
        end = padding.data_ptr() - cache.memory.data_ptr() + padding.nbytes
        assert cache.slabs.num_bytes <= end - padding.nbytes <= end <= cache.memory.nbytes, "after the last slab"


def test_copies_and_clearing_reach_the_blocks_of_their_group(layout: BlockLayout) -> None:
    cache, owned = allocated(layout)
    for group, (tensor, blocks) in enumerate(zip(cache.tensors, owned, strict=True)):
        for index, block in enumerate(blocks):
            tensor[block] = 10 * group + index
    (a, b, c, *_), (d, e, f, *_) = owned
    copies = BlockCopies(
        swap_out=((0, a, 1), (1, d, 1), (0, b, 2)), swap_in=((1, 1, e), (0, 1, c)), copy_on_write=((1, e, f), (0, c, b))
    )
    cache.run_copies(copies, TORCH)
    first, second = ([numbers(tensor[block]) for block in blocks]
                     for tensor, blocks in zip(cache.tensors, owned, strict=True))  # fmt: skip
    assert first[:3] == [[0], [0], [0]]
    assert second[:3] == [[10], [10], [10]]
    assert numbers(cache.hosts[0][2]) == [1]
    cache.clear((torch.tensor([b]), None))
    assert not cache.tensors[0][b].any()
    assert [numbers(cache.tensors[0][a]), numbers(cache.tensors[1][e])] == [[0], [10]]
    cache.clear((None, torch.tensor([d, f])))
    assert not any(bool(cache.tensors[1][block].any()) for block in (d, f))


def test_a_copy_reads_a_block_before_another_group_gets_its_memory(layout: BlockLayout) -> None:
    """The last holder of a copied block is preempted in the same step, and its slab changes hands."""
    cache, (windowed, full) = allocated(layout)
    source, target = windowed[0], windowed[0] + cache.slabs.per_slab[0]  # of two slabs
    reused = source // cache.slabs.per_slab[0] * cache.slabs.per_slab[1]  # at the place of `source`
    cache.tensors[1][full[0]], cache.tensors[1][full[1]] = 3, 4
    cache.tensors[0][source] = 5
    copies = ((1, full[0], full[2]), (0, source, target), (1, full[1], reused))
    cache.run_copies(BlockCopies(copy_on_write=copies), TORCH)
    assert numbers(cache.tensors[0][target]) == [5]
    assert numbers(cache.tensors[1][reused]) == [4]
    assert numbers(cache.tensors[1][full[2]]) == [3]
