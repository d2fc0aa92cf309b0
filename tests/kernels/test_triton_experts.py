"""Triton's mixtures of experts beside their definition: in the interpreter on small shapes, on a GPU on real ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference, torch_experts, triton_experts, triton_pairs, triton_quantize, triton_routing
from pd_kernels.expert_tiling import FEW, experts_tiling
from pd_kernels.values import ExpertPart, HalfNormed, Routing
from tests.kernels.quantized_weights import quantize_weight

if TYPE_CHECKING:
    from pd_kernels.backends import RouteTokens
    from pd_kernels.quantized import QuantizedRows, Weight

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}  # norm of the difference by that of the result
if GPU:  # the interpreter's bfloat16 products come out wrong (Triton 3.6)
    TOLERANCE[torch.bfloat16] = 1e-2
HALF = torch.bfloat16 if GPU else torch.float16
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
REAL = (128, 2048, 768)  # experts, hidden size, size: Qwen3-30B-A3B

Mixture = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # router, gates and ups, downs


def mixture(num_experts: int, hidden: int, size: int, dtype: torch.dtype) -> Mixture:
    random = torch.Generator(DEVICE).manual_seed(0)
    router = torch.randn(num_experts, hidden, generator=random, device=DEVICE) * hidden**-0.5
    gate_up = torch.randn(num_experts, 2 * size, hidden, generator=random, device=DEVICE) * hidden**-0.5
    down = torch.randn(num_experts, hidden, size, generator=random, device=DEVICE) * size**-0.5
    return router, gate_up.to(dtype), down.to(dtype)


def rows(count: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


def mix(x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """The kernel's sum. Few tokens come in parts, which the norm adds."""
    found = triton_experts.experts(x, scores, chosen, gate_up, down)
    return found if found.dim() == 2 else found.sum(0).to(x.dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("count", "num_experts", "num_chosen", "hidden", "has_bias", "is_sigmoid"),
    [
        pytest.param(
            *sizes, *kind, marks=[pytest.mark.slow] if not GPU and sizes[0] > 16 and any(kind) != all(kind) else []
        )
        for sizes in ((1, 7, 7, 32), (3, 128, 8, 200), (20, 96, 3, 136))
        for kind in itertools.product((False, True), repeat=2)
    ],
)
def test_route(count: int, num_experts: int, num_chosen: int, hidden: int, has_bias: bool, is_sigmoid: bool) -> None:
    router, _, _ = mixture(num_experts, hidden, 8, torch.float32)
    bias = torch.randn(num_experts, generator=torch.Generator().manual_seed(1)).to(DEVICE) if has_bias else None
    x = rows(count, hidden, torch.float32)
    for normalized in (False, True):
        routing = Routing(num_chosen, normalized, is_sigmoid, factor=2.5)
        scores, chosen = triton_routing.route(x, router, bias, routing, few=16)
        expected_scores, expected = reference.route(x, router, bias, routing)
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(scores, expected_scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("route", [triton_routing.route, torch_experts.route])
@pytest.mark.parametrize(("count", "num_experts"), [(3, 32), (20, 128)])
def test_a_bias_of_products_chooses_and_weighs(route: RouteTokens, count: int, num_experts: int) -> None:
    """As gpt-oss: the softmax of the best products with their biases."""
    router, _, _ = mixture(num_experts, 200, 8, torch.float32)
    bias = torch.randn(num_experts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x, routing = rows(count, 200, torch.float32), Routing(4, True, biases_products=True)
    scores, chosen = route(x, router, bias, routing)
    expected_scores, expected = reference.route(x, router, bias, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(scores, expected_scores, atol=1e-5, rtol=1e-4)
    best = (x @ router.T + bias).topk(4)
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(scores, best.values.softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("route", [triton_routing.route, torch_experts.route])
@pytest.mark.parametrize(("count", "num_experts", "is_sigmoid"), [(3, 32, False), (20, 40, True)])
def test_a_shared_expert_comes_last_with_the_score_of_its_gate(
    route: RouteTokens, count: int, num_experts: int, is_sigmoid: bool
) -> None:
    """The gate is not among the products of the others: neither their softmax nor their choice has it."""
    router, _, _ = mixture(num_experts + 1, 200, 8, torch.float32)
    x, routing = rows(count, 200, torch.float32), Routing(4, True, is_sigmoid, factor=2.5)
    scores, chosen = route(x, router, None, replace(routing, num_shared=1, shared_gated=True))
    others, expected = route(x, router[:-1].contiguous(), None, routing)
    assert torch.equal(chosen[:, :-1], expected)
    torch.testing.assert_close(scores[:, :-1], others)
    assert (chosen[:, -1] == num_experts).all()
    torch.testing.assert_close(scores[:, -1], (x @ router[-1]).sigmoid(), atol=1e-5, rtol=1e-4)
    of_reference = reference.route(x, router, None, replace(routing, num_shared=1, shared_gated=True))
    assert torch.equal(chosen, of_reference[1])
    torch.testing.assert_close(scores, of_reference[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("route", [triton_routing.route, torch_experts.route])
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_shared_experts_without_a_gate_come_last_with_a_score_of_one(
    route: RouteTokens, num_groups: int, num_shared: int
) -> None:
    """The factor and the sum of the others' scores do not change it."""
    router, _, _ = mixture(32, 200, 8, torch.float32)
    x, routing = rows(5, 200, torch.float32), Routing(4, True, True, 2.5, num_groups, min(num_groups, 2))
    others, expected = route(x, router, None, routing)
    shared = replace(routing, num_shared=num_shared)
    scores, chosen = route(x, router, None, shared)
    assert torch.equal(chosen[:, :4], expected)
    torch.testing.assert_close(scores[:, :4], others)
    assert chosen[:, 4:].tolist() == [[32, 33][:num_shared]] * 5
    assert scores[:, 4:].tolist() == [[1.0] * num_shared] * 5
    of_reference = reference.route(x, router, None, shared)
    assert torch.equal(chosen, of_reference[1])
    torch.testing.assert_close(scores, of_reference[0], atol=1e-5, rtol=1e-4)


def test_a_shared_experts_gate_is_divided_as_its_row_is() -> None:
    router, _, _ = mixture(33, 64, 8, torch.float32)
    x, routing = rows(3, 64, torch.float32), Routing(4, True, num_shared=1, shared_gated=True)
    half = HalfNormed(x, x.pow(2).sum(-1)[None], 1e-6)
    found, expected = (
        triton_routing.route(half, router, None, routing),
        reference.route(half.normed(), router, None, routing),
    )
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)


def test_of_equal_scores_the_lowest_experts_are_chosen() -> None:
    router = torch.zeros(100, 32, device=DEVICE)
    router[-1] = 1.0
    for count in (1, 5):
        x = torch.ones(count, 32, device=DEVICE)
        assert triton_routing.route(x, router, None, Routing(4, False))[1].tolist() == [[99, 0, 1, 2]] * count


def test_groups_of_experts_are_chosen_as_torch_does() -> None:
    router, _, _ = mixture(24, 32, 8, torch.float32)
    routing = Routing(4, True, True, 1.0, 4, 2)
    found, expected = (
        route(rows(9, 32, torch.float32), router, None, routing) for route in (triton_routing.route, reference.route)
    )
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("num_experts", [3, 128])
@pytest.mark.parametrize(("num_tokens", "num_chosen", "tile"), [(1, 1, 16), (5, 3, 16), (30, 3, 4)])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "counted"])
def test_pairs_are_sorted_and_cut_into_tiles_of_one_expert(
    num_tokens: int, num_chosen: int, tile: int, num_experts: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with experts without pairs, and with one expert that has nearly all."""
    if not at_once:  # as more pairs are
        monkeypatch.setattr(triton_pairs, "_MOST_AT_ONCE", 0)
    random = torch.Generator().manual_seed(num_tokens)
    for low in (0, num_experts - 1):
        chosen = torch.randint(low, num_experts, (num_tokens, num_chosen), generator=random)
        chosen[0, 0] = 0
        found = triton_pairs.sort_pairs(chosen.to(DEVICE), num_experts, tile, most=32)
        assert found.order.tolist() == chosen.flatten().argsort(stable=True).tolist()
        counts, start, expected = chosen.flatten().bincount(minlength=num_experts).tolist(), 0, []
        for expert, count in enumerate(counts):
            expected += [[expert, start + at, min(start + at + tile, start + count)] for at in range(0, count, tile)]
            start += count
        tiles = found.tiles.T.tolist()
        assert tiles[: len(expected)] == expected
        assert {expert for expert, _, _ in tiles[len(expected) :]} <= {-1}


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("count", "num_experts", "num_chosen", "hidden", "size"),
    [(1, 8, 2, 64, 40), (3, 4, 4, 72, 40), (17, 3, 1, 64, 48), (20, 5, 2, 40, 136)],
)
def test_experts(count: int, num_experts: int, num_chosen: int, hidden: int, size: int, dtype: torch.dtype) -> None:
    router, gate_up, down = mixture(num_experts, hidden, size, dtype)
    x = rows(count, hidden, dtype)
    scores, chosen = torch_experts.route(x, router, None, Routing(num_chosen, True))
    for choice in (chosen, torch.zeros_like(chosen) + torch.arange(num_chosen, device=DEVICE)):  # all to few experts
        found = mix(x, scores, choice, gate_up, down)
        assert error(found, torch_experts.experts(x, scores, choice, gate_up, down)) < TOLERANCE[dtype]


@pytest.mark.parametrize("count", [1, 3, 17, pytest.param(70, marks=[] if GPU else [pytest.mark.slow])])
def test_each_rank_adds_what_its_experts_compute(count: int) -> None:
    """Beside the definition, and together the whole sum: of few and of sorted pairs, and where a rank has none."""
    router, gate_up, down = mixture(6, 64, 48, torch.float32)
    x = rows(count, 64, torch.float32)
    scores, chosen = torch_experts.route(x, router, None, Routing(3, True))
    for choice in (chosen, torch.zeros_like(chosen) + torch.tensor([5, 0, 4], device=DEVICE)):
        total = torch.zeros_like(x)
        for first, last in ((0, 3), (3, 4), (4, 6)):
            given, part = (x, scores, choice, gate_up[first:last], down[first:last]), ExpertPart(first, 6)
            expected = reference.experts(*given, part=part)
            for compute in (torch_experts.experts, triton_experts.experts):
                found = compute(*given, part=part)
                torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
            total += found
        assert error(total, torch_experts.experts(x, scores, choice, gate_up, down)) < 2e-5


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_blocks", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize(("count", "hidden", "size"), [(1, 144, 208), (20, 256, 144), (18, 128, 64)])
def test_experts_in_float8(count: int, hidden: int, size: int, is_blocks: bool) -> None:
    """Blocks and steps of 128 inputs that the sizes do not fill."""
    router, gate_up, down = mixture(3, hidden, size, torch.float32)
    x = rows(count, hidden, torch.float16)
    scores, chosen = torch_experts.route(x, router, None, Routing(2, True))
    weights = [quantize_weight(weight, is_blocks=is_blocks) for weight in (gate_up, down)]
    found = mix(x, scores, chosen, *weights)
    # On a GPU sums are in another order, and a number between two values of float8 may be rounded to the other
    assert error(found, torch_experts.experts(x, scores, chosen, *weights)) < (3e-2 if GPU else 5e-3)


@pytest.mark.parametrize("count", [1, 13, 17, pytest.param(70, marks=[] if GPU else [pytest.mark.slow])])
def test_activations_are_quantized_on_their_way_as_by_a_launch_between(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: by the programs that read few rows, and by those that compute more."""
    _, gate_up, down = mixture(4, 256, 256, torch.float32)
    x = rows(count, 256, HALF)
    chosen = (torch.arange(2 * count, device=DEVICE) % 3).view(count, 2)
    scores = torch.rand(count, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights = [quantize_weight(weight, is_blocks=True) for weight in (gate_up, down)]
    launches = []

    def counted(x: torch.Tensor, group: int) -> QuantizedRows:
        launches.append(len(x))
        return triton_quantize.quantize(x, group)

    monkeypatch.setattr(triton_experts, "quantize", counted)
    found = mix(x, scores, chosen, *weights)
    assert launches == [count], "the rows of the first product alone"
    monkeypatch.setattr(triton_experts, "_quantizes", lambda *given: (False, False))
    assert torch.equal(found, mix(x, scores, chosen, *weights))
    assert launches == [count, count, 2 * count]
    assert error(found, torch_experts.experts(x, scores, chosen, *weights)) < (3e-2 if GPU else 5e-3)


@pytest.mark.slow_cases
@pytest.mark.parametrize("bytes_per_weight", [1, 2, 4])
@pytest.mark.parametrize(("num_chosen", "num_experts"), [(8, 128), (2, 8), (1, 384)])
def test_both_products_have_the_same_tiles_of_pairs(num_chosen: int, num_experts: int, bytes_per_weight: int) -> None:
    """Pairs are cut into tiles once. Unsorted, all tokens are the rows of a tile. Scales are of 128 inputs."""
    for num_tokens in range(1, 9000, 7):
        first, second = experts_tiling(num_tokens, num_chosen, num_experts, bytes_per_weight)
        assert first.rows == second.rows
        assert num_tokens > FEW or num_tokens <= first.rows
        assert bytes_per_weight > 1 or first.inputs == second.inputs == 128


def test_no_tokens() -> None:
    router, gate_up, down = mixture(4, 32, 16, torch.float16)
    x = rows(0, 32, torch.float16)
    scores, chosen = triton_routing.route(x, router, None, Routing(2, True))
    assert mix(x, scores, chosen, gate_up, down).shape == (0, 32)


def test_rows_that_the_memory_accelerator_cannot_read_are_refused() -> None:
    router, gate_up, down = mixture(4, 32, 12, torch.float16)
    x = rows(2, 32, torch.float16)
    scores, chosen = triton_routing.route(x, router, None, Routing(2, True))
    with pytest.raises(ValueError, match="rows of 32 and 12 weights"):
        triton_experts.experts(x, scores, chosen, gate_up, down)
    with pytest.raises(ValueError, match="float32 router of 32 inputs"):
        triton_routing.route(x, router.half(), None, Routing(2, True))


@pytest.mark.parametrize("count", [6, 20])
def test_a_row_does_not_depend_on_the_order_of_the_others(count: int) -> None:
    router, gate_up, down = mixture(6, 64, 48, torch.float16)
    x, order = rows(count, 64, torch.float16), torch.randperm(count, generator=torch.Generator().manual_seed(1))
    scores, chosen = triton_routing.route(x, router, None, Routing(2, True))
    first = mix(x, scores, chosen, gate_up, down)
    order = order.to(DEVICE)
    assert torch.equal(mix(x[order], scores[order], chosen[order], gate_up, down), first[order])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [1, 7, 16, 17, 64, 256, 1000, 4096])
def test_a_real_mixture(count: int) -> None:
    """Rounded as the definition says, equal in two runs and for permuted rows."""
    router, gate_up, down = mixture(*REAL, torch.bfloat16)
    x, order = rows(count, REAL[1], torch.bfloat16), torch.randperm(count, device=DEVICE)
    scores, chosen = torch_experts.route(x, router, None, Routing(8, True))
    found = [mix(x, scores, chosen, gate_up, down) for _ in range(2)]
    assert error(found[0], torch_experts.experts(x, scores, chosen, gate_up, down)) < 1e-2
    assert torch.equal(found[0], found[1])
    permuted = mix(x[order], scores[order], chosen[order], gate_up, down)
    assert torch.equal(permuted, found[0][order])


@pytest.mark.gpu
@needs_gpu
def test_the_choice_of_a_token_does_not_depend_on_the_number_of_tokens() -> None:
    router, _, _ = mixture(*REAL[:2], 8, torch.bfloat16)
    x, routing = rows(3000, REAL[1], torch.bfloat16), Routing(8, True)
    scores, chosen = triton_routing.route(x, router, None, routing)
    expected = (x.double() @ router.double().T).topk(8).indices
    assert (chosen != expected).any(-1).sum() <= 1, "float32 chooses as float64, but for nearly equal scores"
    for count in (*range(1, 301), 1024, 1025, 2999):
        found = triton_routing.route(x[-count:], router, None, routing)
        assert torch.equal(found[0], scores[-count:])
        assert torch.equal(found[1], chosen[-count:])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [4, 300])
def test_a_captured_mixture_takes_other_tokens(count: int) -> None:
    router, gate_up, down = mixture(*REAL, torch.bfloat16)
    x, others = rows(count, REAL[1], torch.bfloat16), rows(count + 1, REAL[1], torch.bfloat16)[1:]

    def run() -> torch.Tensor:
        return mix(x, *triton_routing.route(x, router, None, Routing(8, True)), gate_up, down)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(others)
    graph.replay()
    assert torch.equal(captured, run())
