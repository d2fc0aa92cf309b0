"""Norms, RoPE, activation and cache writes of the torch backend against the reference and closed forms."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from pd_kernels import reference, torch_ops
from pd_kernels.fp8_cache import FP8
from pd_kernels.selection import BACKENDS, select_kernels
from pd_kernels.values import HeadNorms, NewTokens
from tests.kernels.paged import Shape, layer_of, make_paged

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (5, 80), (3, 4, 96)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for function in (reference.rms_norm, torch_ops.rms_norm):
        found = function(x, weight, 1e-5)
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() < 5 * DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_with_a_wider_weight_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = random(40, 96, dtype=dtype), random(96, dtype=torch.float32, seed=1)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    for function in (reference.rms_norm, torch_ops.rms_norm):
        found = function(x, weight, 1e-5)
        assert found.dtype == dtype
        assert ((found.double() - exact) / exact).abs().max() < 0.51 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_add_rms_norm_gives_norm_and_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (random(5, 33, dtype=dtype, seed=seed) for seed in range(3))
    normed, total = reference.add_rms_norm(x, residual, weight[0], 1e-6)
    found_normed, found_total = torch_ops.add_rms_norm(x, residual.clone(), weight[0], 1e-6)
    assert torch.equal(found_total, x + residual)
    assert torch.equal(total, found_total)
    assert (found_normed.double() - normed.double()).abs().max() < 5 * DTYPES[dtype]


def test_add_rms_norm_sums_parts() -> None:
    parts, residual, weight = (random(*shape, dtype=torch.float32) for shape in ((3, 5, 33), (5, 33), (33,)))
    for function in (reference.add_rms_norm, torch_ops.add_rms_norm):
        found = function(parts, residual.clone(), weight, 1e-6)
        for left, right in zip(found, function(parts.sum(0), residual.clone(), weight, 1e-6), strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96])
def test_rope_is_a_rotation_of_pairs(head_dim: int) -> None:
    x, angles = random(6, 3, head_dim, dtype=torch.float64), random(6, head_dim // 2, dtype=torch.float64, seed=1)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    for function in (reference.rope, torch_ops.rope):
        assert torch.allclose(function(x, angles.cos(), angles.sin()), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("norm_shape", [(), (20,), (6, 20)])
def test_norm_rope_write_rotates_a_part_and_norms_heads_alone_or_together(
    norm_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Against numbers in float64 that are computed head by head."""
    heads, angles = random(5, 10, 20, dtype=dtype), random(5, 4, dtype=torch.float64, seed=1)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    query_norm, key_norm = (random(*norm_shape, dtype=dtype, seed=seed) for seed in (2, 3))
    norms = HeadNorms(query_norm, key_norm[:2] if len(norm_shape) == 2 else key_norm, 1e-6) if norm_shape else None
    cos, sin, slots = angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor([3, 0, 40, 7, 31])
    for function in (reference.norm_rope_write, torch_ops.norm_rope_write):
        cache = torch.zeros(3, 2, 1, 2, 16, 20, dtype=dtype)
        query = function(heads, NewTokens(norms, cos, sin, slots), layer_of(cache, 0))
        blocks, offsets = slots // 16, slots % 16
        key, value = (cache[blocks, :, 0, part, offsets] for part in (0, 1))
        assert torch.equal(value, heads[:, 8:])
        for found, x, weight in (
            (query, heads[:, :6], norms.query if norms else None),
            (key, heads[:, 6:8], norms.key if norms else None),
        ):
            wide = x.double()
            if weight is not None:
                squares = wide.pow(2).mean((1, 2) if weight.dim() == 2 else 2, keepdim=True)
                wide = wide / (squares + 1e-6).sqrt() * weight.double()
            turned = torch.complex(wide[..., :4], wide[..., 4:8]) * turn
            expected = torch.cat((turned.real, turned.imag, wide[..., 8:]), -1)
            assert (found.double() - expected).abs().max() < 10 * DTYPES[dtype]


def test_silu_and_mul() -> None:
    x = random(4, 2 * 37, dtype=torch.float64)
    gate, up = x[:, :37], x[:, 37:]
    expected = gate / (1 + (-gate).exp()) * up
    for function in (reference.silu_and_mul, torch_ops.silu_and_mul):
        assert torch.allclose(function(x), expected, atol=1e-12)


@pytest.mark.parametrize("block_size", [16, 64])
def test_write_cache_writes_its_slots_and_nothing_else(block_size: int) -> None:
    shape = Shape(4, 3, 80, block_size, (1,), (5 * block_size,), 1)
    paged, twin = make_paged(shape), make_paged(shape)
    slots = torch.tensor([0, 3 * block_size - 1, block_size + 5, 6 * block_size])
    key, value = (random(4, 3, 80, dtype=torch.float64, seed=seed) for seed in (7, 8))
    torch_ops.write_cache(key, value, paged.cache, slots)
    for cache, original, update in (
        (paged.key_cache, twin.key_cache, key),
        (paged.value_cache, twin.value_cache, value),
    ):
        for block in range(cache.shape[0]):
            for offset in range(block_size):
                written = (slots == block * block_size + offset).nonzero()
                expected = update[written[0, 0]] if len(written) else original[block, :, offset]
                assert torch.equal(cache[block, :, offset], expected)
    reference.write_cache(key, value, twin.cache, slots)
    assert torch.equal(paged.key_cache, twin.key_cache)
    assert torch.equal(paged.value_cache, twin.value_cache)


@pytest.mark.parametrize(
    ("key_shape", "dtype", "slots", "message"),
    [
        ((2, 3, 80), torch.float64, torch.tensor([1]), "key and value must be"),
        ((1, 3, 80), torch.float64, torch.tensor([1], dtype=torch.int32), "int64"),
        ((1, 3, 80), torch.float32, torch.tensor([1]), "the cache's dtype"),
    ],
)
def test_write_cache_refuses_bad_arguments(
    key_shape: tuple[int, ...], dtype: torch.dtype, slots: torch.Tensor, message: str
) -> None:
    paged = make_paged(Shape(4, 3, 80, 16, (1,), (16,), 1))
    update = torch.zeros(key_shape, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        torch_ops.write_cache(update, update, paged.cache, slots)


@pytest.mark.parametrize("function", [reference.write_cache, torch_ops.write_cache])
def test_an_fp8_cache_takes_the_nearest_number_it_has(function: Callable[..., None]) -> None:
    """448 for all above it; ties to even; what is no number stays none."""
    given = [0.0, 1.06, 1.0625, 1.1875, -3.3, 448.0, 463.0, 1e30, -torch.inf, 2**-10, 1.5 * 2**-10, torch.nan]
    stored = [0.0, 1.0, 1.0, 1.25, -3.25, 448.0, 448.0, 448.0, -448.0, 0.0, 2**-9, torch.nan]
    cache = torch.zeros(3, 2, 2, 2, 16, 12).to(FP8)
    update = torch.tensor(given).expand(1, 2, 12)
    function(update, -update, layer_of(cache, 1), torch.tensor([21]))
    written = torch.tensor(stored).expand(2, 12)
    assert torch.equal(cache[1, :, 1, 0, 5].float().nan_to_num(7.0), written.nan_to_num(7.0))
    assert torch.equal(cache[1, :, 1, 1, 5].float().nan_to_num(7.0), (-written).nan_to_num(7.0))
    assert (cache.float() != 0).sum() == 2 * 2 * 10


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_copy_blocks_reads_all_before_it_writes(dtype: torch.dtype) -> None:
    blocks = random(5, 2, 3, dtype=torch.float32).to(dtype)
    original = blocks.clone()
    torch_ops.copy_blocks(blocks, blocks, torch.tensor([[0, 1], [1, 2], [4, 0]]))
    assert torch.equal(blocks.float(), original[[4, 0, 1, 3, 4]].float())


def test_every_device_type_has_kernels_and_others_are_named() -> None:
    assert {name: select_kernels(torch.device(name)).name for name in BACKENDS} == {
        "cpu": "torch",
        "cuda": "triton" if importlib.util.find_spec("triton") else "torch",
    }
    with pytest.raises(ValueError, match="no kernels for device meta"):
        select_kernels(torch.device("meta"))
