"""Triton's bounds are the reference's, bit by bit, and a captured draw follows new limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import (
    logprobs,
    sampling,
    sampling_limits,
    triton_limits,
    triton_logprobs,
    triton_penalties,
    triton_sampling,
)
from pd_kernels.values import Draws, Limits, TokenMasks
from tests.kernels.limited_rows import make_draws, make_logits, on
from tests.kernels.test_triton_sampling import DEVICE, GPU

# Triton's interpreter on numpy
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # infinities less infinities
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # the hash wraps, as it should
]
SIZES = [(1, 7), (11, 701), *([(240, 128256), (70, 262144)] if GPU else [])]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
CASES = [(1, 7, torch.float32, False), (11, 701, torch.float32, True), (4, 5003, torch.float16, False)]
if GPU:
    CASES += [(*size, dtype, masked) for size in SIZES for dtype in DTYPES for masked in (False, True)]


def masks_for(num_rows: int, vocab_size: int) -> TokenMasks:
    """Every second row has one of three masks, each of which allows about half of the tokens."""
    generator = torch.Generator().manual_seed(9)
    masks = torch.randint(-(1 << 31), 1 << 31, (3, -(-vocab_size // 32)), generator=generator).int()
    rows = torch.tensor([at % 3 if at % 2 else -1 for at in range(num_rows)])
    return TokenMasks(masks.to(DEVICE), rows.to(DEVICE))


@pytest.mark.parametrize(("num_rows", "vocab_size", "dtype", "masked"), CASES, ids=str)
def test_bounds_and_draws_are_the_references(num_rows: int, vocab_size: int, dtype: torch.dtype, masked: bool) -> None:
    logits = make_logits(num_rows, vocab_size).to(DEVICE, dtype)
    draws = make_draws(num_rows, vocab_size, device=DEVICE)
    if masked:
        draws = replace(draws, masks=masks_for(num_rows, vocab_size))
    found, expected = triton_limits.floors(logits, draws), sampling_limits.floors(logits, draws)
    assert found is not None
    for row in (found != expected).nonzero()[:, 0].tolist():
        assert GPU, "bit by bit"
        assert share_between(logits, draws, row, found[row], expected[row]) < 1e-6
    same = found == expected
    drawn, wanted = triton_sampling.draw(logits, draws), sampling.draw(logits, draws)
    assert [(row, drawn[row], wanted[row]) for row in (same & (drawn != wanted)).nonzero()[:, 0].tolist()] == []


def share_between(logits: torch.Tensor, draws: Draws, row: int, one: torch.Tensor, other: torch.Tensor) -> float:
    """The probability of the tokens of a row between two bounds. A GPU's exp2 and torch's differ in the last bit.

    At 128,000 tokens of nearly the same logit this moves a bound of top p by one token in a few rows.
    """
    values = sampling_limits.ranked(sampling_limits.allowed(logits, draws.masks))[row].double()
    between = (values >= torch.minimum(one, other)) & (values < torch.maximum(one, other))
    share = ((values - values.max()) / draws.temperature[row].double()).exp()
    return float(share[between].sum() / share.sum())


@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.float16], ids=str)
def test_rows_that_do_not_fit_are_searched_in_place(dtype: torch.dtype) -> None:
    """More logits tie or lie above the lower limit than a program holds."""
    vocab_size = 8300
    logits = (torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(6)) * 0.02).to(dtype)
    logits[0], logits[1] = 0.0, logits[1].abs() + 1
    limits = Limits(
        torch.tensor([40, 6000, vocab_size, 7000, vocab_size, 5000]),
        torch.tensor([1.0, 1.0, 0.9, 0.7, 0.99999, 0.3]),
        torch.zeros(6),
    )
    draws = Draws(torch.full((6,), 0.8), torch.arange(6), torch.arange(6), limits)
    expected = sampling_limits.floors(logits, draws)
    found = triton_limits.floors(logits.to(DEVICE), on(draws, DEVICE))
    assert found is not None
    assert torch.equal(found.cpu(), expected)


@pytest.mark.skipif(GPU, reason="a compiled kernel does not tell how it searched")
def test_a_mask_of_fewer_tokens_than_top_k_costs_no_search_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most masks of a grammar. The k-th logit is -inf, with which 8,295 other tokens tie."""
    monkeypatch.setattr(triton_limits, "_above", None)  # reads the row again
    logits, masks = torch.randn(2, 8300, generator=torch.Generator().manual_seed(2)), torch.zeros(2, 260).int()
    masks[0, [3, 50, 51, 200, 259]], masks[1, 7] = 4, 1
    limits = Limits(torch.full((2,), 20), torch.tensor([0.9, 1.0]), torch.zeros(2))
    draws = Draws(torch.ones(2), torch.arange(2), torch.arange(2), limits, TokenMasks(masks, torch.arange(2)))
    found = triton_limits.floors(logits, draws)
    assert found is not None
    assert torch.equal(found, sampling_limits.floors(logits, draws))


def test_rows_of_nan_and_bans_have_no_bound() -> None:
    logits = torch.full((4, 300), -torch.inf)
    logits[1], logits[2, 7], logits[3, ::2], logits[3, 1::2] = torch.nan, 1.0, torch.nan, 2.0
    limits = Limits(torch.full((4,), 5), torch.full((4,), 0.9), torch.full((4,), 0.1))
    draws = Draws(torch.ones(4), torch.arange(4), torch.arange(4), limits)
    draws = replace(
        draws,
        temperature=draws.temperature.to(DEVICE), seeds=draws.seeds.to(DEVICE), positions=draws.positions.to(DEVICE),
        limits=Limits(*(each.to(DEVICE) for each in (limits.top_k, limits.top_p, limits.min_p))),
    )  # fmt: skip
    found = triton_limits.floors(logits.to(DEVICE), draws)
    assert found is not None
    assert found.tolist()[:2] == [-torch.inf, -torch.inf]
    drawn = triton_sampling.draw(logits.to(DEVICE), draws).tolist()
    assert drawn[:3] == [0, 0, 7]
    assert drawn[3] % 2 == 1


@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_penalties_are_the_references(num_rows: int, vocab_size: int) -> None:
    """Bit by bit, for rows with and without, of which some share a table."""
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(num_rows, vocab_size, generator=generator)).to(DEVICE)
    counts = torch.randint(-3, 4, (5, vocab_size), generator=generator).clamp_(min=0).int().to(DEVICE)
    seen = (torch.rand(5, vocab_size, generator=generator) < 0.4).to(DEVICE)
    kinds = torch.tensor([[1.0, 0, 0], [1.3, 0, 0], [1.0, 0.5, -0.25], [0.7, -0.3, 0.1]])
    settings = kinds[torch.arange(num_rows) % 4].to(DEVICE)
    rows = (torch.arange(num_rows) * 3 % 5).to(DEVICE)
    expected = logits.clone()
    sampling.penalize(expected, seen, counts, settings, rows)
    triton_penalties.penalize(logits, seen, counts, settings, rows)
    assert torch.equal(logits, expected)
    with pytest.raises(ValueError, match="tables"):
        triton_penalties.penalize(logits, seen[:, 1:], counts, settings, rows)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_logprobs_are_the_references(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    """To the rounding of the sum; a banned token's is -inf."""
    logits = make_logits(num_rows, vocab_size, seed=5).to(DEVICE, dtype)
    logits[0, 0], token_ids = -torch.inf, torch.arange(num_rows, device=DEVICE) * 7 % vocab_size
    expected, found = (each.logprobs(logits, token_ids, 5) for each in (logprobs, triton_logprobs))
    # NaN: a row of infinities
    assert torch.allclose(found[0], expected[0], rtol=1e-6, atol=2e-6, equal_nan=True)
    assert found[0][0] == -torch.inf
    assert torch.equal(logits.gather(1, found[1]), logits.gather(1, expected[1]))
    assert all(len(set(ids)) == 5 for ids in found[1].tolist())
    assert torch.allclose(found[2], expected[2], rtol=1e-6, atol=2e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_draw_follows_new_logits_and_limits(dtype: torch.dtype) -> None:
    num_rows, vocab_size = 64, 128256
    steps = [(make_logits(num_rows, vocab_size, seed).to(DEVICE, dtype), make_draws(num_rows, vocab_size, seed, DEVICE))
             for seed in (0, 1)]  # fmt: skip
    logits, draws = steps[0][0].clone(), make_draws(num_rows, vocab_size, 0, DEVICE)
    triton_sampling.draw(logits, draws)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_sampling.draw(logits, draws)
    for new_logits, new in (steps[1], steps[0]):
        logits.copy_(new_logits)
        assert draws.limits is not None
        assert new.limits is not None
        for name in ("temperature", "seeds", "positions"):
            getattr(draws, name).copy_(getattr(new, name))
        for name in ("top_k", "top_p", "min_p"):
            getattr(draws.limits, name).copy_(getattr(new.limits, name))
        graph.replay()
        assert torch.equal(found, sampling.draw(new_logits, new))
