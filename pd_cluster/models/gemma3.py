"""Gemma 3, text only.

Each half of a layer has a norm before and after it. Most layers have windows. Each kind of layer has its own RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from pd_cluster.models.decoder import Decoder

if TYPE_CHECKING:
    from pd_cluster.models.linear import Linear, Normed, Rows
    from pd_cluster.models.mixer import Mixer


@dataclass(frozen=True, slots=True)
class Gemma3Layer:
    """The weights of one layer. Norms are [hidden], in float32."""

    input_norm: torch.Tensor
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    attention: Mixer
    out: Linear  # [hidden, num_heads * head_dim]
    out_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Linear  # [2 * intermediate, hidden], activated: [T, intermediate]
    down: Linear  # [hidden, intermediate]
    down_norm: torch.Tensor


class Gemma3(Decoder[Gemma3Layer]):
    """Weights and forward pass of one decoder. The outputs of attention and MLP are normed before they are added."""

    offset_norms: ClassVar = True

    @cached_property
    def _embedding_scale(self) -> float:
        return torch.tensor(self.spec.hidden_size**0.5, dtype=self.dtype).item()  # rounded, as in training

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super()._embed(token_ids) * self._embedding_scale

    def _feed(self, layer: Gemma3Layer, following: Linear | None) -> None:
        layer.out.feed(layer.gate_up)
        if following is not None:
            layer.down.feed(following)

    def _finish_layer(
        self, layer: Gemma3Layer, residual: torch.Tensor, attended: Rows, next_norm: torch.Tensor
    ) -> Normed:
        eps = self.spec.norm_eps
        x = layer.out.add_norm(residual, attended, layer.mlp_norm, eps, before=layer.out_norm)
        return layer.down.add_norm(residual, layer.gate_up(x), next_norm, eps, before=layer.down_norm)

    def _make_layer(self, name: str, index: int) -> Gemma3Layer:
        spec, weights = self.spec, self._parameters
        input_norm, out_norm, mlp_norm, down_norm = (
            weights.norm(f"{name}.{norm}_layernorm.weight", spec.hidden_size)
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        return Gemma3Layer(
            input_norm=input_norm,
            qkv=self._make_qkv(f"{name}.self_attn"),
            attention=self._make_attention(f"{name}.self_attn", index),
            out=weights.linear(
                "out", {f"{name}.self_attn.o_proj": spec.hidden_size}, self._queries, bias=spec.out_bias
            ),
            out_norm=out_norm,
            mlp_norm=mlp_norm,
            gate_up=self._make_gate_up(f"{name}.mlp", gelu_and_mul),
            down=weights.linear("down", {f"{name}.mlp.down_proj": spec.hidden_size}, self._activations),
            down_norm=down_norm,
        )


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up for `x` = [gate | up] along the last dimension, with the tanh approximation of gelu."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
