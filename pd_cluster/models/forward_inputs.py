"""The inputs of a model for one step, except the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pd_kernels.attention import AttentionPlan
    from pd_kernels.latent import LatentPlan
    from pd_kernels.state import StatePlan
    from pd_kernels.values import PackedSequences


@dataclass(frozen=True, slots=True)
class Tail:
    """The rows that sample. Once the last layer's keys and values are written, only these rows are computed further."""

    rows: torch.Tensor  # int64 [R] into T, each its sequence's last token; R may be 0
    # Of R sequences of one query token each, for the last layer; None: attend with all T
    plan: AttentionPlan | LatentPlan | None


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One packed step of T tokens: decodes first, then prefill chunks."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mappings: Sequence[torch.Tensor]  # int64 [T], by KV group
    plans: Sequence[AttentionPlan | LatentPlan]  # by KV group
    tail: Tail | None  # the rows that get logits; None: all T
    sequences: Sequence[PackedSequences] | None = None  # by KV group; None: in captured steps
    states: StatePlan | None = None  # of the group of states; None: the model has none
