"""Mixtures of experts in library calls: any device, any dtype. Same meaning and arguments as `reference`.

One product per expert that a step hits, so the host waits for the device: steps with experts cannot be captured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pd_kernels.torch_ops import silu_and_mul


def route(
    x: torch.Tensor, router: torch.Tensor, num_chosen: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.route."""
    # A stable sort keeps equal scores in the order of the experts; topk promises no order
    scores, experts = F.linear(x.to(router.dtype), router).softmax(-1).sort(dim=-1, descending=True, stable=True)
    scores, experts = scores[:, :num_chosen], experts[:, :num_chosen]
    return (scores / scores.sum(-1, keepdim=True) if normalized else scores), experts


def experts(
    x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """See reference.experts. (token, expert) pairs are sorted by expert; each pair's result has its own row."""
    num_tokens, num_chosen = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    # One wait for the device: bincount would wait for the least and the greatest expert as well
    counts = flat.new_zeros(len(gate_up)).scatter_add_(0, flat, torch.ones_like(flat)).tolist()
    sorted_rows = x[order // num_chosen]
    results = torch.empty_like(sorted_rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            activated = silu_and_mul(F.linear(sorted_rows[rows], gate_up[expert]))
            torch.mm(activated, down[expert].t(), out=results[rows])
            start += count
    pairs = torch.empty_like(results).index_copy_(0, order, results).view(num_tokens, num_chosen, -1)
    total = pairs[:, 0].to(scores.dtype) * scores[:, :1]
    for index in range(1, num_chosen):  # one after the other: a fixed order, whatever the number of tokens
        total.addcmul_(pairs[:, index].to(scores.dtype), scores[:, index, None])
    return total.to(x.dtype)
