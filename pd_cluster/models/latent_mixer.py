"""One layer's latent attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_kernels.latent import LatentPlan, NewLatents

if TYPE_CHECKING:
    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_cluster.models.linear import Linear
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.rope import RopeTable
    from pd_cluster.models.spec import LatentSpec
    from pd_kernels.backends import Kernels

LATENT_EPS = 1e-6  # of the norms of compressed vectors, whatever `rms_norm_eps` says


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """The Mixer of latent attention."""

    kernels: Kernels
    group: int  # see Mixer
    spec: LatentSpec
    scale: float  # factor on the scores
    query_norm: torch.Tensor | None  # [query_rank]; None: queries are not compressed
    query: Linear | None  # [H * (nope + rope), query_rank]
    latent_norm: torch.Tensor  # [rank]
    expand: torch.Tensor  # [H, nope + value, rank]: see LatentOps

    def __call__(
        self, x: torch.Tensor, angles: RopeTable, inputs: ForwardInputs, cache: LayerCache, tail: Tail | None
    ) -> torch.Tensor:
        """See Mixer. `x`: the queries or what they are expanded from, then latents and keys that rotate."""
        plan, slots, num_tokens = inputs.plans[self.group], inputs.slot_mappings[self.group], len(x)
        assert isinstance(cache, torch.Tensor)
        assert isinstance(plan, LatentPlan)
        first = x.shape[1] - self.spec.width
        query = x[:, :first]
        if self.query is not None:
            assert self.query_norm is not None
            query = self.query(self.kernels.rms_norm(query.contiguous(), self.query_norm, LATENT_EPS))
        query = query.view(num_tokens, -1, self.spec.nope + self.spec.rope)
        if angles.growth is not None:
            query = query * angles.growth[:, None, None]
        new = NewLatents(self.latent_norm, LATENT_EPS, angles.cos, angles.sin, slots)
        own = plan.ops.norm_rope_write(query, x[:, first:], new, cache)
        if tail is None:
            return plan.run(query, own, self.expand, cache, self.scale).flatten(1)
        if not len(tail.rows):  # chunks in the middle of prompts
            return query.new_empty(0, query.shape[1] * self.spec.value)
        if tail.plan is None:
            return plan.run(query, own, self.expand, cache, self.scale)[tail.rows].flatten(1)
        assert isinstance(tail.plan, LatentPlan)
        return tail.plan.run(query[tail.rows], own[tail.rows], self.expand, cache, self.scale).flatten(1)
