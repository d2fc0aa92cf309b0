"""Triton's products of quantized rows and weights, beside their definition: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.backends import TORCH
from pd_kernels.gluon_quantized_product import ring_split
from pd_kernels.selection import select_kernels
from pd_kernels.triton_quantize import quantize
from pd_kernels.triton_quantized_product import QuantizedTiling, multiply, padded, quantized_product, quantized_tiling
from tests.kernels.quantized_weights import random_quantized

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KINDS = pytest.mark.parametrize("is_blocks", [True, False], ids=["blocks", "channels"])
ERROR = 5e-4 if GPU else 1e-5  # of sums in float32, by norm; Hopper's matrix unit adds float8 with less than 14 bits


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(DEVICE)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("count", [1, 63, 64, 65])
def test_rows_of_zeros_after_rows(count: int) -> None:
    rows = reference.quantize(random(count, 400), 128)
    longer = padded(rows, 64)
    assert len(longer.values) == len(longer.scales) == -(-count // 64) * 64
    numbers = reference.dequantize(longer)
    assert torch.equal(numbers[:count], reference.dequantize(rows))
    assert not numbers[count:].any()


@KINDS
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 256), (5, 200, 400), (17, 130, 656)])
def test_product(rows: int, outputs: int, inputs: int, split: int, is_blocks: bool) -> None:
    weight = random_quantized(outputs, inputs, is_blocks=is_blocks).to(DEVICE)
    x = reference.quantize(random(rows, inputs), weight.group)
    expected = reference.quantized_product(x, weight, torch.float32)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    tiling = QuantizedTiling(16, split)
    for _ in range(2):  # the first leaves the counters as it found them
        found = multiply(x, weight, torch.float32, arrived, tiling)
        assert error(found, expected) < ERROR
        assert not arrived.any()
    assert quantized_product(x, weight, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@KINDS
@pytest.mark.parametrize("rows", [1, 17, 64, 100, 256, 257, 1001])
@pytest.mark.parametrize(
    "outputs_inputs", [(6144, 4096), (4096, 14336), (28672, 4096), (2048, 4096), (1152, 768), (200, 144)]
)
def test_products_of_real_models(rows: int, outputs_inputs: tuple[int, int], is_blocks: bool) -> None:
    """The way that is chosen, and the kernel."""
    outputs, inputs = outputs_inputs
    weight = random_quantized(outputs, inputs, is_blocks=is_blocks).to(DEVICE)
    x = random(rows, inputs)
    arrived = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    expected = reference.quantized_product(reference.quantize(x, weight.group), weight, torch.float32)
    for rounded in (quantize(x, weight.group), reference.quantize(x, weight.group)):  # scales in two orders
        for dtype, most in ((torch.float32, ERROR), (torch.bfloat16, 3e-3)):
            found = quantized_product(rounded, weight, dtype)
            assert error(found, expected) < most
            assert torch.equal(found, quantized_product(rounded, weight, dtype))
            assert error(multiply(rounded, weight, dtype, arrived), expected) < most
    assert not arrived.any()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@KINDS
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 768), (5, 200, 912), (33, 1152, 4096), (64, 96, 2048)])
def test_products_in_the_ring(rows: int, outputs: int, inputs: int, split: int, is_blocks: bool) -> None:
    from pd_kernels.gluon_quantized_product import multiply_in_ring

    weight = random_quantized(outputs, inputs, is_blocks=is_blocks).to(DEVICE)
    x = quantize(random(rows, inputs), weight.group)
    expected = reference.quantized_product(x, weight, torch.float32)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        found = multiply_in_ring(x, weight, torch.float32, arrived, split)
        assert error(found, expected) < ERROR
        assert not arrived.any()
    assert error(multiply_in_ring(x, weight, torch.bfloat16, arrived), expected) < 3e-3


@pytest.mark.parametrize("rows", [1, 32, 64, 128, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (64, 128), (10240, 8192)])
def test_tiling(rows: int, outputs: int, inputs: int) -> None:
    """Programs are at most twice the multiprocessors if inputs are split, and none is without work."""
    tiling = quantized_tiling(rows, outputs, inputs, 132)
    num_tiles = -(-rows // tiling.rows) * -(-outputs // 64)
    assert tiling.split == 1 or num_tiles * tiling.split <= 264
    groups = -(-inputs // 128)
    for split in (tiling.split, ring_split(min(rows, 64), outputs, inputs, 132)):
        assert (split - 1) * -(-groups // split) < groups


def test_gpus_without_float8_quantize_by_library_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for capability in ((8, 6), (8, 9)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        kernels = select_kernels(torch.device("cuda"))
        assert kernels.name == "triton"
        found.append((kernels.quantize, kernels.quantized_product))
    assert found == [(TORCH.quantize, TORCH.quantized_product), (quantize, quantized_product)]


def test_what_does_not_fit_is_refused() -> None:
    weight = random_quantized(64, 256, is_blocks=True).to(DEVICE)
    for x, group in ((random(2, 128), 128), (random(2, 256), 256)):
        with pytest.raises(ValueError, match="do not fit"):
            quantized_product(reference.quantize(x, group), weight, torch.float32)
    assert quantized_product(reference.quantize(random(0, 256), 128), weight, torch.float32).shape == (0, 64)
