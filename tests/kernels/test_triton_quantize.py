"""Rows that Triton's kernels quantize, beside their definition: in the interpreter, or on a GPU at real sizes too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference, torch_quantized, torch_state
from pd_kernels.triton_activation import sigmoid_and_mul, sigmoid_and_mul_quantized, silu_and_mul_quantized
from pd_kernels.triton_norm import add_rms_norm_quantized, add_rms_norm_twice
from pd_kernels.triton_quantize import quantize
from pd_kernels.triton_state import TritonState, gated_norm_quantized

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZES = [(3, 304, 128), (2, 130, 128), (5, 200, 200), (1, 64, 128), (4, 1280, 128), (3, 1281, 1281)]
if GPU:
    SIZES += [(256, 14336, 128), (8192, 14336, 14336), (100, 4096, 4096), (1, 28672, 28672)]
ROWS = pytest.mark.parametrize(("count", "size", "group"), SIZES)
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter's bfloat16 products come out wrong (Triton 3.6)


def random(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def places(rows: QuantizedRows) -> torch.Tensor:
    """The place of each value among all values of float8; 0 for both zeros."""
    bits = rows.values.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def assert_as_defined(found: QuantizedRows, expected: QuantizedRows, exceptions: float) -> None:
    """`exceptions`: the part of the values that may be the next value, because a sum was rounded differently."""
    assert found.group == expected.group
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6 if not exceptions else 0.01, atol=0)
    assert found.values.is_contiguous()
    one, other = places(found), places(expected)
    assert one.shape == other.shape
    assert int((one != other).sum()) <= exceptions * one.numel()
    assert int((one - other).abs().max()) <= 1


@ROWS
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_rows(count: int, size: int, group: int, dtype: torch.dtype) -> None:
    x = random(count, size, dtype=dtype) * random(count, 1, dtype=dtype, seed=1) ** 3
    # A number in the middle between two values: its product with the scale's reciprocal is not its quotient
    assert_as_defined(quantize(x, group), reference.quantize(x, group), 0.01)


@pytest.mark.parametrize("group", [128, 256])
def test_rows_at_the_ends_of_the_range(group: int) -> None:
    x = torch.zeros(3, 256, device=DEVICE)
    x[1, 5], x[1, 6], x[2, 130] = 1e30, -1e-30, -(2.0**-40)
    found = quantize(x, group)
    assert_as_defined(found, reference.quantize(x, group), 0.0)
    assert not found.values[0].float().any()


def test_every_value_is_reached_and_ties_go_to_even() -> None:
    """All values, and the middles between them, in a row that needs no scale."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, middles, -values, -middles)).to(DEVICE)[None]
    found, expected = quantize(x, x.shape[1]), reference.quantize(x, x.shape[1])
    assert float(found.scales) == 1.0
    assert torch.equal(found.values.float(), expected.values.float())


@ROWS
def test_norms(count: int, size: int, group: int) -> None:
    x, residual, weight = random(count, size), random(count, size, seed=1), random(size, seed=2)
    expected, total = reference.add_rms_norm_quantized(x, residual, weight, 1e-5, group)
    parts = torch.stack((x.float() - 1, torch.ones_like(x, dtype=torch.float32)))  # a product in two parts
    for given in (x, parts):
        left = residual.clone()
        found, same = add_rms_norm_quantized(given, left, weight, 1e-5, group)
        assert same is left
        torch.testing.assert_close(left, total, rtol=0, atol=0.01)
        assert_as_defined(found, expected, 0.01)
        again = residual.clone()
        twice, _ = add_rms_norm_twice(given.clone(), again, weight, 1e-5, group)
        assert torch.equal(again, left)
        assert torch.equal(twice.quantized.values.float(), found.values.float())
        plain = reference.add_rms_norm(x, residual, weight, 1e-5)[0]
        torch.testing.assert_close(twice.plain, plain, rtol=2**-7, atol=0.01)  # a step of bfloat16
    left = residual.clone()
    by_library, _ = torch_quantized.add_rms_norm_quantized(x, left, weight, 1e-5, group)
    assert torch.equal(left, total)
    assert_as_defined(by_library, expected, 0.01)


@ROWS
def test_activations(count: int, size: int, group: int) -> None:
    x = random(count, 2 * size)
    expected = reference.silu_and_mul_quantized(x, group)
    assert_as_defined(silu_and_mul_quantized(x, group), expected, 0.01)
    assert_as_defined(torch_quantized.silu_and_mul_quantized(x, group), expected, 0.01)


@ROWS
def test_rows_with_output_gates(count: int, size: int, group: int) -> None:
    """Of a view of a wider product, bit for bit as two launches."""
    both = random(count, 3 * size)
    x, gate = both[:, size : 2 * size].contiguous(), both[:, 2 * size :]
    plain, found = sigmoid_and_mul(x, gate), sigmoid_and_mul_quantized(x, gate, group)
    torch.testing.assert_close(plain, reference.sigmoid_and_mul(x, gate))
    assert_same(found, quantize(plain, group))
    by_library = torch_quantized.sigmoid_and_mul_quantized(x, gate, group)
    assert_as_defined(by_library, reference.quantize(reference.sigmoid_and_mul(x, gate), group), 0.01)


@pytest.mark.parametrize(("num_heads", "size", "group"), [(4, 128, 128), (1, 128, 128), (3, 32, 96), (4, 64, 128)])
def test_gated_norms_of_heads(num_heads: int, size: int, group: int) -> None:
    """A head's numbers share a scale, or it is as many launches as before: bit for bit the same."""
    x, both, weight = random(37, num_heads, size), random(37, 2 * num_heads * size, seed=1), random(size, seed=2)
    gate = both[:, num_heads * size :].view(37, num_heads, size)
    plain = TritonState().gated_norm(x, gate, weight, 1e-6).flatten(1)
    assert_same(gated_norm_quantized(x, gate, weight, 1e-6, group), quantize(plain, group))
    by_library = torch_state.gated_norm_quantized(x, gate, weight, 1e-6, group)
    assert_as_defined(by_library, reference.quantize(plain, group), 0.02)
    assert gated_norm_quantized(x[:0], gate[:0], weight, 1e-6, group).values.shape == (0, num_heads * size)


def assert_same(found: QuantizedRows, expected: QuantizedRows) -> None:
    assert found.group == expected.group
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


def test_no_rows() -> None:
    empty = random(0, 256)
    assert quantize(empty, 128).scales.shape == (0, 2)
    assert silu_and_mul_quantized(empty, 128).values.shape == (0, 128)
    assert add_rms_norm_quantized(empty, empty, random(256), 1e-5, 256)[0].values.shape == (0, 256)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="64 inputs of 256 share a scale"):
        quantize(random(2, 256), 64)
    with pytest.raises(ValueError, match="unit last stride"):
        quantize(random(256, 2).t(), 128)
    with pytest.raises(ValueError, match="must be"):
        sigmoid_and_mul(random(2, 256), random(2, 128))
