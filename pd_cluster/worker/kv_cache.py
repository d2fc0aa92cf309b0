"""The paged KV cache: one tensor for each group of layers, with the block as first dimension.

A pool of the same blocks in host memory takes the blocks of preempted sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.worker.plain_memory import plain_memory
from pd_connectors.base import CacheDescription
from pd_kernels.fp8_cache import FP8, indexable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.scheduling.batch import BlockCopies
    from pd_connectors.protocol.layout import BlockLayout
    from pd_kernels.backends import Kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "float8_e4m3fn": FP8}
_NUM_PADDING_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class KVCache:
    """The tensors of the cache.

    The engine decides which sequence owns which block. A block id is valid in every group's tensor.
    """

    layout: BlockLayout
    tensors: tuple[torch.Tensor, ...]  # by group: [num_blocks + padding, *group.rank_shape(tp_size)]
    hosts: tuple[torch.Tensor, ...]  # by group: [num_host_blocks, as above], pinned when the cache is on a GPU
    layer_views: tuple[
        tuple[torch.Tensor, torch.Tensor], ...
    ]  # K and V by layer, each [num_blocks + padding, num_kv_heads, block_size, head_dim]
    num_blocks: int  # blocks that the engine may use; padding writes to one more block behind them
    num_host_blocks: int

    @classmethod
    def allocate(cls, layout: BlockLayout, num_blocks: int, num_host_blocks: int, device: torch.device) -> KVCache:
        """Allocate the cache of a rank, zeroed. Raises StartupError when memory is short.

        Attention multiplies the value of a masked slot by 0, and 0 times uninitialized memory may be NaN.
        """
        is_pinned = device.type == "cuda" and num_host_blocks > 0
        tensors, hosts = [], []
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            for group in layout.groups:
                shape, dtype = group.rank_shape(layout.tp_size), KV_DTYPES[group.dtype]
                with plain_memory(device):
                    tensor = torch.zeros((num_blocks + _NUM_PADDING_BLOCKS, *shape), dtype=dtype, device=device)
                tensors.append(tensor)
                hosts.append(torch.zeros((num_host_blocks, *shape), dtype=dtype, pin_memory=is_pinned))
                views |= {layer: (tensor[:, :, i, 0], tensor[:, :, i, 1]) for i, layer in enumerate(group.layers)}
        except (RuntimeError, torch.OutOfMemoryError) as error:
            size_gb = (num_blocks + num_host_blocks) * layout.rank_bytes / 1e9
            raise StartupError(f"cannot allocate {size_gb:.2f} GB of KV cache: {error}") from error
        layer_views = tuple(views[layer] for layer in range(len(views)))
        return cls(layout, tuple(tensors), tuple(hosts), layer_views, num_blocks, num_host_blocks)

    @property
    def padding_block(self) -> int:
        """The id of the block that padding writes to. No sequence owns it, and it is never read."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """The size of the tensors on the device, padding included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def describe(self) -> CacheDescription:
        """Describe the cache for a connector, without the padding block."""
        return CacheDescription(tuple(tensor[: self.num_blocks] for tensor in self.tensors), self.layout)

    def run_copies(self, copies: BlockCopies, kernels: Kernels) -> None:
        """Run the copies of a batch: swap out, then swap in, then copy on write."""
        for pairs, sources, targets in (
            (copies.swap_out, self.tensors, self.hosts),
            (copies.swap_in, self.hosts, self.tensors),
            *((pairs, self.tensors, self.tensors) for pairs in independent(copies.copy_on_write)),
        ):
            if pairs:
                ids = torch.tensor(pairs, dtype=torch.int64)
                for source, target in zip(sources, targets, strict=True):
                    kernels.copy_blocks(source, target, ids)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero blocks (int64 [n]) before they are filled in part, so that no read depends on their old content."""
        for tensor in self.tensors:
            indexable(tensor).index_fill_(0, blocks, 0)


def independent(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut copies (from, to) within one memory into parts. A part's copies may run in any order, the parts run in order.

    A launch copies its pairs in any order. If a block was copied on write, and its last holder is preempted in the same
    step, it may be the target of the step's next copy.
    """
    parts: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not parts or target in read or target in written or source in written:
            parts.append([])
            read, written = set(), set()
        parts[-1].append((source, target))
        read.add(source)
        written.add(target)
    return parts


def blocks_in(num_bytes: float, layout: BlockLayout) -> int:
    """The number of blocks, over all groups, of which one rank's parts fit into `num_bytes`."""
    return int(num_bytes // layout.rank_bytes)
