"""Logarithms of probabilities of the chosen tokens and of the best ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logprobs of `token_ids` (int64 [R]) and of the `k` best tokens of each row of `logits` [R, V], by softmax.

    -> float32 [R], int64 [R, k] best first (equal tokens in any order), float32 [R, k]. Arithmetic is in float32.
    """
    top = logits.topk(k, dim=-1)
    # less the greatest first: a normalizer of 40 has steps of 4e-6
    peak = logits.amax(-1, keepdim=True).float()
    rest = (logits.float() - peak).exp_().sum(-1, keepdim=True).log_()
    chosen = logits.gather(1, token_ids[:, None]).float() - peak - rest
    return chosen[:, 0], top.indices, top.values.float() - peak - rest
