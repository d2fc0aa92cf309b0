"""The loop of a balance beside faults: what it orders, what it does not, and what it tells."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from pd_cluster.balancing import balancer
from pd_cluster.balancing.balancer import Balancer
from pd_cluster.balancing.decision import CONFIRMED, OPERATOR_S, SETTLE_S
from tests.balancing.fake_router import KEY, FakeRouter
from tests.balancing.snapshots import TARGETS

pytestmark = pytest.mark.anyio
ROLES = {"p-0": "prefill", "d-0": "decode", "d-1": "decode", "d-2": "decode"}


class World:
    """Routers, and the balances that ask them. Each round of all of them takes 5 s."""

    def __init__(self, *routers: FakeRouter) -> None:
        self.routers = routers
        by_host = {f"127.0.0.{1 + number}": router for number, router in enumerate(routers)}
        self._client = httpx.AsyncClient(
            transport=httpx.MockTransport(lambda request: by_host[request.url.host].answer(request))
        )

    def balance(self, *, skew_s: float = 0.0, is_dry: bool = False) -> Balancer:
        urls = [f"http://127.0.0.{1 + number}" for number, _ in enumerate(self.routers)]
        return Balancer(self._client, urls, KEY, TARGETS, is_dry=is_dry, wall_clock=lambda: time.time() + skew_s)

    async def rounds(self, number: int, *balances: Balancer) -> list[str]:
        """The reasons of the last one."""
        reasons = list[str]()
        for _ in range(number):
            for balance in balances:
                reasons = [one.reason for one in await balance.round()]
            for router in self.routers:
                router.now_s += 5.0
        return reasons


def a_router() -> FakeRouter:
    return FakeRouter(dict(ROLES))


async def test_roles_follow_a_load_and_the_reason_travels_with_the_order() -> None:
    world = World(router := a_router())
    balance = world.balance()
    await world.rounds(CONFIRMED + 1, balance)
    (order,) = router.obeyed
    assert (order.sender, order.role, order.seen_changes) == ("balance", "prefill", 0)
    assert "as a prefill node gains" in order.reason
    assert ("change", order.reason) in router.words, "and the routers hear it with the next look"
    await world.rounds(60, balance)
    assert Counter(router.roles.values()) == {"prefill": 3, "decode": 1}
    router.lengths, router.per_s = (2000, 200), 46.0
    await world.rounds(60, balance)
    assert Counter(router.roles.values()) == {"prefill": 2, "decode": 2}
    assert len(router.obeyed) == 3, "no swing"


async def test_a_dry_run_says_what_it_would_do_and_gives_no_order() -> None:
    world = World(router := a_router())
    await world.rounds(CONFIRMED + 1, world.balance(is_dry=True))
    assert router.obeyed == []
    assert any(word.startswith("dry run: 1P3D") and "gains" in word for _, word in router.words)


async def test_of_two_balances_at_once_one_acts() -> None:
    world = World(router := a_router())
    await world.rounds(CONFIRMED + 2, world.balance(), world.balance())
    assert len(router.obeyed) == 1


async def test_two_balances_that_looked_before_either_acted() -> None:
    """The second order names a state that is over: it is refused, and the next look finds the change of the first."""
    world = World(router := a_router())
    first, second = world.balance(), world.balance()
    await world.rounds(CONFIRMED - 1, first, second)
    told = router._told
    before = told()
    router._told = lambda: before  # type: ignore[method-assign]
    await world.rounds(1, first, second)
    router._told = told  # type: ignore[method-assign]
    assert len(router.obeyed) == 1
    await world.rounds(2, first, second)
    assert router.words[-1][0] == "refused"
    assert "was refused: 409: roles have changed: look again; now: the balance made" in router.words[-1][1]
    assert len(router.obeyed) == 1


async def test_an_order_after_which_the_sum_of_changes_is_what_it_was() -> None:
    """One node starts again, an operator changes another one: what the balance saw is over all the same."""
    world = World(router := a_router())
    router.change("d-1", "prefill", "balance")
    router.change("d-1", "decode", "balance")
    router.now_s += 2 * SETTLE_S
    balance = world.balance()
    await world.rounds(CONFIRMED - 1, balance)
    told = router._told
    before = told()
    router._told = lambda: before  # type: ignore[method-assign]
    router.restart("d-1", "decode")
    router.change("d-2", "prefill")
    router.change("d-2", "mixed")
    await world.rounds(1, balance)
    router._told = told  # type: ignore[method-assign]
    assert router.obeyed == []
    assert (await world.rounds(1, balance))[0].startswith("an operator made d-2 a mixed node")


async def test_routers_that_see_different_nodes_change_nothing() -> None:
    """A node that one of them does not reach: what decodes for it may be the node that is to read prompts."""
    world = World(router := a_router(), other := a_router())
    router.per_s = other.per_s = router.per_s / 2
    other.dead = {"d-1", "d-2"}
    (reason,) = await world.rounds(CONFIRMED + 2, balance := world.balance())
    assert reason == "the routers tell different nodes, or roles or health of them"
    assert (router.obeyed, other.obeyed) == ([], [])
    other.dead = set()
    await world.rounds(CONFIRMED, balance)
    assert len(router.obeyed) == 1


@pytest.mark.parametrize(
    ("addresses", "asked"),
    [
        ({"127.0.0.1": 4, "::1": 6}, ["http://routers:80"]),
        ({"10.0.0.1": 4, "10.0.0.2": 4, "fd00::1": 6, "fd00::2": 6}, ["http://10.0.0.1:80", "http://10.0.0.2:80"]),
        ({"fd00::1": 6, "fd00::2": 6}, ["http://[fd00::1]:80", "http://[fd00::2]:80"]),
    ],
)
async def test_an_address_of_each_family_is_one_router(
    addresses: dict[str, int], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else requests would count twice, or half of the routers never answer."""
    families = {4: socket.AF_INET, 6: socket.AF_INET6}

    async def getaddrinfo(*_: object, **__: object) -> list[Any]:
        return [(families[of], socket.SOCK_STREAM, 6, "", (host, 80)) for host, of in addresses.items()]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert [httpx.URL(url) for url in await balancer._each("http://routers:80")] == [httpx.URL(url) for url in asked]


async def test_a_router_that_never_ends_its_answer_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """httpx's deadline is one for each piece."""

    async def stand(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(balancer, "CALL_S", 0.01)
    async with httpx.AsyncClient(transport=httpx.MockTransport(stand)) as client:
        balance = Balancer(client, ["http://127.0.0.1"] * 2, KEY, TARGETS)
        for _ in range(2):
            assert [one.reason for one in await balance.round()] == ["0 of 1 routers answer: no majority"]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "http://127.0.0.1: no answer (TimeoutError)"
    ]


async def test_what_a_balance_says_fits_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(router := a_router())
    balance = world.balance()
    monkeypatch.setattr(balance, "_word", "x" * 100_000)
    await world.rounds(1, balance)
    assert len(router.words[0][1]) == balancer.MAX_WORD_CHARS


async def test_after_an_operators_order_nothing_is_done_for_a_while() -> None:
    world = World(router := a_router())
    balance = world.balance()
    await world.rounds(CONFIRMED - 1, balance)
    router.change("d-2", "prefill")
    router.change("d-2", "decode")  # an operator tries something
    assert "an operator made d-2 a decode node 0 s ago" in (await world.rounds(1, balance))[0]
    await world.rounds(int(OPERATOR_S / 5) - 2, balance)
    assert router.obeyed == []
    await world.rounds(CONFIRMED + 2, balance)
    assert len(router.obeyed) == 1


async def test_one_that_is_killed_between_two_orders_goes_on_where_it_was() -> None:
    world = World(router := a_router())
    await world.rounds(CONFIRMED, world.balance())
    assert len(router.obeyed) == 1
    successor = world.balance()
    assert f"nothing is done for {SETTLE_S:.0f} s" in (await world.rounds(CONFIRMED + 2, successor))[0]
    assert len(router.obeyed) == 1, "the nodes tell when the last order was"


async def test_a_node_that_dies_during_a_change_is_told_and_not_ordered_again() -> None:
    world = World(router := a_router())
    balance = world.balance()
    await world.rounds(CONFIRMED - 1, balance)
    told = router._told
    before = told()
    router._told = lambda: before  # type: ignore[method-assign]
    router.dead = {"d-0", "d-1", "d-2"}
    await world.rounds(1, balance)
    router._told = told  # type: ignore[method-assign]
    await world.rounds(3, balance)
    assert router.obeyed == []
    kind, word = router.words[-1]
    assert kind == "refused"
    assert "as a prefill node was refused: 502: node d-0 gave no answer; now: 1 of 4 nodes are healthy" in word


async def test_a_lost_answer_is_no_second_order() -> None:
    world = World(router := a_router())
    router.loses_orders = True
    await world.rounds(CONFIRMED + 3, world.balance())
    assert len(router.obeyed) == 1
    assert "was refused: no answer (timed out)" in router.words[-1][1]


async def test_cut_feeds_and_routers_without_a_majority_change_nothing() -> None:
    world = World(router := a_router(), other := a_router())
    router.per_s = other.per_s = router.per_s / 2  # each has half of the requests
    balance = world.balance()
    for what in ("silent", "away"):
        router.silent = {"d-1"} if what == "silent" else set()
        other.is_up = what != "away"
        (reason,) = await world.rounds(CONFIRMED + 2, balance)
        assert reason == {"silent": "nothing is told by d-1", "away": "1 of 2 routers answer: no majority"}[what]
        assert (router.obeyed, other.obeyed) == ([], [])
    assert router.words[-1] == ("hold", "1 of 2 routers answer: no majority")
    other.is_up = True
    await world.rounds(CONFIRMED, balance)
    assert (len(router.obeyed), len(other.obeyed)) == (1, 0)


@pytest.mark.parametrize(("skew_s", "num_orders"), [(-25.0, 1), (3600.0, 1), (-60.0, 0)])
async def test_clocks_that_differ(skew_s: float, num_orders: int) -> None:
    """Ages come from the nodes' own clocks. An order of a clock that is a minute late has expired: nothing is done."""
    world = World(router := a_router())
    (reason,) = await world.rounds(CONFIRMED + 2, world.balance(skew_s=skew_s))
    assert len(router.obeyed) == num_orders
    assert num_orders or reason == "0 of 1 routers answer: no majority"


async def test_a_node_that_restarts_with_its_command_lines_role_gets_it_again_by_the_same_function() -> None:
    world = World(router := a_router())
    balance = world.balance()
    await world.rounds(CONFIRMED, balance)
    changed = router.obeyed[0].node
    router.restart(changed, "decode")
    await world.rounds(CONFIRMED + 2, balance)
    assert [order.node for order in router.obeyed] == [changed, "d-0"]
