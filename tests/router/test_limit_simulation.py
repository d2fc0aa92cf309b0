"""Clients of a key that do not come back, come back early or as they are told: the key's limit is used all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.limit_world import ANSWERS, Clients, LimitWorld

LOADS = (1.0, 1.2, 3.0)
# (share of the refused clients that come back, whether they do so at half of the time)
COMING_BACK = {"none": (0.0, False), "half": (0.5, False), "all": (1.0, False), "all early": (1.0, True)}
CONCURRENCY = 8
PER_S = {"requests_per_minute": 60, "tokens_per_minute": 6000}  # one request a second


def clients_of(per_s: float, coming_back: str, **settings: Any) -> Clients:
    share, early = COMING_BACK[coming_back]
    return Clients(per_s, share, early, **settings)


def share_of_places(clients: Clients, seconds: float = 60.0, seed: int = 0) -> float:
    """The used share of what the limit allows, from 2 s on."""
    world = LimitWorld(clients, seed, concurrency=CONCURRENCY).run(seconds, 2.0)
    assert world.most_inside <= CONCURRENCY
    assert world.refused_idle == 0
    return world.served_s / (seconds - 2.0) / CONCURRENCY


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("coming_back", COMING_BACK)
@pytest.mark.parametrize("load", LOADS)
def test_a_limit_of_concurrency_is_used(load: float, coming_back: str) -> None:
    """Without requests that wait, random arrivals at a load of 1.0 use 0.76 (Erlang's loss formula)."""
    assert share_of_places(clients_of(load * CONCURRENCY, coming_back)) >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("load", LOADS)
def test_a_limit_of_concurrency_is_used_by_even_arrivals(load: float) -> None:
    assert share_of_places(clients_of(load * CONCURRENCY, "none", evenly=True), 30.0) >= 0.95


def test_a_burst_leaves_nothing_behind() -> None:
    """Half of what the limit allows, after four times as much: it is all served."""
    world = LimitWorld(Clients(CONCURRENCY / 2, evenly=True, burst=32), concurrency=CONCURRENCY).run(60.0, 10.0)
    assert world.served == pytest.approx(CONCURRENCY / 2 * 50, abs=2)


@pytest.mark.slow_cases
@pytest.mark.long_cases
@pytest.mark.parametrize("coming_back", COMING_BACK)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("limit", PER_S)
def test_a_budget_is_used(limit: str, load: float, coming_back: str) -> None:
    clients = clients_of(load, coming_back, burst=100)
    world = LimitWorld(clients, **{limit: PER_S[limit]}).run(300.0, 2.0)
    assert world.served >= 0.9 * 298


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("coming_back", COMING_BACK)
@pytest.mark.parametrize("load", LOADS)
def test_answers_of_any_length_use_a_limit(load: float, coming_back: str, answer: str, seed: int) -> None:
    clients = clients_of(load * CONCURRENCY, coming_back, answer=answer)
    assert share_of_places(clients, 300.0, seed) >= 0.9
