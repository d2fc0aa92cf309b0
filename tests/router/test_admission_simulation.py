"""A greedy and a quiet key before simulated nodes, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from pd_router.admission.api_keys import ApiKey
from tests.router.admission_world import AdmissionWorld, SimKey

SECONDS = 120.0
QUIET = SimKey(ApiKey(name="quiet", sha256="0" * 64), per_s=1.0)


def greedy(**settings: Any) -> SimKey:
    return SimKey(ApiKey(name="greedy", sha256="1" * 64, priority=1), **settings)


@pytest.mark.long
def test_a_quiet_key_hardly_notices_a_greedy_one() -> None:
    """Six runs (16 and 64 slots, 200 s) gave 1.03 to 1.13 times the p99 alone; without admission, more than 100."""
    alone = AdmissionWorld(QUIET, seed=1).run(SECONDS)["quiet"]
    beside = AdmissionWorld(QUIET, greedy(clients=200), seed=1).run(SECONDS)
    unfair = AdmissionWorld(QUIET, greedy(clients=200), seed=1, has_admission=False).run(SECONDS)
    assert beside["quiet"].p99_s <= 1.5 * alone.p99_s
    assert unfair["quiet"].p99_s > 20 * alone.p99_s
    assert beside["quiet"].refused == 0
    assert beside["greedy"].served > 0.75 * unfair["greedy"].served


@pytest.mark.long
def test_a_greedy_key_s_first_requests_do_not_queue_at_the_prefill_node() -> None:
    """They are below its share of the slots, which once let 31 of them pass."""
    world = AdmissionWorld(QUIET, greedy(clients=200, tokens=500), num_slots=64)
    world.admission.limits_of(QUIET.key)  # it had a request lately
    world.admission._counted_s = -1.0
    world.run(2.0)
    assert 1 <= world.most_prompts <= 4


@pytest.mark.long
def test_equal_keys_get_equal_shares_and_a_heavier_one_more() -> None:
    def key(name: str, digit: str, weight: float, tokens: int) -> SimKey:
        return SimKey(ApiKey(name=name, sha256=digit * 64, weight=weight), clients=60, tokens=tokens)

    outcomes = AdmissionWorld(
        key("short", "0", 1.0, 500), key("long", "1", 1.0, 2000), key("heavy", "2", 2.0, 500)
    ).run(SECONDS)
    assert outcomes["short"].served == pytest.approx(outcomes["long"].served, rel=0.25)
    assert outcomes["heavy"].served == pytest.approx(2 * outcomes["short"].served, rel=0.25)
