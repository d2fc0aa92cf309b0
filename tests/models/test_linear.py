"""The two shapes of a product, whatever computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pd_cluster.models.linear import Linear
from pd_kernels import reference
from pd_kernels.backends import TORCH
from pd_kernels.values import HalfNormed
from tests.worker.test_few_rows import FEW_ROWS, PlainFewRows

EPS = 1e-5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("before", [None, random(6, seed=4)], ids=["plain", "normed before"])
@pytest.mark.parametrize("num_rows", [2, 3])
def test_add_norm_adds_in_place_and_norms_the_sum(num_rows: int, before: torch.Tensor | None) -> None:
    """Products of up to 2 rows have a kernel of their own, which cannot norm what it adds."""
    weight, bias, norm = random(6, 5), random(6, seed=1), random(6, seed=2)
    linear = Linear(weight, bias, TORCH)
    linear.use_few_rows(PlainFewRows(weight, bias, gated=False), 2)
    x, residual = random(num_rows, 5, seed=3), random(num_rows, 6, seed=5)
    product = F.linear(x, weight, bias)
    expected = residual + (product if before is None else reference.rms_norm(product, before, EPS))
    found = linear.add_norm(residual, x, norm, EPS, before)
    torch.testing.assert_close(residual, expected)
    assert isinstance(found, HalfNormed) == (num_rows == 2 and before is None)
    if isinstance(found, HalfNormed):
        found = found.x / torch.sqrt(found.squares.sum(0) / 6 + EPS)[:, None]
    torch.testing.assert_close(found, reference.rms_norm(expected, norm, EPS))


def test_only_swiglu_has_a_kernel_that_includes_the_product() -> None:
    kernels, weight = FEW_ROWS, random(4, 5)
    assert Linear(weight, None, kernels).few_rows_product() is not None
    swiglu = Linear(weight, None, kernels, kernels.silu_and_mul).few_rows_product()
    assert isinstance(swiglu, PlainFewRows)
    assert swiglu.gated
    assert Linear(weight, None, kernels, torch.relu).few_rows_product() is None
