"""Attention of decodes with drafts against the float64 oracle: interpreted on small shapes, on a GPU on real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.fp8_cache import FP8
from pd_kernels.triton_draft_attention import queries_of_pair
from pd_kernels.values import StepOnDevice, StepSize
from tests.kernels.paged import Paged, Shape, attention_shape, make_paged, sunk
from tests.kernels.test_triton_attention import DEVICE, SMALL_DECODE, TOLERANCE, attention_of, on_device

if TYPE_CHECKING:
    from pd_kernels.decode_tiling import DecodeTiling

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
# Contexts of several tiles of 16 and of one token, tiles that drafts begin, and more queries than a pair has
SHAPES = {
    "group-1": Shape(2, 2, 64, 16, (2, 1, 5, 17), (66, 1, 5, 50), 0),
    "group-2": Shape(4, 2, 80, 16, (3, 4, 1, 33), (130, 17, 33, 40), 0),
    "group-4": Shape(4, 1, 64, 32, (4, 1, 2, 17, 33), (20, 16, 18, 100, 65), 0),
    "group-6": Shape(6, 1, 256, 64, (2, 11), (129, 64), 0),
    "group-8": Shape(8, 1, 64, 16, (1, 4, 17), (90, 34, 40), 0),
}
REAL = {
    "8b": Shape(32, 8, 128, 64, (*(4,) * 30, *range(1, 18)), (*range(5, 3005, 100), *range(1024, 1041)), 0),
    "8b-one": Shape(32, 8, 128, 64, (8,), (15000,), 0),
    "30b-a3b": Shape(32, 4, 128, 64, (*(2,) * 40, 9, 17, 1), (*range(3, 4003, 100), 4000, 7000, 16), 0),
    "head-64": Shape(64, 8, 64, 64, (*(4,) * 20, *range(1, 18)), (*range(5, 2005, 100), *range(1024, 1041)), 0),
    "head-256": Shape(8, 1, 256, 64, (1, 4, 9), (1025, 2000, 700), 0),
    "heads-of-27b": Shape(24, 4, 256, 64, (*(4,) * 20, *range(1, 18)), (*range(5, 2005, 100), *range(1024, 1041)), 0),
    "many": Shape(4, 1, 64, 16, (2,) * 250, tuple(np.random.default_rng(0).integers(2, 300, 250).tolist()), 0),
}


def padded(paged: Paged, size: StepSize) -> StepOnDevice:
    """The step, with room for more sequences."""
    packed, count, num_seqs = paged.packed, paged.packed.num_seqs, size.num_seqs
    lens = torch.zeros(num_seqs, dtype=torch.int32, device=DEVICE)
    lens[:count] = packed.seq_lens
    starts = torch.full((num_seqs + 1,), int(packed.query_starts[-1]), dtype=torch.int32, device=DEVICE)
    starts[: count + 1] = packed.query_starts
    tables = torch.full((num_seqs, packed.block_tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
    tables[:count] = packed.block_tables
    nothing = lens.new_empty(0)
    return StepOnDevice(nothing, lens, starts, tables, nothing.reshape(2, 0))


def check(
    paged: Paged, window: int = 0, tiling: DecodeTiling | None = None, room: int = 3, *, is_captured: bool = False
) -> None:
    """The rows of a step with padding. Unseen blocks are not read: their entries of the table are far outside.

    `is_captured`: those of a graph, too.
    """
    paged, count = on_device(paged), len(paged.query)
    size = StepSize(count + room, paged.packed.num_seqs + room, 0, has_decodes=True, has_drafts=True)
    replayable = attention_of(paged, window, tiling).captured(size)
    assert replayable is not None
    step = padded(paged, size)
    query = torch.full((size.num_tokens, *paged.query.shape[1:]), torch.nan, dtype=paged.query.dtype, device=DEVICE)
    query[:count] = paged.query
    plan, scale = replayable.plan(step), query.shape[2] ** -0.5
    assert not plan.may_rotate
    found = [plan.run(query, paged.cache, scale, torch.full_like(query, torch.nan), paged.sinks) for _ in range(2)]
    assert torch.equal(found[0], found[1]), "counters are 0 again for the next layer"
    if is_captured:
        graph, place = torch.cuda.CUDAGraph(), torch.full_like(query, torch.nan)
        with torch.cuda.graph(graph):
            replayable.plan(step).run(query, paged.cache, scale, place, paged.sinks)
        for _ in range(2):
            place.fill_(torch.nan)
            graph.replay()
            assert torch.equal(place[:count], found[0][:count])
    expected = reference.draft_attention(
        query.double(),
        paged.wide_cache,
        step.block_tables,
        step.query_starts,
        step.seq_lens,
        scale,
        window,
        paged.sinks,
    )
    assert (found[0].double() - expected).abs().max() < TOLERANCE[query.dtype]


@pytest.mark.parametrize(("name", "window"), [(name, index % 2 * 20) for index, name in enumerate(SHAPES)])
def test_small_tiles_equal_the_oracle(name: str, window: int) -> None:
    """Tiles far smaller than the contexts: shares end within pairs, parts are merged, rows see no token of a part."""
    check(make_paged(SHAPES[name], torch.float32), window, SMALL_DECODE)


@pytest.mark.parametrize(("name", "window"), [("group-4", 0), ("group-4", 20), ("group-2", 0)])
def test_an_fp8_cache_is_widened_exactly(name: str, window: int) -> None:
    check(make_paged(SHAPES[name], torch.float32, cache_dtype=FP8), window, SMALL_DECODE)


@pytest.mark.parametrize(
    ("name", "window", "fp8"), [("group-2", 0, False), ("group-4", 20, True), ("group-8", 20, False)]
)
def test_each_querys_sink_is_in_one_part(name: str, window: int, fp8: bool) -> None:
    check(sunk(make_paged(SHAPES[name], torch.float32, cache_dtype=FP8 if fp8 else None)), window, SMALL_DECODE)


def test_an_fp8_cache_beside_queries_of_two_bytes() -> None:
    check(make_paged(SHAPES["group-4"], torch.float16, cache_dtype=FP8))


@pytest.mark.parametrize(("setup", "least"), [(0, 1), (1, 5), (5, 2)])
def test_any_shares_equal_the_oracle(setup: int, least: int) -> None:
    check(make_paged(SHAPES["group-4"], torch.float32), 20, replace(SMALL_DECODE, setup=setup, least=least), 0)


@pytest.mark.parametrize(
    ("size", "cache_dtype", "rows"),
    [(64, None, 64), (64, FP8, 32), (96, FP8, 64), (128, None, 64), (128, FP8, 64), (256, None, 32)],
)
@pytest.mark.parametrize("group", [1, 2, 4, 6, 8, 16, 64])
def test_a_pair_fills_its_tile(group: int, size: int, cache_dtype: torch.dtype | None, rows: int) -> None:
    """Of 64 rows, but of 32 where the instructions of 64 are slow or wrong."""
    shape = attention_shape(
        make_paged(Shape(group, 1, size, 16, (1,), (1,), 0), torch.float16, cache_dtype=cache_dtype)
    )
    assert rows - group < queries_of_pair(shape) * group <= max(rows, group)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(("cache_dtype", "window"), [(None, 0), (FP8, 0), (None, 500)])
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_real_steps_equal_the_oracle(name: str, cache_dtype: torch.dtype | None, window: int) -> None:
    check(make_paged(REAL[name], torch.bfloat16, cache_dtype=cache_dtype), window, room=5)


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_sink_real_steps_equal_the_oracle(window: int, cache_dtype: torch.dtype | None) -> None:
    """The shape of gpt-oss."""
    paged = sunk(make_paged(REAL["head-64"], torch.bfloat16, cache_dtype=cache_dtype))
    check(paged, window, room=5, is_captured=True)
