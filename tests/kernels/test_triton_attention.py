"""Triton's paged attention against the float64 oracle: in the interpreter on small shapes, on a GPU on real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.decode_tiling import DecodeTiling
from pd_kernels.fp8_cache import FP8
from pd_kernels.triton_plan import TritonAttention
from pd_kernels.triton_prefill import prefill_tiling, unshared_if_many
from pd_kernels.values import PackedSequences, PrefillTiling
from tests.kernels.paged import Paged, Shape, attention_shape, make_paged, sunk

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # largest difference; values are O(1)
SMALL_DECODE = DecodeTiling(tile=16, num_warps=4, num_stages=2, programs_per_processor=2, few_pairs=0)
SMALL_PREFILL = PrefillTiling(rows=16, keys=16, num_warps=4, num_stages=2)
SHAPES = {
    "mha-64": Shape(2, 2, 64, 16, (1, 1, 1, 5, 19), (1, 16, 47, 5, 40), 3),
    "gqa-80": Shape(6, 2, 80, 16, (1, 1, 17), (69, 7, 17), 2),
    "mqa-96": Shape(5, 1, 96, 32, (1, 34, 3), (33, 34, 60), 1),
    "gqa-128": Shape(8, 4, 128, 128, (1, 1, 20, 1), (128, 129, 150, 77), 2),
    "gqa-256": Shape(12, 2, 256, 64, (1, 9), (65, 70), 1),  # 6 heads a KV head, as 24 and 4
    "only-decodes": Shape(4, 2, 64, 16, (1,) * 7, (1, 2, 15, 16, 17, 33, 130), 7),
    "short-beside-long": Shape(4, 2, 64, 16, (1,) * 9, (1, 3, 200, 1, 1, 16, 90, 2, 1), 9),
    "only-prefill": Shape(2, 1, 64, 64, (40, 30), (40, 100), 0),
}
REAL = {
    "8b": Shape(32, 8, 128, 64, (*(1,) * 40, 700, 1024, 3), (*range(1, 3000, 75), 700, 2500, 4000), 40),
    "8b-block-16": Shape(32, 8, 128, 16, (1, 1, 333), (1025, 4000, 1111), 2),
    "8b-block-128": Shape(32, 8, 128, 128, (1, 1, 333), (1025, 4000, 1111), 2),
    "8b-short-chunks": Shape(32, 8, 128, 64, (1, 40, 64, 7), (100, 6000, 3000, 2000), 1),
    "head-64": Shape(32, 8, 64, 32, (1, 1, 500), (1025, 2000, 700), 2),
    "head-80": Shape(28, 4, 80, 64, (1, 1, 500), (1025, 2000, 700), 2),
    "head-96": Shape(32, 32, 96, 64, (1, 1, 500), (1025, 2000, 700), 2),
    "head-256": Shape(8, 1, 256, 64, (1, 1, 500), (1025, 2000, 700), 2),
    "heads-of-35b": Shape(16, 2, 256, 64, (*(1,) * 40, 700, 1024, 3), (*range(1, 3000, 75), 700, 2500, 4000), 40),
    "heads-of-27b": Shape(24, 4, 256, 64, (*(1,) * 40, 700, 1024, 3), (*range(1, 3000, 75), 700, 2500, 4000), 40),
    "many": Shape(4, 1, 64, 16, (1,) * 300, tuple(np.random.default_rng(0).integers(1, 300, 300).tolist()), 300),
}
SINK_REAL = {  # gpt-oss: chunks beside decodes, decodes of which programs share one, and many
    "sink_real-prompts": Shape(64, 8, 64, 64, (1, 1, 700, 1024, 3), (1025, 2000, 700, 2500, 4000), 2),
    "sink_real-split": Shape(64, 8, 64, 64, (1, 1, 1), (9000, 130, 15000), 3),
    "sink_real-decodes": Shape(64, 8, 64, 64, (1,) * 256, tuple(range(1, 1025, 4)), 256),
}


def on_device(paged: Paged) -> Paged:
    packed = paged.packed
    return Paged(
        paged.query.to(DEVICE),
        *whole_cache(paged),
        PackedSequences(
            packed.num_decodes,
            packed.query_starts.to(DEVICE),
            packed.seq_lens.to(DEVICE),
            packed.block_tables.to(DEVICE),
            packed.host_query_lens,
            packed.host_seq_lens,
        ),
        None if paged.sinks is None else paged.sinks.to(DEVICE),
    )


def whole_cache(paged: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """The views on the device, still strided within a whole cache."""
    key = paged.key_cache
    if DEVICE.type == "cpu":
        return key, paged.value_cache
    num_blocks, num_kv_heads, block_size, head_dim = key.shape
    num_layers = key.stride(1) // (2 * block_size * head_dim)
    cache = torch.zeros(num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim, dtype=key.dtype, device=DEVICE)
    cache[:, :, 1, 0], cache[:, :, 1, 1] = key.to(DEVICE), paged.value_cache.to(DEVICE)
    return cache[:, :, 1, 0], cache[:, :, 1, 1]


def expected(paged: Paged, window: int) -> torch.Tensor:
    packed = paged.packed
    return reference.prefill_attention(
        paged.query.double(),
        paged.wide_cache,
        packed.block_tables,
        packed.query_starts,
        packed.seq_lens,
        paged.query.shape[2] ** -0.5,
        window,
        sinks=paged.sinks,
    )


def attention_of(
    paged: Paged, window: int = 0, decode: DecodeTiling | None = None, prefill: PrefillTiling | None = None
) -> TritonAttention:
    """On a GPU that of the backend which serves this shape there."""
    shape = attention_shape(paged, window)
    attention = TritonAttention.of(shape, DEVICE)
    if DEVICE.type == "cuda":
        chosen = choose_attention(shape, DEVICE).backend.attention(shape, DEVICE)
        assert isinstance(chosen, TritonAttention)
        attention = chosen
    return replace(attention, decode=decode or attention.decode, prefill=prefill)


def check(paged: Paged, window: int, decode: DecodeTiling | None, prefill: PrefillTiling | None) -> None:
    plan = attention_of(paged, window, decode, prefill).plan(paged.packed)
    place = torch.full_like(paged.query, torch.nan)
    found = plan.run(paged.query, paged.cache, paged.query.shape[2] ** -0.5, place, paged.sinks)
    assert found is place
    difference = (found.double() - expected(paged, window)).abs().max()
    assert difference < TOLERANCE[paged.query.dtype]


@pytest.mark.parametrize(
    ("name", "window"),
    [
        # The others are those of the float8 cache
        pytest.param(
            name, window, marks=[pytest.mark.slow] if DEVICE.type == "cpu" and window == index % 2 * 20 else []
        )
        for index, name in enumerate(SHAPES)
        for window in (0, 20)
    ],
)
def test_small_tiles_equal_the_oracle(name: str, window: int) -> None:
    """Tiles far smaller than the sequences: every loop runs, shares end within heads, parts are merged."""
    check(on_device(make_paged(SHAPES[name], torch.float32)), window, SMALL_DECODE, SMALL_PREFILL)


@pytest.mark.parametrize(
    ("name", "window", "cache_dtype", "parts"),
    [
        ("mha-64", 20, None, 1), ("gqa-80", 0, None, 5), ("mqa-96", 0, FP8, 1), ("only-decodes", 0, None, 1),
        ("only-decodes", 20, FP8, 1), ("short-beside-long", 0, None, 1), ("only-prefill", 0, None, 3),
        ("only-prefill", 20, FP8, 1),
    ],
)  # fmt: skip
def test_sinks_are_in_one_part_of_each_softmax(
    name: str, window: int, cache_dtype: torch.dtype | None, parts: int
) -> None:
    """Of whole pairs and tiles, and of those that programs share."""
    paged = sunk(make_paged(SHAPES[name], torch.float32, cache_dtype=cache_dtype))
    check(on_device(paged), window, SMALL_DECODE, replace(SMALL_PREFILL, parts=parts))


@pytest.mark.parametrize(("name", "window"), [(name, index % 2 * 20) for index, name in enumerate(SHAPES)])
def test_an_fp8_cache_is_widened_exactly(name: str, window: int) -> None:
    """Within the error of float32 of the oracle over the cache's numbers."""
    paged = on_device(make_paged(SHAPES[name], torch.float32, cache_dtype=FP8))
    check(paged, window, SMALL_DECODE, SMALL_PREFILL)


@pytest.mark.parametrize(("descriptors", "parts"), [(False, 1), (True, 1), (True, 3)])
def test_an_fp8_cache_beside_queries_of_two_bytes(descriptors: bool, parts: int) -> None:
    paged = on_device(make_paged(SHAPES["only-prefill"], torch.float16, cache_dtype=FP8))
    check(paged, 0, None, replace(SMALL_PREFILL, keys=32, descriptors=descriptors, parts=parts))


def test_decodes_of_an_fp8_cache_beside_queries_of_two_bytes() -> None:
    check(on_device(make_paged(SHAPES["gqa-128"], torch.float16, cache_dtype=FP8)), 0, None, None)


@pytest.mark.parametrize(("setup", "least"), [(0, 1), (1, 5), (3, 1), (5, 2)])
def test_any_shares_equal_the_oracle(setup: int, least: int) -> None:
    """Shares begin and end among tiles, and among the units that stand for the beginning of a pair."""
    paged = on_device(make_paged(SHAPES["short-beside-long"], torch.float32))
    check(paged, 0, replace(SMALL_DECODE, setup=setup, least=least), None)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])], ids=str)
@pytest.mark.parametrize("name", ["gqa-80", "gqa-128"])
def test_short_dtypes_and_default_tiles(name: str, dtype: torch.dtype) -> None:
    """Not bfloat16 in the interpreter: its dot treats the bits as integers (Triton 3.6)."""
    check(on_device(make_paged(SHAPES[name], dtype)), 0, None, None)


@pytest.mark.parametrize(("name", "parts"), [("mha-64", 2), ("gqa-80", 5), ("mqa-96", 2), ("only-prefill", 5)])
def test_programs_share_a_tiles_keys(name: str, parts: int) -> None:
    """More parts than some tiles have keys for, parts that end on the diagonal, rows that a part shows nothing to."""
    check(on_device(make_paged(SHAPES[name], torch.float32)), 0, None, replace(SMALL_PREFILL, parts=parts))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_plan_serves_all_layers(parts: int) -> None:
    """The second takes another way to the kernel. Here its keys are the first one's values."""
    paged = on_device(make_paged(SHAPES["only-prefill"], torch.float16))
    plan = attention_of(paged, prefill=replace(SMALL_PREFILL, parts=parts)).plan(paged.packed)
    for layer in (paged, replace(paged, key_cache=paged.value_cache, value_cache=paged.key_cache)):
        found = plan.run(layer.query, layer.cache, paged.query.shape[2] ** -0.5)
        assert (found.double() - expected(layer, 0)).abs().max() < TOLERANCE[torch.float16]


@pytest.mark.slow_cases
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("window", [0, 1, 30])
def test_tiles_by_pointer_and_by_descriptor(window: int, descriptors: bool) -> None:
    paged = on_device(make_paged(SHAPES["only-prefill"], torch.float16))
    check(paged, window, None, replace(SMALL_PREFILL, keys=32, descriptors=descriptors))


def test_content_of_unused_memory_does_not_matter() -> None:
    """NaN in every slot that no sequence fills, those of its own last block too."""
    paged = on_device(make_paged(SHAPES["gqa-80"], torch.float32))
    before = expected(paged, 0)
    _, _, block_size, _ = paged.key_cache.shape
    owned = torch.zeros(paged.key_cache.shape[0], block_size, dtype=torch.bool)
    for row, length in enumerate(paged.packed.host_seq_lens.tolist()):
        for position in range(length):
            owned[int(paged.packed.block_tables[row, position // block_size]), position % block_size] = True
    for cache in (paged.key_cache, paged.value_cache):
        cache.masked_fill_(~owned[:, None, :, None].to(DEVICE), torch.nan)
    plan = attention_of(paged, 0, SMALL_DECODE, SMALL_PREFILL).plan(paged.packed)
    found = plan.run(paged.query, paged.cache, paged.query.shape[2] ** -0.5)
    assert (found.double() - before).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("num_tokens", "num_keys", "rows", "parts"),
    [
        (16, 16000, 64, 16), (64, 2048, 64, 8), (64, 8064, 64, 8), (64, 500, 64, 1), (64, 0, 64, 1),
        (256, 8256, 128, 4), (512, 1536, 64, 1), (512, 8512, 128, 2), (1000, 15000, 128, 1), (1024, 1024, 64, 1),
        (4096, 4096, 128, 1),
    ],
)  # fmt: skip
def test_the_fastest_tiling_is_chosen(num_tokens: int, num_keys: int, rows: int, parts: int) -> None:
    """Of those measured on an H200 for 32 heads of 128."""
    tiling = prefill_tiling(torch.bfloat16, 128, num_tokens * 32, num_keys, 132)
    assert (tiling.rows, tiling.parts) == (rows, parts)


@pytest.mark.parametrize(
    ("count", "length", "num_heads", "parts"), [(1, 64, 32, 8), (4, 64, 32, 8), (64, 2, 32, 1), (17, 2, 256, 1)]
)
def test_many_short_chunks_share_no_tiles(count: int, length: int, num_heads: int, parts: int) -> None:
    """Of 8 KV heads, on 132 processors: else their parts would take a gigabyte that was not measured."""
    lens = np.full(count, length)
    none = torch.empty(0, dtype=torch.int32)
    packed = PackedSequences(0, none, none, none[:, None], lens, lens + 5000)
    shape = AttentionShape(num_heads, 8, 128, 64, 1, torch.bfloat16)
    tiling = unshared_if_many(PrefillTiling(64, 64, 4, 2, parts=8), packed, shape, 132)
    assert tiling.parts == parts


def test_an_empty_sequence_gives_zeros() -> None:
    """Padding rows of a CUDA graph, in the middle and at the end."""
    paged = on_device(make_paged(SHAPES["only-decodes"], torch.float32))
    packed, scale = paged.packed, paged.query.shape[2] ** -0.5
    before = expected(paged, 0)
    packed.seq_lens[torch.tensor([2, 6])] = 0
    plan = attention_of(paged, 0, SMALL_DECODE).plan(packed)
    found = plan.run(paged.query, paged.cache, scale)
    assert (found[[2, 6]] == 0).all()
    others = [0, 1, 3, 4, 5]
    assert (found[others].double() - before[others]).abs().max() < TOLERANCE[torch.float32]


def test_a_query_of_scattered_heads_is_refused() -> None:
    paged = on_device(make_paged(SHAPES["only-decodes"], torch.float32))
    plan = attention_of(paged).plan(paged.packed)
    scattered = paged.query.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="must be contiguous"):
        plan.run(scattered, paged.cache, 1.0)
    with pytest.raises(ValueError, match="out must be contiguous"):
        plan.run(paged.query, paged.cache, 1.0, torch.empty_like(paged.query)[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("name", list(REAL))
def test_real_shapes_equal_the_oracle(name: str, window: int, dtype: torch.dtype) -> None:
    check(on_device(make_paged(REAL[name], dtype)), window, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("name", list(REAL))
def test_real_shapes_with_an_fp8_cache_equal_the_oracle(name: str, window: int, dtype: torch.dtype) -> None:
    check(on_device(make_paged(REAL[name], dtype, cache_dtype=FP8)), window, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("name", list(SINK_REAL))
def test_sinks_of_real_shapes_equal_the_oracle(name: str, window: int, cache_dtype: torch.dtype | None) -> None:
    check(on_device(sunk(make_paged(SINK_REAL[name], torch.bfloat16, cache_dtype=cache_dtype))), window, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "window", "cache_dtype"),
    [
        ("many", 0, None),
        *(
            (f"sink_real-{name}", window, dtype)
            for name in ("decodes", "split")
            for window, dtype in ((0, None), (0, FP8), (128, None), (128, FP8))
        ),
    ],
)
def test_a_captured_decode_follows_new_lengths(name: str, window: int, cache_dtype: torch.dtype | None) -> None:
    paged = make_paged((REAL | SINK_REAL)[name], torch.bfloat16, cache_dtype=cache_dtype)
    paged = on_device(sunk(paged) if name in SINK_REAL else paged)
    packed, scale, attention = paged.packed, paged.query.shape[2] ** -0.5, attention_of(paged, window)

    def run() -> torch.Tensor:
        return attention.plan(packed).run(paged.query, paged.cache, scale, None, paged.sinks)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    packed.seq_lens.copy_((packed.seq_lens + 1) // 2)
    graph.replay()
    assert (found.double() - expected(paged, window)).abs().max() < TOLERANCE[torch.bfloat16]
