"""Blocks in memory that several groups share: strides larger than a block, and no read of blocks before a window.

All memory of no live block is NaN, and so are the blocks that undefined entries of the block tables name.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.attention_backends import ATTENTION_BACKENDS
from pd_kernels.fp8_cache import FP8
from pd_kernels.latent import LatentPlan
from pd_kernels.torch_attention import TorchAttention
from pd_kernels.torch_ops import write_cache
from pd_kernels.triton_block_copy import copy_blocks
from pd_kernels.values import PrefillTiling
from tests.kernels.paged import Paged, Shape, attention_shape, make_paged
from tests.kernels.test_triton_attention import DEVICE, SMALL_DECODE, SMALL_PREFILL, TOLERANCE, attention_of, on_device
from tests.kernels.test_triton_new_token import Problem, make
from tests.worker.driver import poison

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
MIXED = Shape(4, 2, 64, 16, (1, 1, 1, 20, 19, 40), (1, 60, 130, 90, 19, 100), 3)
LARGE_BLOCKS = Shape(4, 2, 64, 64, (1, 1, 30, 40), (60, 200, 170, 100), 2)
DECODES = Shape(4, 2, 64, 16, (1,) * 5, (1, 17, 49, 130, 64), 5)
WIDE_PREFILL = PrefillTiling(rows=32, keys=64, num_warps=4, num_stages=2)
WIDE_DECODE = replace(SMALL_DECODE, tile=64)
WINDOWS = (0, 20, 48)
SPLITS = 4  # with 16 programs a pair, most of the interpreter's time goes to programs without a tile
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")]


def in_slabs(paged: Paged, window: int, *, tail: bool = True) -> tuple[Paged, torch.Tensor]:
    """The live blocks of `paged` in memory of larger blocks, and all layers. `tail`: NaN after the last tokens too."""
    num_blocks, num_kv_heads, block_size, size = paged.key_cache.shape
    packed, device = paged.packed, paged.key_cache.device
    memory = torch.zeros(num_blocks + 1, num_kv_heads + 3, 3, 2, block_size, size, dtype=paged.key_cache.dtype)
    poison(memory)
    tables = packed.block_tables.cpu().clone()
    for row, (count, length) in enumerate(zip(packed.host_query_lens, packed.host_seq_lens, strict=True)):
        first = max(length - count - window + 1, 0) // block_size if window else 0
        last = -(-length // block_size)
        for block in tables[row, first:last].tolist():
            memory[block, :num_kv_heads, 1, 0] = paged.key_cache[block].cpu()
            memory[block, :num_kv_heads, 1, 1] = paged.value_cache[block].cpu()
        if tail and length % block_size:
            behind = memory[int(tables[row, last - 1]), :, 1, :, length % block_size :]
            behind.view(torch.uint8).fill_(0x7F) if behind.dtype is FP8 else behind.fill_(torch.nan)
        tables[row, :first] = tables[row, last:] = num_blocks
    cache = memory.to(device)[:, :num_kv_heads]
    assert cache.stride(0) > cache[0].numel()
    moved = replace(packed, block_tables=tables.to(device))
    return Paged(paged.query, cache[:, :, 1, 0], cache[:, :, 1, 1], moved), cache


def wanted(paged: Paged, window: int) -> torch.Tensor:
    packed = paged.packed
    return reference.prefill_attention(
        paged.query.double(), paged.wide_cache, packed.block_tables,
        packed.query_starts, packed.seq_lens, paged.query.shape[2] ** -0.5, window,
    )  # fmt: skip


def differs(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max().nan_to_num(torch.inf))


@pytest.mark.slow_cases
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [MIXED, LARGE_BLOCKS], ids=["16", "64"])
def test_the_reference_reads_live_blocks_only(shape: Shape, window: int) -> None:
    paged = on_device(make_paged(shape, torch.float64))
    assert differs(wanted(in_slabs(paged, window)[0], window), wanted(paged, window)) < 1e-12


@pytest.mark.slow_cases
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [MIXED, LARGE_BLOCKS], ids=["16", "64"])
def test_torch_reads_live_blocks_only(shape: Shape, window: int, cache_dtype: torch.dtype | None) -> None:
    paged = on_device(make_paged(shape, torch.float32, cache_dtype=cache_dtype))
    moved, _ = in_slabs(paged, window, tail=False)
    plan = TorchAttention(attention_shape(paged, window)).plan(moved.packed)
    found = plan.run(moved.query, moved.cache, moved.query.shape[2] ** -0.5)
    assert differs(found, wanted(paged, window)) < TOLERANCE[torch.float32]


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [MIXED, LARGE_BLOCKS], ids=["16", "64"])
def test_triton_reads_live_blocks_only(shape: Shape, window: int, is_wide: bool) -> None:
    """Tiles of more tokens than a block, and of fewer. Any two of the three meet a cache of each dtype."""
    has_fp8_cache = (WINDOWS.index(window) + is_wide + (shape is LARGE_BLOCKS)) % 2
    paged = on_device(make_paged(shape, torch.float32, cache_dtype=FP8 if has_fp8_cache else None))
    moved, _ = in_slabs(paged, window)
    tilings = (WIDE_DECODE, WIDE_PREFILL) if is_wide else (SMALL_DECODE, SMALL_PREFILL)
    plan = attention_of(moved, window, *tilings).plan(moved.packed)
    found = plan.run(moved.query, moved.cache, moved.query.shape[2] ** -0.5)
    assert differs(found, wanted(paged, window)) < TOLERANCE[torch.float32]


@pytest.mark.slow_cases
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [0, 30])
def test_descriptors_have_the_stride_of_blocks(window: int, parts: int) -> None:
    if window and parts > 1:
        pytest.skip("no tile is shared under a window")
    paged = on_device(make_paged(LARGE_BLOCKS, torch.float16))
    moved, _ = in_slabs(paged, window)
    tiling = replace(SMALL_PREFILL, keys=32, descriptors=True, parts=parts)
    plan = attention_of(moved, window, SMALL_DECODE, tiling).plan(moved.packed)
    found = plan.run(moved.query, moved.cache, moved.query.shape[2] ** -0.5)
    assert differs(found, wanted(paged, window)) < TOLERANCE[torch.float16]


@pytest.mark.slow_cases
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("few_pairs", [0, 100])
@pytest.mark.parametrize("window", WINDOWS)
def test_rotating_decodes_read_and_write_live_blocks_only(window: int, few_pairs: int, tile: int) -> None:
    """In equal shares, and where programs share each pair. Any two of the three meet a cache of each dtype."""
    fp8 = (WINDOWS.index(window) + (few_pairs > 0) + (tile == 64)) % 2 == 1
    problem = make(DECODES, torch.float32, fp8=fp8, normed=not fp8)  # norms make numbers that e4m3 does not have
    expected, _ = problem.expected(window)
    moved, cache = in_slabs(problem.paged, window)
    last = moved.packed.seq_lens.long() - 1
    blocks = moved.packed.block_tables.long().gather(1, (last // 16)[:, None])[:, 0]
    assert torch.equal(problem.new.slot_mapping, blocks * 16 + last % 16)
    found = Problem(moved, problem.heads, problem.new, cache).run(window, few_pairs=few_pairs, splits=SPLITS, tile=tile)
    assert found is not None
    assert differs(found, expected) < TOLERANCE[torch.float32]
    for index, block in enumerate(blocks.tolist()):
        written = cache[block, :, 1, :, int(last[index]) % 16].float()
        assert not written.isnan().any()
    spare = cache[-1].float()
    assert spare.isnan().all(), "a block of no sequence is not written"


def test_writes_and_copies_keep_to_their_blocks() -> None:
    paged = on_device(make_paged(MIXED, torch.float32))
    moved, cache = in_slabs(paged, 0)
    memory = cache._base
    assert memory is not None
    before, slots = memory.clone(), torch.tensor([0, 17, 35], device=DEVICE)
    key, value = torch.ones(2, 3, 2, 64, device=DEVICE).unbind()
    write_cache(key, 2 * value, moved.cache, slots)
    for slot in slots.tolist():
        before[slot // 16, :2, 1, 0, slot % 16], before[slot // 16, :2, 1, 1, slot % 16] = 1, 2
    assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0))
    copy_blocks(cache, cache, torch.tensor([[0, 1], [1, 2]]))
    old = before.clone()
    before[1, :2], before[2, :2] = old[0, :2], old[1, :2]
    assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("mark", [pytest.param(None, marks=on_gpu)])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("window", [0, 128, 512, 1024])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", [backend.name for backend in ATTENTION_BACKENDS])
def test_real_shapes_on_a_gpu(
    name: str, block_size: int, window: int, cache_dtype: torch.dtype | None, mark: None
) -> None:
    """Of every backend that serves the group. Chunks begin in the middle of prompts, blocks and tiles."""
    backend = next(backend for backend in ATTENTION_BACKENDS if backend.name == name)
    lens = ((1, 1, 1, 700, 1000, 333, 64), (1, 1300, 4000, 3001, 2500, 333, 6000))
    paged = on_device(make_paged(Shape(32, 8, 128, block_size, *lens, 3), torch.bfloat16, cache_dtype=cache_dtype))
    shape = attention_shape(paged, window)
    if reason := backend.why_not(shape, DEVICE):
        pytest.skip(f"{name} {reason}")
    moved, _ = in_slabs(paged, window, tail=name != "torch")
    plan = backend.attention(shape, DEVICE).plan(moved.packed)
    assert not isinstance(plan, LatentPlan)
    found = plan.run(moved.query, moved.cache, moved.query.shape[2] ** -0.5)
    assert differs(found, wanted(paged, window)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("mark", [pytest.param(None, marks=on_gpu)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("window", [0, 128, 512, 1024])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_real_rotating_decodes_on_a_gpu(count: int, block_size: int, window: int, fp8: bool, mark: None) -> None:
    lens = tuple(range(4000, 4000 - 97 * count, -97))
    problem = make(Shape(32, 4, 128, block_size, (1,) * count, lens, count), torch.bfloat16, fp8=fp8)
    expected, _ = problem.expected(window)
    moved, cache = in_slabs(problem.paged, window)
    found = Problem(moved, problem.heads, problem.new, cache).run(window)
    if found is None:
        pytest.skip("two launches are faster")
    assert differs(found, expected) < 2 * TOLERANCE[torch.bfloat16]
