"""A paged cache with known contents, for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pd_kernels.attention import AttentionShape
from pd_kernels.fp8_cache import FP8
from pd_kernels.values import KeysValues, PackedSequences


@dataclass(frozen=True)
class Shape:
    """One attention problem."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_lens: tuple[int, ...]  # decodes (ones) first
    seq_lens: tuple[int, ...]
    num_decodes: int


@dataclass(frozen=True)
class Paged:
    """Layer views of a block-first cache with scattered blocks, and the queries."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    packed: PackedSequences
    sinks: torch.Tensor | None = None  # [heads]

    @property
    def cache(self) -> KeysValues:
        return KeysValues(self.key_cache, self.value_cache)

    @property
    def wide_cache(self) -> KeysValues:
        """In float64."""
        return KeysValues(self.key_cache.double(), self.value_cache.double())


def layer_of(cache: torch.Tensor, layer: int) -> KeysValues:
    """The views of one layer of a cache [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]."""
    return KeysValues(cache[:, :, layer, 0], cache[:, :, layer, 1])


def make_paged(
    shape: Shape,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    num_layers: int = 3,
    cache_dtype: torch.dtype | None = None,
) -> Paged:
    """Random keys and values in layer 1 of `num_layers`; unused blocks and other layers are random too.

    `cache_dtype`: None: that of the queries, `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)
    per_seq = [-(-length // shape.block_size) for length in shape.seq_lens]
    num_blocks = sum(per_seq) + 3
    size = (num_blocks, shape.num_kv_heads, num_layers, 2, shape.block_size, shape.head_dim)
    cache = torch.randn(size, generator=generator, dtype=torch.float64).to(cache_dtype or dtype)
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(per_seq), max(per_seq) + 1), int(order[-1]), dtype=torch.int32)  # padding
    at = 0
    for row, count in enumerate(per_seq):
        tables[row, :count] = order[at : at + count]
        at += count
    query = torch.randn(
        sum(shape.query_lens), shape.num_heads, shape.head_dim, generator=generator, dtype=torch.float64
    )
    packed = PackedSequences(
        num_decodes=shape.num_decodes,
        query_starts=torch.tensor(np.concatenate(([0], np.cumsum(shape.query_lens))), dtype=torch.int32),
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32),
        block_tables=tables,
        host_query_lens=np.array(shape.query_lens),
        host_seq_lens=np.array(shape.seq_lens),
    )
    return Paged(query.to(dtype), cache[:, :, 1, 0], cache[:, :, 1, 1], packed)


def sunk(paged: Paged) -> Paged:
    """With sinks that take nearly nothing from some heads and nearly all from others."""
    sinks = torch.linspace(-4, 6, paged.query.shape[1], dtype=torch.float32, device=paged.query.device)
    return replace(paged, sinks=sinks)


def attention_shape(paged: Paged, window: int = 0) -> AttentionShape:
    """Of the layers that lie in the cache."""
    _, num_kv_heads, block_size, head_dim = paged.key_cache.shape
    num_layers = paged.key_cache.stride(1) // (2 * block_size * head_dim)
    dtype, num_heads = paged.query.dtype, paged.query.shape[1]
    has_fp8_cache = paged.key_cache.dtype is FP8
    return AttentionShape(
        num_heads, num_kv_heads, head_dim, block_size, num_layers, dtype, window, has_fp8_cache, paged.sinks is not None
    )
