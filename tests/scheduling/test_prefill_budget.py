"""How much of a step prompts are given: by cost where it is limited, and always enough to get on."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pd_cluster.scheduling.prefill_budget import (
    COARSE,
    LEAST_PROMPT_TOKENS,
    ROUND,
    STEP_MULTIPLE,
    PrefillBudget,
    affordable,
    cost_of,
)
from pd_connectors.protocol.feed import FAR

KEYS = 6000  # about those of Llama 8B
STARTS = st.one_of(st.just(0), st.integers(0, 12_000), st.integers(0, 200_000))
LENGTHS = st.one_of(st.integers(2, 200), st.integers(2, 20_000))
KEYS_PER_TOKEN = st.one_of(st.just(0), st.just(KEYS), st.integers(1, 50_000))
DECODES = st.integers(0, 300)


def chunks_of(share: PrefillBudget, prompts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, tokens) given to prompts of (start, tokens left) in their order."""
    return [(start, share.take(start, left)) for start, left in prompts if share.admits(start)]


def cost(chunks: list[tuple[int, int]], keys_per_token: int) -> int:
    return sum(cost_of(num_tokens, start, keys_per_token) for start, num_tokens in chunks)


@pytest.mark.long
@given(st.integers(0, 5000), STARTS, KEYS_PER_TOKEN)
def test_the_longest_chunk_that_is_affordable_is_found(most: int, start: int, keys_per_token: int) -> None:
    num_tokens = affordable(most, start, keys_per_token)
    assert cost_of(num_tokens, start, keys_per_token) <= most < cost_of(num_tokens + 1, start, keys_per_token)


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 160), (6000, 80), (12_000, 54), (60_000, 15)])
def test_a_token_costs_what_it_and_its_keys_do(start: int, num_tokens: int) -> None:
    seen = sum(1 + (start + i + 1) / KEYS for i in range(num_tokens))
    assert seen <= cost_of(num_tokens, start, KEYS) < seen + 1
    assert seen == pytest.approx(162, rel=0.02)


@pytest.mark.long
@given(
    DECODES, st.lists(st.tuples(STARTS, LENGTHS), min_size=1, max_size=5), st.integers(0, 512), KEYS_PER_TOKEN,
    st.integers(0, 2048),
)  # fmt: skip
def test_no_step_costs_more_than_its_limit_unless_that_is_the_least_of_prompts(
    num_decodes: int, prompts: list[tuple[int, int]], most: int, keys_per_token: int, room: int
) -> None:
    share = PrefillBudget.beside(num_decodes, num_decodes + room, most, keys_per_token)
    room_cost = share.cost_left
    assert room_cost == most or LEAST_PROMPT_TOKENS <= room_cost < LEAST_PROMPT_TOKENS + STEP_MULTIPLE
    chunks = chunks_of(share, prompts)
    num_tokens = sum(count for _, count in chunks)
    assert num_tokens <= room
    assert num_tokens <= min(STEP_MULTIPLE, room_cost) or cost(chunks, keys_per_token) <= room_cost
    assert all(count for _, count in chunks)
    assert chunks[:-1] == prompts[: max(0, len(chunks) - 1)], "those before the last are complete"


@pytest.mark.long
@given(DECODES, STARTS, LENGTHS, st.integers(0, 512), KEYS_PER_TOKEN)
@example(225, 0, 33, 96, 0)
def test_the_first_prompt_gets_on_however_many_decode_and_wherever_it_stands(
    num_decodes: int, start: int, left: int, most: int, keys_per_token: int
) -> None:
    share = PrefillBudget.beside(num_decodes, 2048, most, keys_per_token)
    assert share.admits(start)
    count = share.take(start, left)
    assert count == left or count >= LEAST_PROMPT_TOKENS
    if count < left:
        assert not share.admits(0)


def test_a_prompt_of_which_much_is_read_gets_the_least_beside_many_decodes() -> None:
    assert PrefillBudget.beside(200, 2048, 0, KEYS).take(100_000, 5000) == 56, "256 in all"
    assert PrefillBudget.beside(80, 2048, 60, KEYS).take(100_000, 5000) == 48, "128 in all"
    assert PrefillBudget.beside(30, 2048, 162, KEYS).take(100_000, 5000) == 64, "half of that would fit into 64 in all"


@pytest.mark.parametrize(
    ("start", "total"),
    [(0, 189), (1000, 167), (1700, 128), (2500, 128), (4100, 125), (6000, 110), (9000, 94), (50_000, 94)],
)
def test_steps_end_at_or_below_a_size_that_is_captured(start: int, total: int) -> None:
    share = PrefillBudget.beside(30, 2048, 162, KEYS)
    assert 30 + share.take(start, 20_000) == total == share.num_planned


@pytest.mark.long
@given(most=st.integers(0, 3000), num_decodes=st.integers(0, 256))
def test_a_step_is_the_largest_captured_one_within_the_limit_or_has_the_least_of_prompts(
    most: int, num_decodes: int
) -> None:
    share = PrefillBudget.beside(num_decodes, 4096, most)
    total, asked = num_decodes + share.tokens_left, num_decodes + most
    assert total % (STEP_MULTIPLE if total < COARSE else 2 * STEP_MULTIPLE) == 0
    assert share.tokens_left >= LEAST_PROMPT_TOKENS
    if total > asked or (asked % STEP_MULTIPLE == 0 and asked < COARSE):
        assert total == asked or total < num_decodes + LEAST_PROMPT_TOKENS + STEP_MULTIPLE
    else:
        assert asked - total < 2 * STEP_MULTIPLE


def test_a_prompt_that_ends_is_not_cut_for_the_sake_of_a_size() -> None:
    assert PrefillBudget.beside(30, 2048, 162, KEYS).take(0, 110) == 110


@pytest.mark.long
@given(st.lists(st.tuples(STARTS, LENGTHS), min_size=1, max_size=5), st.integers(1, 4096))
def test_without_a_limit_position_costs_nothing(prompts: list[tuple[int, int]], room: int) -> None:
    given_out = sum(count for _, count in chunks_of(PrefillBudget.whole(room), prompts))
    assert given_out == min(room, sum(left for _, left in prompts))


@pytest.mark.long
@given(DECODES, LENGTHS, STARTS, st.sampled_from([64, 128, 192, 256]))
def test_without_a_price_a_limited_step_is_full(num_decodes: int, left: int, start: int, most: int) -> None:
    share = PrefillBudget.beside(num_decodes, 2048, most)
    count = share.take(start, left)
    assert count == left or (num_decodes + count) % STEP_MULTIPLE == 0


@pytest.mark.parametrize(
    ("num_decodes", "most", "left", "taken"),
    [
        (5, 600, 5000, ROUND - 5),
        (5, 1000, 5000, ROUND - 5),
        (5, 1200, 5000, 2 * ROUND - 5),  # the most whole ones, not the first
        (505, 2000, 5000, 4 * ROUND - 505),
        (505, 700, 5000, 2 * ROUND - 505),
        (505, 400, 5000, 896 - 505),  # else 7
        (511, 400, 5000, 896 - 511),  # else 1
        (480, 0, 5000, 32),
        (5, 900, 508, 508),  # it ends: a step for one token more takes longer
        (5, 900, 507 + LEAST_PROMPT_TOKENS, 507),
        (5, 900, 507, 507),
    ],
)
def test_a_far_prompt_ends_with_a_whole_round_unless_that_takes_most_of_it(
    num_decodes: int, most: int, left: int, taken: int
) -> None:
    assert PrefillBudget.beside(num_decodes, 8192, most).take(FAR, left) == taken
    usual = PrefillBudget.beside(num_decodes, 8192, most)
    assert usual.take(FAR - 1, left) == min(left, usual.num_planned - num_decodes)
    assert PrefillBudget.whole(2000).take(FAR, left) == min(left, 2000), "nothing is limited"


def test_a_far_prompt_after_another_ends_with_a_whole_round_too() -> None:
    share = PrefillBudget.beside(5, 8192, 1200)
    assert (share.take(0, 520), share.take(FAR, 5000)) == (520, 2 * ROUND - 525)
    share = PrefillBudget.beside(5, 8192, 900)
    assert (share.take(0, 520), share.take(FAR, 5000)) == (520, 896 - 525), "there is none to end with"


@pytest.mark.long
@given(DECODES, LENGTHS, st.integers(FAR, 200_000), st.integers(0, 3000), KEYS_PER_TOKEN, st.integers(0, 600))
def test_a_far_prompt_keeps_half_of_what_it_would_get(
    num_decodes: int, left: int, start: int, most: int, keys_per_token: int, before: int
) -> None:
    share = PrefillBudget.beside(num_decodes, 8192, most, keys_per_token)
    if before:
        share.take(0, before)
    if share.admits(start):
        fits = max(share.least_left, affordable(share.cost_left, start, keys_per_token))
        room, planned = min(left, share.tokens_left, fits), share.num_planned
        taken = share.take(start, left)
        assert 2 * taken >= room
        assert taken > room - STEP_MULTIPLE or (planned + taken) % ROUND == 0
        assert planned + taken >= (planned + room) // ROUND * ROUND
