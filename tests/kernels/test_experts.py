"""Mixtures of experts in library calls, beside their definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_kernels import reference, torch_experts
from pd_kernels.values import Routing

if TYPE_CHECKING:
    from pd_kernels.backends import RouteTokens

HIDDEN, SIZE, NUM_EXPERTS = 32, 24, 7


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router, gates and ups, downs."""
    random = torch.Generator().manual_seed(0)
    router = torch.randn(NUM_EXPERTS, HIDDEN, generator=random)
    gate_up = torch.randn(NUM_EXPERTS, 2 * SIZE, HIDDEN, generator=random) * HIDDEN**-0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, SIZE, generator=random) * SIZE**-0.5
    return router.to(torch.promote_types(dtype, torch.float32)), gate_up.to(dtype), down.to(dtype)


def rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_same(dtype: torch.dtype) -> None:
    """Of scores computed once, so that no rounding changes which experts are chosen. Equal scores have one order."""
    router, gate_up, down = weights(dtype)
    x = rows(300, dtype)
    scores, chosen = torch_experts.route(x, router, None, Routing(3, True))
    found = [torch_experts.experts(*(part.cuda() for part in (x, scores, chosen, gate_up, down))) for _ in range(2)]
    assert torch.equal(found[0], found[1])
    expected = torch_experts.experts(x, scores, chosen, gate_up, down)
    torch.testing.assert_close(found[0].cpu(), expected, atol=1e-5 if dtype is torch.float32 else 0.03, rtol=0)
    ties = torch.zeros(128, HIDDEN, device="cuda")
    assert torch_experts.route(x.cuda(), ties, None, Routing(8, False))[1].tolist() == [list(range(8))] * 300


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("num_chosen", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_library_calls_equal_the_definition(
    dtype: torch.dtype, tolerance: float, num_chosen: int, normalized: bool
) -> None:
    router, gate_up, down = weights(dtype)
    for count in (1, 2, 40):
        x = rows(count, dtype)
        scores, chosen = torch_experts.route(x, router, None, Routing(num_chosen, normalized))
        expected_scores, expected = reference.route(x, router, None, Routing(num_chosen, normalized))
        assert torch.equal(chosen, expected)
        assert scores.dtype is router.dtype
        torch.testing.assert_close(scores, expected_scores)
        found = torch_experts.experts(x, scores, chosen, gate_up, down)
        assert found.dtype is dtype
        torch.testing.assert_close(found, reference.experts(x, scores, chosen, gate_up, down), atol=tolerance, rtol=0)


@pytest.mark.parametrize("route", [reference.route, torch_experts.route])
@pytest.mark.parametrize("num_experts", [6, 128])  # a sort of few numbers is often stable by chance
def test_of_equal_scores_the_lowest_experts_are_chosen(route: RouteTokens, num_experts: int) -> None:
    router = torch.zeros(num_experts, HIDDEN)
    router[-1] = 1.0
    scores, chosen = route(torch.ones(3, HIDDEN), router, None, Routing(4, False))
    assert chosen.tolist() == [[num_experts - 1, 0, 1, 2]] * 3
    assert (scores[:, 1:] == scores[:, 1:2]).all()


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize(("num_groups", "groups_chosen"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_bias_and_groups_change_the_choice_and_not_the_scores(
    is_sigmoid: bool, num_groups: int, groups_chosen: int
) -> None:
    random = torch.Generator().manual_seed(3)
    router, bias = torch.randn(24, HIDDEN, generator=random), torch.randn(24, generator=random)
    routing = Routing(4, True, is_sigmoid, 2.5, num_groups, groups_chosen)
    scores, chosen = torch_experts.route(rows(30, torch.float32), router, bias, routing)
    expected_scores, expected = reference.route(rows(30, torch.float32), router, bias, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(scores, expected_scores)
    torch.testing.assert_close(scores.sum(-1), torch.full((30,), 2.5))
    assert all(len(set((row // (24 // num_groups)).tolist())) <= groups_chosen for row in chosen)
    without_bias = torch_experts.route(rows(30, torch.float32), router, None, routing)[1]
    assert not torch.equal(chosen, without_bias)


@pytest.mark.parametrize("route", [reference.route, torch_experts.route])
def test_scores_are_of_all_experts_unless_they_are_normalized(route: RouteTokens) -> None:
    router = torch.eye(3).log1p()  # e^x: 2 for an expert's own input, 1 for the others
    x = torch.tensor([[0.0, 1.0, 0.0]])
    assert route(x, router, None, Routing(2, False))[0].tolist() == [pytest.approx([0.5, 0.25])]
    assert route(x, router, None, Routing(2, True))[0].tolist() == [pytest.approx([2 / 3, 1 / 3])]


@pytest.mark.parametrize("route", [reference.route, torch_experts.route])
def test_scores_of_sigmoids_are_normalized_however_small(route: RouteTokens) -> None:
    """Down to a sum of 1e-20, below which they are left as small as they are."""
    router = torch.tensor([[-43.0], [-44.0], [-90.0]])
    scores, chosen = route(torch.tensor([[1.0], [4.0]]), router, None, Routing(2, True, is_sigmoid=True))
    assert chosen.tolist() == [[0, 1], [0, 1]]
    assert scores[0].tolist() == [pytest.approx(0.7310586), pytest.approx(0.2689414)]
    assert scores[1].max() == 0


def test_a_row_does_not_depend_on_the_order_of_the_others() -> None:
    router, gate_up, down = weights(torch.float64)
    x, order = rows(50, torch.float64), torch.randperm(50, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch_experts.route(x, router, None, Routing(2, True))
        return torch_experts.experts(x, scores, chosen, gate_up, down)

    first = run(x)
    assert torch.equal(first, run(x)), "two runs are equal bit for bit"
    torch.testing.assert_close(run(x[order]), first[order], atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.cat([run(row[None]) for row in x]), first, atol=1e-12, rtol=0)
