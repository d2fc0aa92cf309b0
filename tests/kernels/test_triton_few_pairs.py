"""The rows of few pairs in one launch, beside those of `triton_pairs`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels.triton_few_pairs import MOST_PAIRS, sort_rows
from pd_kernels.triton_pair_rows import sorted_rows
from pd_kernels.triton_pairs import OwnPairs, sort_pairs
from pd_kernels.values import HalfNormed

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step(num_tokens: int, num_chosen: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(num_tokens)
    chosen = torch.stack([torch.randperm(num_experts, generator=random)[:num_chosen] for _ in range(num_tokens)])
    return torch.randn(num_tokens, 24, generator=random).to(DEVICE), chosen.to(DEVICE)


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_experts", [3, 128])
@pytest.mark.parametrize(("num_tokens", "num_chosen", "rows"), [(1, 1, 8), (5, 3, 8), (12, 3, 4), (9, 2, 16)])
def test_rows_and_tiles_are_those_of_three_launches(
    num_tokens: int, num_chosen: int, rows: int, num_experts: int
) -> None:
    """Also where few experts have all pairs, and of half normed rows."""
    x, chosen = step(num_tokens, num_chosen, num_experts)
    half = HalfNormed(x, x.pow(2).view(num_tokens, 3, 8).sum(-1).T.contiguous(), 1e-6)
    for given, choice in ((x, chosen), (half, torch.zeros_like(chosen) + torch.arange(num_chosen, device=DEVICE))):
        found, pairs = sort_rows(given, choice, num_experts, rows), sort_pairs(choice, num_experts, rows)
        used = pairs.tiles[0] >= 0
        assert torch.equal(found.order, pairs.order)
        assert torch.equal(found.tiles[0], pairs.tiles[0])
        assert torch.equal(found.tiles[:, used], pairs.tiles[:, used])
        assert torch.equal(found.x, sorted_rows(given, pairs.order, num_chosen))


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 7), (7, 8)])
def test_only_the_pairs_of_a_rank_are_in_tiles(first: int, last: int) -> None:
    x, chosen = step(7, 3, 8)
    own = OwnPairs(chosen, first, last - first)
    found, pairs = sort_rows(x, chosen, last - first, 4, own), sort_pairs(chosen, last - first, 4, own=own)
    used = pairs.tiles[0] >= 0
    assert torch.equal(found.tiles[0], pairs.tiles[0])
    assert torch.equal(found.tiles[:, used], pairs.tiles[:, used])
    count = int(((chosen >= first) & (chosen < last)).sum())
    assert torch.equal(found.order[:count], pairs.order[:count])
    assert sorted(found.order.tolist()) == list(range(21)), "the rows of other ranks' pairs are defined, too"
    assert torch.equal(found.x, x[found.order.long() // 3])


def test_what_it_does_not_take() -> None:
    x, chosen = step(MOST_PAIRS // 2 + 1, 2, 3)
    for rows, choice in ((x, chosen), (x[:0], chosen[:0]), (x[:4].T, chosen[:24]), (x[:3], chosen[:4])):
        with pytest.raises(ValueError, match="pairs of rows"):
            sort_rows(rows, choice, 3, 8)
