"""Paged attention against a float64 oracle that is written without paging."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels import reference
from pd_kernels.fp8_cache import FP8
from pd_kernels.torch_attention import MERGE_BYTES, TorchAttention, TorchAttentionPlan, bucket_rows
from pd_kernels.values import KeysValues
from tests.kernels.paged import Paged, Shape, attention_shape, make_paged, sunk

SHAPES = {
    "mha-64": Shape(4, 4, 64, 16, (1, 1, 1, 5, 33), (1, 16, 47, 5, 40), 3),
    "gqa-80": Shape(6, 2, 80, 16, (1, 1, 17), (129, 7, 17), 2),
    "mqa-96": Shape(5, 1, 96, 32, (1, 64, 64, 3), (33, 64, 64, 200), 1),
    "gqa-128": Shape(8, 4, 128, 128, (1, 1, 130, 1), (128, 129, 300, 77), 2),
    "only-decodes": Shape(8, 2, 64, 16, (1,) * 9, (1, 2, 15, 16, 17, 31, 33, 250, 600), 9),
    "only-prefill": Shape(4, 2, 64, 64, (300, 70), (300, 400), 0),
}
Change = Callable[[Paged], tuple[torch.Tensor, KeysValues]]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def plan_of(paged: Paged, window: int = 0) -> TorchAttentionPlan:
    return TorchAttention(attention_shape(paged, window)).plan(paged.packed)


def by_hand(paged: Paged, window: int) -> torch.Tensor:
    """One query token and one head at a time, in float64."""
    packed, scale = paged.packed, 1 / math.sqrt(paged.query.shape[2])
    _, num_kv_heads, block_size, _ = paged.key_cache.shape
    out = torch.zeros(paged.query.shape, dtype=torch.float64)
    row = 0
    for seq, (num_queries, length) in enumerate(zip(packed.host_query_lens, packed.host_seq_lens, strict=True)):
        table = packed.block_tables[seq].tolist()
        places = [(table[position // block_size], position % block_size) for position in range(length)]
        for position in range(length - num_queries, length):
            first = max(0, position - window + 1) if window else 0
            for head in range(paged.query.shape[1]):
                group = head * num_kv_heads // paged.query.shape[1]
                seen = places[first : position + 1]
                key = torch.stack([paged.key_cache[block, group, offset] for block, offset in seen]).double()
                value = torch.stack([paged.value_cache[block, group, offset] for block, offset in seen]).double()
                weights = (key @ paged.query[row, head].double() * scale).softmax(0)
                out[row, head] = weights @ value
            row += 1
    return out


@pytest.mark.slow_cases
@pytest.mark.parametrize("window", [0, 1, 20, 64])
@pytest.mark.parametrize("name", ["mha-64", "gqa-80", "mqa-96"])
def test_reference_equals_attention_by_hand(name: str, window: int) -> None:
    paged = make_paged(SHAPES[name])
    packed = paged.packed
    found = reference.prefill_attention(
        paged.query,
        paged.cache,
        packed.block_tables,
        packed.query_starts,
        packed.seq_lens,
        paged.query.shape[2] ** -0.5,
        window,
    )
    assert torch.allclose(found, by_hand(paged, window), atol=1e-12)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        # Each window with float32 and with one other type
        pytest.param(window, dtype, marks=[pytest.mark.slow] * (dtype is not torch.float32 and at != index))
        for at, window in enumerate((0, 20, 100))
        for index, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16, torch.float32))
    ],
    ids=str,
)
@pytest.mark.parametrize("name", list(SHAPES))
def test_torch_attention_equals_the_reference(name: str, window: int, dtype: torch.dtype) -> None:
    paged = make_paged(SHAPES[name], dtype)
    packed, scale = paged.packed, paged.query.shape[2] ** -0.5
    expected = reference.prefill_attention(
        paged.query.double(),
        paged.wide_cache,
        packed.block_tables,
        packed.query_starts,
        packed.seq_lens,
        scale,
        window,
    )
    plan = plan_of(paged, window)
    found = plan.run(paged.query, paged.cache, scale)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < TOLERANCE[dtype]
    place = torch.full_like(found, torch.nan)
    assert plan.run(paged.query, paged.cache, scale, place) is place
    assert torch.equal(place, found)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("name", list(SHAPES))
def test_torch_attention_has_sinks(name: str, window: int, dtype: torch.dtype) -> None:
    """Beside the reference, and that beside a result without sinks times sigmoid(log of the sum - sink)."""
    paged = sunk(make_paged(SHAPES[name], dtype))
    packed, scale, sinks = paged.packed, paged.query.shape[2] ** -0.5, paged.sinks
    assert sinks is not None
    given = packed.block_tables, packed.query_starts, packed.seq_lens, scale, window
    expected = reference.prefill_attention(paged.query.double(), paged.wide_cache, *given, sinks=sinks)
    found = plan_of(paged, window).run(paged.query, paged.cache, scale, sinks=sinks)
    assert (found.double() - expected).abs().max() < TOLERANCE[dtype]
    without = reference.prefill_attention(paged.query.double(), paged.wide_cache, *given)
    ones = paged.wide_cache._replace(values=torch.ones_like(paged.wide_cache.values))
    share = reference.prefill_attention(paged.query.double(), ones, *given, sinks=sinks)  # 1 - the sink's weight
    torch.testing.assert_close(expected, without * share, atol=1e-12, rtol=0)
    assert share.min() < 0.2 < 0.9 < share.max()


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("name", list(SHAPES))
def test_torch_attention_widens_an_fp8_cache(name: str, window: int, dtype: torch.dtype) -> None:
    """The oracle has the cache's numbers in the query's dtype, which has them all."""
    paged = make_paged(SHAPES[name], dtype, cache_dtype=FP8)
    wide = replace(paged, key_cache=widened(paged.key_cache, dtype), value_cache=widened(paged.value_cache, dtype))
    scale = paged.query.shape[2] ** -0.5
    found = plan_of(paged, window).run(paged.query, paged.cache, scale)
    expected = plan_of(wide, window).run(wide.query, wide.cache, scale)
    assert (found - expected).abs().max() < 1e-5


def widened(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One layer's view, still within a cache of three layers."""
    cache = torch.zeros(*view.shape[:2], 3, 2, *view.shape[2:], dtype=dtype)
    cache[:, :, 1, 0] = view.to(dtype)
    return cache[:, :, 1, 0]


def test_decode_attention_is_prefill_of_one_token() -> None:
    paged = make_paged(SHAPES["only-decodes"])
    packed, scale = paged.packed, paged.query.shape[2] ** -0.5
    found = reference.decode_attention(paged.query, paged.cache, packed.block_tables, packed.seq_lens, scale)
    assert torch.allclose(found, by_hand(paged, 0), atol=1e-12)


def test_other_sequences_blocks_do_not_matter() -> None:
    """Padding of a bucket reads the row's own blocks: NaN elsewhere in the cache stays elsewhere."""
    paged = make_paged(SHAPES["only-decodes"], torch.float32)
    scale = paged.query.shape[2] ** -0.5
    before = plan_of(paged).run(paged.query, paged.cache, scale)
    others = paged.packed.block_tables[8].long()  # and the tables' padding, its last entry
    paged.key_cache[others] = torch.nan
    paged.value_cache[others] = torch.nan
    after = plan_of(paged).run(paged.query, paged.cache, scale)
    assert torch.equal(before[:8], after[:8])
    assert after[8].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p.query.float(), p.cache), "query is torch.float32"),
        (lambda p: (p.query[:-1], p.cache), "query must be"),
        (lambda p: (p.query[:, :3], p.cache), "not a multiple"),
        (lambda p: (p.query, KeysValues(p.key_cache.contiguous(), p.value_cache)), "differ in dtype or stride"),
        (lambda p: (p.query, KeysValues(p.key_cache.contiguous(), p.value_cache.contiguous())), "not one of 3 layers"),
        (
            lambda p: (p.query, KeysValues(p.key_cache[:, :, ::2], p.value_cache[:, :, ::2])),
            "not a layer of a block-first cache",
        ),
    ],
)
def test_bad_arguments_are_refused(change: Change, message: str) -> None:
    paged = make_paged(SHAPES["gqa-80"])
    plan = plan_of(paged)
    with pytest.raises(ValueError, match=message):
        plan.run(*change(paged), 1.0)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=80),
    st.sampled_from([1 << 10, 1 << 13, 1 << 16, 1 << 20]),
)
@settings(max_examples=200, deadline=None)
def test_buckets_hold_every_row_once_and_pad_little(num_blocks: list[int], block_bytes: int) -> None:
    sizes = np.array(num_blocks)
    groups = bucket_rows(sizes, block_bytes)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(sizes)))
    for group in groups:
        longest, own = sizes[group].max(), sizes[group].sum()
        assert longest * len(group) <= 2 * own + MERGE_BYTES / block_bytes
