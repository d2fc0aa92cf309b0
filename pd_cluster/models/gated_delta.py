"""One layer's gated delta rule over the states of sequences (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_kernels.state import StateCache, StateGates

if TYPE_CHECKING:
    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_cluster.models.linear import Rows
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.rope import RopeTable
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The Mixer of a layer that keeps a state."""

    kernels: Kernels
    group: int  # see Mixer
    convolution: torch.Tensor  # [C, width]: queries and keys [key heads, key_dim] of this rank, then its values
    decay_log: torch.Tensor  # float32 [H], of the H value heads of this rank
    decay_bias: torch.Tensor
    norm: torch.Tensor  # [value_dim]
    norm_eps: float
    next_group: int = 0  # the group of the Linear that this feeds; see Linear.group

    def __call__(
        self,
        x: torch.Tensor,
        angles: RopeTable,
        inputs: ForwardInputs,
        cache: LayerCache,
        tail: Tail | None,
        betas_decays: torch.Tensor | None = None,
    ) -> Rows:
        """See Mixer. `x`: [T, C + H * value_dim], the convolution's inputs, then output gates.

        `betas_decays`: [T, 2 H], the layer's other product.
        """
        plan, ops = inputs.states, self.kernels.state
        assert isinstance(cache, StateCache)
        assert plan is not None
        assert betas_decays is not None
        num_tokens, (num_heads, key_dim, value_dim) = len(x), cache.recurrent.shape[1:]
        channels, values = len(self.convolution), num_heads * value_dim
        keys = (channels - values) // 2
        seen = ops.convolve(x[:, :channels], self.convolution, None, cache, plan)
        query, key, value = torch.split(seen, [keys, keys, values], 1)
        beta, decay = betas_decays.chunk(2, 1)
        gates = StateGates(decay, beta, self.decay_log, self.decay_bias)
        query, key = query.view(num_tokens, -1, key_dim), key.view(num_tokens, -1, key_dim)
        value, gate = (part.view(num_tokens, num_heads, value_dim) for part in (value, x[:, channels:]))
        mixed = ops.mix_gated(query, key, value, gates, cache.recurrent, plan, key_dim**-0.5)
        if tail is not None:
            mixed, gate = mixed[tail.rows], gate[tail.rows]
            if not len(mixed):  # chunks in the middle of prompts
                return mixed.flatten(1)
        if self.next_group:
            return self.kernels.gated_norm_quantized(mixed, gate, self.norm, self.norm_eps, self.next_group)
        return ops.gated_norm(mixed, gate, self.norm, self.norm_eps).flatten(1)
