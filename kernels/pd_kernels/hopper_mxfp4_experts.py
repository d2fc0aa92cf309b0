"""Mixtures of experts with biases in MXFP4 on Hopper GPUs: `gluon_mxfp4_experts` and the kernels around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_kernels.gluon_mxfp4_experts import Product, SortedRows, multiply
from pd_kernels.mxfp4_tiles import LINES, in_order, in_tiles
from pd_kernels.launch_sizes import cdiv, num_processors
from pd_kernels.triton_pair_rows import sorted_rows, sum_pairs
from pd_kernels.triton_pairs import OwnPairs, sort_pairs
from pd_kernels.values import FEW_ROWS, HalfNormed

if TYPE_CHECKING:
    from pd_kernels.biased_experts import BiasedExperts
    from pd_kernels.values import ExpertPart
    from pd_kernels.weight_forms import PackedWeight

_MOST_IN_PARTS = FEW_ROWS[1]  # tokens


@dataclass(frozen=True, slots=True)
class Mxfp4Mix:
    """A BiasedMix."""

    gate_up: Product
    down: Product
    activation: tuple[float, float]
    part: ExpertPart | None

    def __call__(
        self, x: torch.Tensor | HalfNormed, scores: torch.Tensor, chosen: torch.Tensor,
        size: int | None = None, split: int | None = None,
    ) -> torch.Tensor:
        """See BiasedMix. `size`, `split`: others in tests."""
        (num_tokens, num_chosen), num_experts = chosen.shape, len(self.down.bias)
        hidden, inner = self.gate_up.num_inputs, self.down.num_inputs
        like = x.x if isinstance(x, HalfNormed) else x
        if not num_tokens:
            return torch.empty_like(like)
        scores, chosen = scores.contiguous(), chosen.contiguous()
        num_all = num_experts if self.part is None else self.part.num_experts
        size = size or tile_rows(num_tokens, num_chosen, num_all)
        own = None if self.part is None else OwnPairs(chosen, self.part.first, num_experts)
        pairs = sort_pairs(chosen, num_experts, size, own=own)
        rows = SortedRows(sorted_rows(x, pairs.order, num_chosen), pairs.order, pairs.tiles)
        activated = like.new_empty((chosen.numel(), inner))
        multiply(self.gate_up, rows, activated, scores, size=size, activation=self.activation)
        is_parts = num_tokens <= _MOST_IN_PARTS and self.part is None
        if is_parts:
            split = split or down_split(pairs.tiles.shape[1] * cdiv(hidden, LINES), num_processors(like.device))
            results = scores.new_empty((split * num_chosen, num_tokens, hidden))
        else:
            split, results = 1, like.new_empty((chosen.numel(), hidden))
        multiply(self.down, rows._replace(x=activated), results, scores, size=size, split=split)
        return results if is_parts else sum_pairs(results, scores, own=own)


def tile_rows(num_tokens: int, num_chosen: int, num_experts: int) -> int:
    """The rows of a tile; chosen by measurement."""
    mean = num_tokens * num_chosen / num_experts
    if num_tokens <= 8:
        return 8
    return 16 if mean <= 8 else 32 if mean <= 20 else 64 if mean <= 100 else 128


def down_split(num_tiles: int, num_processors: int) -> int:
    """The programs that share the inputs of a tile of outputs."""
    return 2 if num_tiles <= 4 * num_processors else 1


def prepare(weights: BiasedExperts, part: ExpertPart | None) -> Mxfp4Mix:
    gate_up, down = weights.gate_up, weights.down
    return Mxfp4Mix(
        _product(gate_up, weights.gate_up_bias, is_gated=True),
        _product(down, weights.down_bias, is_gated=False),
        (weights.limit, weights.alpha),
        part,
    )


def _product(weight: PackedWeight, bias: torch.Tensor, *, is_gated: bool) -> Product:
    _, num_outputs, num_inputs = weight.shape
    num_outputs = num_outputs // 2 if is_gated else num_outputs
    return Product(in_tiles(weight, is_gated=is_gated), in_order(bias, is_gated=is_gated), num_inputs, num_outputs)
