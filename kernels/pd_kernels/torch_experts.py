"""Mixtures of experts in library calls: any device, any dtype. Same meaning and arguments as `reference`.

One product per expert that a step hits, so the host waits for the device: steps with experts cannot be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_kernels.quantized import RowsTwice
from pd_kernels.torch_ops import silu_and_mul
from pd_kernels.torch_quantized import multiply_quantized
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.quantized import Weight
    from pd_kernels.values import ExpertPart, Routing

TINY = 1e-20  # least sum that scores are divided by: sigmoids of very negative products are 0


def route(
    x: torch.Tensor | HalfNormed, router: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """See backends.RouteTokens."""
    x = x.normed() if isinstance(x, HalfNormed) else x
    products = F.linear(x.to(router.dtype), router, bias if routing.biases_products else None)
    if routing.shared_gated:
        products, gates = products[:, :-1], products[:, -1:]
    scores = products.sigmoid() if routing.is_sigmoid else products.softmax(-1)
    ranks = scores if bias is None or routing.biases_products else scores + bias
    if routing.num_groups > 1:
        ranks = _of_best_groups(ranks, routing)
    experts = _best(ranks, routing.num_chosen)
    chosen = scores.gather(-1, experts)
    if routing.normalized:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=TINY)
    chosen = chosen * routing.factor if routing.factor != 1 else chosen
    if not routing.num_shared:
        return chosen, experts
    weights = gates.sigmoid() if routing.shared_gated else chosen.new_ones(len(x), routing.num_shared)
    shared = scores.shape[1] + torch.arange(routing.num_shared, device=x.device).expand_as(weights)
    return torch.cat((chosen, weights), 1), torch.cat((experts, shared), 1)


def _best(ranks: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` greatest of each row. A stable sort keeps equal ones in order; topk promises no order."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _of_best_groups(ranks: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`ranks` [T, E] with -inf for the experts of other groups than the best."""
    groups = ranks.view(len(ranks), routing.num_groups, -1)
    best = _best(groups.topk(routing.group_best, dim=-1).values.sum(-1), routing.groups_chosen)
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, True)
    return ranks.masked_fill(~kept.repeat_interleave(groups.shape[2], 1), -torch.inf)


def experts(
    x: torch.Tensor | HalfNormed | RowsTwice,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    part: ExpertPart | None = None,
) -> torch.Tensor:
    """See backends.MixExperts."""
    x = x.plain if isinstance(x, RowsTwice) else x.normed() if isinstance(x, HalfNormed) else x

    def of_expert(rows: torch.Tensor, expert: int) -> torch.Tensor:
        return _multiply(silu_and_mul(_multiply(rows, gate_up, expert)), down, expert)

    return sum_of_experts(x, scores, chosen, gate_up.shape[0], part, of_expert)


def sum_of_experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    num_experts: int,
    part: ExpertPart | None,
    of_expert: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum of what the chosen ones of `num_experts` compute: see backends.MixExperts.

    (token, expert) pairs are sorted by expert; each pair's result has its own row.
    """
    num_tokens, num_chosen = chosen.shape
    flat = chosen.flatten()
    if part is not None:  # pairs of other ranks' experts come last
        flat = flat - part.first
        flat = flat.where((flat >= 0) & (flat < num_experts), num_experts)
    order = flat.argsort(stable=True)
    # One wait for the device: bincount would wait for the least and the greatest expert as well
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:-1].tolist()
    sorted_rows = x[order // num_chosen]
    results = torch.empty_like(sorted_rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            results[rows] = of_expert(sorted_rows[rows], expert)
            start += count
    if start < len(results):
        results[start:] = 0
    pairs = torch.empty_like(results).index_copy_(0, order, results).view(num_tokens, num_chosen, -1)
    total = pairs[:, 0].to(scores.dtype) * scores[:, :1]
    for index in range(1, num_chosen):  # one after the other: a fixed order, whatever the number of tokens
        total.addcmul_(pairs[:, index].to(scores.dtype), scores[:, index, None])
    return total.to(x.dtype)


def _multiply(x: torch.Tensor, weight: Weight, expert: int) -> torch.Tensor:
    """`x` [rows, in] times the weight of one expert. -> [rows, out]."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight[expert])
    return multiply_quantized(x, weight.expert(expert))
