"""Triton's norms, activation, rotation with cache write and block copies against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference, triton_activation, triton_block_copy, triton_norm, triton_rotary
from pd_kernels.fp8_cache import FP8
from pd_kernels.values import HeadNorms, NewTokens
from tests.kernels.paged import layer_of

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3}  # per unit of size
if GPU:  # the interpreter (Triton 3.6) truncates to bfloat16 instead of rounding
    TOLERANCE[torch.bfloat16] = 3e-2
NORMED = ("", "each", "together")
BIG = [pytest.param(4096, 4096, id="4096x4096", marks=pytest.mark.gpu)] if GPU else []


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    difference = (found.double() - expected).abs() / expected.abs().clamp(min=1)
    return found.dtype == dtype and bool(difference.max() < TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (5, 80), (33, 96), (3, 256), *BIG])
def test_rms_norm_and_the_sum_before_it(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(rows, size, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert close(triton_norm.rms_norm(x, weight, 1e-5), expected, dtype)
    total = x + residual
    expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
    normed, found = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(found, total)
    assert close(normed, expected, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("parts", "rows", "size"), [(2, 5, 80), (3, 1, 7), *([(2, 192, 4096)] if GPU else [])])
def test_the_sum_of_parts_and_its_norm(parts: int, rows: int, size: int, dtype: torch.dtype) -> None:
    """Rounded before it is added to the residual, as a product is."""
    x, residual = random(parts, rows, size, dtype=torch.float32), random(rows, size, dtype=dtype, seed=1)
    weight, before = random(size, dtype=dtype, seed=2), x.clone()
    wanted_normed, wanted = reference.add_rms_norm(x, residual, weight, 1e-5)
    normed, found = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert close(found, wanted.double(), dtype)
    assert close(normed, wanted_normed.double(), dtype)
    assert torch.equal(x, before)


def test_norms_with_a_wider_weight_are_rounded_once() -> None:
    """Those of queries and keys too: rotated by no angle, they are what the norm leaves."""
    dtype, eps = torch.float16, 1e-5
    x, weight = random(40, 96, dtype=dtype), random(96, dtype=torch.float32, seed=1)
    exact = reference.rms_norm(x.double(), weight.double(), eps)
    cache = torch.zeros(3, 1, 1, 2, 16, 96, dtype=dtype, device=DEVICE)
    heads, slots = torch.stack((x, x, x), dim=1), torch.arange(40, device=DEVICE)
    cos, sin = (torch.full((40, 48), value, dtype=dtype, device=DEVICE) for value in (1.0, 0.0))
    norms = HeadNorms(weight, weight, eps)
    query = triton_rotary.norm_rope_write(heads, NewTokens(norms, cos, sin, slots), layer_of(cache, 0))
    for found in (
        triton_norm.rms_norm(x, weight, eps),
        triton_norm.add_rms_norm(x.clone(), torch.zeros_like(x), weight, eps)[0],
        query[:, 0],
        cache[:, 0, 0, 0].flatten(0, 1)[:40],
    ):
        assert found.dtype == dtype
        assert ((found.double() - exact) / exact).abs().max() < 0.52 * torch.finfo(dtype).eps


def test_rms_norm_of_some_heads_of_a_wider_row() -> None:
    wide, weight = random(5, 7, 80, dtype=torch.float32), random(80, dtype=torch.float32, seed=1)
    found = triton_norm.rms_norm(wide[:, 2:5], weight, 1e-6)
    assert found.is_contiguous()
    assert close(found, reference.rms_norm(wide[:, 2:5].double(), weight.double(), 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (5, 1100), *BIG])
def test_silu_and_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    x = random(rows, 2 * size, dtype=dtype)
    assert close(triton_activation.silu_and_mul(x), reference.silu_and_mul(x.double()), dtype)


@pytest.mark.slow_cases
@pytest.mark.parametrize("normed", NORMED)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary", "block_size"),
    [
        (4, 2, 64, 64, 16), (20, 4, 80, 80, 32), (3, 3, 96, 96, 16), (6, 1, 128, 128, 64), (2, 1, 256, 256, 16),
        (48, 8, 128, 64, 64), (5, 1, 80, 20, 16), (3, 3, 96, 94, 16),
    ],
)  # fmt: skip
def test_norm_rope_write(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary: int, block_size: int, normed: str
) -> None:
    """Queries come back, keys and values lie in their slots, a negative slot is nowhere, all else is as it was."""
    num_tokens, num_blocks = 7, 4
    index = num_heads + NORMED.index(normed)
    dtype = list(TOLERANCE)[index % len(TOLERANCE)]  # each one with each shape and each norm
    heads = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = random(num_tokens, rotary // 2, dtype=torch.float64, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    shapes = ((num_heads, head_dim), (num_kv_heads, head_dim)) if normed == "together" else ((head_dim,),) * 2
    query_norm, key_norm = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes, 2))
    norms = HeadNorms(query_norm, key_norm, 1e-6) if normed else None
    wide_norms = HeadNorms(query_norm.double(), key_norm.double(), 1e-6) if normed else None
    cache = random(num_blocks, num_kv_heads, 3, 2, block_size, head_dim, dtype=dtype, seed=4)
    twin = cache.double()
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(5))[:num_tokens].to(DEVICE)
    expected = reference.norm_rope_write(
        heads.double(), NewTokens(wide_norms, cos.double(), sin.double(), slots), layer_of(twin, 1)
    )
    skipped = int(slots[3])
    block, offset = skipped // block_size, skipped % block_size
    twin[block, :, 1, :, offset] = cache[block, :, 1, :, offset].double()
    slots[3] = -1
    found = triton_rotary.norm_rope_write(heads, NewTokens(norms, cos, sin, slots), layer_of(cache, 1))
    assert close(found, expected, dtype)
    assert close(cache, twin, dtype)
    assert torch.equal(cache[:, :, ::2].double(), twin[:, :, ::2])  # other layers


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_an_fp8_cache_takes_the_same_bytes_as_torch_gives_it(dtype: torch.dtype) -> None:
    """Keys and values above 448 become 448. On a GPU also ties, subnormal numbers and NaN.

    The interpreter (Triton 3.6, 3.7) rounds otherwise: 1.97 to 1. There the others are numbers that e4m3 has.
    """
    heads = 4 * random(6, 8, 64, dtype=dtype)
    given = [448.0, 463.0, 6e4, -6e4]
    if GPU:
        given += [1.06, 1.0625, 1.1875, -3.3, 2**-10, 1.5 * 2**-10, torch.nan]
    else:
        heads = heads.to(FP8).to(dtype).masked_fill_(heads.abs() < 2**-5, 0.0)
    heads[2, 4:, : len(given)] = torch.tensor(given, dtype=dtype, device=DEVICE)
    cos, sin = (torch.full((6, 32), angle, dtype=dtype, device=DEVICE) for angle in (1.0, 0.0))
    slots = torch.tensor([40, 3, 17, 0, 63, 20], device=DEVICE)
    caches = [torch.zeros(4, 2, 3, 2, 16, 64, device=DEVICE).to(FP8) for _ in range(2)]
    for function, cache in zip((triton_rotary.norm_rope_write, reference.norm_rope_write), caches, strict=True):
        query = function(heads, NewTokens(None, cos, sin, slots), layer_of(cache, 1))
        assert torch.equal(query, heads[:, :4])
    found, expected = (cache.float().nan_to_num(1000.0) for cache in caches)
    assert torch.equal(found, expected)


def test_norm_rope_write_refuses_other_shapes() -> None:
    cache = random(2, 2, 1, 2, 16, 64, dtype=torch.float32)
    views, slots = layer_of(cache, 0), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    angles = (random(3, half, dtype=torch.float32) for half in (32, 33))
    turned, wide = (NewTokens(None, each, each, slots) for each in angles)
    with pytest.raises(ValueError, match=r"contiguous \[3, at most 32\], not \(3, 33\)"):
        triton_rotary.norm_rope_write(random(3, 8, 64, dtype=torch.float32), wide, views)
    for heads, message in (
        (random(3, 8, 32, dtype=torch.float32), "heads must be"),
        (random(3, 4, 64, dtype=torch.float32), "heads must be"),
        (random(3, 8, 64, dtype=torch.float16), "into torch.float32"),
        (random(2, 8, 64, dtype=torch.float32), "2 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_rotary.norm_rope_write(heads, turned, views)


@pytest.mark.parametrize("pairs_on_device", [False, True])
@pytest.mark.parametrize("pairs", [[(0, 3), (2, 1)], [(0, 1), (1, 2), (2, 0)], []])
def test_copy_blocks_reads_all_before_it_writes(pairs: list[tuple[int, int]], pairs_on_device: bool) -> None:
    blocks = random(5, 3, 2, 2, 16, 80, dtype=torch.bfloat16)
    expected = blocks.clone()
    for read, write in pairs:
        expected[write] = blocks[read]
    index = torch.tensor(pairs, dtype=torch.int64, device=DEVICE if pairs_on_device else "cpu").view(-1, 2)
    triton_block_copy.copy_blocks(blocks, blocks, index)
    assert torch.equal(blocks, expected)


def test_copy_blocks_to_another_tensor() -> None:
    """The host's, where there is a GPU."""
    blocks = random(5, 3, 2, 2, 16, 80, dtype=torch.float32)
    target = torch.zeros(blocks.shape, pin_memory=GPU)
    triton_block_copy.copy_blocks(blocks, target, torch.tensor([[4, 0], [1, 3]]))
    if GPU:
        torch.cuda.synchronize()
    assert torch.equal(target[[0, 3]], blocks[[4, 1]].cpu())
    assert (target[[1, 2, 4]] == 0).all()


def test_blocks_of_odd_bytes_are_refused() -> None:
    blocks = random(3, 3, dtype=torch.float32)
    with pytest.raises(ValueError, match="words of 8 bytes"):
        triton_block_copy.copy_blocks(blocks, blocks, torch.tensor([[0, 1]]))
