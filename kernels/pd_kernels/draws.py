"""How each row of a step chooses its token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """P rows that draw from their best tokens only."""

    rows: torch.Tensor  # int64 [P] into R; none of them with temperature 0
    top_k: torch.Tensor  # int64 [P]; V: all
    top_p: torch.Tensor  # float32 [P]
    min_p: torch.Tensor  # float32 [P]


@dataclass(frozen=True, slots=True)
class Draws:
    """For R rows of logits."""

    temperature: torch.Tensor  # float32 [R]; 0: the first of the greatest, nothing is drawn
    seeds: torch.Tensor  # int64 [R]: any bits
    positions: torch.Tensor  # int64 [R]: tokens of the sequence before the one that is chosen
    limits: Limits | None
