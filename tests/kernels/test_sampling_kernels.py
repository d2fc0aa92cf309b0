"""The draw: its distribution, its bits, its independence of the batch; penalties and logprobs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels import sampling
from pd_kernels.logprobs import logprobs
from pd_kernels.sampling_limits import floors
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
    limits = Limits(torch.tensor([5000] * 4 + [5] + [5000] * 3), torch.ones(8), torch.tensor([0.0] * 7 + [0.05]))
    limited, free, greedy = torch.tensor([4, 7]), torch.tensor([0, 2, 3, 5]), torch.tensor([1, 6])
    seeds, positions, before = torch.arange(count) * 977, torch.arange(count) + 5, logits.clone()
    draws = Draws(temperature, seeds, positions, limits)
    found = sampling.draw(logits, draws)
    assert torch.equal(logits, before)
    over = logits.float() / temperature[:, None]
    assert torch.equal(found[free], sampling.gumbel_sample(over[free], seeds[free], positions[free]))
    over[logits < floors(logits, draws)[:, None]] = -torch.inf
    assert torch.equal(found[limited], sampling.gumbel_sample(over[limited], seeds[limited], positions[limited]))
    assert torch.equal(found[greedy], logits.argmax(-1)[greedy])


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0], [2.0, -2.0, 1.0, 1.0]])
    seen = torch.tensor([[True, True, False, False], [False, False, False, True]])
    sampling.penalize_repetition(logits, seen, torch.tensor([2.0, 4.0]))
    assert logits.tolist() == [[1.0, -4.0, 1.0, 1.0], [2.0, -2.0, 1.0, 0.25]]
    counts = torch.tensor([[0, 1, 3, 0], [0, 0, 0, 2]], dtype=torch.int32)
    sampling.penalize_counts(logits, counts, torch.tensor([0.5, 0.0]), torch.tensor([0.25, -1.0]))
    assert logits.tolist() == [[1.0, -4.75, -0.25, 1.0], [2.0, -2.0, 1.0, 2.25]]


def test_penalties_of_all_rows_from_the_tables_of_their_sequences() -> None:
    """Rows of one sequence read the same table; neutral settings change nothing."""
    seen = torch.tensor([[False] * 4, [True, True, False, False]])
    counts = torch.tensor([[9, 9, 9, 9], [0, 1, 3, 0]], dtype=torch.int32)
    settings = torch.tensor([[2.0, 0.5, 0.25], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]]).repeat(3, 1)
    sampling.penalize(logits, seen, counts, settings, torch.tensor([1, 0, 1]))
    assert logits.tolist() == [[1.0, -4.75, -0.25, 1.0], [2.0, -2.0, 1.0, 1.0], [2.0, -3.0, -2.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_softmax(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(5, 3001, generator=torch.Generator().manual_seed(8))).to(dtype)
    token_ids = torch.tensor([0, 3000, 17, 5, 5])
    chosen, top_ids, top = logprobs(logits, token_ids, 7)
    expected = logits.double().log_softmax(-1)
    assert (chosen - expected.gather(1, token_ids[:, None])[:, 0]).abs().max() < 2e-6
    assert (top - expected.gather(1, top_ids)).abs().max() < 2e-6
    assert torch.equal(top.double().sort(-1, descending=True).values, top.double())
    assert (expected > expected.gather(1, top_ids[:, -1:])).sum(-1).max() < 7


def test_rows_without_penalties_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU one penalized row of 32 must not cost the work of 32, nor a penalty that is not asked for."""
    widths = list[int]()
    inner = sampling.penalize_counts
    monkeypatch.setattr(sampling, "penalize_repetition", None)

    def noted(part: torch.Tensor, *told: torch.Tensor) -> None:
        widths.append(len(part))
        inner(part, *told)

    monkeypatch.setattr(sampling, "penalize_counts", noted)
    logits, wanted = torch.zeros(3, 5), torch.tensor([[1.0, 0, 0], [1.0, 0.5, 0], [1.0, 0, 0]])
    seen, counts = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 5, dtype=torch.int32)
    sampling.penalize(logits, seen, counts, wanted, torch.tensor([3, 0, 2]))
    assert widths == [1]
    assert logits.tolist() == [[0.0] * 5, [-0.5] * 5, [0.0] * 5]
