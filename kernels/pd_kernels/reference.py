"""Definitions of the kernels in plain torch. Tests compare every faster implementation with them.

Not used in serving, but for attention of transformers' modules with sinks or soft caps.

Shapes: T tokens, S sequences, H query heads, G KV heads, D head size, N cache blocks, B block size.
A layer's cache views are `[N, G, B, D]`; slot `s` is token `s % B` of block `s // B`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_kernels.fp8_cache import stored
from pd_kernels.quantized import BLOCK, LEAST, MOST, QuantizedRows, QuantizedWeight

if TYPE_CHECKING:
    from pd_kernels.biased_experts import BiasedExperts
    from pd_kernels.quantized import Weight
    from pd_kernels.values import ExpertPart, KeysValues, NewTokens, Routing


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the weight's dimensions (arXiv 1910.07467), in float32 inside. Any leading shape.

    The normed value is rounded to the weight's dtype before the weight multiplies it: with a float32 weight (Gemma) a
    bfloat16 result is rounded once.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims = tuple(range(-weight.dim(), 0))
    normed = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm(x + residual), x + residual). A kernel leaves the sum in `residual` and may overwrite `x`.

    `residual` [T, size]; `x` [T, size], or float32 parts [parts, T, size]. Parts are summed, then rounded, before the
    addition.
    """
    total = (x if x.dim() == 2 else x.sum(0).to(residual.dtype)) + residual
    return rms_norm(total, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + R/2) of `x` [T, heads, D] by each token's angles (arXiv 2104.09864, half-split form).

    `cos`, `sin`: [T, R/2], already gathered by position. The dimensions after the first R stay as they are.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for `x` = [gate | up] along the last dimension (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`x` times sigmoid(`gate`), both [T, size]. The sigmoid is rounded."""
    return x * gate.sigmoid()


def write_cache(key: torch.Tensor, value: torch.Tensor, cache: KeysValues, slot_mapping: torch.Tensor) -> None:
    """Store `key`, `value` [T, G, D] at `slot_mapping` (int64 [T]). An FP8 cache rounds them: see `stored`."""
    block_size = cache.keys.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for part, update in zip(cache, (key, value), strict=True):
        part[blocks, :, offsets] = stored(update, part.dtype)


def norm_rope_write(heads: torch.Tensor, new: NewTokens, cache: KeysValues) -> torch.Tensor:
    """Rotate the queries of `heads` [T, H + 2G, D] (queries, keys, values), and store its keys and values.

    Returns the rotated queries [T, H, D]. With `norms`, queries and keys are normed first. The first R dimensions of
    queries and keys are rotated by `cos`, `sin` [T, R/2]. Keys and values are stored at `slot_mapping` (int64 [T]).
    """
    norms, cos, sin, slot_mapping = new
    num_kv_heads = cache.keys.shape[1]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    write_cache(rope(key, cos, sin), value, cache, slot_mapping)
    return rope(query, cos, sin)


def read_cache(cache: torch.Tensor, block_table: torch.Tensor, num_tokens: int, first: int = 0) -> torch.Tensor:
    """Tokens [first, num_tokens) of one sequence from a layer's K or V view, as [G, num_tokens - first, D]."""
    block_size = cache.shape[2]
    first_block = first // block_size
    tiles = cache[block_table[first_block : -(-num_tokens // block_size)].long()]
    return tiles.transpose(0, 1).flatten(1, 2)[:, first % block_size : num_tokens - first_block * block_size]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last n tokens: `query` [n, H, D] over `key`, `value` [G, T, D], T >= n. -> [n, H, D].

    `window` > 0: a token sees itself and the window - 1 tokens before it. `soft_cap` > 0: scores become
    cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118). `sinks` [H]: each head's score of a key without a value
    (gpt-oss, arXiv 2508.10925).
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads, num_keys, _ = key.shape
    key = key.repeat_interleave(num_heads // num_kv_heads, dim=0)
    value = value.repeat_interleave(num_heads // num_kv_heads, dim=0)
    scores = torch.einsum("nhd,htd->hnt", query, key) * scale
    distance = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None] - torch.arange(
        num_keys, device=query.device
    )
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    scores = (soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, num_queries, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :num_keys]
    return torch.einsum("hnt,htd->nhd", weights, value)


def prefill_attention(
    query: torch.Tensor,
    cache: KeysValues,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Variable-length causal attention over the paged cache, this step's keys already written.

    Keys and values of an FP8 cache are widened to the query's dtype, which is exact.

    `query` [T, H, D]; sequence i's rows are `[query_starts[i], query_starts[i + 1])` and are its last tokens, the
    ones before them a cached prefix. `soft_cap`, `sinks`: see `attend`. -> [T, H, D].
    """
    out = torch.empty_like(query)
    for row, num_tokens in enumerate(seq_lens.tolist()):
        start, end = int(query_starts[row]), int(query_starts[row + 1])
        first = max(num_tokens - (end - start) - window + 1, 0) if window else 0
        key, value = (read_cache(part, block_tables[row], num_tokens, first).to(query.dtype) for part in cache)
        out[start:end] = attend(query[start:end], key, value, scale, window, soft_cap, sinks)
    return out


def decode_attention(
    query: torch.Tensor,
    cache: KeysValues,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per sequence: `query` [S, H, D] -> [S, H, D]. `sinks`: see `attend`."""
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=query.device)
    return prefill_attention(query, cache, block_tables, starts, seq_lens, scale, window, sinks=sinks)


def draft_attention(
    query: torch.Tensor,
    cache: KeysValues,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of decodes with drafts: `prefill_attention`, with padding.

    Sequences of length 0 have no rows. Rows after the last sequence's give zeros.
    """
    count, num_rows = int((seq_lens > 0).sum()), int(query_starts[-1])
    found = prefill_attention(
        query[:num_rows], cache, block_tables, query_starts[: count + 1], seq_lens[:count], scale, window, sinks=sinks
    )
    return torch.cat((found, torch.zeros_like(query[num_rows:])))


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """`target[pairs[i, 1]] = source[pairs[i, 0]]`; whole blocks, `pairs` int64 [n, 2], no target twice.

    All reads come before all writes when `source` is `target`.
    """
    target[pairs[:, 1].to(target.device)] = source[pairs[:, 0].to(source.device)].to(target.device)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Returns `x` [T, in] times `weight` [out, in] transposed, plus `bias` [out]; `gated`: silu_and_mul of that."""
    product = torch.nn.functional.linear(x, weight, bias)
    return silu_and_mul(product) if gated else product


def quantize(x: torch.Tensor, group: int) -> QuantizedRows:
    """Quantize rows `x` [T, in]. Each `group` inputs share a scale; the last group of a row may be smaller.

    A scale is the greatest absolute number of its group, at least LEAST, divided by MOST, in float32. The number
    divided by the scale is rounded to the nearest value, and never to more than MOST.
    """
    parts = torch.split(x.float(), group, dim=-1)
    scales = [part.abs().amax(-1).clamp(min=LEAST) / MOST for part in parts]
    values = [(part / scale[:, None]).clamp(-MOST, MOST) for part, scale in zip(parts, scales, strict=True)]
    return QuantizedRows(torch.cat(values, -1).to(torch.float8_e4m3fn), torch.stack(scales, -1), group)


def dequantize(quantized: QuantizedRows | QuantizedWeight) -> torch.Tensor:
    """The numbers of rows or of a weight, in float32 and in the shape of the values."""
    is_blocks = isinstance(quantized, QuantizedWeight) and quantized.is_blocks
    num_rows, size = quantized.values.shape[-2:]
    scales = quantized.scales.repeat_interleave(BLOCK if is_blocks else 1, -2)[..., :num_rows, :]
    return quantized.values.float() * scales.repeat_interleave(quantized.group, -1)[..., :size]


def add_rms_norm_quantized(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[QuantizedRows, torch.Tensor]:
    """`add_rms_norm`, with the norm quantized: `group` of its numbers share a scale."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize(normed, group), total


def silu_and_mul_quantized(x: torch.Tensor, group: int) -> QuantizedRows:
    """`silu_and_mul`, quantized: `group` of a row's outputs share a scale."""
    return quantize(silu_and_mul(x), group)


def quantized_product(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, in] times `weight` [out, in] transposed. The sum is in float32 and is rounded to `dtype` once."""
    return (dequantize(rows) @ dequantize(weight).T).to(dtype)


def route(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token of `x` [T, in], and their scores. See Routing.

    `router` [E, in] and `bias` [E], in float32 or more: products and scores have the router's dtype. Experts are in the
    order of their scores plus bias. Of equal ones the lowest expert comes first. Shared experts, from E on, come last;
    with a gate, `router` is [E + 1, in]. -> scores and experts (int64), [T, num_scores].
    """
    products = x.to(router.dtype) @ router.T
    gates = products.new_ones(len(x), routing.num_shared)
    if routing.shared_gated:
        products, gates = products[:, :-1], products[:, -1:].sigmoid()
    if routing.biases_products and bias is not None:
        products, bias = products + bias, None
    scores = products.sigmoid() if routing.is_sigmoid else products.softmax(-1)
    ranks = scores if bias is None else scores + bias
    rows = [_choose(row, routing) for row in ranks.tolist()]
    experts = torch.tensor(rows, device=x.device).view(-1, routing.num_chosen)
    chosen = scores.gather(1, experts)
    if routing.normalized:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20)
    chosen = chosen * routing.factor
    shared = products.shape[1] + torch.arange(routing.num_shared, device=x.device).expand_as(gates)
    return torch.cat((chosen, gates), 1), torch.cat((experts, shared), 1)


def _choose(ranks: list[float], routing: Routing) -> list[int]:
    """The experts of one token, best first."""
    size = len(ranks) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(ranks), size)]
    if routing.num_groups > 1:
        most = routing.group_best
        best = sorted(
            groups, key=lambda group: (-sum(sorted((ranks[i] for i in group), reverse=True)[:most]), group[0])
        )
        groups = best[: routing.groups_chosen]
    allowed = [expert for group in groups for expert in group]
    return sorted(allowed, key=lambda expert: (-ranks[expert], expert))[: routing.num_chosen]


def experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    part: ExpertPart | None = None,
) -> torch.Tensor:
    """The sum of each token's chosen experts, times their scores. `x` [T, in] -> [T, in].

    `scores` (float32 or more) and `chosen` (int64): [T, k]. `gate_up` [E, 2 * size, in]: an expert's gates, then its
    ups. `down` [E, in, size]. An expert's result has the dtype of `x`. The sum has that of `scores`, goes from the
    first to the last of a token's experts, and is rounded once. Rows are quantized for a weight that is.

    `part`: the experts that the weights are of, and others add nothing; None: all.
    """
    total = torch.zeros_like(x, dtype=scores.dtype)
    for token, row in enumerate(chosen.tolist()):
        for score, number in zip(scores[token], row, strict=True):
            expert = number - (part.first if part else 0)
            if part is not None and not 0 <= expert < gate_up.shape[0]:
                continue
            activated = silu_and_mul(_of_expert(x[token], gate_up, expert))
            total[token] += score * _of_expert(activated, down, expert).to(scores.dtype)
    return total.to(x.dtype)


def biased_experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    weights: BiasedExperts,
    *,
    part: ExpertPart | None = None,
) -> torch.Tensor:
    """`experts` with the biases and the activation of BiasedExperts. Packed weights are widened to the dtype of `x`.

    Products, biases and activation of an expert have the dtype of `x`.
    """
    total = torch.zeros_like(x, dtype=scores.dtype)
    for token, row in enumerate(chosen.tolist()):
        for score, number in zip(scores[token], row, strict=True):
            expert = number - (part.first if part else 0)
            if not 0 <= expert < len(weights.down_bias):
                continue
            gate_up, down = (
                weight[expert] if isinstance(weight, torch.Tensor) else weight.expert(expert, x.dtype)
                for weight in (weights.gate_up, weights.down)
            )
            gate, up = (gate_up @ x[token] + weights.gate_up_bias[expert]).view(-1, 2).T
            gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
            activated = (up + 1) * gate * torch.sigmoid(weights.alpha * gate)
            total[token] += score * (down @ activated + weights.down_bias[expert]).to(scores.dtype)
    return total.to(x.dtype)


def _of_expert(x: torch.Tensor, weight: Weight, expert: int) -> torch.Tensor:
    """The product of `x` [in] and the weight of one expert. -> [out]."""
    if isinstance(weight, torch.Tensor):
        return weight[expert] @ x
    return quantized_product(quantize(x[None], weight.group), weight.expert(expert), x.dtype)[0]
