"""flashinfer's prefill over our cache against the float64 oracle, on a GPU for which it is installed and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="decodes are Triton's")

from pd_kernels.flashinfer_attention import FlashAttention
from pd_kernels.flashinfer_prefill import FlashPrefill
from pd_kernels.prefill_choice import AttentionShape
from pd_kernels.triton_attention import plan_attention
from tests.kernels.paged import Paged, Shape, make_paged
from tests.kernels.test_triton_attention import DEVICE, TOLERANCE, expected, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")]
SHAPES = {
    "8b": Shape(32, 8, 128, 64, (*(1,) * 40, 700, 1024, 3), (*range(1, 3000, 75), 700, 2500, 4000), 40),
    "8b-block-16": Shape(32, 8, 128, 16, (1, 1, 333), (1025, 4000, 1111), 2),
    "8b-block-128": Shape(32, 8, 128, 128, (129, 1, 96), (129, 1, 97), 0),
    "mqa": Shape(5, 1, 128, 64, (1, 200, 128), (63, 200, 1000), 1),
    "head-64": Shape(32, 8, 64, 32, (1, 1, 500), (1025, 2000, 700), 2),
    "head-256": Shape(8, 1, 256, 64, (1, 1, 500), (1025, 2000, 700), 2),
}


def kernel_for(paged: Paged) -> FlashPrefill:
    """Skips the test where there is none."""
    pytest.importorskip("flashinfer", reason="not installed")
    _, num_kv_heads, block_size, head_dim = paged.key_cache.shape
    dtype, num_heads = paged.query.dtype, paged.query.shape[1]
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, dtype, DEVICE)
    try:
        return FlashPrefill.load(shape, compiles=False)
    except RuntimeError as error:
        if "not compiled" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(SHAPES))
def test_chunks_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    paged = on_device(make_paged(SHAPES[name], dtype))
    plan = plan_attention(paged.packed, paged.key_cache, chunks=kernel_for(paged).plan(paged.packed))
    found = plan.run(paged.query, paged.key_cache, paged.value_cache, paged.query.shape[2] ** -0.5)
    assert (found.double() - expected(paged, 0)).abs().max() < TOLERANCE[dtype]


def test_plans_may_outrun_the_device() -> None:
    """Steps are launched while the device is busy, each plan's host memory free again before its copy has begun."""
    steps = []
    for seed in range(6):
        query_lens = (200 + 70 * seed, 400 - 50 * seed)
        shape = replace(SHAPES["8b"], query_lens=query_lens, seq_lens=(900, 400), num_decodes=0)
        steps.append(on_device(make_paged(shape, torch.bfloat16, seed)))
    kernel, scale = kernel_for(steps[0]), 128**-0.5
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # clock cycles: half a second
    found = []
    for paged in steps:
        plan = plan_attention(paged.packed, paged.key_cache, chunks=kernel.plan(paged.packed))
        found.append(plan.run(paged.query, paged.key_cache, paged.value_cache, scale))
        del plan
    for paged, out in zip(steps, found, strict=True):
        assert (out.double() - expected(paged, 0)).abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("query_lens", "window", "is_taken"),
    [((1, 1024), 0, True), ((1, 1024), 300, False), ((1, 128), 0, False), ((1,), 0, False)],
)
def test_only_chunks_that_occupy_the_device_are_taken(query_lens: tuple[int, ...], window: int, is_taken: bool) -> None:
    shape = replace(SHAPES["8b"], query_lens=query_lens, seq_lens=(1024,) * len(query_lens), num_decodes=1)
    paged = on_device(make_paged(shape, torch.bfloat16))
    plan = FlashAttention(kernel_for(paged))(paged.packed, paged.key_cache, window)
    assert (plan.chunks is not None) == is_taken
    found = plan.run(paged.query, paged.key_cache, paged.value_cache, 128**-0.5)
    assert (found.double() - expected(paged, window)).abs().max() < TOLERANCE[torch.bfloat16]
