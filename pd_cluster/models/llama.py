"""Llama and its relatives (Mistral, Qwen, mixtures): pre-norm decoder, rotary attention, SwiGLU or experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F

from pd_cluster.models.decoder import Decoder
from pd_cluster.models.experts import ExpertNames, make_experts
from pd_cluster.models.feed_forward import Dense
from pd_cluster.models.rope import make_rope_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pd_cluster.models.feed_forward import FeedForward
    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.mixer import LayerCache, Mixer
    from pd_cluster.models.model_share import ModelShare
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The weights of one layer."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    attention: Mixer
    out: Linear  # [hidden, num_heads * head_dim]
    post_norm: torch.Tensor
    feed_forward: FeedForward


class Llama(Decoder[LlamaLayer]):
    """Weights and forward pass of one decoder."""

    expert_names: ClassVar = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        share: ModelShare,
    ) -> None:
        self._rope = make_rope_table(spec.rope, spec.rotary_dim or spec.head_dim, max_len, dtype, device)
        super().__init__(spec, kernels, dtype, device, share)
        for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            layer.feed_forward.feed(layer.out, following.qkv if following else None)

    def hidden(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> Normed:
        """See Decoder."""
        eps, last = self.spec.norm_eps, self._layers[-1]
        angles = self._rope.at(inputs.positions)  # before an ordinary launch: see triton_dependent_launch
        residual = F.embedding(inputs.token_ids, self._embedding)
        x: Normed = self._kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            tail = inputs.tail if layer is last else None
            attended = layer.attention(layer.qkv(x), angles, inputs, caches[index], tail)
            if tail is not None:
                residual = residual[tail.rows]
                if not len(residual):
                    return residual
            x = layer.out.add_norm(residual, attended, layer.post_norm, eps)
            x = layer.feed_forward.add_norm(residual, x, next_norm, eps)
        return x

    def _make_layer(self, name: str, index: int) -> LlamaLayer:
        spec, weights = self.spec, self._parameters
        return LlamaLayer(
            input_norm=weights.norm(f"{name}.input_layernorm.weight", spec.hidden_size),
            qkv=self._make_qkv(f"{name}.self_attn"),
            attention=self._make_attention(f"{name}.self_attn", index),
            out=weights.linear(
                "out", {f"{name}.self_attn.o_proj": spec.hidden_size}, self._queries, bias=spec.out_bias, adds=True
            ),
            post_norm=weights.norm(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
            feed_forward=self._make_feed_forward(name, index),
        )

    def _make_feed_forward(self, name: str, index: int) -> FeedForward:
        spec, weights = self.spec, self._parameters
        if spec.experts is not None and index not in spec.experts.dense_layers:
            names, experts = self.expert_names, spec.experts
            return make_experts(name, names, spec.hidden_size, experts, weights, self._kernels, self._share)
        return Dense(
            gate_up=self._make_gate_up(f"{name}.mlp", self._kernels.silu_and_mul),
            down=weights.linear(
                "down",
                {f"{name}.mlp.down_proj": spec.hidden_size},
                self._activations,
                bias=spec.mlp_bias,
                adds=True,
            ),
        )
