"""Attention of captured steps, planned without lengths, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from typing import TYPE_CHECKING

from pd_kernels.launch_sizes import num_processors
from pd_kernels.values import StepOnDevice, StepSize
from tests.kernels.paged import Paged, layer_of, make_paged, sunk
from tests.kernels.test_triton_attention import DEVICE, REAL, SHAPES, TOLERANCE, attention_of, expected, on_device

if TYPE_CHECKING:
    from pd_kernels.triton_plan import TritonReplayable

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def sized(paged: Paged, num_tokens: int, num_seqs: int, *, is_far: bool, num_chunks: int = 3) -> StepSize:
    return StepSize(num_tokens, num_seqs, num_chunks, has_decodes=paged.packed.num_decodes > 0, is_far=is_far)


def make(size: StepSize, paged: Paged, window: int = 0) -> TritonReplayable:
    attention = attention_of(paged, window).captured(size)
    assert attention is not None
    return attention


def padded(paged: Paged, size: StepSize, attention: TritonReplayable) -> StepOnDevice:
    """The step, with room for more."""
    packed, count = paged.packed, paged.packed.num_seqs

    def placed(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(DEVICE)

    decode_lens = np.zeros(size.num_seqs if size.has_decodes else 0, np.int64)
    decode_lens[: packed.num_decodes] = packed.host_seq_lens[: packed.num_decodes]
    seq_lens, starts = np.zeros(size.num_seqs + 1, np.int64), np.zeros(size.num_seqs + 2, np.int64)
    seq_lens[:count] = packed.host_seq_lens
    starts[1 : count + 1], starts[count + 1 :] = np.cumsum(packed.host_query_lens), packed.host_query_lens.sum()
    tables = torch.full((size.num_seqs + 1, packed.block_tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
    tables[:count] = packed.block_tables
    tiles = attention.tiles.cut(packed.host_query_lens, packed.host_seq_lens, packed.num_decodes, size.num_seqs)
    assert tiles.shape == (2, attention.tiles.count)
    return StepOnDevice(placed(decode_lens), placed(seq_lens), placed(starts), tables, placed(tiles))


def check(paged: Paged, size: StepSize, window: int = 0) -> None:
    attention = make(size, paged, window)
    plan = attention.plan(padded(paged, size, attention))
    count = len(paged.query)
    query = torch.full((size.num_tokens, *paged.query.shape[1:]), torch.nan, dtype=paged.query.dtype, device=DEVICE)
    query[:count] = paged.query
    place = torch.full_like(query, torch.nan)
    found = plan.run(query, paged.cache, query.shape[2] ** -0.5, place, paged.sinks)
    assert found is place
    assert (found[:count].double() - expected(paged, window)).abs().max() < TOLERANCE[query.dtype]
    behind = found[count:]
    assert (behind.isnan() | (behind == 0)).all(), "rows without a sequence"


@pytest.mark.parametrize(("name", "window"), [("mha-64", 0), ("gqa-80", 20)])
def test_padding_has_no_sinks(name: str, window: int) -> None:
    paged = on_device(sunk(make_paged(SHAPES[name], torch.float32)))
    check(paged, sized(paged, len(paged.query) + 3, paged.packed.num_seqs + 2, is_far=False), window)


@pytest.mark.parametrize(
    ("name", "window"),
    [("mha-64", 0), ("gqa-80", 20), ("mqa-96", 0), ("mqa-96", 20), ("gqa-128", 0), ("only-decodes", 20),
     ("only-prefill", 20)],
)  # fmt: skip
def test_padded_steps_equal_the_oracle(name: str, window: int) -> None:
    paged = on_device(make_paged(SHAPES[name], torch.float32))
    check(paged, sized(paged, 80, 10, is_far=False), window)


@pytest.mark.parametrize(
    "name", [pytest.param("mha-64", marks=[pytest.mark.slow] if DEVICE.type == "cpu" else []), "gqa-80"]
)
def test_chunks_that_programs_share_equal_the_oracle(name: str) -> None:
    """Padding tiles leave no parts, and no memory is read for them."""
    paged = on_device(make_paged(SHAPES[name], torch.float16))
    size = sized(paged, 64, 8, is_far=True)
    tiling = make(size, paged).tiling
    assert tiling is not None
    assert tiling.parts > 1
    check(paged, size)


def test_a_full_step_has_room() -> None:
    """As many tokens, sequences and chunks as there are at most, none of a whole number of tiles."""
    paged = on_device(make_paged(SHAPES["mqa-96"], torch.float32))
    check(paged, sized(paged, sum(SHAPES["mqa-96"].query_lens), 3, is_far=False, num_chunks=2))


def test_chunks_under_a_window_have_no_far_size() -> None:
    """They have few keys, which no programs share."""
    paged = on_device(make_paged(SHAPES["mha-64"], torch.float16))
    near, far = (sized(paged, 64, 8, is_far=is_far) for is_far in (False, True))
    assert attention_of(paged).captured(far) is not None
    assert attention_of(paged, 20).captured(far) is None
    assert attention_of(paged, 20).captured(near) is not None


@pytest.mark.parametrize("window", [0, 20])
def test_steps_of_decodes_alone_have_no_tiles(window: int) -> None:
    """Padded as decode graphs are: as many sequences as tokens, empty ones after them."""
    paged = on_device(make_paged(SHAPES["only-decodes"], torch.float32))
    size = StepSize(9, 9, 0, has_decodes=True)
    assert make(size, paged).tiles.count == 0
    check(paged, size, window)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("name", ["8b", "8b-block-16", "8b-short-chunks", "head-64", "head-80", "head-256"])
def test_real_steps_equal_the_oracle(name: str, is_far: bool) -> None:
    for num_tokens in (1792, 2048) if sum(REAL[name].query_lens) > 512 else (192, 512):
        if num_tokens >= sum(REAL[name].query_lens):
            paged = on_device(make_paged(REAL[name], torch.bfloat16))
            size = sized(paged, num_tokens, 64, is_far=is_far)
            if is_far and attention_of(paged).captured(size) is None:
                continue  # cut like what is near
            check(paged, size)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_step_follows_new_lengths() -> None:
    """Captured for one step, replayed for another."""
    shape = REAL["8b-short-chunks"]
    other = replace(shape, query_lens=(1, 1, 90, 5), seq_lens=(99, 7000, 300, 5), num_decodes=2)
    first, second = (on_device(make_paged(each, torch.bfloat16)) for each in (shape, other))
    size = sized(first, 128, 16, is_far=True)
    attention = make(size, first)
    assert attention.tiling is not None
    assert attention.tiling.parts > 1
    assert num_processors(DEVICE) > 100
    steps = [padded(paged, size, attention) for paged in (first, second)]
    width = max(step.block_tables.shape[1] for step in steps)
    place = replace(steps[0], block_tables=torch.zeros(size.num_seqs + 1, width, dtype=torch.int32, device=DEVICE))
    num_blocks = max(len(first.key_cache), len(second.key_cache))
    cache = torch.zeros(num_blocks, 8, 3, 2, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    keys, values = views = layer_of(cache, 1)
    query = torch.zeros(size.num_tokens, 32, 128, dtype=torch.bfloat16, device=DEVICE)

    def run() -> torch.Tensor:
        return attention.plan(place).run(query, views, 128**-0.5)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for paged, step in zip((first, second), steps, strict=True):
        keys[: len(paged.key_cache)], values[: len(paged.value_cache)] = paged.key_cache, paged.value_cache
        query[: len(paged.query)] = paged.query
        place.block_tables[:, : step.block_tables.shape[1]] = step.block_tables
        for name in ("decode_lens", "seq_lens", "query_starts", "tiles"):
            getattr(place, name).copy_(getattr(step, name))
        graph.replay()
        difference = (found[: len(paged.query)].double() - expected(paged, 0)).abs().max()
        assert difference < TOLERANCE[torch.bfloat16]
