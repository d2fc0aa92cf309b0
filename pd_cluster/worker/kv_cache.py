"""The paged KV cache: one tensor, block first, and a pool of the same blocks in host memory for preempted sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_connectors.base import CacheDescription

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import BlockCopies
    from pd_connectors.protocol.ticket import Geometry
    from pd_kernels.backends import Kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_PADDING_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class KVCache:
    """The tensors. Who owns which block is the engine's business, not theirs."""

    tensor: torch.Tensor  # [num_blocks + padding, num_kv_heads, num_layers, 2, block_size, head_dim]
    host: torch.Tensor  # [num_host_blocks, ...], pinned when the cache is on a GPU
    geometry: Geometry
    layer_views: tuple[
        tuple[torch.Tensor, torch.Tensor], ...
    ]  # K and V, each [num_blocks + padding, num_kv_heads, block_size, head_dim]
    num_blocks: int  # what the engine may use; a block behind them takes what padding writes

    @classmethod
    def allocate(cls, geometry: Geometry, num_blocks: int, num_host_blocks: int, device: torch.device) -> KVCache:
        """Zeroed: a masked slot multiplies its value by 0, and 0 times garbage may be NaN. Raises StartupError."""
        shape = (geometry.num_kv_heads, geometry.num_layers, 2, geometry.block_size, geometry.head_dim)
        dtype = DTYPES[geometry.dtype]
        try:
            tensor = torch.zeros((num_blocks + _NUM_PADDING_BLOCKS, *shape), dtype=dtype, device=device)
            host = torch.zeros(
                (num_host_blocks, *shape), dtype=dtype, pin_memory=device.type == "cuda" and num_host_blocks > 0
            )
        except (RuntimeError, torch.OutOfMemoryError) as error:
            size_gb = (num_blocks + num_host_blocks) * geometry.block_bytes / 1e9
            raise StartupError(f"cannot allocate {size_gb:.2f} GB of KV cache: {error}") from error
        views = tuple((tensor[:, :, layer, 0], tensor[:, :, layer, 1]) for layer in range(geometry.num_layers))
        return cls(tensor, host, geometry, views, num_blocks)

    @property
    def padding_block(self) -> int:
        """Belongs to nobody and is never read."""
        return self.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.host.shape[0]

    def describe(self) -> CacheDescription:
        """For a connector."""
        return CacheDescription(self.tensor[: self.num_blocks], self.geometry, self.num_blocks)

    def run_copies(self, copies: BlockCopies, kernels: Kernels) -> None:
        """Swap out, swap in, copy on write, in this order."""
        for pairs, source, target in (
            (copies.swap_out, self.tensor, self.host),
            (copies.swap_in, self.host, self.tensor),
            (copies.copy_on_write, self.tensor, self.tensor),
        ):
            if pairs:
                kernels.copy_blocks(source, target, torch.tensor(pairs, dtype=torch.int64))

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero blocks (int64 [n]) that are about to be filled in part, so that no read depends on what they held."""
        self.tensor.index_fill_(0, blocks, 0)


def blocks_in(num_bytes: float, geometry: Geometry) -> int:
    """How many blocks fit."""
    return int(num_bytes // geometry.block_bytes)
