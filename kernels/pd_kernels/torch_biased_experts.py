"""Mixtures of experts with biases in library calls: any device, any dtype, any form of weights.

One product per expert that a step hits, as in `torch_experts`. A packed expert is widened when it is hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_kernels.torch_experts import sum_of_experts
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from pd_kernels.biased_experts import BiasedExperts, ExpertsWeight
    from pd_kernels.values import ExpertPart


@dataclass(frozen=True, slots=True)
class TorchBiasedMix:
    """A BiasedMix."""

    weights: BiasedExperts
    part: ExpertPart | None

    def __call__(self, x: torch.Tensor | HalfNormed, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See BiasedMix."""
        x = x.normed() if isinstance(x, HalfNormed) else x
        return sum_of_experts(x, scores, chosen, len(self.weights.down_bias), self.part, self._of_expert)

    def _of_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """`rows` [n, hidden] -> [n, hidden] by one expert."""
        weights = self.weights
        both = F.linear(rows, _weight(weights.gate_up, expert, rows.dtype), weights.gate_up_bias[expert])
        activated = clamped_swiglu(both, weights.limit, weights.alpha)
        return F.linear(activated, _weight(weights.down, expert, rows.dtype), weights.down_bias[expert])


def clamped_swiglu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """The activation of BiasedExperts, of `x` [..., 2 * size]: a gate, its up, and so on. -> [..., size]."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def _weight(weight: ExpertsWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    return weight[expert] if isinstance(weight, torch.Tensor) else weight.expert(expert, dtype)
