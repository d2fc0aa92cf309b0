"""Llama and its relatives (Mistral, Qwen, mixtures): pre-norm decoder, rotary attention, SwiGLU or experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.models.decoder import Decoder
from pd_cluster.models.experts import NAMES, USUAL_NAMES, make_experts
from pd_cluster.models.feed_forward import Dense

if TYPE_CHECKING:
    import torch

    from pd_cluster.models.feed_forward import FeedForward
    from pd_cluster.models.linear import Linear, Normed, Rows
    from pd_cluster.models.mixer import Mixer
    from pd_cluster.models.shard import Cut


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

    def _feed(self, layer: LlamaLayer, following: Linear | None) -> None:
        layer.feed_forward.feed(layer.out, following)

    def _finish_layer(
        self, layer: LlamaLayer, residual: torch.Tensor, attended: Rows, next_norm: torch.Tensor
    ) -> Normed:
        eps = self.spec.norm_eps
        x = layer.out.add_norm(residual, attended, layer.post_norm, eps)
        return layer.feed_forward.add_norm(residual, x, next_norm, eps)

    def _make_layer(self, name: str, index: int) -> LlamaLayer:
        spec, weights = self.spec, self._parameters
        return LlamaLayer(
            input_norm=weights.norm(f"{name}.input_layernorm.weight", spec.hidden_size),
            qkv=self._make_qkv(f"{name}.self_attn"),
            attention=self._make_mixer(f"{name}.self_attn", index),
            out=weights.linear(
                "out", {f"{name}.self_attn.o_proj": spec.hidden_size}, self._attended, bias=spec.out_bias, adds=True
            ),
            post_norm=weights.norm(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
            feed_forward=self._make_feed_forward(name, index),
        )

    def _make_mixer(self, name: str, layer: int) -> Mixer:
        return self._make_attention(name, layer)

    @property
    def _attended(self) -> Cut:
        """This rank's results of attention."""
        return self._queries

    def _make_feed_forward(self, name: str, index: int) -> FeedForward:
        spec, weights = self.spec, self._parameters
        if spec.experts is not None and index not in spec.experts.dense_layers:
            names, experts = NAMES.get(spec.architecture, USUAL_NAMES), spec.experts
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
