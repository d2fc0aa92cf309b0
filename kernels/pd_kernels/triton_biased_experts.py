"""Mixtures of experts with biases in MXFP4: pairs are sorted, multiplied twice, and summed for each token.

`gluon_mxfp4_experts` has the products on Hopper GPUs, `triton_mxfp4_experts` those on all others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from pd_kernels import mxfp4_tiles
from pd_kernels.torch_biased_experts import TorchBiasedMix
from pd_kernels.triton_few_pairs import MOST_PAIRS, sort_rows
from pd_kernels.triton_mxfp4_experts import PlainProduct
from pd_kernels.triton_pair_rows import sorted_rows, sum_pairs
from pd_kernels.triton_pairs import OwnPairs, SortedRows, sort_pairs
from pd_kernels.values import FEW_ROWS, HalfNormed
from pd_kernels.weight_forms import MXFP4, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.biased_experts import BiasedExperts, BiasedMix
    from pd_kernels.values import ExpertPart, Gates
    from pd_kernels.weight_forms import WeightForm

    MakeProduct = Callable[[PackedWeight, torch.Tensor, bool], "ExpertProduct"]

logger = logging.getLogger(__name__)
_MOST_IN_PARTS = FEW_ROWS[1]  # tokens; more float32 parts leave the L2 cache too early


class ExpertProduct(Protocol):
    """The product of sorted rows with a weight and bias of each expert."""

    @property
    def num_inputs(self) -> int: ...

    def tile_rows(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """The rows of a tile that `multiply` is fastest with."""

    def num_parts(self, num_tiles: int) -> int:
        """The parts that a result of few tokens comes in, each of some inputs; 0: results come whole."""

    def multiply(self, rows: SortedRows, out: torch.Tensor, scores: torch.Tensor, size: int, gates: Gates) -> None:
        """Fill `out`. `size`: rows of a tile, with which the pairs were sorted.

        Of gates and ups, which alternate (`gates`), activations [pairs, in] in the order of the rows. Else results
        [T * k, hidden] in the order of the pairs, or float32 parts times scores, [parts * k, T, hidden].
        """


@dataclass(frozen=True, slots=True)
class SortedMix:
    """A BiasedMix."""

    gate_up: ExpertProduct
    down: ExpertProduct
    weights: tuple[int, int]  # experts of this rank, outputs of each
    gates: Gates
    part: ExpertPart | None

    def __call__(self, x: torch.Tensor | HalfNormed, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See BiasedMix."""
        like, (num_tokens, num_chosen) = x.x if isinstance(x, HalfNormed) else x, chosen.shape
        if not num_tokens:
            return torch.empty_like(like)
        scores, chosen, (num_experts, hidden) = scores.contiguous(), chosen.contiguous(), self.weights
        own = None if self.part is None else OwnPairs(chosen, self.part.first, num_experts)
        num_all = num_experts if self.part is None else self.part.num_experts
        size = self.gate_up.tile_rows(num_tokens, num_chosen, num_all)
        if chosen.numel() <= MOST_PAIRS:
            rows = sort_rows(x, chosen, num_experts, size, own)
        else:
            pairs = sort_pairs(chosen, num_experts, size, own=own)
            rows = SortedRows(sorted_rows(x, pairs.order, num_chosen), pairs.order, pairs.tiles)
        activated = like.new_empty((chosen.numel(), self.down.num_inputs))
        self.gate_up.multiply(rows, activated, scores, size, self.gates)
        num_parts = self.down.num_parts(rows.tiles.shape[1]) if num_tokens <= _MOST_IN_PARTS and own is None else 0
        if num_parts:
            results = scores.new_empty((num_parts * num_chosen, num_tokens, hidden))
        else:
            results = like.new_empty((chosen.numel(), hidden))
        self.down.multiply(rows._replace(x=activated), results, scores, size, None)
        return results if num_parts else sum_pairs(results, scores, own=own)


def needs_room(form: WeightForm, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of a model of `dtype` are put into tiles, unless a scale is above 2."""
    return form is MXFP4 and dtype is torch.bfloat16 and _for_hopper(device) is not None


def make_biased_mix(weights: BiasedExperts, part: ExpertPart | None) -> BiasedMix:
    """See MakeBiasedMix. Experts in MXFP4 never wait for the host."""
    gate_up, down = weights.gate_up, weights.down
    if not (
        isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight) and gate_up.form is down.form is MXFP4
    ):
        return TorchBiasedMix(weights, part)
    products: tuple[ExpertProduct, ExpertProduct]
    products = PlainProduct(gate_up, weights.gate_up_bias), PlainProduct(down, weights.down_bias)
    if (make := _for_hopper(down.blocks.device)) is not None:
        if weights.down_bias.dtype is not torch.bfloat16:
            _warn_slow(f"the model is in {weights.down_bias.dtype}, not bfloat16")
        elif not (mxfp4_tiles.fits(gate_up) and mxfp4_tiles.fits(down)):  # both, before one is overwritten
            _warn_slow("a scale is above 2")
        else:
            products = make(gate_up, weights.gate_up_bias, True), make(down, weights.down_bias, False)
    return SortedMix(*products, (down.shape[0], down.shape[1]), (weights.limit, weights.alpha), part)


@cache  # one line, not one a layer
def _warn_slow(reason: str) -> None:
    logger.warning("slow MXFP4 experts: %s", reason)


@cache
def _for_hopper(device: torch.device) -> MakeProduct | None:
    try:
        from pd_kernels.gluon_mxfp4_experts import TiledProduct, runs_on
    except Exception as error:  # Gluon is experimental: in another version its decorators may raise anything
        logger.warning("no MXFP4 experts of registers: %s", error)
        return None
    return TiledProduct.of if runs_on(device) else None
