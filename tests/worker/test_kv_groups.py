"""How a model's layers become groups of KV blocks, and groups tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.models.directory import read_json
from pd_cluster.models.registry import resolve_spec
from pd_cluster.scheduling.batch import BlockCopies
from pd_cluster.worker.kv_cache import KVCache
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
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


def test_layers_of_another_window_lie_in_another_tensor(spec: ModelSpec) -> None:
    layout = BlockLayout(replace(spec, windows=(8, 0, 8)).kv_groups(16, "float32"))
    assert [(group.layers, group.window) for group in layout.groups] == [((0, 2), 8), ((1,), 0)]
    cache = KVCache.allocate(layout, 3, 2, CPU)
    for layer, (keys, values) in enumerate(cache.layer_views):
        keys.fill_(layer + 1)
        values.fill_(-layer - 1)
    assert [tensor[0, 0, :, :, 0, 0].tolist() for tensor in cache.tensors] == [[[1, -1], [3, -3]], [[2, -2]]]
    assert [tensor.shape[0] for tensor in cache.describe().tensors] == [3, 3], "without the padding block"


def test_copies_and_clearing_reach_every_group(spec: ModelSpec) -> None:
    cache = KVCache.allocate(BlockLayout(replace(spec, windows=(8, 0, 8)).kv_groups(16, "float32")), 3, 2, CPU)
    for tensor in cache.tensors:
        tensor[0] = 5
    cache.run_copies(BlockCopies(swap_out=((0, 1),), swap_in=((1, 2),), copy_on_write=((2, 1),)), TORCH)
    assert all(bool((tensor[:3] == 5).all()) for tensor in cache.tensors)
    cache.clear(torch.tensor([1]))
    assert not any(bool(tensor[1].any()) for tensor in cache.tensors)
