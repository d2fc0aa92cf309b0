"""Float8 experts of many rows: the path around their products; all of it on a Hopper GPU, else that they compile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="these products need Triton's Gluon")

from pd_kernels import gluon_experts, reference, torch_experts, torch_quantized
from pd_kernels.quantized import BLOCK, QuantizedRows, QuantizedWeight
from pd_kernels.triton_pairs import place_pairs
from pd_kernels.values import ExpertPart, Routing
from tests.kernels.compiler import compile_by
from tests.kernels.quantized_weights import random_quantized

if TYPE_CHECKING:
    from pathlib import Path

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, QuantizedWeight, QuantizedWeight]


def operands(num_tokens: int, num_experts: int, num_chosen: int, hidden: int, size: int) -> Operands:
    """Tokens, scores and the choice, gates and ups, downs."""
    random = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=random).to(DEVICE, torch.bfloat16)
    router = torch.randn(num_experts, hidden, generator=random).to(DEVICE)
    scores, chosen = torch_experts.route(x, router, None, Routing(num_chosen, True))
    gate_up = random_quantized(num_experts, 2 * size, hidden, is_blocks=True)
    down = random_quantized(num_experts, hidden, size, is_blocks=True, seed=1)
    return x, scores, chosen, gate_up.to(DEVICE), down.to(DEVICE)


def down_by_torch(rows: QuantizedRows, weight: QuantizedWeight, experts: torch.Tensor) -> torch.Tensor:
    """The definition of `down_experts`. Rows of no pair become NaN, which must not reach a token."""
    out = torch.full((len(rows.values), weight.shape[1]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for tile, expert in enumerate(experts.tolist()):
        if expert >= 0:
            of_tile = slice(tile * gluon_experts.ROWS, (tile + 1) * gluon_experts.ROWS)
            some = QuantizedRows(rows.values[of_tile], rows.scales[of_tile], BLOCK)
            out[of_tile] = torch_quantized.quantized_product(some, weight.expert(expert), torch.bfloat16)
    return out


def gated_by_torch(rows: QuantizedRows, weight: QuantizedWeight, experts: torch.Tensor) -> QuantizedRows:
    """The definition of `gated_experts`."""
    return torch_quantized.silu_and_mul_quantized(down_by_torch(rows, weight, experts), BLOCK)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_experts", [3, 128])
@pytest.mark.parametrize(("num_tokens", "num_chosen", "tile"), [(5, 3, 16), (20, 3, 4)])
def test_each_pair_has_its_own_row_in_a_tile_of_its_expert(
    num_tokens: int, num_chosen: int, tile: int, num_experts: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    for low in (0, num_experts - 1):
        chosen = torch.randint(low, num_experts, (num_tokens, num_chosen), generator=random)
        chosen[0, 0] = 0
        found = place_pairs(chosen.to(DEVICE), num_experts, tile, most=16)
        rows, experts, start = found.rows.tolist(), found.experts.tolist(), 0
        expected = dict[int, int]()
        for expert in range(num_experts):
            pairs = (chosen.flatten() == expert).nonzero().flatten().tolist()
            expected |= {pair: start * tile + place for place, pair in enumerate(pairs)}
            needed = -(-len(pairs) // tile)
            assert experts[start : start + needed] == [expert] * needed
            start += needed
        assert rows == [expected[pair] for pair in range(len(rows))]
        assert set(experts[start:]) <= {-1}


@pytest.mark.parametrize(("num_tokens", "hidden", "size"), [(1, 256, 128), (19, 512, 256)])
def test_the_path_around_the_products(num_tokens: int, hidden: int, size: int) -> None:
    """With the products of torch; a number between two values of float8 may be rounded to the other."""
    given = operands(num_tokens, 5, 2, hidden, size)
    found = gluon_experts.experts(*given, products=(gated_by_torch, down_by_torch))
    assert error(found, torch_experts.experts(*given)) < 1e-2


def test_the_path_around_the_products_leaves_out_other_ranks_experts() -> None:
    x, scores, chosen, gate_up, down = operands(19, 5, 2, 256, 128)
    total = torch.zeros_like(x)
    for first, last in ((0, 2), (2, 5)):
        weights = [QuantizedWeight(one.values[first:last], one.scales[first:last], True) for one in (gate_up, down)]
        given, part = (x, scores, chosen, weights[0], weights[1]), ExpertPart(first, 5)
        total += gluon_experts.experts(*given, part=part, products=(gated_by_torch, down_by_torch))
    assert error(total, torch_experts.experts(x, scores, chosen, gate_up, down)) < 1e-2


def test_nothing_is_proposed_for_a_cpu() -> None:
    *_, gate_up, down = operands(1, 2, 1, 256, 128)
    cpu = torch.device("cpu")
    assert gluon_experts.propose_experts(gate_up.to(cpu), down.to(cpu)) is None


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "size"),
    [(1, 3, 2, 256, 128), (70, 3, 2, 256, 384), (1000, 5, 2, 512, 256), (2048, 128, 8, 2048, 768)],
)
def test_experts_on_a_hopper_gpu(num_tokens: int, num_experts: int, num_chosen: int, hidden: int, size: int) -> None:
    """As defined, equal bit by bit for permuted tokens and for some of them, also if few experts have all pairs."""
    x, scores, chosen, *both = operands(num_tokens, num_experts, num_chosen, hidden, size)
    weights = both[0], both[1]
    assert gluon_experts.propose_experts(*weights) is not None
    order, some = torch.randperm(num_tokens, device=DEVICE), (num_tokens + 1) // 2
    for choice in (chosen, torch.zeros_like(chosen) + torch.arange(num_chosen, device=DEVICE)):
        found = gluon_experts.experts(x, scores, choice, *weights)
        assert error(found, torch_experts.experts(x, scores, choice, *weights)) < 2e-2
        assert torch.equal(gluon_experts.experts(x[order], scores[order], choice[order], *weights), found[order])
        assert torch.equal(gluon_experts.experts(x[:some], scores[:some], choice[:some], *weights), found[:some])


@pytest.mark.gpu
@on_hopper
def test_many_replays_are_bit_by_bit_the_same() -> None:
    """No warp reads a stage before it has arrived, or overwrites a tile that is still copied."""
    given = operands(1500, 128, 8, 2048, 768)
    first = gluon_experts.experts(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = gluon_experts.experts(*given)
    for _ in range(100):
        graph.replay()
        assert torch.equal(again, first)


@pytest.mark.gpu
@on_hopper
def test_the_products_equal_their_definitions() -> None:
    x, _, chosen, gate_up, down = operands(300, 4, 2, 512, 256)
    placed = place_pairs(chosen, 4, gluon_experts.ROWS)
    tokens = torch.zeros(len(placed.experts) * gluon_experts.ROWS, 512, dtype=x.dtype, device=DEVICE)
    tokens[placed.rows.long()] = x.repeat_interleave(2, 0)
    rows, used = torch_quantized.quantize(tokens, BLOCK), placed.rows.long()
    rows = QuantizedRows(rows.values, rows.scales.t().contiguous().t(), BLOCK)
    found = gluon_experts.gated_experts(rows, gate_up, placed.experts)
    expected = gated_by_torch(rows, gate_up, placed.experts)
    numbers, others = (reference.dequantize(quantized)[used] for quantized in (found, expected))
    assert error(numbers, others) < 2e-2
    product = gluon_experts.down_experts(found, down, placed.experts)[used]
    assert error(product, down_by_torch(found, down, placed.experts)[used]) < 5e-3


@pytest.mark.parametrize("product", ["gated", pytest.param("down", marks=pytest.mark.slow)])
def test_it_compiles_for_a_hopper_gpu_and_keeps_its_sums_in_registers(product: str, tmp_path: Path) -> None:
    """Each group waits for its product before it adds and multiplies on, and gives a stage back after both products."""
    done = compile_by("tests.kernels.hopper_gluon_experts", tmp_path, product)
    assert done.output.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1
    assert done.output.count("wgmma.mma_async.sync.aligned.m64n128k32") == 2 * 8  # groups, 256 outputs
    events = re.findall(
        r"(wgmma\.mma_async|wgmma\.wait_group|fma\.rn|bar\.sync|mbarrier\.arrive\.shared::cta|mbarrier\.try_wait)",
        done.output,
    )
    turns = " ".join(event for event, before in zip(events, ["", *events], strict=False) if event != before)
    waited = "wgmma.mma_async wgmma.wait_group"
    turn = f"{waited} fma.rn wgmma.wait_group {waited} bar.sync mbarrier.arrive.shared::cta fma.rn"
    assert turns.count(turn) == 2, turns
