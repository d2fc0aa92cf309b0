"""A mixture of experts: a router chooses a few of a layer's feed-forwards for each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_cluster.models.linear import add_norm_for
from pd_cluster.models.parameters import Stacks
from pd_kernels.quantized import QuantizedRows, QuantizedWeight, RowsTwice
from pd_kernels.values import ExpertPart, HalfNormed, Routing

if TYPE_CHECKING:
    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.model_share import ModelShare
    from pd_cluster.models.parameters import Parameters
    from pd_cluster.models.reduce import Reduce
    from pd_cluster.models.shard import Shard
    from pd_cluster.models.spec import ExpertsSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.quantized import Weight


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How checkpoints name a layer's experts: `{layer}.{block}.experts.{number}.{gate}.weight`."""

    block: str
    gate: str
    up: str
    down: str
    shared: str = "shared_expert"  # the expert that computes every token
    bias: str = "gate.e_score_correction_bias"  # of a router of sigmoids
    may_fuse: bool = False  # or plain ones as `{layer}.{block}.experts.gate_up_proj` and `down_proj` of all experts


_MOST_JOINED = 2  # experts that a shared one without a gate is read as: DeepSeek-V2-Lite's and Moonlight's have two
USUAL_NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")
NAMES = {  # by architecture, where they differ
    "MixtralForCausalLM": ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
        replace(USUAL_NAMES, shared="shared_experts"),
    ),
    "Mistral4ForCausalLM": replace(USUAL_NAMES, shared="shared_experts", may_fuse=True),
    "Qwen3_5MoeForCausalLM": replace(USUAL_NAMES, may_fuse=True),
    "MiniMaxM2ForCausalLM": ExpertNames("block_sparse_moe", "w1", "w3", "w2", bias="e_score_correction_bias"),
}


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that computes every token. A sigmoid of its own may weigh its result, on several ranks each part."""

    gate: torch.Tensor | None  # [1, hidden]
    gate_up: Linear  # [2 * size, hidden], activated: [T, size]
    down: Linear  # [hidden, size]

    def __call__(self, x: torch.Tensor | HalfNormed | RowsTwice) -> torch.Tensor:
        """`x` [T, hidden] -> [T, hidden]."""
        product = self.down(self.gate_up.activated(x))
        if self.gate is None:
            return product
        rows = x.plain if isinstance(x, RowsTwice) else x.normed() if isinstance(x, HalfNormed) else x
        return product.mul_(F.linear(rows, self.gate).sigmoid())


@dataclass(slots=True)
class Experts:
    """A FeedForward of experts. One expert's gates, ups and downs are rows of three products.

    A shared expert is one or two more of them where it may be: see `_num_joined`.
    """

    kernels: Kernels
    routing: Routing
    router: torch.Tensor  # [E, hidden], float32: with rounded scores, two nodes choose different experts more often
    bias: torch.Tensor | None  # [E], as wide as the router: added to scores to choose by
    gate_up: Weight  # [experts of this rank, 2 * size, hidden]
    down: Weight  # [experts of this rank, hidden, size]
    shared: SharedExpert | None
    part: ExpertPart | None = None  # the experts of this rank; None: all, and there are no other ranks
    reduce: Reduce | None = None
    next_group: int = 0  # the group of the Linear that this feeds
    is_read_plain: bool = False  # what this feeds is read plain, too

    def feed(self, before: Linear, following: Linear | None, *, also_plain: bool = False) -> None:
        """See FeedForward. The router reads plain rows."""
        if isinstance(self.gate_up, QuantizedWeight):
            before.feed_experts(self.gate_up.group)
        self.next_group, self.is_read_plain = following.group if following is not None else 0, also_plain

    def add_norm(self, residual: torch.Tensor, x: Normed, norm: torch.Tensor, eps: float) -> Normed:
        """See FeedForward."""
        assert not isinstance(x, QuantizedRows)  # see `feed`
        plain = x.plain if isinstance(x, RowsTwice) else x
        scores, chosen = self.kernels.route(plain, self.router, self.bias, self.routing)
        product = self.kernels.experts(x, scores, chosen, self.gate_up, self.down, part=self.part)
        if self.shared is not None:
            shared = self.shared(x)
            product = product + shared if product.dim() == 2 else torch.cat((product, shared[None]))
        if self.reduce is not None:
            if not self.next_group:
                return self.reduce.add_norm(product, residual, norm, eps)
            product = self.reduce.add(product)
        return add_norm_for(self.next_group, self.is_read_plain, self.kernels, product, residual, norm, eps)


def make_experts(
    layer: str,
    names: ExpertNames,
    hidden_size: int,
    spec: ExpertsSpec,
    weights: Parameters,
    kernels: Kernels,
    share: ModelShare,
) -> Experts:
    """The experts of the checkpoint's `layer`. Each rank has some of them, whole, and a part of the shared one.

    Raises StartupError if the ranks cannot share them evenly.
    """
    own, count = share.shard.part(spec.num_experts, "experts"), spec.num_experts
    block, size, bias = f"{layer}.{names.block}", spec.size, None
    joined = _num_joined(block, names, spec, weights, share)
    if spec.is_sigmoid:
        bias = weights.tensor(f"{block}.{names.bias}", count, wide=True)
    experts, router = [f"{block}.experts.{number}" for number in range(count)], {f"{block}.gate.weight": count}
    shared, is_gated = f"{block}.{names.shared}", bool(joined) and spec.shared_gated
    if is_gated:
        router[f"{shared}_gate.weight"] = 1
    fused = [(f"{block}.experts.{name}" if names.may_fuse else "", count) for name in ("gate_up_proj", "down_proj")]
    gates_and_ups, downs = (
        Stacks(
            [[f"{expert}.{part}" for part in parts] for expert in experts],
            [f"{shared}.{part}" for part in parts],
            joined,
            dim,
        )
        for dim, parts in enumerate(((names.gate, names.up), (names.down,)))
    )
    routing = Routing(
        spec.num_chosen, spec.normalized, spec.is_sigmoid, spec.factor, spec.num_groups, spec.groups_chosen,
        spec.group_best,
    )  # fmt: skip
    return Experts(
        kernels=kernels,
        routing=replace(routing, num_shared=joined, shared_gated=is_gated),
        router=weights.merged(router, hidden_size),
        bias=bias,
        gate_up=weights.stacked(gates_and_ups, own, size, hidden_size, fused[0]),
        down=weights.stacked(downs, own, hidden_size, size, fused[1]),
        shared=None if joined else _make_shared(block, names, hidden_size, spec, weights, kernels, share.shard),
        part=None if share.reduce is None else ExpertPart(own.start, count),
        reduce=share.reduce,
    )


def _num_joined(block: str, names: ExpertNames, spec: ExpertsSpec, weights: Parameters, share: ModelShare) -> int:
    """The experts of each token that the shared one makes: it has their size, or twice theirs, and is on one rank.

    Apart it took 9 launches a layer with a gate (360 of the 1,100 of a decode step of 40 layers) and 4 without.
    0: it stays apart.
    """
    count, rest = divmod(spec.shared_size, spec.size)
    can_divide = not spec.shared_gated and weights.can_divide(f"{block}.{names.shared}.{names.down}", spec.size)
    most = _MOST_JOINED if can_divide else 1
    if rest or count > most or share.reduce is not None:
        return 0
    pairs = [(f"{block}.experts.0.{part}", f"{block}.{names.shared}.{part}") for part in (names.gate, names.down)]
    return count if all(map(weights.are_alike, pairs)) else 0


def _make_shared(
    block: str,
    names: ExpertNames,
    hidden_size: int,
    spec: ExpertsSpec,
    weights: Parameters,
    kernels: Kernels,
    shard: Shard,
) -> SharedExpert | None:
    if not spec.shared_size:
        return None
    shared, size = f"{block}.{names.shared}", shard.cut(spec.shared_size, "activations of the shared expert")
    parts = {f"{shared}.{part}": size for part in (names.gate, names.up)}
    gate = weights.tensor(f"{shared}_gate.weight", 1, hidden_size) if spec.shared_gated else None
    gate_up = weights.linear("shared_gate_up", parts, hidden_size, activate=kernels.silu_and_mul)
    down = weights.linear("shared_down", {f"{shared}.{names.down}": hidden_size}, size)
    gate_up.feed(down)
    return SharedExpert(gate, gate_up, down)
