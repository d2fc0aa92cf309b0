"""A mixture of experts with biases, of its router too, and with a clamped SwiGLU (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_kernels.biased_experts import BiasedExperts
from pd_kernels.quantized import QuantizedRows, RowsTwice
from pd_kernels.values import ExpertPart, Routing

if TYPE_CHECKING:
    import torch

    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.model_share import ModelShare
    from pd_cluster.models.parameters import Parameters
    from pd_cluster.models.reduce import Reduce
    from pd_cluster.models.spec import ExpertsSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.biased_experts import BiasedMix


@dataclass(slots=True)
class BiasedMixture:
    """A FeedForward. It takes part in steps once its weights are loaded."""

    kernels: Kernels
    routing: Routing
    router: torch.Tensor  # [E, hidden], float32
    router_bias: torch.Tensor  # [E], float32
    weights: BiasedExperts | None  # of this rank, whole experts; None once they are loaded: `mix` has them
    part: ExpertPart | None  # None: all experts
    reduce: Reduce | None
    mix: BiasedMix | None = None

    def finish_loading(self) -> None:
        """Let the kernels lay out the weights."""
        assert self.weights is not None
        self.mix, self.weights = self.kernels.biased_experts(self.weights, self.part), None

    def feed(self, before: Linear, following: Linear | None, *, also_plain: bool = False) -> None:
        """See FeedForward. No rows are quantized here: weights of these models are plain, or packed experts."""

    def add_norm(self, residual: torch.Tensor, x: Normed, norm: torch.Tensor, eps: float) -> Normed:
        """See FeedForward."""
        assert self.mix is not None
        assert not isinstance(x, QuantizedRows | RowsTwice)
        scores, chosen = self.kernels.route(x, self.router, self.router_bias, self.routing)
        product = self.mix(x, scores, chosen)
        if self.reduce is not None:
            return self.reduce.add_norm(product, residual, norm, eps)
        return self.kernels.add_rms_norm(product, residual, norm, eps)[0]


def make_biased_mixture(
    block: str, hidden_size: int, spec: ExpertsSpec, weights: Parameters, kernels: Kernels, share: ModelShare
) -> BiasedMixture:
    """The mixture `block` of the checkpoint. Raises StartupError if the ranks cannot share the experts evenly."""
    count, size, own = spec.num_experts, spec.size, share.shard.part(spec.num_experts, "experts")
    experts = f"{block}.experts"
    return BiasedMixture(
        kernels=kernels,
        routing=Routing(spec.num_chosen, spec.normalized, biases_products=True),
        router=weights.tensor(f"{block}.router.weight", count, hidden_size, wide=True),
        router_bias=weights.tensor(f"{block}.router.bias", count, wide=True),
        weights=BiasedExperts(
            gate_up=weights.fused(f"{experts}.gate_up_proj", (count, 2 * size, hidden_size), own, spec.form),
            gate_up_bias=weights.tensor(f"{experts}.gate_up_proj_bias", count, 2 * size, own=own),
            down=weights.fused(f"{experts}.down_proj", (count, hidden_size, size), own, spec.form),
            down_bias=weights.tensor(f"{experts}.down_proj_bias", count, hidden_size, own=own),
            limit=spec.limit,
            alpha=spec.alpha,
        ),
        part=None if share.reduce is None else ExpertPart(own.start, count),
        reduce=share.reduce,
    )
