"""Paged attention with soft caps and sinks in plain torch: right on any device, not fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pd_kernels.values import PackedSequences

_SCORES = 1 << 26  # in one piece, 256 MB in float32: bounds the memory of long prompts


def attend_with_sinks(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    packed: PackedSequences,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with `query` [T, H, D] over one layer's cache views [N, G, B, D]. Returns [T, H, D].

    `window`: tokens that a query sees; 0: all. `soft_cap`: scores become cap * tanh(score / cap), as in Gemma 2 (arXiv
    2408.00118); 0: none. `sinks` [H]: the score of a key without a value (gpt-oss, arXiv 2508.10925); None: none.
    """
    out, row = torch.empty_like(query), 0
    for index, (num_queries, num_keys) in enumerate(
        zip(packed.host_query_lens.tolist(), packed.host_seq_lens.tolist(), strict=True)
    ):
        blocks = packed.block_tables[index, : -(-num_keys // key_cache.shape[2])].long()
        key, value = (cache[blocks].transpose(0, 1).flatten(1, 2) for cache in (key_cache, value_cache))
        size = max(1, _SCORES // (num_keys * query.shape[1]))
        for begin in range(num_keys - num_queries, num_keys, size):
            end = min(begin + size, num_keys)
            first = max(0, begin - window + 1) if window else 0
            keys = slice(first, end)
            rows = slice(row, row := row + end - begin)
            out[rows] = _attend(query[rows], key[:, keys], value[:, keys], scale, window, soft_cap, sinks)
    return out


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last n tokens: `query` [n, H, D] over `key`, `value` [G, T, D]. -> [n, H, D]."""
    num_queries, num_heads, head_dim = query.shape
    num_groups, num_keys, _ = key.shape
    grouped = query.transpose(0, 1).reshape(num_groups, -1, head_dim)  # the heads of a KV head below each other
    scores = (grouped @ key.transpose(1, 2)).float().view(num_heads, num_queries, num_keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None] - torch.arange(
        num_keys, device=query.device
    )
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :num_keys].to(value.dtype).reshape(num_groups, -1, num_keys)
    return (weights @ value).view(num_heads, num_queries, head_dim).transpose(0, 1)
