"""How fast nodes are found to read prompts."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pd_router.nodes.node import Node, Role
from pd_router.nodes.speed import DOUBT_S, FORGET_S, ODD, ReadingSpeed
from pd_router.policy.charge import Charge


def reader(*samples: tuple[float, float], num_bytes: int = 1000) -> ReadingSpeed:
    """Of prompts of 1000 bytes that took (begun, ended)."""
    speed = ReadingSpeed()
    for begun_s, ended_s in samples:
        speed.note(num_bytes, begun_s, ended_s)
    return speed


def test_a_speed_is_learned_from_what_was_read() -> None:
    assert ReadingSpeed().at(5.0) is None
    assert ReadingSpeed().at(5.0, guess=7.0) == 7.0
    assert reader((0.0, 0.5)).at(0.5) == pytest.approx(2000)


def test_a_prompt_that_waits_for_another_does_not_slow_its_node() -> None:
    """Three at once, read one after the other; and three that end together."""
    assert reader((0.0, 0.1), (0.0, 0.2), (0.0, 0.3)).at(0.3) == pytest.approx(10_000, rel=0.01)
    assert reader((0.0, 0.3), (0.0, 0.3), (0.0, 0.3)).at(0.3) == pytest.approx(10_000, rel=0.4)


def test_idle_time_counts_for_nothing_and_forgets() -> None:
    speed = reader((0.0, 1.0), (50.0, 51.0))
    assert speed.at(51.0) == pytest.approx(1000, rel=0.02)
    assert speed.at(51.0 + FORGET_S) == pytest.approx(1000, rel=0.02)
    guess = 8000.0
    guesses = [speed.at(51.0 + FORGET_S * age, guess) for age in range(12)]
    assert all(one is not None and 1000 < one < guess for one in guesses)
    assert guesses == sorted(guesses, key=float)  # type: ignore[arg-type]
    assert guesses[-1] == pytest.approx(guess, rel=0.01)
    assert speed.at(51.0 + 100 * FORGET_S) is None


@pytest.mark.parametrize("took_s", [1e-6, 1000.0])
def test_one_odd_sample_is_no_rule(took_s: float) -> None:
    speed = reader(*((float(i), i + 0.1) for i in range(10)))
    usual = speed.at(10.0)
    assert usual is not None
    speed.note(1000, 20.0, 20.0 + took_s)
    odd = speed.at(20.0 + took_s)
    assert odd is not None
    assert usual / ODD <= odd * 1.001
    assert odd <= ODD * usual * 1.001
    guess = speed.at(20.0 + took_s + 5 * FORGET_S, guess=usual)
    assert guess == pytest.approx(usual, rel=0.05), "no node is locked out, or flooded, for long"


@pytest.mark.long
@given(
    st.lists(
        st.tuples(st.integers(1, 10**8), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e6)),
        min_size=1, max_size=30,
    ),
    st.floats(0, 1e7),
)  # fmt: skip
@example([(1, 529.0, 10000.0, 529.0), (8092, 0.0, 0.0, 0.0)], 0.0)
def test_whatever_is_read_the_speed_is_a_number(samples: list[tuple[int, float, float, float]], idle_s: float) -> None:
    speed, now_s = ReadingSpeed(), 0.0
    for num_bytes, waited_s, took_s, pause_s in samples:
        now_s += pause_s + took_s
        speed.note(num_bytes, max(0.0, now_s - took_s - waited_s), now_s)
        for at_s in (now_s, now_s + idle_s):
            known, guessed = speed.at(at_s), speed.at(at_s, guess=1000.0)
            assert known is None or (known > 0 and math.isfinite(known))
            assert guessed is not None
            assert 0 < guessed < math.inf
            assert guessed >= 1000.0 * DOUBT_S / (DOUBT_S + ODD * 31e4)


def test_only_a_prompt_that_was_read_tells_a_speed() -> None:
    now_s = [1.0]
    node = Node(url="", role=Role.DECODE, node_id="d")
    for end in ("release", "prefill_over"):
        with Charge(node, lambda: now_s[0], prefill_bytes=100) as charge:
            now_s[0] += 1
            getattr(charge, end)()
            charge.prefill_done()
    assert node.speed.at(now_s[0]) is None
    with Charge(node, lambda: now_s[0], prefill_bytes=100) as charge:
        now_s[0] += 1
        charge.prefill_done()
        charge.prefill_done()
    assert node.speed.at(now_s[0]) == pytest.approx(100)
    assert node.is_idle
