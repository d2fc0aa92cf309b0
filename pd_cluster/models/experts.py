"""A mixture of experts: a router chooses a few of a layer's feed-forwards for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_kernels.quantized import QuantizedRows
from pd_kernels.values import HalfNormed, Routing

if TYPE_CHECKING:
    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.parameters import Parameters
    from pd_cluster.models.spec import ExpertsSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.quantized import Weight


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's checkpoints name a layer's experts: `{layer}.{block}.experts.{number}.{gate}.weight`."""

    block: str
    gate: str
    up: str
    down: str
    shared: str = "shared_expert"  # the expert that computes every token
    bias: str = "gate.e_score_correction_bias"  # of a router of sigmoids


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that computes every token. A sigmoid of its own may weigh its result."""

    gate: torch.Tensor | None  # [1, hidden]
    gate_up: Linear  # [2 * size, hidden], activated: [T, size]
    down: Linear  # [hidden, size]

    def __call__(self, x: torch.Tensor | HalfNormed) -> torch.Tensor:
        """`x` [T, hidden] -> [T, hidden]."""
        product = self.down(self.gate_up(x))
        if self.gate is None:
            return product
        rows = x.normed() if isinstance(x, HalfNormed) else x
        return product.mul_(F.linear(rows, self.gate).sigmoid())


@dataclass(frozen=True, slots=True)
class Experts:
    """A FeedForward of experts. One expert's gates, ups and downs are rows of three products."""

    kernels: Kernels
    routing: Routing
    router: torch.Tensor  # [E, hidden], float32: with rounded scores, two nodes choose different experts more often
    bias: torch.Tensor | None  # [E], as wide as the router: added to scores to choose by
    gate_up: Weight  # [E, 2 * size, hidden]
    down: Weight  # [E, hidden, size]
    shared: SharedExpert | None

    def add_norm(self, residual: torch.Tensor, x: Normed, norm: torch.Tensor, eps: float) -> Normed:
        """See FeedForward."""
        assert not isinstance(x, QuantizedRows)  # the router reads plain rows, so no product feeds experts
        scores, chosen = self.kernels.route(x, self.router, self.bias, self.routing)
        product = self.kernels.experts(x, scores, chosen, self.gate_up, self.down)
        if self.shared is not None:
            shared = self.shared(x)
            product = product + shared if product.dim() == 2 else torch.cat((product, shared[None]))
        return self.kernels.add_rms_norm(product, residual, norm, eps)[0]


def make_experts(
    layer: str, names: ExpertNames, hidden_size: int, spec: ExpertsSpec, weights: Parameters, kernels: Kernels
) -> Experts:
    """The experts of the checkpoint's `layer`."""
    block, size, bias = f"{layer}.{names.block}", spec.size, None
    if spec.is_sigmoid:
        bias = weights.tensor(f"{block}.{names.bias}", spec.num_experts, wide=True)
    experts = [f"{block}.experts.{number}" for number in range(spec.num_experts)]
    gates_and_ups = [[f"{expert}.{part}" for part in (names.gate, names.up)] for expert in experts]
    return Experts(
        kernels=kernels,
        routing=Routing(
            spec.num_chosen, spec.normalized, spec.is_sigmoid, spec.factor, spec.num_groups, spec.groups_chosen
        ),
        router=weights.tensor(f"{block}.gate.weight", spec.num_experts, hidden_size, wide=True),
        bias=bias,
        gate_up=weights.stacked(gates_and_ups, size, hidden_size),
        down=weights.stacked([[f"{expert}.{names.down}"] for expert in experts], hidden_size, size),
        shared=_make_shared(block, names, hidden_size, spec, weights, kernels),
    )


def _make_shared(
    block: str, names: ExpertNames, hidden_size: int, spec: ExpertsSpec, weights: Parameters, kernels: Kernels
) -> SharedExpert | None:
    if not spec.shared_size:
        return None
    shared, size = f"{block}.{names.shared}", spec.shared_size
    parts = {f"{shared}.{part}": size for part in (names.gate, names.up)}
    return SharedExpert(
        gate=weights.tensor(f"{shared}_gate.weight", 1, hidden_size) if spec.shared_gated else None,
        gate_up=weights.linear("shared_gate_up", parts, hidden_size, activate=kernels.silu_and_mul),
        down=weights.linear("shared_down", {f"{shared}.{names.down}": hidden_size}, size),
    )
