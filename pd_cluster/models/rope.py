"""Rotary position embedding: the angles of every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_cluster.models.rope_kinds import ROPE_KINDS

if TYPE_CHECKING:
    from pd_cluster.models.spec import RopeSpec


@dataclass(slots=True)
class RopeTable:
    """cos and sin of positions' angles times the attention factor, each [positions, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    growth: torch.Tensor | None = None  # [positions]: factors on queries; None: they are 1

    def at(self, positions: torch.Tensor) -> RopeTable:
        """The rows of `positions` (int64 [T])."""
        growth = None if self.growth is None else self.growth.index_select(0, positions)
        return RopeTable(self.cos.index_select(0, positions), self.sin.index_select(0, positions), growth)


def make_rope_table(
    spec: RopeSpec, rotary_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> RopeTable:
    """Make the table of `max_len` positions on the device, in `dtype`. `rotary_dim`: dimensions of a head that rotate.

    The angles are computed on the CPU in float32 and then moved, so that every device has the same numbers.
    """
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), rope_frequencies(spec, rotary_dim))
    cos, sin = (part.mul_(spec.attention_factor).to(device, dtype) for part in (angles.cos(), angles.sin()))
    if not spec.query_beta:
        return RopeTable(cos, sin)
    contexts = torch.arange(max_len, dtype=torch.float32).div_(spec.original_max_len).floor_()
    return RopeTable(cos, sin, contexts.log1p_().mul_(spec.query_beta).add_(1).to(device, dtype))


def rope_frequencies(spec: RopeSpec, rotary_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, float32 [rotary_dim / 2]."""
    plain = 1.0 / spec.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    return ROPE_KINDS[spec.kind].scale(spec, plain)
