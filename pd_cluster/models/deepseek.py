"""DeepSeek-V2, V3 and their relatives (Moonlight, Kimi-K2, GLM-4.7-Flash, Mistral Small 4): Llama's decoder with latent
attention and a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.models.latent_mixer import LatentMixer
from pd_cluster.models.llama import Llama

if TYPE_CHECKING:
    from pd_cluster.models.linear import Linear
    from pd_cluster.models.mixer import Mixer
    from pd_cluster.models.shard import Cut
    from pd_cluster.models.spec import LatentSpec


class Deepseek(Llama):
    """Weights and forward pass of one decoder.

    The first product of a layer is all that reads the hidden state: queries, or the vector that they are expanded
    from, and the token's row of the cache. Ranks split heads; what has none, each of them has.
    """

    def finish_loading(self) -> None:
        """See Model. Kernels rotate halves of heads: rows of pairs are put in this order, which changes no score."""
        if self._latent.is_interleaved:
            for layer in self._layers:
                assert isinstance(layer.attention, LatentMixer)
                query, row = layer.attention.query, self._latent.width
                layer.qkv.reorder(self._rotary_order(layer.qkv, 0 if query is not None else self._head_size, row))
                if query is not None:
                    query.reorder(self._rotary_order(query, self._head_size, 0))
        super().finish_loading()

    @property
    def _latent(self) -> LatentSpec:
        assert self.spec.latent is not None
        return self.spec.latent

    @property
    def _head_size(self) -> int:
        return self._latent.nope + self._latent.rope

    @property
    def _attended(self) -> Cut:
        return self._share.shard.cut(self.spec.num_heads, "query heads", self._latent.value)

    def _rotary_order(self, linear: Linear, head_size: int, row_size: int) -> torch.Tensor:
        """The rows of a product by their new places: of heads of `head_size` (0: there are none), then of one row.

        The last `rope` rows of each rotate.
        """
        order, rope = torch.arange(len(linear.weight)), self._latent.rope
        pairs = torch.arange(rope).view(-1, 2).T.flatten()
        heads = order[: len(order) - row_size].view(-1, head_size)[:, -rope:] if head_size else order[:0].view(0, rope)
        heads.copy_(heads[:, pairs].clone())
        if row_size:
            order[-rope:] = order[-rope:][pairs]
        return order.to(linear.weight.device)

    def _make_qkv(self, name: str) -> Linear:
        latent = self._latent
        first: dict[str, int | Cut] = {f"{name}.q_proj": self._queries}
        if latent.query_rank:
            first = {f"{name}.q_a_proj": latent.query_rank}
        parts = {**first, f"{name}.kv_a_proj_with_mqa": latent.width}
        return self._parameters.linear("latent", parts, self.spec.hidden_size)

    def _make_mixer(self, name: str, layer: int) -> Mixer:
        latent, weights = self._latent, self._parameters
        query_norm = query = None
        if latent.query_rank:
            query_norm = weights.norm(f"{name}.q_a_layernorm.weight", latent.query_rank)
            query = weights.linear("query", {f"{name}.q_b_proj": self._queries}, latent.query_rank)
        size = latent.nope + latent.value
        heads = self._share.shard.cut(self.spec.num_heads, "query heads", size)
        return LatentMixer(
            self._kernels,
            group=0,
            spec=latent,
            scale=self.spec.attention_scale,
            query_norm=query_norm,
            query=query,
            latent_norm=weights.norm(f"{name}.kv_a_layernorm.weight", latent.rank),
            expand=weights.widened(f"{name}.kv_b_proj", heads, latent.rank).view(-1, size, latent.rank),
        )
