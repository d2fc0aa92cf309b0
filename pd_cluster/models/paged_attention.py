"""One layer's attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_kernels.values import NewTokens

if TYPE_CHECKING:
    import torch

    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_kernels.backends import Kernels
    from pd_kernels.values import HeadNorms


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Rotary attention with grouped heads."""

    kernels: Kernels
    head_dim: int
    group: int  # the layer's KV group: index into ForwardInputs.plans
    scale: float  # factor on the scores
    norms: HeadNorms | None

    def __call__(
        self,
        heads: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        inputs: ForwardInputs,
        views: tuple[torch.Tensor, torch.Tensor],
        tail: Tail | None,
    ) -> torch.Tensor:
        """Write the keys and values of T tokens into the cache, and attend.

        `heads`: [T, (H + 2 G) * head_dim], queries, then keys, then values, as the product leaves them.
        `angles`: cos and sin, [T, rotary_dim / 2] each. `views`: the layer's K and V, [num_blocks, G, block_size,
        head_dim] each. -> [T, H * head_dim]; with `tail`, of its R rows only.
        """
        heads = heads.view(heads.shape[0], -1, self.head_dim)
        plan = inputs.plans[self.group]
        if tail is None and plan.may_rotate:
            new = NewTokens(self.norms, *angles, inputs.slot_mapping)
            attended = plan.run_rotating(heads, new, *views, self.scale)
            if attended is not None:
                return attended.view(attended.shape[0], -1)
        query = self.kernels.norm_rope_write(heads, self.norms, *angles, *views, inputs.slot_mapping)
        if tail is not None and not len(tail.rows):  # chunks in the middle of prompts
            return query.new_empty(0, query.shape[1] * self.head_dim)
        if tail is not None and tail.plan is not None:
            attended = tail.plan.run(query[tail.rows], *views, self.scale)
        else:
            attended = plan.run(query, *views, self.scale)
            if tail is not None:
                attended = attended[tail.rows]
        return attended.view(attended.shape[0], -1)
