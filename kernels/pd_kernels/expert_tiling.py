"""Sizes of the tiles of mixtures of experts: `triton_experts`."""

from __future__ import annotations

from dataclasses import dataclass

from pd_kernels.values import FEW_ROWS

FEW = FEW_ROWS[0]  # tokens up to which pairs are not sorted


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Sizes of the tiles of one product; the defaults of `experts_tiling` were chosen by measurement."""

    rows: int  # pairs
    outputs: int  # of a program: gates and as many ups. The matrix unit multiplies 64 lines of weights at once
    inputs: int
    num_warps: int
    num_stages: int


def experts_tiling(
    num_tokens: int, num_chosen: int, num_experts: int, bytes_per_weight: int
) -> tuple[ExpertTiling, ExpertTiling]:
    """Tilings of gate-up and down, with equal rows, for 228 KiB of shared memory per multiprocessor."""
    mean = num_tokens * num_chosen / num_experts  # pairs of an expert
    if bytes_per_weight == 4:  # for tests
        return ExpertTiling(16, 64, 32, 4, 2), ExpertTiling(16, 64, 32, 4, 2)
    if bytes_per_weight == 1:
        return _quantized_tiling(num_tokens, mean)
    if num_tokens <= FEW:
        return ExpertTiling(16, 64, 128, 4, 3), ExpertTiling(16, 64, 128, 4, 4)
    if mean <= 10:
        return ExpertTiling(16, 64, 128, 4, 3), ExpertTiling(16, 128, 128, 4, 3)
    if mean <= 24:
        return ExpertTiling(32, 64, 64, 4, 3), ExpertTiling(32, 128, 64, 4, 4)
    if mean <= 48:
        return ExpertTiling(64, 64, 64, 4, 3), ExpertTiling(64, 128, 64, 4, 4)
    return ExpertTiling(128, 128, 64, 8, 4 if mean <= 128 else 3), ExpertTiling(128, 128, 64, 8, 3)


def _quantized_tiling(num_tokens: int, mean: float) -> tuple[ExpertTiling, ExpertTiling]:
    """Steps of 128 inputs share scales."""
    if num_tokens <= FEW:
        return ExpertTiling(16, 64, 128, 4, 5), ExpertTiling(16, 64, 128, 4, 6)
    if mean <= 10:
        return ExpertTiling(16, 128, 128, 4, 3), ExpertTiling(16, 128, 128, 4, 3)
    if mean <= 24:
        return ExpertTiling(32, 128, 128, 8, 3), ExpertTiling(32, 128, 128, 4, 3)
    return ExpertTiling(64, 128, 128, 8, 3), ExpertTiling(64, 128, 128, 4, 4)
