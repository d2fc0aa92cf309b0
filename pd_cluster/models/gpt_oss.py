"""gpt-oss: Llama's decoder with attention sinks, windows in every second layer, and experts with biases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pd_cluster.models.biased_mixture import BiasedMixture, make_biased_mixture
from pd_cluster.models.llama import Llama

if TYPE_CHECKING:
    from pd_cluster.models.feed_forward import FeedForward
    from pd_cluster.models.paged_attention import PagedAttention


class GptOss(Llama):
    """Weights and forward pass of one decoder."""

    wide_norms: ClassVar = True  # a norm is multiplied by its weight in float32, and rounded once

    def _make_attention(self, name: str, layer: int) -> PagedAttention:
        size, rows = self.spec.head_dim, self._queries.part
        heads = range(rows.start // size, rows.stop // size)
        sinks = self._parameters.tensor(f"{name}.sinks", self.spec.num_heads, wide=True, own=heads)
        return replace(super()._make_attention(name, layer), sinks=sinks)

    def _make_feed_forward(self, name: str, index: int) -> FeedForward:
        spec, experts = self.spec, self.spec.experts
        assert experts is not None
        return make_biased_mixture(
            f"{name}.mlp", spec.hidden_size, experts, self._parameters, self._kernels, self._share
        )

    def finish_loading(self) -> None:
        """See Model."""
        super().finish_loading()
        for layer in self._layers:
            assert isinstance(layer.feed_forward, BiasedMixture)
            layer.feed_forward.finish_loading()
