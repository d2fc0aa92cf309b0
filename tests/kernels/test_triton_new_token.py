"""Decode attention that takes new tokens from the QKV product, against two launches of the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.fp8_cache import FP8
from pd_kernels.triton_rotary import norm_rope_write
from pd_kernels.values import HeadNorms, NewTokens, StepOnDevice, StepSize
from tests.kernels.paged import Paged, Shape, layer_of, make_paged, sunk
from tests.kernels.test_triton_attention import (
    DEVICE,
    SMALL_DECODE,
    TOLERANCE,
    attention_of,
    on_device,
)

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = DEVICE.type == "cuda"
MANY = 100  # (sequence, KV head) pairs that programs of their own share
LENS = (1, 2, 16, 17, 48)  # tiles have 16 tokens
SHAPES = {
    "mha-64": Shape(2, 2, 64, 16, (1,) * 5, LENS, 5),
    "gqa-128": Shape(8, 2, 128, 64, (1,) * 5, LENS, 5),
    "mqa-96": Shape(8, 1, 96, 32, (1,) * 5, LENS, 5),
    "gqa-80": Shape(6, 2, 80, 16, (1,) * 4, (1, 17, 32, 129), 4),
    "wide-64": Shape(20, 1, 64, 16, (1,) * 4, (1, 17, 32, 129), 4),
    "one-long": Shape(4, 1, 64, 16, (1,), (257,), 1),
    "many": Shape(4, 2, 64, 16, (1,) * 5, (1, 49, 2, 17, 1), 5),
    "gqa-256": Shape(16, 2, 256, 64, (1,) * 2, (17, 65), 2),
}
REAL = {
    "8b": Shape(32, 8, 128, 64, (1,) * 40, tuple(range(1, 3000, 75)), 40),
    "30b-a3b": Shape(32, 4, 128, 64, (1,) * 3, (1025, 1, 4000), 3),
    "one": Shape(32, 4, 128, 64, (1,), (1024,), 1),
    "one-8b": Shape(32, 8, 128, 64, (1,), (15_001,), 1),
    "two": Shape(32, 4, 128, 64, (1,) * 2, (64, 3000), 2),
    "block-128": Shape(28, 4, 80, 128, (1,) * 3, (1025, 4000, 128), 3),
    "35b": Shape(16, 2, 256, 64, (1,) * 3, (1025, 1, 4000), 3),
    "27b": Shape(24, 4, 256, 64, (1,) * 2, (1025, 4000), 2),
    "many": Shape(4, 1, 256, 16, (1,) * 300, tuple(range(1, 301)), 300),
}


@dataclass
class Problem:
    """New tokens of a step of decodes, and the cache that lacks them."""

    paged: Paged
    heads: torch.Tensor
    new: NewTokens
    cache: torch.Tensor  # all layers; `paged` has the views of one

    def run(self, window: int = 0, **tiling: int) -> torch.Tensor | None:
        attention = attention_of(self.paged, window, None if GPU and not tiling else SMALL_DECODE)
        attention = replace(attention, decode=replace(attention.decode, **{"rotates_from": 1} | tiling))
        plan = attention.plan(self.paged.packed)
        paged, scale = self.paged, self.heads.shape[2] ** -0.5
        return plan.run_rotating(self.heads, self.new, paged.cache, scale, paged.sinks)

    def expected(self, window: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Of two launches: the result, and the whole cache after them."""
        cache, new, packed = self.cache.clone(), self.new, self.paged.packed
        norms = new.norms and HeadNorms(new.norms.query.double(), new.norms.key.double(), new.norms.eps)
        real = packed.seq_lens > 0
        wide = cache.double()
        query = reference.norm_rope_write(
            self.heads[real].double(),
            NewTokens(norms, new.cos[real].double(), new.sin[real].double(), new.slot_mapping[real]),
            layer_of(wide, 1),
        )
        cache.copy_(wide.clamp(-448, 448) if cache.dtype is FP8 else wide)
        found = torch.zeros_like(self.heads[:, : query.shape[1]], dtype=torch.float64)
        found[real] = reference.decode_attention(
            query, layer_of(cache.double(), 1), packed.block_tables[real], packed.seq_lens[real],
            query.shape[2] ** -0.5, window, self.paged.sinks,
        )  # fmt: skip
        return found, cache


def make(
    shape: Shape, dtype: torch.dtype = torch.float32, *, rotary: int = 0, normed: bool = True, fp8: bool = False
) -> Problem:
    paged = on_device(make_paged(shape, dtype, cache_dtype=FP8 if fp8 else None))
    count, size, rotary = len(paged.query), shape.head_dim, rotary or shape.head_dim
    generator = torch.Generator().manual_seed(5)

    def random(*lengths: int) -> torch.Tensor:
        return torch.randn(lengths, generator=generator, dtype=torch.float64)

    heads = random(count, shape.num_heads + 2 * shape.num_kv_heads, size)
    if fp8:  # numbers that e4m3 has: the interpreter rounds others otherwise
        heads = heads.to(FP8).double().masked_fill(heads.abs() < 2**-5, 0.0)
    angles = random(count, rotary // 2)
    if fp8:
        angles = angles.zero_()
    # Of about 0.5: scores of many units would turn the rounding of short dtypes into differences of results
    query_norm, key_norm = (0.5 + random(2, size) / 4).to(DEVICE, dtype)
    norms = HeadNorms(query_norm, key_norm, 1e-6) if normed else None
    last = torch.tensor(shape.seq_lens) - 1
    blocks = paged.packed.block_tables.cpu()[torch.arange(count), last // shape.block_size].long()
    slots = (blocks * shape.block_size + last % shape.block_size).to(DEVICE)
    new = NewTokens(norms, angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype), slots)
    cache = paged.key_cache._base
    assert cache is not None
    for view in (paged.key_cache, paged.value_cache):  # what is read of a new token's place is noticed
        view[blocks.to(DEVICE), :, (last % shape.block_size).to(DEVICE)] = torch.nan
    return Problem(paged, heads.to(DEVICE, dtype), new, cache)


def check(problem: Problem, window: int = 0, **tiling: int) -> None:
    result, cache = problem.expected(window)
    found = problem.run(window, **tiling)
    assert found is not None
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), result, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(problem.cache.double(), cache.double(), atol=tolerance, rtol=tolerance, equal_nan=True)


def slow_case(*values: object) -> ParameterSet:
    """A shape that another case has with the other kind of sharing."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "window", "normed", "rotary", "splits"),
    [
        ("mha-64", 0, True, 64, 0), ("gqa-128", 1, True, 128, 0), ("mqa-96", 0, False, 94, 0),
        ("gqa-80", 16, True, 20, 0), ("wide-64", 0, True, 32, 0), slow_case("one-long", 100, True, 64, 0),
        ("mha-64", 0, True, 64, 2), ("gqa-128", 1, True, 128, 4), ("mqa-96", 0, False, 94, 8),
        ("gqa-80", 16, True, 20, 4), ("one-long", 100, True, 64, 16), slow_case("gqa-256", 0, True, 64, 0),
        ("gqa-256", 0, True, 64, 16),
    ],
)  # fmt: skip
def test_one_launch_equals_two(name: str, window: int, normed: bool, rotary: int, splits: int) -> None:
    """By equal shares of all, or by so many programs for each (sequence, KV head)."""
    check(make(SHAPES[name], rotary=rotary, normed=normed), window, splits=splits, few_pairs=MANY * bool(splits))


@pytest.mark.parametrize(
    ("name", "window", "splits"),
    [("gqa-128", 0, 0), ("gqa-80", 16, 0), ("mqa-96", 0, 4), ("one-long", 100, 16), ("many", 0, 2)],
)
def test_sinks_stand_beside_the_new_token(name: str, window: int, splits: int) -> None:
    problem = make(SHAPES[name])
    problem.paged = sunk(problem.paged)
    check(problem, window, splits=splits, few_pairs=MANY * bool(splits))


@pytest.mark.slow_cases
@pytest.mark.parametrize("few_pairs", [0, MANY])
@pytest.mark.parametrize("name", ["mqa-96", "gqa-80"])
def test_an_fp8_cache_gets_the_same_numbers(name: str, few_pairs: int) -> None:
    problem = make(SHAPES[name], normed=False, fp8=True)
    problem.heads[1, -1, :2] = torch.tensor([500.0, -6e4], device=DEVICE)  # a value
    check(problem, window=20 if name == "gqa-80" else 0, few_pairs=few_pairs, splits=4)


@pytest.mark.parametrize(("setup", "least"), [(0, 1), (1, 5), (3, 40)])
def test_any_shares_equal_two_launches(setup: int, least: int) -> None:
    """Of one tile, of parts of pairs, and of many pairs."""
    check(make(SHAPES["many"]), setup=setup, least=least)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if GPU else [])], ids=str)
def test_short_dtypes(dtype: torch.dtype) -> None:
    check(make(SHAPES["gqa-80"], dtype))


def test_rounding_is_that_of_two_launches() -> None:
    """Of keys in float16, with weights of norms in float32. Sums of squares in another order move a few of them."""
    problem = make(SHAPES["wide-64"], torch.float16)
    weight = torch.linspace(0.5, 2.0, 64, device=DEVICE)
    new = problem.new._replace(norms=HeadNorms(weight, weight, 1e-6))
    twin = problem.cache.clone()
    views = layer_of(twin, 1)
    norm_rope_write(problem.heads, new, views)
    replace(problem, new=new).run()
    blocks, offsets = new.slot_mapping // 16, new.slot_mapping % 16
    found, expected = (keys[blocks, 0, offsets] for keys in (problem.paged.key_cache, views[0]))
    assert (found != expected).double().mean() < 0.02


@pytest.mark.parametrize("few_pairs", [0, MANY])
def test_padding_is_not_stored_and_gives_zeros(few_pairs: int) -> None:
    problem = make(SHAPES["many"])
    padding = torch.tensor([0, 2, 4])
    problem.paged.packed.seq_lens[padding] = 0
    problem.new.slot_mapping[padding] = -1
    check(problem, few_pairs=few_pairs, splits=4)


def test_layers_count_arrivals_on() -> None:
    """Also beyond the largest number of 32 bits."""
    problem = make(replace(SHAPES["gqa-80"], query_lens=(1, 1), seq_lens=(17, 70), num_decodes=2))
    plan = attention_of(problem.paged, 0, replace(SMALL_DECODE, splits=4, few_pairs=MANY)).plan(problem.paged.packed)
    assert plan.decode is not None
    assert plan.decode.split_arrived is not None
    plan.decode.split_arrived.fill_(2**31 - 4)
    result, _ = problem.expected()
    for layer in range(3):
        found = plan.run_rotating(problem.heads, problem.new, problem.paged.cache, 80**-0.5)
        assert found is not None
        assert (found.double() - result).abs().max() < TOLERANCE[torch.float32], layer
    assert set(plan.decode.split_arrived.flatten().tolist()) == {-(2**31) + 8}


def test_a_negative_slot_is_nowhere() -> None:
    """The token itself is attended to."""
    problem = make(SHAPES["gqa-80"])
    result, cache = problem.expected()
    place = int(problem.new.slot_mapping[2])
    block, offset = place // 16, place % 16
    cache[block, :, 1, :, offset] = problem.cache[block, :, 1, :, offset]
    problem.new.slot_mapping[2] = -1
    found = problem.run()
    assert found is not None
    assert (found.double() - result).abs().max() < TOLERANCE[torch.float32]
    torch.testing.assert_close(problem.cache, cache, equal_nan=True)


def test_the_rule_leaves_steps_to_two_launches() -> None:
    """Those of few sequences, but for the fewest, and those with heads that are normed together: nothing is written."""
    problem = make(SHAPES["gqa-80"])
    before = problem.cache.clone()
    assert problem.run(rotates_from=5) is None
    together = HeadNorms(torch.ones(6, 80, device=DEVICE), torch.ones(2, 80, device=DEVICE), 1e-6)
    assert replace(problem, new=problem.new._replace(norms=together)).run() is None
    assert torch.equal(problem.cache.nan_to_num(7.0), before.nan_to_num(7.0))
    assert problem.run(rotates_from=4) is not None
    assert problem.run(rotates_from=5, few_pairs=8, splits=2) is not None


def test_steps_with_prompts_are_left_to_two_launches() -> None:
    shape = replace(SHAPES["gqa-80"], query_lens=(1, 1, 1, 5), num_decodes=3)
    paged = on_device(make_paged(shape, torch.float32))
    plan = attention_of(paged, 0, SMALL_DECODE).plan(paged.packed)
    problem = make(SHAPES["gqa-80"])
    assert plan.run_rotating(problem.heads, problem.new, paged.cache, 1.0) is None


def test_captured_steps_of_decodes_take_new_tokens_too() -> None:
    problem = make(SHAPES["gqa-80"])
    paged, packed = problem.paged, problem.paged.packed
    replayable = attention_of(paged, 0, replace(SMALL_DECODE, rotates_from=1)).captured(
        StepSize(4, 4, 0, has_decodes=True)
    )
    assert replayable is not None
    no_tiles = torch.empty(2, 0, dtype=torch.int32, device=DEVICE)
    lens, starts, tables = packed.seq_lens, packed.query_starts, packed.block_tables
    plan = replayable.plan(StepOnDevice(lens, lens, starts, tables, no_tiles))
    found = plan.run_rotating(problem.heads, problem.new, paged.cache, 80**-0.5)
    assert found is not None
    torch.testing.assert_close(found.double(), problem.expected()[0], atol=2e-5, rtol=2e-5)


def test_other_shapes_are_refused() -> None:
    problem = make(SHAPES["gqa-80"])
    for wrong, message in (
        (replace(problem, heads=problem.heads[:, :4]), "heads must be"),
        (replace(problem, heads=problem.heads.half()), "into torch.float32"),
        (replace(problem, new=problem.new._replace(cos=problem.new.cos[:, ::2])), "cos and sin"),
        (replace(problem, new=problem.new._replace(slot_mapping=problem.new.slot_mapping[:2])), "at 2 slots"),
        (first_tokens(problem, 3), "3 tokens in a step of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.run()


def first_tokens(problem: Problem, count: int) -> Problem:
    """The problem with the plan of all sequences, and new tokens of the first ones."""
    new = problem.new
    new = NewTokens(new.norms, new.cos[:count], new.sin[:count], new.slot_mapping[:count])
    return replace(problem, heads=problem.heads[:count], new=new)


def test_heads_that_do_not_rotate_are_left_to_two_launches() -> None:
    problem = make(SHAPES["gqa-80"])
    still = problem.new._replace(cos=problem.new.cos[:, :0].contiguous(), sin=problem.new.sin[:, :0].contiguous())
    assert replace(problem, new=still).run() is None


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("window", "fp8"), [(0, False), (300, False), (0, True)])
@pytest.mark.parametrize("name", list(REAL))
def test_real_shapes_equal_two_launches(name: str, window: int, fp8: bool, dtype: torch.dtype) -> None:
    check(make(REAL[name], dtype, normed=not fp8, fp8=fp8), window)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["8b", "two"])
def test_a_captured_launch_follows_new_lengths(name: str) -> None:
    problem = make(REAL[name], torch.bfloat16)
    problem.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = problem.run()
    other = make(replace(REAL[name], seq_lens=tuple(reversed(REAL[name].seq_lens))), torch.bfloat16)
    assert found is not None
    problem.cache.copy_(other.cache)
    problem.paged.packed.seq_lens.copy_(other.paged.packed.seq_lens)
    problem.paged.packed.block_tables.copy_(other.paged.packed.block_tables)
    problem.new.slot_mapping.copy_(other.new.slot_mapping)
    result, cache = problem.expected()
    graph.replay()
    assert (found.double() - result).abs().max() < TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(problem.cache, cache, atol=2e-2, rtol=2e-2, equal_nan=True)
