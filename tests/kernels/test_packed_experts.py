"""Experts in MXFP4 beside their definition: in the interpreter on small shapes, on a GPU on those of gpt-oss-120b."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import mxfp4_tiles, reference, torch_experts, triton_biased_experts
from pd_kernels.backends import TORCH
from pd_kernels.mxfp4_tiles import (
    KEPT,
    LINES,
    PIECES,
    ROTATIONS,
    SHARES,
    STEP,
    USED,
    Mxfp4Tiles,
    fits,
    in_order,
    in_tiles,
)
from pd_kernels.torch_biased_experts import TorchBiasedMix
from pd_kernels.triton_biased_experts import SortedMix, make_biased_mix
from pd_kernels.triton_mxfp4_experts import PlainProduct
from pd_kernels.triton_pairs import SortedRows
from pd_kernels.values import ExpertPart, HalfNormed, Routing
from pd_kernels.weight_forms import MXFP4, PackedWeight
from tests.kernels.compiler import compile_by
from tests.kernels.packed_experts import random_experts, random_packed

if TYPE_CHECKING:
    from pathlib import Path

    from pd_kernels.biased_experts import BiasedExperts, ExpertsWeight

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
ALL_CODES = torch.arange(16, dtype=torch.uint8) * 17  # each of the 16 codes, twice a byte

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def step(num_tokens: int, num_experts: int, num_chosen: int, hidden: int, dtype: torch.dtype) -> Step:
    """Tokens, scores and the choice."""
    random = torch.Generator().manual_seed(num_tokens)
    x, router = (torch.randn(count, hidden, generator=random) for count in (num_tokens, num_experts))
    scores, chosen = torch_experts.route(x, router, None, Routing(num_chosen, True))
    return x.to(DEVICE, dtype), scores.to(DEVICE), chosen.to(DEVICE)


def packed(weight: ExpertsWeight, first: int = 0, last: int | None = None) -> PackedWeight:
    """The weight of some experts."""
    assert isinstance(weight, PackedWeight)
    return PackedWeight(MXFP4, weight.blocks[first:last].contiguous(), weight.scales[first:last].contiguous())


def some(weights: BiasedExperts, first: int, last: int) -> BiasedExperts:
    """The experts of a rank."""
    biases = weights.gate_up_bias[first:last], weights.down_bias[first:last]
    both = packed(weights.gate_up, first, last), packed(weights.down, first, last)
    return replace(weights, gate_up=both[0], gate_up_bias=biases[0], down=both[1], down_bias=biases[1])


def plain(weights: BiasedExperts, part: ExpertPart | None = None) -> SortedMix:
    """The products for all GPUs, also on a Hopper GPU."""
    gate_up = PlainProduct(packed(weights.gate_up), weights.gate_up_bias)
    down = PlainProduct(packed(weights.down), weights.down_bias)
    num_experts, hidden, _ = weights.down.shape
    return SortedMix(gate_up, down, (num_experts, hidden), (weights.limit, weights.alpha), part)


def whole(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Few tokens come in parts, which the norm adds."""
    return found if found.dim() == 2 else found.sum(0).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("num_tokens", "hidden", "size"), [(1, 96, 64), (5, 64, 160), (18, 32, 96)])
def test_the_plain_products_equal_the_definition(num_tokens: int, hidden: int, size: int) -> None:
    weights = random_experts(4, hidden, size, torch.float32, DEVICE)
    x, scores, chosen = step(num_tokens, 4, 2, hidden, torch.float32)
    for choice in (chosen, torch.zeros_like(chosen) + torch.tensor([3, 1], device=DEVICE)):  # all to few experts
        found = plain(weights)(x, scores, choice)
        assert error(found, reference.biased_experts(x, scores, choice, weights)) < 2e-5


def test_each_rank_adds_what_its_experts_compute() -> None:
    weights, total = random_experts(5, 64, 32, torch.float32, DEVICE), torch.zeros(9, 64, device=DEVICE)
    x, scores, chosen = step(9, 5, 3, 64, torch.float32)
    for first, last in ((0, 2), (2, 5)):
        total += plain(some(weights, first, last), ExpertPart(first, 5))(x, scores, chosen)
    assert error(total, reference.biased_experts(x, scores, chosen, weights)) < 2e-5


def test_rows_are_divided_by_their_root_mean_square_before_the_products() -> None:
    weights = random_experts(3, 64, 32, torch.float32, DEVICE)
    x, scores, chosen = step(4, 3, 2, 64, torch.float32)
    half = HalfNormed(x, x.pow(2).view(4, 2, 32).sum(-1).T.contiguous(), 1e-6)
    expected = reference.biased_experts(half.normed(), scores, chosen, weights)
    assert error(plain(weights)(half, scores, chosen), expected) < 2e-5


def test_all_codes_and_exponents_of_the_plain_products() -> None:
    """Exact, subnormal results too; NaN stays NaN."""
    scales = torch.tensor([*range(253), 255], dtype=torch.uint8)  # 6 * 2 ** 126 passes the greatest float32
    weight = PackedWeight(MXFP4, ALL_CODES.repeat(1, 254, 1, 1).to(DEVICE), scales.view(1, 254, 1).to(DEVICE))
    product, pairs = PlainProduct(weight, torch.zeros(1, 254, device=DEVICE)), torch.arange(32, device=DEVICE).int()
    tiles = torch.tensor([[0, 0], [0, 16], [16, 32]], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(32, 254, device=DEVICE)
    rows = SortedRows(torch.eye(32, device=DEVICE), pairs, tiles)
    product.multiply(rows, out, torch.ones(32, 1, device=DEVICE), 16, None)
    expected = weight.expert(0, torch.float32).T
    assert torch.equal(out[:, :253], expected[:, :253])
    assert out[:, 253].isnan().all()


def test_no_tokens() -> None:
    weights = random_experts(2, 32, 32, torch.float32, DEVICE)
    x, scores, chosen = step(0, 2, 2, 32, torch.float32)
    assert plain(weights)(x, scores, chosen).shape == (0, 32)


def test_what_is_not_in_mxfp4_is_left_to_torch() -> None:
    weights = random_experts(2, 32, 32, torch.float32, DEVICE)
    wide = replace(weights, gate_up=torch.zeros(2, 64, 32, device=DEVICE), down=torch.zeros(2, 32, 32, device=DEVICE))
    assert isinstance(make_biased_mix(wide, None), TorchBiasedMix)
    assert isinstance(make_biased_mix(weights, None), SortedMix)


def as_threads_read(tiles: Mxfp4Tiles) -> torch.Tensor:
    """What the kernel for Hopper GPUs has in registers: numbers [tiles, pieces, outputs, inputs], float64."""
    row, mask = torch.arange(8), 0xFFFFFFFF
    units = tiles.values.view(-1, 8, 8, 16)[:, row[:, None], row[:, None] ^ row]  # as the accelerator swizzles
    words = units.reshape(-1, PIECES, SHARES, 4, 8, 4, 2, 8).view(torch.int32).long() & mask
    first, second = words[..., 0], words[..., 1]
    both = (first & KEPT) | (second & ~KEPT)
    pairs = [
        (word << rotation | word >> (32 - rotation)) & USED
        for word, rotations in zip((first, second, both), ROTATIONS, strict=True)
        for rotation in rotations
    ]
    halves = torch.stack([torch.stack((pair & 0xFFFF, pair >> 16), -1) for pair in pairs], -2)
    numbers = (halves << 16).int().view(torch.float32).double() * 2.0**126
    numbers = numbers.view(-1, PIECES, SHARES, 4, 8, 4, 2, 2, 2, 2, 2)  # warps, lanes (2), rows, groups, places (3)
    exponents = tiles.scales.view(torch.uint8).view(-1, PIECES * SHARES, 8, 16)
    swizzled = exponents[:, row[:, None], row[:, None] ^ row]  # by one copy; the last row is the first of another one
    exponents = torch.cat((swizzled, exponents[:, 8:]), 1).reshape(-1, PIECES, SHARES, 4, 8, 1, 2, 2, 1, 1, 1)
    numbers = numbers * torch.exp2(exponents.double() - 253)
    return numbers.permute(0, 1, 3, 6, 4, 2, 7, 8, 9, 5, 10).reshape(-1, PIECES * 64, STEP)


@pytest.mark.parametrize("is_gated", [False, True])
def test_each_number_is_where_its_thread_finds_it(is_gated: bool) -> None:
    """With sizes that fill no tile: what is after them is 0."""
    outputs, inputs = 208, 224
    weight = random_packed(2, outputs, inputs, seed=3, scales=(0, 129))
    found = as_threads_read(in_tiles(weight, is_gated=is_gated)).view(2, -1, 2, LINES, STEP)
    found = found.transpose(2, 3).reshape(2, -1, 2 * STEP)
    numbers, order = weight.form.take(weight.blocks, weight.scales, torch.float64), torch.arange(outputs)
    if is_gated:
        order = order.view(-1, 8, 2).transpose(1, 2).flatten()
    assert torch.equal(found[:, :outputs, :inputs], numbers[:, order])
    assert not found[:, outputs:].any()
    assert not found[..., inputs:].any()
    bias = torch.randn(2, outputs)
    assert torch.equal(in_order(bias, is_gated=is_gated)[:, :outputs], bias[:, order])


class NewStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the sizes in bytes of all memory that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.sizes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.slow_cases
@pytest.mark.parametrize("at_once", [1, 5, 24])
@pytest.mark.parametrize(("outputs", "inputs", "is_gated"), [(208, 160, True), (192, 192, False), (32, 416, True)])
def test_a_weight_with_room_is_put_into_tiles_in_place(
    outputs: int, inputs: int, is_gated: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tiles as those in new memory, of experts that are packed in several parts."""
    shape = 24, outputs, inputs
    weight, roomy = random_packed(*shape, seed=3), PackedWeight.empty(MXFP4, shape, torch.device("cpu"), has_room=True)
    assert roomy.room is not None
    assert roomy.blocks.shape == weight.blocks.shape
    assert roomy.scales.shape == weight.scales.shape
    assert [part.data_ptr() for part in roomy.room] == [roomy.blocks.data_ptr(), roomy.scales.data_ptr()]
    expected, before = in_tiles(weight, is_gated=is_gated), weight.blocks.clone()
    roomy.blocks.copy_(weight.blocks)
    roomy.scales.copy_(weight.scales)
    monkeypatch.setattr(mxfp4_tiles, "_NUMBERS", at_once * outputs * inputs)
    with NewStorages() as new:
        found = in_tiles(roomy, is_gated=is_gated)
    for own, tiles, other in zip(roomy.room, found, expected, strict=True):
        assert torch.equal(tiles, other)
        assert tiles.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        assert tiles.untyped_storage().nbytes() == tiles.nbytes, "the room has the size of the tiles"
    assert new.sizes
    assert at_once > 1 or max(new.sizes) < roomy.room[0].nbytes / 2
    assert torch.equal(weight.blocks, before), "a weight without room is left as it was"


@pytest.mark.parametrize(
    ("dtype", "device", "has_room"),
    [(torch.bfloat16, "cuda", True), (torch.float32, "cuda", False), (torch.bfloat16, "cpu", False)],
)
def test_only_weights_that_become_tiles_have_room(
    dtype: torch.dtype, device: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers = {torch.device("cuda"): PlainProduct}
    monkeypatch.setattr(triton_biased_experts, "_for_hopper", makers.get)
    assert triton_biased_experts.needs_room(MXFP4, dtype, torch.device(device)) is has_room
    assert not TORCH.needs_room(MXFP4, dtype, torch.device(device))
    assert PackedWeight.empty(MXFP4, (2, 32, 64), torch.device("cpu"), has_room=False).room is None


@pytest.mark.parametrize(
    ("dtype", "scale", "reason"),
    [(torch.float32, 120, "the model is in torch.float32, not bfloat16"), (torch.bfloat16, 129, "a scale is above 2")],
)
def test_why_experts_are_slow_is_logged_once_and_before_a_weight_is_touched(
    dtype: torch.dtype, scale: int, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(weight: PackedWeight, bias: torch.Tensor, is_gated: bool) -> PlainProduct:
        raise AssertionError("put into tiles")

    monkeypatch.setattr(triton_biased_experts, "_for_hopper", lambda device: make)
    triton_biased_experts._warn_slow.cache_clear()
    weights = random_experts(2, 32, 32, dtype, torch.device("cpu"))
    packed(weights.down).scales[1, 3] = scale
    for _layer in range(3):
        assert isinstance(make_biased_mix(weights, None), SortedMix)
    assert [record.getMessage() for record in caplog.records] == [f"slow MXFP4 experts: {reason}"]


def test_a_scale_without_a_factor_is_not_put_into_tiles() -> None:
    weight = random_packed(1, 16, 32, seed=0, scales=(128, 129))
    assert fits(weight)
    weight.scales[0, 3] = 129
    assert not fits(weight)


def test_the_rows_of_tiles_have_a_ring_that_fits_a_multiprocessor() -> None:
    pytest.importorskip("triton.experimental.gluon", reason="these products need Triton's Gluon")
    from pd_kernels.gluon_mxfp4_experts import TiledProduct
    from pd_kernels.gluon_mxfp4_ring import STAGES

    product = TiledProduct(Mxfp4Tiles(torch.empty(0), torch.empty(0)), torch.zeros(1, LINES), 2880, LINES)
    found = [product.tile_rows(count, 4, experts) for experts in (32, 128) for count in range(1, 9000)]
    assert found[:1] == [8]
    assert set(found) == set(STAGES)
    assert max(product.tile_rows(64, 4, experts) for experts in range(4, 40)) == 64, "parts are moved in float32"
    stage = {rows: LINES * STEP // 2 + 2048 + rows * STEP * 2 for rows in STAGES}
    # Sums of three groups on their way to memory: float32 of few tokens, some bfloat16 at a time of many
    sums = {rows: 3 * (64 * rows * 4 if rows <= 64 else 2052) for rows in STAGES}
    assert all(STAGES[rows] * (stage[rows] + 16) + sums[rows] <= 227 * 1024 for rows in STAGES)
    assert product.num_parts(1) == 2
    assert product.num_parts(10000) == 1


def real(dtype: torch.dtype = torch.bfloat16) -> BiasedExperts:
    return random_experts(128, 2880, 2880, dtype, DEVICE)


@pytest.mark.gpu
@on_hopper
def test_all_codes_and_exponents_on_a_hopper_gpu() -> None:
    """Each code with each scale from 0 to 128, in few and in many rows: the numbers of bfloat16, subnormal ones too."""
    from pd_kernels.gluon_mxfp4_experts import TiledProduct
    from pd_kernels.gluon_mxfp4_ring import STAGES

    weight = random_packed(1, 192, 129 * 32, seed=0)
    weight.scales[:] = torch.arange(129, dtype=torch.uint8)
    weight.blocks[:, :16] = ALL_CODES
    weight = PackedWeight(MXFP4, weight.blocks.to(DEVICE), weight.scales.to(DEVICE))
    product = TiledProduct.of(weight, torch.zeros(1, 192, dtype=torch.bfloat16, device=DEVICE), False)
    expected, count = weight.expert(0, torch.bfloat16).T, 129 * 32
    rows, pairs = torch.eye(count, dtype=torch.bfloat16, device=DEVICE), torch.arange(count, device=DEVICE).int()
    for size in STAGES:
        first = torch.arange(0, count, size, device=DEVICE).int()
        tiles = torch.stack((torch.zeros_like(first), first, (first + size).clamp(max=count)))
        out = torch.full((count, 192), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        product.multiply(SortedRows(rows, pairs, tiles), out, torch.ones(count, 1, device=DEVICE), size, None)
        assert torch.equal(out, expected)


@pytest.mark.gpu
@on_hopper
def test_experts_of_gpt_oss_120b_on_a_hopper_gpu() -> None:
    """As defined, equal in replays of a graph, and of permuted tokens; other rows are not touched."""
    weights = real()
    wide = replace(weights, gate_up_bias=weights.gate_up_bias.float(), down_bias=weights.down_bias.float())
    mix = make_biased_mix(weights, None)
    for num_tokens in (1, 3, 8, 40, 128, 300, 700, 2048, 6000):
        x, scores, chosen = step(num_tokens, 128, 4, 2880, torch.bfloat16)
        order = torch.randperm(num_tokens, device=DEVICE)
        for choice in (chosen, torch.zeros_like(chosen) + torch.arange(4, device=DEVICE)):
            found = whole(mix(x, scores, choice), x.dtype)
            assert error(found, TorchBiasedMix(wide, None)(x.float(), scores, choice)) < 5e-3
            assert torch.equal(whole(mix(x[order], scores[order], choice[order]), x.dtype), found[order])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = mix(x, scores, choice)
        for _ in range(20):
            graph.replay()
            assert torch.equal(whole(again, x.dtype), found)


@pytest.mark.gpu
@on_hopper
def test_ranks_and_half_normed_rows_on_a_hopper_gpu() -> None:
    weights = random_experts(8, 2880, 192, torch.bfloat16, DEVICE)
    x, scores, chosen = step(20, 8, 4, 2880, torch.bfloat16)
    half = HalfNormed(x, x.float().pow(2).sum(-1)[None], 1e-6)
    found = whole(make_biased_mix(weights, None)(half, scores, chosen), x.dtype)
    assert error(found, TorchBiasedMix(weights, None)(half, scores, chosen)) < 1e-2
    total = torch.zeros_like(x)
    for first, last in ((0, 3), (3, 8)):
        total += make_biased_mix(some(weights, first, last), ExpertPart(first, 8))(x, scores, chosen)
    assert error(total, TorchBiasedMix(weights, None)(x, scores, chosen)) < 1e-2


@pytest.mark.parametrize("rows", ["8", pytest.param("128", marks=pytest.mark.slow)])
def test_they_compile_for_a_hopper_gpu_and_keep_weights_and_sums_in_registers(rows: str, tmp_path: Path) -> None:
    """No weight moves between threads after its load: it is unpacked where the matrix unit reads it."""
    pytest.importorskip("triton.experimental.gluon", reason="these products need Triton's Gluon")
    done = compile_by("tests.kernels.hopper_packed_experts", tmp_path, rows)
    assert done.output.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2
    assert "serialized" not in done.output, "the matrix unit works while a group unpacks"
    assert all(int(size) <= 227 * 1024 for size in re.findall(r"(\d+) bytes of shared memory", done.output))
    groups, both = 3, 2  # of warps; weights of gates and ups, and of downs
    assert done.output.count("mul.rn.bf16x2") == groups * both * SHARES * 16
    product = r"mma.sync.aligned.m16n8k16" if rows == "8" else r"wgmma.mma_async.sync.aligned.m64n128k16"
    assert done.output.count(product) == groups * both * SHARES * 4
    assert re.search(r"ld\.shared\.v4\.b32", done.output)
