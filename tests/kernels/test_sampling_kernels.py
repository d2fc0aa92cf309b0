"""The draw: its distribution, its bits, its independence of the batch; truncation against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels import sampling
from pd_kernels.values import Draws, Limits

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64's finaliser in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def bits_by_hand(seed: int, position: int, token_id: int) -> int:
    key = mix((mix(seed & MASK) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    low, high, mask = key & 0xFFFFFFFF, key >> 32, 0xFFFFFFFF
    x = (token_id * 0x9E3779B1 + low) & mask
    x = (((x ^ (x >> 16)) * 0x21F0AAAD) & mask) ^ high
    x = ((x ^ (x >> 15)) * 0x735A2D97) & mask
    return x ^ (x >> 15)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 20), st.integers(0, 200_000))
@settings(max_examples=200, deadline=None)
def test_bits_are_those_of_exact_integer_arithmetic(seed: int, position: int, token_id: int) -> None:
    found = sampling.random_bits(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([token_id], dtype=torch.int32)
    )
    assert int(found.item()) & 0xFFFFFFFF == bits_by_hand(seed, position, token_id)


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 40,000 draws: half at one seed and many positions, half at many seeds."""
    weights = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0624, 0.0001])
    count = 20_000
    many, one = torch.arange(count), torch.full((count,), 1234)
    for seeds, positions in ((one, many), (many, one)):
        drawn = sampling.gumbel_sample(weights.log().repeat(count, 1), seeds, positions)
        observed = torch.bincount(drawn, minlength=6).double()
        expected = weights.double() * count
        assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 99.9% of the distribution with 5 degrees


def test_noise_is_finite_for_every_bit_pattern_at_the_ends() -> None:
    ends = torch.tensor([[0, 1, -1, 2**31 - 1, -(2**31), 2**31 - 64]], dtype=torch.int32)
    noise = sampling._exponential(ends).log()
    assert noise.isfinite().all()
    assert noise.min() < -21  # the smallest variate is 2**-32


def test_a_single_allowed_token_is_always_drawn() -> None:
    logits = torch.full((500, 50), -torch.inf)
    logits[:, 17] = -3.0
    assert (sampling.gumbel_sample(logits, torch.arange(500), torch.arange(500)) == 17).all()


def limits(rows: list[tuple[int, float, float]], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k, top_p, min_p = zip(*rows, strict=True)
    return torch.tensor([k or vocab_size for k in top_k]), torch.tensor(top_p), torch.tensor(min_p)


def kept_by_definition(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:  # type: ignore[type-arg]
    """Tokens at least as good as the last one that all three limits keep, in float64."""
    order = np.argsort(-logits, kind="stable")
    inside = order[: top_k or len(order)]
    share = np.exp(logits[inside] - logits[order[0]])
    before = np.cumsum(share) - share
    last = inside[np.flatnonzero(before / share.sum() < top_p)[-1]] if top_p < 1 else inside[-1]
    floor = max(logits[last], logits[order[0]] + np.log(min_p)) if min_p else logits[last]
    return set(np.flatnonzero(logits >= floor).tolist())


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_truncate_keeps_what_the_definition_keeps(vocab_size: int, spread: float) -> None:
    settings_of_rows = [
        (0, 0.9, 0.0),
        (5, 1.0, 0.0),
        (30, 0.5, 0.0),
        (0, 1.0, 0.2),
        (7, 0.8, 0.05),
        (1, 1.0, 0.0),
        (0, 0.01, 0.0),
    ]
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    logits[2, 4] = logits[2, 9]  # a tie
    found = sampling.truncate(logits, *limits(settings_of_rows, vocab_size)).isfinite()
    for row, (top_k, top_p, min_p) in enumerate(settings_of_rows):
        expected = kept_by_definition(logits[row].double().numpy(), top_k, top_p, min_p)
        assert set(found[row].nonzero()[:, 0].tolist()) == expected


@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 40, 63, 64, 65, 1000, 1024, 1500]),
            st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0.01, 1.0, 6.0]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_candidates_draw_what_the_whole_row_would(
    seed: int, rows: list[tuple[int, float, float]], spread: float, coarse: bool
) -> None:
    """The quick way equals truncate + gumbel_sample, with ties (coarse logits) and with sets of every size."""
    vocab_size = 2000
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    if coarse:
        logits = logits.bfloat16().float()
    seeds, positions = torch.arange(len(rows)) + seed, torch.arange(len(rows)) * 7
    bounds = limits(rows, vocab_size)
    expected = sampling.gumbel_sample(sampling.truncate(logits, *bounds), seeds, positions)
    assert torch.equal(sampling.truncated_sample(logits.clone(), *bounds, seeds, positions), expected)


def test_ties_beyond_the_candidates_can_be_drawn() -> None:
    """All 2000 tokens tie with the 40th best, so all are in the set of every row."""
    bounds = limits([(40, 1.0, 0.0)] * 50, 2000)
    seeds, positions = torch.arange(50), torch.zeros(50, dtype=torch.int64)
    expected = sampling.gumbel_sample(torch.zeros(50, 2000), seeds, positions)
    assert torch.equal(sampling.truncated_sample(torch.zeros(50, 2000), *bounds, seeds, positions), expected)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    vocab_size, count = 5000, 24
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(count) * 977, torch.arange(count) + 5
    together = sampling.gumbel_sample(logits.clone(), seeds, positions)
    alone = [sampling.gumbel_sample(logits[[i]], seeds[[i]], positions[[i]]).item() for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    shuffled = sampling.gumbel_sample(logits[order], seeds[order], positions[order])
    assert together.tolist() == alone
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_that_of_logits_over_their_temperature(dtype: torch.dtype) -> None:
    """In float32, whatever the logits' type; a row is drawn as if it were alone, and one of temperature 0 is not."""
    count, vocab_size = 8, 3000
    logits = (3 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(4))).to(dtype)
    temperature = torch.tensor([0.6, 0.0, 1.3, 0.2, 0.9, 1.0, 0.0, 0.7])
    bounds = [torch.tensor([5, vocab_size]), torch.tensor([1.0, 0.8]), torch.tensor([0.0, 0.05])]
    limited, free, greedy = torch.tensor([4, 7]), torch.tensor([0, 2, 3, 5]), torch.tensor([1, 6])
    seeds, positions, before = torch.arange(count) * 977, torch.arange(count) + 5, logits.clone()
    found = sampling.draw(logits, Draws(temperature, seeds, positions, Limits(limited, *bounds)))
    assert torch.equal(logits, before)
    over = logits.float() / temperature[:, None]
    assert torch.equal(found[free], sampling.gumbel_sample(over[free], seeds[free], positions[free]))
    cut = sampling.truncate(over[limited], *bounds)
    assert torch.equal(found[limited], sampling.gumbel_sample(cut, seeds[limited], positions[limited]))
    assert torch.equal(found[greedy], logits.argmax(-1)[greedy])


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0], [2.0, -2.0, 1.0, 1.0]])
    seen = torch.tensor([[True, True, False, False], [False, False, False, True]])
    sampling.penalize_repetition(logits, seen, torch.tensor([2.0, 4.0]))
    assert logits.tolist() == [[1.0, -4.0, 1.0, 1.0], [2.0, -2.0, 1.0, 0.25]]
    counts = torch.tensor([[0, 1, 3, 0], [0, 0, 0, 2]], dtype=torch.int32)
    sampling.penalize_counts(logits, counts, torch.tensor([0.5, 0.0]), torch.tensor([0.25, -1.0]))
    assert logits.tolist() == [[1.0, -4.75, -0.25, 1.0], [2.0, -2.0, 1.0, 2.25]]
