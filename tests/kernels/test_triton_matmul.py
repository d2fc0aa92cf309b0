"""Triton's products of few rows against float64: in the interpreter on small shapes, on a GPU on real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.triton_matmul import FewRowsLinear, MatmulTiling, matmul_tiling
from tests.worker.test_few_rows import PlainFewRows

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCE = {torch.float16: 2e-3}  # norm of the difference by that of the result
if GPU:  # the interpreter's bfloat16 products come out wrong (Triton 3.6)
    TOLERANCE[torch.bfloat16] = 1e-2
SMALL = MatmulTiling(outputs=32, inputs=64, head=64, split=1, num_warps=4, num_stages=3)
TILINGS = {"one": SMALL, "no-head": replace(SMALL, head=0), "split": replace(SMALL, split=2, head=128)}
SHAPES = [(1, 64, 256), (3, 104, 200), (16, 32, 128), (33, 96, 192)]  # rows, outputs, inputs
REAL = [(rows, *size) for rows in (1, 7, 32, 64) for size in ((4096, 4096), (1024, 3072), (6144, 4096))] if GPU else []


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


def few_rows(
    weight: torch.Tensor, tiling: MatmulTiling, bias: torch.Tensor | None = None, gated: bool = False
) -> FewRowsLinear:
    """As `FewRowsLinear.of` makes one, of any device and type."""
    if GPU:  # the matrix unit takes 64 rows of weights
        tiling = replace(tiling, outputs=64)
    return FewRowsLinear(weight, bias, gated, torch.zeros(256, dtype=torch.int32, device=DEVICE), 64, tiling)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("tiling", list(TILINGS.values()), ids=list(TILINGS))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_product(rows: int, outputs: int, inputs: int, tiling: MatmulTiling, gated: bool, dtype: torch.dtype) -> None:
    """Each shape with a bias, and without: the one gated, the other not."""
    has_bias = (rows + gated) % 2 == 1
    x = random(rows, inputs, dtype=dtype)
    weight = random(outputs * (2 if gated else 1), inputs, dtype=dtype, seed=1)
    bias = random(len(weight), dtype=dtype, seed=2) if has_bias else None
    product = few_rows(weight, tiling, bias, gated)
    expected = reference.linear(x.double(), weight.double(), None if bias is None else bias.double(), gated)
    for _ in range(2):  # the first leaves the counters as it found them
        assert error(product(x), expected) < TOLERANCE[dtype]
    assert not product.arrived.any()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tiling", list(TILINGS.values()), ids=list(TILINGS))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_sum_and_norm_between_two_products(
    rows: int, outputs: int, inputs: int, tiling: MatmulTiling, dtype: torch.dtype
) -> None:
    x, first = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1) / 16
    second = random(64, outputs, dtype=dtype, seed=2)
    residual, norm = random(rows, outputs, dtype=dtype, seed=3), random(outputs, dtype=dtype, seed=4)
    wide = residual.double()
    expected = PlainFewRows(first.double(), None, False).add_to(wide, x.double(), norm.double(), 1e-5)
    normed = few_rows(first, tiling).add_to(residual, x, norm, 1e-5)
    assert error(residual, wide) < TOLERANCE[dtype]
    assert error(normed.x, expected.x) < TOLERANCE[dtype]
    assert error(normed.squares.sum(0), expected.squares.sum(0)) < TOLERANCE[dtype]
    found = few_rows(second, tiling)(normed)
    plain = reference.rms_norm(wide, norm.double(), 1e-5)
    assert error(found, reference.linear(plain, second.double(), None, False)) < 2 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), REAL)
def test_products_of_real_models(rows: int, outputs: int, inputs: int) -> None:
    dtype = torch.bfloat16
    x, up = random(rows, inputs, dtype=dtype), random(2 * outputs, inputs, dtype=dtype, seed=1) / 64
    down, head = random(inputs, outputs, dtype=dtype, seed=2) / 64, random(8192, inputs, dtype=dtype, seed=3) / 64
    residual, norm = random(rows, inputs, dtype=dtype, seed=4), random(inputs, dtype=dtype, seed=5)
    wide = residual.double()
    hidden = reference.linear(x.double(), up.double(), None, True)
    PlainFewRows(down.double(), None, False).add_to(wide, hidden, norm.double(), 1e-5)
    expected = reference.linear(reference.rms_norm(wide, norm.double(), 1e-5), head.double(), None, False)
    first, second, third = (FewRowsLinear.of(weight, None, weight is up) for weight in (up, down, head))
    assert first is not None
    assert second is not None
    assert third is not None
    found: list[torch.Tensor] = []
    first, second, third = (replace(product, max_rows=64) for product in (first, second, third))
    for _ in range(3):
        total = residual.clone()
        normed = second.add_to(total, first(x), norm, 1e-5)
        assert error(total, wide) < 1e-2
        found.append(third(normed))
    assert error(found[0], expected) < 1e-2
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("num_rows", [1, 17, 64])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(4096, 14336), (1024, 2048), (28672, 4096), (64, 64), (64, 8192), (151936, 1024)]
)
def test_tiling(num_outputs: int, num_inputs: int, num_rows: int) -> None:
    """Programs are no more than the device takes at once if inputs are split, and none is without work."""
    tiling = matmul_tiling(num_outputs, num_inputs, num_rows, 132)
    num_tiles = -(-num_outputs // tiling.outputs)
    assert tiling.split == 1 or num_tiles * tiling.split <= 132
    share = -(-num_inputs // tiling.inputs // tiling.split) * tiling.inputs
    assert (tiling.split - 1) * share < num_inputs
    assert tiling.head % tiling.inputs == 0


def test_a_heads_product_reads_nothing_ahead() -> None:
    tiling = matmul_tiling(151936, 1024, 32, 132)
    assert (tiling.head, tiling.num_stages) == (0, 3)
    assert matmul_tiling(151936, 4096, 16, 132).head, "of a large model with few rows it does"


def test_what_does_not_fit_is_refused() -> None:
    product = few_rows(random(64, 128, dtype=torch.float16), SMALL)
    for x in (
        random(65, 128, dtype=torch.float16),
        random(2, 64, dtype=torch.float16),
        random(2, 128, dtype=torch.float32),
        random(2, 132, dtype=torch.float16)[:, 4:],
    ):
        with pytest.raises(ValueError, match="rows"):
            product(x)
    with pytest.raises(ValueError, match="cannot be added"):
        product.add_to(random(2, 32, dtype=x.dtype), x, product.weight[0], 1e-5)


def test_there_is_none_for_other_types_and_devices() -> None:
    assert FewRowsLinear.of(torch.zeros(64, 128, dtype=torch.float16, device=DEVICE), None, False) is None
    assert FewRowsLinear.of(torch.zeros(64, 128, dtype=torch.bfloat16), None, False) is None
