"""Prefill attention's kernel for Hopper GPUs: what it is chosen for, how it compiles, its sums against the oracle."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from pd_kernels import reference
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.fp8_cache import FP8, indexable
from pd_kernels.hopper_attention import HopperBackend
from pd_kernels.hopper_prefill import HopperPrefill, compiled
from pd_kernels.triton_plan import TritonAttention
from pd_kernels.triton_prefill import prefill_tiling
from pd_kernels.values import PrefillTiling
from tests.kernels.compiler import compile_by
from tests.kernels.paged import Paged, Shape, attention_shape, make_paged, sunk
from tests.kernels.test_triton_attention import DEVICE, TOLERANCE, on_device

if TYPE_CHECKING:
    from pathlib import Path

LARGE = PrefillTiling(rows=128, keys=64, num_warps=8, num_stages=2, max_registers=128)
PREFILL = HopperPrefill(num_kv_heads=8, group=4, head_dim=128, block_size=64, dtype=torch.bfloat16)
SHAPES = {
    "one-token": Shape(32, 8, 128, 64, (1,), (1,), 0),
    "tails": Shape(32, 8, 128, 64, (1, 700, 1024, 3), (900, 700, 2500, 4000), 1),
    "odd-prefixes": Shape(32, 8, 128, 64, (1, 130, 33, 7, 257), (100, 130, 1031, 2000, 1281), 1),
    "group-of-2": Shape(16, 8, 128, 128, (200, 515), (200, 900), 0),
    "group-of-1": Shape(4, 4, 128, 64, (200, 515), (200, 900), 0),
    "group-of-8": Shape(64, 8, 128, 192, (200, 300), (200, 900), 0),
    "head-64": Shape(32, 8, 64, 64, (200, 515), (200, 900), 0),
}
on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability(DEVICE) != (9, 0), reason="needs a Hopper GPU"
)


def test_a_kernel_is_compiled_for_each_shape() -> None:
    shape = AttentionShape(32, 8, 128, 64, num_layers=3, dtype=torch.bfloat16)
    assert HopperPrefill.of(shape) == HopperPrefill.of(replace(shape, num_layers=1)) == PREFILL
    assert HopperPrefill.of(replace(shape, has_sinks=True)) == replace(PREFILL, has_sinks=True) != PREFILL
    changed = HopperPrefill.of(AttentionShape(64, 8, 64, 128, 3, torch.float16))
    assert changed == HopperPrefill(8, group=8, head_dim=64, block_size=128, dtype=torch.float16)


@pytest.mark.parametrize(
    ("tiling", "spare", "taken"),
    [
        (LARGE, 0, True), (LARGE, 1024, True), (LARGE, 4, False), (replace(LARGE, parts=2), 0, False),
        (replace(LARGE, rows=64), 0, False),
    ],
)  # fmt: skip
def test_large_tiles_are_taken(tiling: PrefillTiling, spare: int, taken: bool) -> None:
    """`spare`: elements between the queries of one token and of the next."""
    query = torch.zeros(5, 32 * 128 + spare, dtype=torch.bfloat16)[:, : 32 * 128].view(5, 32, 128)
    assert PREFILL.takes(query, tiling) == taken


def test_large_tiles_get_the_sinks_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(HopperPrefill, "launch", lambda prefill, *arguments: given.append(arguments[-1]))
    paged = sunk(make_paged(Shape(64, 8, 64, 64, (200,), (200,), 0), torch.bfloat16))
    prefill = HopperPrefill.of(attention_shape(paged))
    attention = replace(TritonAttention.of(attention_shape(paged), DEVICE, prefill), prefill=LARGE)
    paged = on_device(paged)
    for sinks in (paged.sinks, None):
        attention.plan(paged.packed).run(paged.query, paged.cache, 1.0, None, sinks)
    assert given[0] is paged.sinks
    assert given[1] is None


@pytest.mark.parametrize("sinks", [None, torch.zeros(64, dtype=torch.bfloat16)])
def test_a_kernel_with_sinks_needs_them_in_float32(sinks: torch.Tensor | None) -> None:
    paged = make_paged(Shape(64, 8, 64, 64, (200,), (200,), 0), torch.bfloat16)
    given = paged.query, paged.cache, paged.packed, torch.zeros(2, 1), paged.query, 1.0
    with pytest.raises(AssertionError):
        HopperPrefill(8, 8, 64, 64, torch.bfloat16, has_sinks=True).launch(*given, sinks)
    with pytest.raises(AssertionError):
        HopperPrefill(8, 8, 64, 64, torch.bfloat16).launch(*given, torch.zeros(64))


@pytest.mark.parametrize(("num_tokens", "num_keys", "rows"), [(352, 352, 64), (384, 384, 128), (512, 8512, 128)])
def test_one_large_tile_a_processor_is_enough(num_tokens: int, num_keys: int, rows: int) -> None:
    """For 32 heads of 128 on an H200, by measurement; nor are its keys shared."""
    tiling = prefill_tiling(torch.bfloat16, 128, num_tokens * 32, num_keys, 132, has_large=True)
    assert (tiling.rows, tiling.parts) == (rows, 1)


def test_without_a_compiler_that_takes_it_triton_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is given, and the warning once."""

    def fail(_: HopperPrefill) -> None:
        raise TypeError("no such layout")

    monkeypatch.setattr(HopperPrefill, "compile", fail)
    compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert compiled(PREFILL) is None
            monkeypatch.setattr("pd_kernels.hopper_attention._is_hopper", lambda device: True)
            shape = AttentionShape(32, 8, 128, 64, 3, torch.bfloat16)
            reason = "the kernel does not compile with this Triton"
            assert HopperBackend().why_not(shape, torch.device("cpu")) == reason
    finally:
        compiled.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    "options",
    [(), ("sinks",), *(pytest.param(one, marks=pytest.mark.slow) for one in (("fp8",), ("fp8", "sinks")))],
    ids="-".join,
)
def test_it_compiles_and_the_softmax_runs_under_the_products(options: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own: where the tests run in Triton's interpreter, nothing can be compiled."""
    done = compile_by("tests.kernels.hopper_prefill", tmp_path, *options)
    (ptx,), fp8 = done.output.split(".visible .entry")[1:], "fp8" in options
    # A thread has two rows and 64 scores of a step; three steps are written for each of two warpgroups. A row's sink is
    # one exponential more
    assert ptx.count("ex2.approx") == 2 * 3 * (64 + 2) + 4 * ("sinks" in options)
    assert "sinks" not in options or re.findall(r"(\d+) bytes spill stores", done.output + done.log) == ["0"]
    assert f"setmaxnreg.inc.sync.aligned.u32 \t{232 if fp8 else 240};" in ptx
    assert "cp.async.bulk.tensor.3d" in ptx
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == fp8
    walks = re.findall(r"wgmma\.wait_group\.sync\.aligned 1;(.*?)wgmma\.wait_group\.sync\.aligned 0;", ptx, re.DOTALL)
    assert len(walks) == 4  # with a mask and without, in each warpgroup
    for walk in walks:
        exponents, last = walk.rindex("ex2.approx"), walk.rindex("mbarrier.try_wait")
        assert "ld.global" not in walk
        assert exponents < last  # this wait's branch keeps the assembler from moving them after the products


def hopper_attention(paged: Paged) -> TritonAttention:
    """With large tiles, whatever the step."""
    shape = attention_shape(paged)
    backend = choose_attention(shape, DEVICE).backend
    assert isinstance(backend, HopperBackend)
    attention = backend.attention(shape, DEVICE)
    assert isinstance(attention, TritonAttention)
    return replace(attention, prefill=LARGE)


def expected(paged: Paged, scale: float) -> torch.Tensor:
    packed = paged.packed
    tables, starts, lens = packed.block_tables, packed.query_starts, packed.seq_lens
    return reference.prefill_attention(
        paged.query.double(), paged.wide_cache, tables, starts, lens, scale, 0, sinks=paged.sinks
    )


def spoil(paged: Paged) -> None:
    """NaN in every slot that no sequence fills, those of its own last block too."""
    block_size = paged.key_cache.shape[2]
    owned = torch.zeros(paged.key_cache.shape[0], block_size, dtype=torch.bool)
    for row, length in enumerate(paged.packed.host_seq_lens.tolist()):
        position = torch.arange(length)
        owned[paged.packed.block_tables[row].cpu().long()[position // block_size], position % block_size] = True
    for cache in (paged.key_cache, paged.value_cache):
        nan = 0x7F if cache.dtype is FP8 else torch.nan
        indexable(cache).masked_fill_(~owned[:, None, :, None].to(DEVICE), nan)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.088, 0.125, 0.3])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in SHAPES), ("tails", torch.float16)])
def test_sums_equal_the_oracle_whatever_lies_after_sequences(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, scale: float
) -> None:
    """Any scale: rows that see nothing of a tile's keys must weigh them 0 exactly. Queries are strided as a step's."""
    paged = on_device(make_paged(SHAPES[name], dtype, cache_dtype=cache_dtype))
    paged = replace(paged, query=torch.cat((paged.query, paged.query), dim=1)[:, : paged.query.shape[1]])
    assert PREFILL.takes(paged.query, LARGE)
    want = expected(paged, scale)
    spoil(paged)
    plan = hopper_attention(paged).plan(paged.packed)
    place = torch.full_like(want, torch.nan, dtype=dtype)
    plan.run(paged.query, paged.cache, scale, place)
    assert (place.double() - want).abs().max() < TOLERANCE[dtype]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(64, 8, 64, 64, (1, 700, 1024, 3), (900, 700, 2500, 4000), 1),  # gpt-oss
        Shape(32, 8, 64, 64, (130, 33, 1, 257), (130, 1031, 1, 1281), 0),  # of a rank of two; one key and a sink
        Shape(32, 8, 128, 64, (200, 515), (200, 900), 0),
    ],
)
def test_sinks_are_in_each_rows_sum(shape: Shape, cache_dtype: torch.dtype | None) -> None:
    """Those far above all scores leave nothing of a row, those far below change nothing."""
    paged = sunk(on_device(make_paged(shape, torch.bfloat16, cache_dtype=cache_dtype)))
    assert paged.sinks is not None
    paged.sinks[:2] = torch.tensor([400.0, -400.0])
    scale = shape.head_dim**-0.5
    want = expected(paged, scale)
    assert want[shape.num_decodes :, 0].abs().max() < 1e-30
    spoil(paged)
    found = hopper_attention(paged).plan(paged.packed).run(paged.query, paged.cache, scale, None, paged.sinks)
    assert (found.double() - want).abs().max() < TOLERANCE[torch.bfloat16]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_replays_are_the_same_bit_by_bit(cache_dtype: torch.dtype | None) -> None:
    """More tiles than processors, so that programs take several; warps that overtake each other would show."""
    shape = Shape(32, 8, 128, 64, (1500, 700), (1500, 2300), 0)
    paged = on_device(make_paged(shape, torch.bfloat16, cache_dtype=cache_dtype))
    plan = hopper_attention(paged).plan(paged.packed)
    found = [torch.empty_like(paged.query) for _ in range(50)]

    def run() -> None:
        for place in found:
            plan.run(paged.query, paged.cache, 0.088, place)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    first = found[0].clone()
    for place in found:
        place.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(place, first) for place in found)
