"""Gemma 3, text only.

Each half of a layer has a norm before and after it. Most layers have windows. Each kind of layer has its own RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_cluster.models.decoder import Decoder
from pd_cluster.models.rope import make_rope_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.mixer import LayerCache, Mixer
    from pd_cluster.models.model_share import ModelShare
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels


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

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        share: ModelShare,
    ) -> None:
        ropes = [spec.window_rope or spec.rope if window else spec.rope for window in spec.group_windows]
        self._ropes = [make_rope_table(rope, spec.head_dim, max_len, dtype, device) for rope in ropes]
        self._embedding_scale = torch.tensor(spec.hidden_size**0.5, dtype=dtype).item()  # rounded, as in training
        super().__init__(spec, kernels, dtype, device, share, offset_norms=True)
        for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            layer.out.feed(layer.gate_up)
            if following is not None:
                layer.down.feed(following.qkv)

    def hidden(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> Normed:
        """See Decoder."""
        eps, last = self.spec.norm_eps, self._layers[-1]
        # before an ordinary launch: see triton_dependent_launch
        angles = [rope.at(inputs.positions) for rope in self._ropes]
        residual = F.embedding(inputs.token_ids, self._embedding) * self._embedding_scale
        x: Normed = self._kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            tail = inputs.tail if layer is last else None
            attended = layer.attention(layer.qkv(x), angles[layer.attention.group], inputs, caches[index], tail)
            if tail is not None:
                residual = residual[tail.rows]
                if not len(residual):
                    return residual
            x = layer.out.add_norm(residual, attended, layer.mlp_norm, eps, before=layer.out_norm)
            x = layer.down.add_norm(residual, layer.gate_up(x), next_norm, eps, before=layer.down_norm)
        return x

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
