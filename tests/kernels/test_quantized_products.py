"""Rows and weights in float8, in library calls, beside their definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_kernels import reference, torch_experts, torch_quantized
from pd_kernels.quantized import BLOCK, LEAST, MOST, QuantizedWeight
from tests.kernels.quantized_weights import quantize_weight, random_quantized

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.quantized import QuantizedRows

KINDS = pytest.mark.parametrize("is_blocks", [True, False], ids=["blocks", "channels"])


def rows(count: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("quantize", [reference.quantize, torch_quantized.quantize])
def test_the_greatest_number_of_a_group_becomes_the_greatest_value(
    quantize: Callable[[torch.Tensor, int], QuantizedRows],
) -> None:
    x = torch.tensor([[1.0, -3.5, 0.5, 0.0, 0.0, 7.0], [0.0, 0.0, 0.0, 1e30, -1e-30, 5.0]])
    found = quantize(x, 4)
    assert found.values.float().tolist() == [[128, -MOST, 64, 0, 0, MOST], [0, 0, 0, MOST, 0, MOST]]
    expected = torch.tensor([[3.5, 7.0], [1e30, 5.0]]) / MOST
    assert torch.equal(found.scales, expected)
    assert quantize(torch.zeros(2, 3), 3).scales.tolist() == [[pytest.approx(LEAST / MOST)]] * 2
    assert torch.equal(reference.dequantize(quantize(torch.tensor([[16.0, -1.0]]), 2)), torch.tensor([[16.0, -1.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "size", "group"), [(0, 96, 96), (1, 130, 128), (7, 256, 128), (5, 300, 300)])
def test_rows_are_quantized_as_defined(count: int, size: int, group: int, dtype: torch.dtype) -> None:
    x = rows(count, size, dtype)
    found, expected = torch_quantized.quantize(x, group), reference.quantize(x, group)
    assert found.group == expected.group == group
    assert found.scales.shape == (count, -(-size // group))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert found.values.is_contiguous()
    torch.testing.assert_close(reference.dequantize(found), x.float(), rtol=2**-4, atol=0.01)


@KINDS
@pytest.mark.parametrize(("count", "num_outputs", "size"), [(1, 128, 256), (3, 200, 130), (9, 40, 96), (0, 256, 128)])
def test_products_are_as_defined(
    monkeypatch: pytest.MonkeyPatch, count: int, num_outputs: int, size: int, is_blocks: bool
) -> None:
    """The whole weight is widened at once, and 128 rows at a time."""
    weight = random_quantized(num_outputs, size, is_blocks=is_blocks)
    quantized = reference.quantize(rows(count, size), weight.group)
    expected = reference.quantized_product(quantized, weight, torch.float32)
    exact = reference.dequantize(quantized).double() @ reference.dequantize(weight).double().T
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-5)
    for most in (1 << 24, 1):
        monkeypatch.setattr(torch_quantized, "MOST_WIDENED", most)
        found = torch_quantized.quantized_product(quantized, weight, torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    half = torch_quantized.quantized_product(quantized, weight, torch.bfloat16)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@KINDS
def test_a_gpu_computes_the_same(is_blocks: bool) -> None:
    weight, x = random_quantized(300, 520, is_blocks=is_blocks), rows(9, 520, torch.bfloat16)
    on_gpu = QuantizedWeight(weight.values.cuda(), weight.scales.cuda(), is_blocks)
    quantized, expected = torch_quantized.quantize(x.cuda(), weight.group), reference.quantize(x, weight.group)
    torch.testing.assert_close(reference.dequantize(quantized).cpu(), reference.dequantize(expected))
    found = torch_quantized.quantized_product(quantized, on_gpu, torch.float32)
    expected_product = reference.quantized_product(expected, weight, torch.float32)
    torch.testing.assert_close(found.cpu(), expected_product, rtol=1e-4, atol=1e-4)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_experts_are_as_defined(is_blocks: bool, dtype: torch.dtype) -> None:
    gate_up = random_quantized(5, 2 * 128, 192, is_blocks=is_blocks)
    down = random_quantized(5, 192, 128, is_blocks=is_blocks, seed=1)
    for count in (1, 20):
        random = torch.Generator().manual_seed(count)
        scores = torch.rand(count, 2, generator=random)
        chosen = torch.stack([torch.randperm(5, generator=random)[:2] for _ in range(count)])
        x = rows(count, 192, dtype)
        found = torch_experts.experts(x, scores, chosen, gate_up, down)
        expected = reference.experts(x, scores, chosen, gate_up, down)
        assert found.dtype is dtype
        # Where a sum is at the middle between two values of float8, its rounding may differ
        error = (found - expected).float().norm() / expected.float().norm()
        assert error <= (1e-3 if dtype is torch.float32 else 0.01)
        wide = reference.experts(x.float(), scores, chosen, reference.dequantize(gate_up), reference.dequantize(down))
        assert (found - wide).float().norm() <= 0.06 * wide.norm(), "rounding of rows costs some 4%"


@KINDS
def test_rows_of_a_weight_have_their_own_scales(is_blocks: bool) -> None:
    weight = random_quantized(3, 300, 200, is_blocks=is_blocks)
    whole = reference.dequantize(weight)
    assert weight.shape == (3, 300, 200)
    assert torch.equal(reference.dequantize(weight.expert(1)), whole[1])
    assert torch.equal(reference.dequantize(weight.rows(128, 300)), whole[:, 128:])
    assert torch.equal(reference.dequantize(weight.expert(2).rows(128, 256)), whole[2, 128:256])
    if is_blocks:
        with pytest.raises(ValueError, match="row 64 is not the first of a block of 128 rows"):
            weight.rows(64, 128)


def test_blocks_keep_what_one_scale_for_all_would_lose() -> None:
    """The tests' own quantization of weights: a block of small numbers beside a block of large ones."""
    weight = torch.ones(BLOCK, 2 * BLOCK)
    weight[:, BLOCK:] = 1e-6
    torch.testing.assert_close(reference.dequantize(quantize_weight(weight, is_blocks=True)), weight)
    assert not reference.dequantize(quantize_weight(weight, is_blocks=False))[:, BLOCK:].any()
