"""One layer's attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_kernels.latent import LatentPlan
from pd_kernels.values import KeysValues, NewTokens

if TYPE_CHECKING:
    import torch

    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.rope import RopeTable
    from pd_kernels.backends import Kernels
    from pd_kernels.values import HeadNorms


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The Mixer of rotary attention with grouped heads."""

    kernels: Kernels
    head_dim: int
    group: int  # the layer's KV group: see Mixer
    scale: float  # factor on the scores
    norms: HeadNorms | None
    sinks: torch.Tensor | None = None  # float32 [H]: see AttentionPlan.run

    def __call__(
        self, x: torch.Tensor, angles: RopeTable, inputs: ForwardInputs, cache: LayerCache, tail: Tail | None
    ) -> torch.Tensor:
        """Write the keys and values of T tokens into the cache, and attend.

        `x`: [T, (H + 2 G) * head_dim], queries, then keys, then values, as the product leaves them.
        `angles`: of the T tokens. -> [T, H * head_dim]; with `tail`, of its R rows only.
        """
        plan = inputs.plans[self.group]
        assert isinstance(cache, KeysValues)
        assert not isinstance(plan, LatentPlan)
        heads = x.view(x.shape[0], -1, self.head_dim)
        new = NewTokens(self.norms, angles.cos, angles.sin, inputs.slot_mappings[self.group])
        if tail is None and plan.may_rotate:
            attended = plan.run_rotating(heads, new, cache, self.scale, self.sinks)
            if attended is not None:
                return attended.view(attended.shape[0], -1)
        query = self.kernels.norm_rope_write(heads, new, cache)
        if tail is not None and not len(tail.rows):  # chunks in the middle of prompts
            return query.new_empty(0, query.shape[1] * self.head_dim)
        if tail is not None and tail.plan is not None:
            assert not isinstance(tail.plan, LatentPlan)
            attended = tail.plan.run(query[tail.rows], cache, self.scale, sinks=self.sinks)
        else:
            attended = plan.run(query, cache, self.scale, sinks=self.sinks)
            if tail is not None:
                attended = attended[tail.rows]
        return attended.view(attended.shape[0], -1)
