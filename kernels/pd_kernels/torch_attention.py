"""Paged attention in library calls: gather a layer's blocks into dense K and V, then scaled-dot-product attention.

A (block, head) tile of a layer is contiguous, so the gather is one `index_select` of rows of `block_size * head_dim`
numbers: near memcpy speed on CPU (14 GB/s with tiles of 4 KiB in fp32; fancy indexing reaches 9). The index tensors are
the same in every layer. The first layer makes them, as they depend on the cache's strides, and a plan holds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from pd_kernels.attention import NO_LATENT
from pd_kernels.checks import check_cache, check_query, output

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape
    from pd_kernels.values import Ints, KeysValues, NewTokens, PackedSequences, StepSize

MERGE_BYTES = 1 << 18  # padding that costs less than another bucket's calls (about 20 us)
Views: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # of a layer's keys and values, see `tile_view`
QUERY_PIECE = 256  # query rows under one explicit mask: bounds the mask's memory


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decodes of similar length, padded to the longest."""

    rows: torch.Tensor | None  # int64 [n]: query rows; None when they are all the decodes, in order
    num_rows: int
    blocks: torch.Tensor  # int64 [n, width]
    mask: torch.Tensor  # [n, 1, 1, width * block_size], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Prefill chunks of equal shape, run as one dense batch."""

    first_rows: tuple[int, ...]  # each sequence's first query row
    num_queries: int
    num_keys: int  # from the first block on
    blocks: torch.Tensor  # int64 [n, num_blocks]: from the one that holds the first key of the first query


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """The AttentionPlan of TorchAttention: how to gather the blocks of one step."""

    num_tokens: int
    shape: AttentionShape
    decodes: tuple[DecodeBucket, ...]
    prefills: tuple[PrefillGroup, ...]
    # int64 [n * num_kv_heads * blocks] for each part of the step: rows of `tile_view`
    tiles: list[torch.Tensor] = field(default_factory=list)

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan."""
        check_cache(cache)
        key_cache = cache.keys
        check_query(query, key_cache, self.num_tokens)
        if key_cache.stride(1) != 2 * self.shape.num_layers * key_cache.shape[2] * key_cache.shape[3]:
            raise ValueError(f"the cache view is not one of {self.shape.num_layers} layers")
        if not self.tiles:
            blocks = [*(part.blocks for part in self.decodes), *(part.blocks for part in self.prefills)]
            self.tiles.extend(_tile_index(one, key_cache) for one in blocks)
        views = tile_view(key_cache), tile_view(cache.values)
        if len(self.decodes) == 1 and self.decodes[0].rows is None and not self.prefills:
            found = _decode(self.decodes[0], self.tiles[0], views, key_cache.shape, query, scale, sinks)
            return found if out is None else out.copy_(found)
        out = output(out, query.shape, query)
        tiles = iter(self.tiles)
        for bucket in self.decodes:
            rows = slice(0, bucket.num_rows) if bucket.rows is None else bucket.rows
            out[rows] = _decode(bucket, next(tiles), views, key_cache.shape, query[rows], scale, sinks)
        for group in self.prefills:
            _prefill(group, next(tiles), views, key_cache.shape, query, scale, self.shape.window, out, sinks)
        return out

    @property
    def may_rotate(self) -> bool:
        """See AttentionPlan. Always False, because library calls gain nothing."""
        return False

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> None:
        """See AttentionPlan. Always None."""


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """The GroupAttention of TorchBackend."""

    shape: AttentionShape

    def plan(self, packed: PackedSequences) -> TorchAttentionPlan:
        """See GroupAttention: index tensors for one step."""
        num_tokens = int(packed.host_query_lens.sum())
        return TorchAttentionPlan(
            num_tokens, self.shape, _plan_decodes(packed, self.shape), _plan_prefills(packed, self.shape)
        )

    def captured(self, size: StepSize) -> None:
        """See GroupAttention. Always None, because the shapes of the gathered tensors depend on lengths."""


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """An AttentionBackend for any device and any group of keys and values."""

    name: ClassVar[str] = "torch"

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """See AttentionBackend."""
        return NO_LATENT if shape.latent is not None else ""

    def attention(self, shape: AttentionShape, device: torch.device) -> TorchAttention:
        """See AttentionBackend."""
        return TorchAttention(shape)


def tile_view(cache: torch.Tensor) -> torch.Tensor:
    """View one layer's K or V [N, G, B, D] as rows of B * D numbers, each row one contiguous (block, head) tile.

    `_tile_index` gives the row numbers.
    """
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    tile = block_size * head_dim
    num_rows = ((num_blocks - 1) * cache.stride(0) + (num_kv_heads - 1) * cache.stride(1)) // tile + 1
    return cache.as_strided((num_rows, tile), (tile, 1), cache.storage_offset())


def _tile_index(blocks: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Tile rows of `blocks` (int64 [n, width]), head by head: flat [n, num_kv_heads, width]."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    block_rows, head_rows = (stride // (block_size * head_dim) for stride in cache.stride()[:2])
    heads = torch.arange(num_kv_heads, device=blocks.device)[:, None] * head_rows
    return (blocks[:, None] * block_rows + heads).flatten()


def bucket_rows(num_blocks: Ints, tile_row_bytes: int) -> list[Ints]:
    """Group row indices so that padding each row to the longest of its group costs little.

    Padding costs less than 2x in each group, or less than MERGE_BYTES. `num_blocks`: blocks to read for each row;
    `tile_row_bytes`: bytes of K and V in one block of a layer.
    """
    order = np.argsort(num_blocks, kind="stable")
    groups: list[Ints] = []
    end = len(order)
    while end:
        longest = num_blocks[order[end - 1]]
        sizes = num_blocks[order[:end]]
        start = int(np.searchsorted(sizes * 2, longest, side="right"))
        padding = np.cumsum((longest - sizes[:start])[::-1]) * tile_row_bytes
        start -= int(np.searchsorted(padding, MERGE_BYTES, side="right"))
        groups.append(np.sort(order[start:end]))
        end = start
    return groups


def _plan_decodes(packed: PackedSequences, shape: AttentionShape) -> tuple[DecodeBucket, ...]:
    count, device = packed.num_decodes, packed.block_tables.device
    if not count:
        return ()
    block_size, window = shape.block_size, shape.window
    block_bytes = 2 * shape.num_kv_heads * block_size * shape.head_dim * shape.dtype.itemsize
    lens = packed.host_seq_lens[:count]
    firsts = np.maximum(lens - window, 0) // block_size if window else np.zeros_like(lens)
    lasts = (lens - 1) // block_size
    buckets = []
    for rows in bucket_rows(lasts - firsts + 1, block_bytes):
        index = torch.from_numpy(rows)
        first, last, length = (torch.from_numpy(part[rows])[:, None] for part in (firsts, lasts, lens))
        width = int((last - first).max()) + 1
        columns = torch.minimum(first + torch.arange(width), last)  # padding repeats the row's own last block
        positions = first * block_size + torch.arange(width * block_size)
        hidden = positions >= length
        if window:
            hidden |= positions < length - window
        mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
        whole = len(rows) == count
        blocks = packed.block_tables[:count] if whole else packed.block_tables[index.to(device)]
        buckets.append(
            DecodeBucket(
                rows=None if whole else index.to(device),
                num_rows=len(rows),
                blocks=blocks.long().gather(1, columns.to(device)),
                mask=mask.to(device)[:, None, None],
            )
        )
    return tuple(buckets)


def _plan_prefills(packed: PackedSequences, shape: AttentionShape) -> tuple[PrefillGroup, ...]:
    starts = np.concatenate(([0], np.cumsum(packed.host_query_lens)))
    shapes: dict[tuple[int, int], list[int]] = {}
    for row in range(packed.num_decodes, packed.num_seqs):
        shapes.setdefault((int(packed.host_query_lens[row]), int(packed.host_seq_lens[row])), []).append(row)
    groups = []
    for (num_queries, num_keys), rows in shapes.items():
        first = max(num_keys - num_queries - shape.window + 1, 0) // shape.block_size if shape.window else 0
        columns = slice(first, -(-num_keys // shape.block_size))
        blocks = packed.block_tables[torch.tensor(rows, device=packed.block_tables.device), columns].long()
        first_rows = tuple(int(starts[row]) for row in rows)
        groups.append(PrefillGroup(first_rows, num_queries, num_keys - first * shape.block_size, blocks))
    return tuple(groups)


def _gather(
    tiles: torch.Tensor, views: Views, num_rows: int, cache_shape: torch.Size, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather tiles into dense keys and values [num_rows, num_kv_heads, tokens, head_dim] of `dtype`."""
    shape = (num_rows, cache_shape[1], -1, cache_shape[3])
    return views[0].index_select(0, tiles).to(dtype).view(shape), views[1].index_select(0, tiles).to(dtype).view(shape)


def _decode(
    bucket: DecodeBucket,
    tiles: torch.Tensor,
    views: Views,
    cache_shape: torch.Size,
    query: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    # The query heads that share a KV head become query rows: all of them see the same keys
    grouped = query.view(bucket.num_rows, cache_shape[1], -1, cache_shape[3])
    key, value = _gather(tiles, views, bucket.num_rows, cache_shape, query.dtype)
    mask = bucket.mask
    if sinks is not None:
        key, value, mask = _with_sinks(key, value, mask, sinks.view(1, cache_shape[1], -1, 1))
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def _prefill(
    group: PrefillGroup,
    tiles: torch.Tensor,
    views: Views,
    cache_shape: torch.Size,
    query: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of one group into its rows of `out`."""
    num_queries, num_keys = group.num_queries, group.num_keys
    gathered = _gather(tiles, views, len(group.first_rows), cache_shape, query.dtype)
    key, value = (dense[:, :, :num_keys] for dense in gathered)
    dense = torch.stack([query[row : row + num_queries] for row in group.first_rows]).transpose(1, 2)
    gqa = query.shape[1] != cache_shape[1]
    if num_queries == num_keys and (not window or num_keys <= window) and sinks is None:
        result = F.scaled_dot_product_attention(dense, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
        _scatter(group, 0, result, out)
        return
    for start in range(0, num_queries, QUERY_PIECE):
        end = min(start + QUERY_PIECE, num_queries)
        prefix = num_keys - num_queries
        high = prefix + end
        low = max(prefix + start - window + 1, 0) if window else 0
        distance = torch.arange(prefix + start, high, device=query.device)[:, None] - torch.arange(
            low, high, device=query.device
        )
        visible = distance >= 0
        if window:
            visible &= distance < window
        seen = key[:, :, low:high], value[:, :, low:high], visible
        if sinks is not None:
            mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(~visible, -torch.inf)
            seen = _with_sinks(*seen[:2], mask[None, None], sinks.view(1, -1, 1, 1))
        result = F.scaled_dot_product_attention(
            dense[:, :, start:end], seen[0], seen[1], attn_mask=seen[2], scale=scale, enable_gqa=gqa
        )
        _scatter(group, start, result, out)


def _with_sinks(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and the mask [n, heads, queries, keys] with one more key of zeros: its score is in the mask."""
    sinks = sinks.to(mask.dtype) + torch.zeros_like(mask[..., :1])
    mask = torch.cat((mask.expand(*sinks.shape[:-1], -1), sinks), dim=-1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), mask


def _scatter(group: PrefillGroup, start: int, result: torch.Tensor, out: torch.Tensor) -> None:
    """Write `result` [n, H, q, D] to the positions of the group's query rows."""
    for row, part in zip(group.first_rows, result.transpose(1, 2), strict=True):
        out[row + start : row + start + part.shape[0]] = part
