"""Latent attention in library calls: the definition of each result, on any device, in any dtype.

Scores and sums are in float32, or in float64 where the tensors are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from pd_kernels.latent import ABSORBED_QUERIES, PREFIX_PIECE
from pd_kernels.latent_attention import LatentAttention, refusal
from pd_kernels.torch_attention import QUERY_PIECE, bucket_rows
from pd_kernels.torch_ops import rms_norm, rope

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape
    from pd_kernels.latent import LatentChunks, LatentRows, NewLatents


_Part: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # means of values [H, T, n], logarithms of sums [H, T]


class RowBucket(NamedTuple):
    """Rows that see about as many tokens, padded to the one that sees most."""

    rows: torch.Tensor  # int64 [n]: rows of the step
    blocks: torch.Tensor  # int64 [n * width]
    hidden: torch.Tensor  # bool [n, 1, width * block_size]: tokens that a row does not see


class TorchLatent:
    """A LatentOps."""

    captures: bool = False  # shapes depend on lengths

    def norm_rope_write(
        self, query: torch.Tensor, keys: torch.Tensor, new: NewLatents, cache: torch.Tensor
    ) -> torch.Tensor:
        """See LatentOps."""
        rank, turned = len(new.norm), 2 * new.cos.shape[1]
        part = query[..., query.shape[2] - turned :]
        part.copy_(rope(part, new.cos, new.sin))
        latent = rms_norm(keys[:, :rank].contiguous(), new.norm, new.eps)
        own = torch.cat((latent, rope(keys[:, None, rank:], new.cos, new.sin)[:, 0]), 1)
        block_size = cache.shape[1]
        blocks = torch.div(new.slot_mapping, block_size, rounding_mode="floor")
        cache[blocks, new.slot_mapping - blocks * block_size] = own
        return own

    def decode(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, rows: LatentRows, scale: float
    ) -> torch.Tensor:
        """See LatentOps."""
        if not rows.plans:
            rows.plans.append(_plan_rows(rows, cache))
        query, out = torch.cat((query_latent, query_rope), 2), torch.empty_like(query_latent)
        for bucket in rows.plans[0]:
            seen = cache[bucket.blocks].view(len(bucket.rows), -1, cache.shape[2])
            seen.masked_fill_(bucket.hidden.transpose(1, 2), 0)  # 0 times a number that is not written may be NaN
            scores = torch.bmm(query[bucket.rows], seen.transpose(1, 2)).to(_wide(query)) * scale
            weights = scores.masked_fill_(bucket.hidden, -torch.inf).softmax(-1)
            out[bucket.rows] = torch.bmm(weights.to(query.dtype), seen[..., : query_latent.shape[2]])
        return out

    def prefill(
        self,
        query: torch.Tensor,
        own: torch.Tensor,
        expand: torch.Tensor,
        cache: torch.Tensor,
        chunks: LatentChunks,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See LatentOps."""
        packed, start = chunks.packed, 0
        for index, (count, length) in enumerate(zip(packed.host_query_lens, packed.host_seq_lens, strict=True)):
            rows = slice(start, start := start + int(count))
            table = packed.block_tables[index, : -(-int(length) // cache.shape[1])].long()
            before = cache[table].flatten(0, 1)[: int(length - count)]
            _attend_chunk(query[rows], own[rows], expand, before, scale, out[rows])


@dataclass(frozen=True, slots=True)
class TorchLatentBackend:
    """An AttentionBackend for any device and any latent group."""

    name: ClassVar[str] = "latent-torch"

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        """See AttentionBackend."""
        return refusal(shape)

    def attention(self, shape: AttentionShape, device: torch.device) -> LatentAttention:
        """See AttentionBackend."""
        return LatentAttention(shape, TorchLatent())


def _wide(like: torch.Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _plan_rows(rows: LatentRows, cache: torch.Tensor) -> list[RowBucket]:
    assert rows.host_query_lens is not None
    assert rows.host_seq_lens is not None
    counts, ends = rows.host_query_lens, rows.host_seq_lens
    _, block_size, width = cache.shape
    sums, device = np.cumsum(counts), cache.device
    sequences = np.repeat(np.arange(len(counts)), counts)
    lens = ends[sequences] - (sums[sequences] - 1 - np.arange(sums[-1]))  # tokens that a row sees
    found = []
    for chosen in bucket_rows(-(-lens // block_size), block_size * width * cache.element_size()):
        own = torch.from_numpy(lens[chosen])
        most = int(-(-own.max() // block_size))
        columns = torch.minimum(torch.arange(most), ((own - 1) // block_size)[:, None])  # the last block is repeated
        tables = rows.block_tables[torch.from_numpy(sequences[chosen]).to(device)].long()
        hidden = (torch.arange(most * block_size) >= own[:, None])[:, None].to(device)
        found.append(
            RowBucket(torch.from_numpy(chosen).to(device), tables.gather(1, columns.to(device)).flatten(), hidden)
        )
    return found


def _attend_chunk(
    query: torch.Tensor, own: torch.Tensor, expand: torch.Tensor, before: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """See LatentOps.prefill: one chunk, after the rows `before` [n, width] of its sequence."""
    rank = expand.shape[2]
    nope = query.shape[2] - (own.shape[1] - rank)
    heads = query.transpose(0, 1)
    parts: list[list[_Part]] = [[] for _ in range(0, len(query), QUERY_PIECE)]
    is_absorbed = len(before) > 0 and len(query) < ABSORBED_QUERIES
    pieces = () if is_absorbed or not len(before) else torch.split(before, PREFIX_PIECE)
    for rows in (own, *pieces):
        expanded = F.linear(rows[:, :rank], expand.flatten(0, 1)).view(len(rows), *expand.shape[:2]).transpose(0, 1)
        for piece, first in enumerate(range(0, len(query), QUERY_PIECE)):
            asking = heads[:, first : first + QUERY_PIECE]
            scores = asking[..., :nope] @ expanded[..., :nope].mT + asking[..., nope:] @ rows[:, rank:].T
            parts[piece].append(_attend(scores, expanded[..., nope:], scale, first if rows is own else None))
    if is_absorbed:  # which is one piece of queries
        scores = heads[..., :nope] @ expand[:, :nope] @ before[:, :rank].T + heads[..., nope:] @ before[:, rank:].T
        sums, logs = _attend(scores, before[:, :rank], scale, None)
        parts[0].append((sums @ expand[:, nope:].mT, logs))
    for piece, found in enumerate(parts):
        first = piece * QUERY_PIECE
        out[first : first + QUERY_PIECE] = _merge(found).transpose(0, 1)


def _attend(scores: torch.Tensor, values: torch.Tensor, scale: float, first: int | None) -> _Part:
    """Means of `values` by `scores` [H, T, n]. `first`: query i sees the keys up to `first + i`; None: all."""
    scores = scores.to(_wide(scores)) * scale
    if first is not None:
        number, length = scores.shape[1:]
        last = torch.arange(number, device=scores.device)[:, None] + first
        scores = scores.masked_fill_(torch.arange(length, device=scores.device) > last, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values, scores.logsumexp(-1)


def _merge(parts: list[_Part]) -> torch.Tensor:
    """Attention over all keys, from that over each part of them. -> [H, T, value]."""
    if len(parts) == 1:
        return parts[0][0]
    shares = torch.stack([logs for _, logs in parts]).softmax(0)
    means = torch.stack([mean for mean, _ in parts])
    return (means.to(shares.dtype) * shares[..., None]).sum(0).to(means.dtype)
