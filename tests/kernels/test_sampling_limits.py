"""The bound of top k, top p and min p: against a sort in float64, with ties, in every order of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pd_kernels import sampling
from pd_kernels.sampling_limits import LEAST_LOGIT, allowed, floors
from pd_kernels.values import Draws, Limits, TokenMasks
from tests.kernels.limited_rows import kept_by_definition, make_draws, make_logits


@pytest.mark.parametrize("vocab_size", [7, 701, 3000])
def test_the_bound_keeps_what_the_definition_keeps(vocab_size: int) -> None:
    count = 80
    logits, draws = make_logits(count, vocab_size), make_draws(count, vocab_size)
    found, limits = floors(logits, draws), draws.limits
    assert limits is not None
    for row in range(count):
        if draws.temperature[row] == 0 or row % 4 == 0:
            assert found[row] == -torch.inf
            continue
        bounds = (draws.temperature, limits.top_k, limits.top_p, limits.min_p)
        expected = kept_by_definition(logits[row].numpy(), *(each[row].item() for each in bounds))
        kept = ((logits[row] >= found[row]) & (logits[row] > -torch.inf)).numpy()
        assert np.array_equal(kept, expected), row


def test_neither_the_order_of_the_vocabulary_nor_the_batch_moves_the_bound() -> None:
    count, vocab_size = 60, 2000
    logits, draws = make_logits(count, vocab_size, seed=1), make_draws(count, vocab_size, seed=1)
    expected = floors(logits, draws)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))
    assert torch.equal(floors(logits[:, order], draws), expected)
    assert torch.equal(floors(logits.flip(0), draws.of(torch.arange(count).flip(0))).flip(0), expected)
    for row in range(0, count, 7):
        assert floors(logits[[row]], draws.of(torch.tensor([row]))) == expected[row]


def test_ties_with_the_kth_stay_and_count_in_the_total() -> None:
    """Of five equal seconds, k = 2 keeps all. The best then has a share of e / (e + 5) = 0.352, and not 0.731."""
    logits = torch.tensor([[1.0, 0, 0, 0, 0, 0, -1, -1]] * 3)
    limits = Limits(torch.tensor([2, 2, 2]), torch.tensor([1.0, 0.3, 0.5]), torch.zeros(3))
    draws = Draws(torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), limits)
    assert floors(logits, draws).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_candidates_draw_what_the_whole_row_would(seed: int) -> None:
    """The quick way of `draw` equals a draw from the row cut at its bound, with ties and with sets of every size."""
    count, vocab_size = 60, 2000
    logits, draws = make_logits(count, vocab_size, seed), make_draws(count, vocab_size, seed)
    drawn = (draws.temperature > 0).nonzero()[:, 0]
    part = draws.of(drawn)
    cut = logits[drawn].masked_fill(logits[drawn] < floors(logits[drawn], part)[:, None], -torch.inf)
    expected = sampling.gumbel_sample(cut / part.temperature[:, None], part.seeds, part.positions)
    found = sampling.draw(logits, draws)
    assert torch.equal(found[drawn], expected)
    assert torch.equal(
        found, torch.cat([sampling.draw(logits[[i]], draws.of(torch.tensor([i]))) for i in range(count)])
    )


def test_rows_without_a_token_are_drawn_from_nothing() -> None:
    """No error, and a token of the vocabulary."""
    logits = torch.full((3, 50), -torch.inf)
    logits[1], logits[2, 7] = torch.nan, 1.0
    limits = Limits(torch.tensor([5, 5, 5]), torch.tensor([0.9] * 3), torch.tensor([0.1] * 3))
    draws = Draws(torch.ones(3), torch.arange(3), torch.arange(3), limits)
    found = sampling.draw(logits, draws)
    assert 0 <= int(found.min()) <= int(found.max()) < 50
    assert found[2] == 7


def test_a_mask_bans_and_allows() -> None:
    """Bit i of word j is token 32 j + i. Where other bans hit all allowed tokens of a row, one of these is drawn."""
    vocab_size = 70
    logits = torch.zeros(4, vocab_size)
    logits[:, 5], logits[2] = 9.0, -torch.inf
    masks = torch.zeros(2, 3, dtype=torch.int32)
    masks[0, 1], masks[1, 2], masks[1, 0] = 1 << 3, 1 << 4, -(1 << 31)  # 35; 68 and 31
    given = TokenMasks(masks, torch.tensor([0, -1, 1, 1]))
    seen = allowed(logits, given)
    assert seen[0].isfinite().nonzero().tolist() == [[35]]
    assert torch.equal(seen[1], logits[1])
    assert (seen[2] == LEAST_LOGIT).nonzero().tolist() == [[31], [68]]
    limits = Limits(torch.full((4,), 3), torch.ones(4), torch.zeros(4))
    draws = Draws(torch.tensor([1.0, 0.0, 0.7, 0.0]), torch.arange(4), torch.arange(4), limits, given)
    assert sampling.draw(logits, draws).tolist() == [35, 5, 31, 31]
    free = replace(draws, limits=None, temperature=torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert all(sampling.draw(logits, replace(free, seeds=free.seeds + at))[3] in (31, 68) for at in range(20))


def test_top_p_takes_its_share_of_the_best_k_when_these_are_more_than_the_candidates() -> None:
    """A share of all tokens would keep about 150, and those are fewer than the candidates."""
    count, vocab_size = 200, 3000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5)).mul_(0.01).expand(count, -1)
    limits = Limits(torch.full((count,), 1500), torch.full((count,), 0.05), torch.zeros(count))
    draws = Draws(torch.ones(count), torch.arange(count), torch.zeros(count, dtype=torch.int64), limits)
    kept = logits[0] >= floors(logits, draws)[0]
    assert 70 < int(kept.sum()) < 80
    assert bool(kept[sampling.draw(logits, draws)].all())
