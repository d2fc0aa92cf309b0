"""The two shapes of a product, whatever computes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from pd_cluster.models.experts import Experts
from pd_cluster.models.linear import Linear
from pd_cluster.models.linear_group import LinearGroup
from pd_cluster.models.quantized_linear import QuantizedLinear
from pd_kernels import reference
from pd_kernels.backends import TORCH
from pd_kernels.quantized import QuantizedRows, RowsTwice
from pd_kernels.values import HalfNormed, Routing
from tests.kernels.quantized_weights import random_quantized
from tests.worker.test_few_rows import FEW_ROWS, PlainFewRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.gemm_selection import Product

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


@pytest.mark.parametrize("is_blocks", [True, False], ids=["blocks", "channels"])
def test_a_quantized_product_rounds_rows_and_does_the_rest_as_a_plain_one(is_blocks: bool) -> None:
    weight = random_quantized(256, 192, is_blocks=is_blocks)
    bias, norm, residual = (random(*shape).float() for shape in ((256,), (256,), (3, 256)))
    x = random(3, 192, seed=3).float()
    plain = reference.dequantize(weight)
    rows = reference.dequantize(reference.quantize(x, 128 if is_blocks else 192))
    found = QuantizedLinear(weight, bias, TORCH, x.dtype, TORCH.silu_and_mul)(x)
    torch.testing.assert_close(found, Linear(plain, bias, TORCH, TORCH.silu_and_mul)(rows))
    for before in (None, norm.flip(0)):
        sums = [residual.clone(), residual.clone()]
        normed = QuantizedLinear(weight, bias, TORCH, x.dtype).add_norm(sums[0], x, norm, EPS, before)
        torch.testing.assert_close(normed, Linear(plain, bias, TORCH).add_norm(sums[1], rows, norm, EPS, before))
        torch.testing.assert_close(sums[0], sums[1])


def test_a_quantized_weight_is_offered_to_kernels_of_few_rows_and_to_no_plain_product() -> None:
    weight, bias = random_quantized(256, 128, is_blocks=True), random(256).float()
    asked: list[object] = []
    kernels = replace(TORCH, few_rows=lambda *arguments: asked.append(arguments))
    linear = QuantizedLinear(weight, bias, kernels, bias.dtype, kernels.silu_and_mul)
    assert linear.few_rows_product() is None
    assert asked == [(weight, bias, True)]
    assert QuantizedLinear(weight, None, FEW_ROWS, bias.dtype).few_rows_product() is None

    def never(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
        raise AssertionError

    plain = QuantizedLinear(weight, None, kernels, bias.dtype)
    assert LinearGroup([plain], lambda *sums: None).choose([4], never, lambda run: 1.0) == 0
    plain.pack()
    assert torch.equal(plain.weight.float(), weight.values.float()), "no other layout"


def test_products_are_chosen_for_the_layers_that_are_not_quantized() -> None:
    """`modules_to_not_convert` may leave out one layer: the first one of its kind, or a later one."""
    plain = Linear(random(256, 128), None, TORCH)
    quantized = QuantizedLinear(random_quantized(256, 128, is_blocks=True), None, TORCH, torch.bfloat16)
    asked: list[torch.Tensor] = []

    def propose(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
        asked.append(weight)
        return [lambda x, weight: x @ weight.T]

    def measure(run: Callable[[], object]) -> float:
        run()
        return 1.0

    for linears in ([plain, quantized], [quantized, plain]):
        assert LinearGroup(linears, lambda *sums: None).choose([4], propose, measure) == 0
        assert asked.pop() is plain.weight
    assert not asked


@pytest.mark.parametrize("is_blocks", [True, False], ids=["blocks", "channels"])
def test_results_are_quantized_for_the_only_product_that_uses_them(is_blocks: bool) -> None:
    """The numbers are those of rows that the next product quantizes. A plain product gets plain rows."""
    gate_up, down = (random_quantized(*shape, is_blocks=is_blocks) for shape in ((512, 128), (128, 256)))
    x, norm = random(3, 128).float(), random(128, seed=1).float()
    residuals = [random(3, 128, seed=2).float() for _ in range(2)]
    results = []
    for residual, feeds in zip(residuals, (False, True), strict=True):
        first = QuantizedLinear(gate_up, None, TORCH, x.dtype, TORCH.silu_and_mul)
        second = QuantizedLinear(down, None, TORCH, x.dtype)
        if feeds:
            first.feed(second)
            second.feed(first)
        activated = first.activated(x)
        normed = second.add_norm(residual, activated, norm, EPS)
        assert isinstance(activated, QuantizedRows) == isinstance(normed, QuantizedRows) == feeds
        results.append(first(normed))
    assert torch.equal(*residuals)
    assert torch.equal(*results)
    first.feed(Linear(random(4, 128), None, TORCH))
    assert isinstance(first.activated(x), torch.Tensor)


def test_a_mixture_gets_rows_twice_and_quantizes_for_the_product_after_it() -> None:
    """The numbers are those of plain rows, which the experts and the next product quantize."""
    gate_up, down = random_quantized(4, 128, 128, is_blocks=True), random_quantized(4, 128, 64, is_blocks=True)
    weight, router = random_quantized(128, 128, is_blocks=True), random(4, 128, seed=3).float()
    x, norm, results = random(3, 128).float(), random(128, seed=1).float(), []
    residuals = [random(3, 128, seed=2).float() for _ in range(2)]
    for residual, feeds in zip(residuals, (False, True), strict=True):
        linear = QuantizedLinear(weight, None, TORCH, x.dtype)
        mixture = Experts(TORCH, Routing(2, True), router, None, gate_up, down, None)
        if feeds:
            mixture.feed(linear, linear)
        normed = linear.add_norm(residual, x, norm, EPS)
        found = mixture.add_norm(residual, normed, norm, EPS)
        assert (isinstance(normed, RowsTwice), isinstance(found, QuantizedRows)) == (feeds, feeds)
        results.append(QuantizedLinear(weight, None, TORCH, x.dtype)(found))
    assert torch.equal(*residuals)
    assert torch.equal(*results)
    mixture.feed(linear, None)
    assert isinstance(mixture.add_norm(residual, normed, norm, EPS), torch.Tensor), "the last norm is the head's"
