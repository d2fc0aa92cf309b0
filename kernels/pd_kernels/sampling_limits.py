"""Top k, top p and min p as one bound per row: the lowest logit that may be drawn.

All decisions are made with integers, which add up to the same sum in every order. So the bound depends neither on the
order of the vocabulary nor on the batch, nor on how a kernel splits a row.

Ties. Tokens that tie with the last one that a limit keeps are kept, and those that tie with the k-th count in the total
of which top p takes its share. vLLM's sorting sampler and transformers' TopKLogitsWarper also keep the ties of the
k-th; their top p cuts between equal tokens at a place that the sort decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pd_kernels.values import Draws, Limits, TokenMasks

MASS_ONE = 2.0**40  # of the best token. V of at most 2^18 gives a sum of at most 2^58; a share under 2^-41 counts as 0
LEAST_LOGIT = -(2.0**100)  # exact in bfloat16, and finite over the least temperature
LOG2_E = 1.4426950408889634


def floors(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The lowest logit that each row of `logits` [R, V] may draw, in the units of `logits`. -> float32 [R].

    Of the tokens that the mask allows, top k keeps the k best. Of the probability of these, top p keeps the smallest
    set of best tokens that has at least this share. min p is the least probability, as a share of the best token's.
    Probabilities are those of logits / temperature. -inf for a row without limits, or of temperature 0, or without a
    token above -inf. NaN ranks last.
    """
    limits = draws.limits
    found = torch.full((len(logits),), -torch.inf, device=logits.device)
    if limits is None:
        return found
    values = ranked(allowed(logits, draws.masks))
    rows = limited_rows(limits, draws.temperature, logits.shape[1])
    best = values[rows].sort(-1, descending=True).values
    found[rows] = floors_of_best(best, best, draws.of(rows))
    return found


def limited_rows(limits: Limits, temperature: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The rows that draw (temperature above 0) within a limit. Waits for the device. -> int64 [P]."""
    has_limit = (limits.top_k < vocab_size) | (limits.top_p < 1) | (limits.min_p > 0)
    return (has_limit & (temperature > 0)).nonzero()[:, 0]


def floors_of_best(best: torch.Tensor, values: torch.Tensor, draws: Draws) -> torch.Tensor:
    """`floors` of P rows with limits from their W best logits `best` (float32 [P, W], descending). -> float32 [P].

    `values` float32 [P, V]: all their logits, in any order; both as `ranked` gives them. The result is exact if W is V,
    and for a row with top k of at most W, of V, or with top p of 1 if it is above the last of `best`. Raises ValueError
    for draws without limits.
    """
    limits, temperature = draws.limits, draws.temperature
    if limits is None:
        raise ValueError("the rows have no limits")
    width, vocab_size = best.shape[1], values.shape[1]
    top = best[:, :1]
    kth = best.gather(1, (limits.top_k.clamp(1, width) - 1)[:, None])
    kth[limits.top_k > width] = -torch.inf
    masses = masses_of(best, top, temperature).masked_fill_(best < kth, 0)
    totals = masses.sum(-1)
    if width < vocab_size:
        more = ((limits.top_k > width) & (limits.top_p < 1)).nonzero()[:, 0]
        part = values if len(more) == len(values) else values[more]  # a copy of 32,000 logits takes 20 us
        totals[more] = masses_of(part, top[more], temperature[more]).sum(-1)
    needed = (limits.top_p.double() * totals).ceil_().clamp_(min=1)
    before = masses.cumsum(-1).sub_(masses)
    kept = (best >= kth) & ((before < needed[:, None]) | (limits.top_p >= 1)[:, None])
    last = best.gather(1, kept.sum(-1, keepdim=True).clamp_(min=1) - 1)[:, 0]
    last[(limits.top_k >= vocab_size) & (limits.top_p >= 1)] = -torch.inf
    # float64: its logarithm rounds to the same float32 on every device
    least = (top[:, 0].double() + temperature.double() * limits.min_p.double().log()).float()
    return torch.where(top[:, 0] > -torch.inf, torch.maximum(last, least), -torch.inf)


def masses_of(values: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Each token's probability as a share of the best one's, in units of 1 / MASS_ONE. -> int64 like `values`.

    `values` float32 [P, W]; `top` float32 [P, 1]: the greatest logit of the row, finite; `temperature` float32 [P],
    above 0.
    """
    return (values - top).mul_((LOG2_E / temperature)[:, None]).exp2_().mul_(MASS_ONE).round_().long()


def ranked(logits: torch.Tensor) -> torch.Tensor:
    """float32(`logits`) with -inf for NaN, and the greatest float for inf, so that differences are numbers."""
    return logits.float().nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)


def allowed(logits: torch.Tensor, masks: TokenMasks | None) -> torch.Tensor:
    """`logits` [R, V] if `masks` is None; otherwise a float32 copy with -inf for tokens that the row's mask bans.

    Allowed tokens of a row with a mask are at least LEAST_LOGIT: where another ban has hit them all, the draw is among
    them all the same.
    """
    if masks is None:
        return logits
    rows = (masks.mask_of_row >= 0).nonzero()[:, 0]
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (masks.masks.view(torch.uint8)[:, :, None] >> shifts) & 1  # by byte: a quarter of the memory of words
    is_banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    out = logits.to(torch.float32, copy=True)
    out[rows] = out[rows].clamp_(min=LEAST_LOGIT).masked_fill_(is_banned[masks.mask_of_row[rows].long()], -torch.inf)
    return out
