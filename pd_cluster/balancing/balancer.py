"""The loop around `decide`: asks the routers, decides, orders, and says why. Keeps nothing that it cannot lose."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import httpx

from pd_cluster.balancing.decision import BalanceDecision, decide
from pd_cluster.balancing.snapshot import BALANCE, BalanceTargets, read_snapshot
from pd_connectors.protocol.ticket import (
    ALL_NODES,
    BALANCE_ACTION,
    NOT_SEEN,
    ORDER_HEADER,
    ROLE_ACTION,
    NodeOrder,
    sign,
)
from pd_http.names import MAX_NAME_CHARS, plain_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.balancing.decision import Forecaster, Memory, RoleChange

logger = logging.getLogger("pd_cluster.balance")
PERIOD_S = 5.0  # between two rounds
CALL_S = 3.0  # of a router's whole answer, and of finding a name's addresses
ORDER_S = 10.0  # of an order, which the router passes on to the node
MAX_WORD_CHARS = 1000  # of what an order tells, which travels in a header
ORDER_LIFETIME_S = 30.0  # more than clocks differ
REFUSED_S = 60.0  # after an order that was refused, for a word that differs: what was refused is shown so long


class RefusedOrder(NamedTuple):
    reason: str
    at_s: float


class Balancer:
    """Of the nodes of `routers`, URLs of routers with equal nodes. The first that answers gets the orders.

    `clock`: monotonic seconds. `is_dry`: no order is given.
    """

    def __init__(
        self, client: httpx.AsyncClient, routers: Sequence[str], key: bytes, targets: BalanceTargets, *,
        is_dry: bool = False, forecast: Forecaster | None = None,
        clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.routers = routers
        self._client, self._key, self._targets = client, key, targets
        self._is_dry, self._forecast, self._clock, self._wall_clock = is_dry, forecast, clock, wall_clock
        self._memory: Memory = {}
        self._word, self._kind = "it has just started", "start"  # of the last round, for the routers
        self._refusal = RefusedOrder("", 0.0)
        self._failures: dict[str, str] = {}  # by router, to log each once

    async def run(self) -> None:
        """Rounds without end. One that fails is logged, and the next one begins anew."""
        while True:
            try:
                await self.round()
            except Exception:
                logger.exception("a round failed")
                self._memory = {}
            await asyncio.sleep(PERIOD_S)

    async def round(self) -> list[BalanceDecision]:
        """Look, decide, order."""
        began_s = self._clock()
        found = await asyncio.gather(*map(_each, self.routers))
        routers = list(dict.fromkeys(url for urls in found for url in urls))
        answers = await asyncio.gather(*(self._ask(url) for url in routers))
        told = [(url, answer) for url, answer in zip(routers, answers, strict=True) if answer is not None]
        snapshot = read_snapshot([answer for _, answer in told], len(routers), self._clock() - began_s)
        decisions, self._memory = decide(snapshot, self._memory, self._targets, self._forecast)
        for decision in decisions:
            if decision.change is not None and not self._is_dry:
                await self._order(told[0][0], decision.change, decision.reason)
        self._say(decisions)
        return decisions

    def _say(self, decisions: Sequence[BalanceDecision]) -> None:
        """Log what differs from the last round in more than its figures, and keep it for the routers."""
        kind = "change" if any(decision.change for decision in decisions) else "hold"
        several = len(decisions) > 1
        word = "; ".join(f"{one.models[:MAX_NAME_CHARS]}: {one.reason}" if several else one.reason for one in decisions)
        if self._is_dry:
            word = f"dry run: {word}"
        if kind == "hold" and self._refusal.reason and self._clock() - self._refusal.at_s < REFUSED_S:
            kind, word = "refused", f"{self._refusal.reason}; now: {word}"
        if _outline(word) != _outline(self._word):
            logger.info("%s: %s", kind, word)
        self._word, self._kind = word, kind

    async def _ask(self, url: str) -> dict[str, Any] | None:
        """Nodes and load by this router. None: no answer that can be read."""
        order = self._signed(BALANCE_ACTION, ALL_NODES, self._kind, self._word)
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._client.post(f"{url}/balance", headers=order, timeout=CALL_S)
            reported: dict[str, Any] = answer.json()
            has_told = answer.status_code == 200 and "role_state" in reported
            why = "" if has_told else f"{answer.status_code}: {_why(reported)}"
        except (httpx.HTTPError, ValueError, TypeError, TimeoutError) as error:
            why = f"no answer ({str(error) or type(error).__name__})"
        if why and why != self._failures.get(url):
            logger.warning("%s: %s", url, why)
        self._failures[url] = why
        return None if why else reported

    async def _order(self, url: str, change: RoleChange, reason: str) -> None:
        """Give the order. One that is refused, or that nothing answers, is told; the next round looks anew."""
        headers = self._signed(
            ROLE_ACTION,
            change.node,
            change.role,
            reason,
            seen_changes=change.seen_changes,
            seen_state=change.seen_state,
        )
        what = f"{change.node} as a {change.role} node"
        try:
            path = f"/nodes/{quote(change.node, safe='')}/role"
            async with asyncio.timeout(ORDER_S):
                answer = await self._client.post(url + path, headers=headers, timeout=ORDER_S)
            why = "" if answer.status_code == 200 else f"{answer.status_code}: {_why(answer.json())}"
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            why = f"no answer ({str(error) or type(error).__name__})"
        self._refusal = RefusedOrder(f"{what} was refused: {why}" if why else "", self._clock())
        if why:
            logger.warning("%s", self._refusal.reason)
        else:
            logger.info("%s: %s", what, reason)

    def _signed(
        self, action: Any, node: str, role: str, reason: str, seen_changes: int = NOT_SEEN, seen_state: int = NOT_SEEN
    ) -> dict[str, str]:
        until_s = self._wall_clock() + ORDER_LIFETIME_S
        order = NodeOrder(
            action, node, until_s, role, sender=BALANCE, reason=reason[:MAX_WORD_CHARS], seen_changes=seen_changes,
            seen_state=seen_state,
        )  # fmt: skip
        return {ORDER_HEADER: sign(self._key, order)}


async def _each(url: str) -> list[str]:
    """A URL for each address of a name with several, as a headless Service has: each router tells its own requests.

    Of one family: an address of IPv4 and one of IPv6, as of localhost, are the same router, or one of them is none.
    """
    at = httpx.URL(url)
    try:
        async with asyncio.timeout(CALL_S):
            found = await asyncio.get_running_loop().getaddrinfo(at.host, at.port or 80, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return [url]
    for family in (socket.AF_INET, socket.AF_INET6):
        hosts = sorted({str(address[0]) for of, *_, address in found if of == family})
        if at.scheme != "https" and len(hosts) > 1:
            return [str(at.copy_with(host=host)) for host in hosts]
    return [url]


def _why(reported: object) -> str:
    error = reported.get("error") if isinstance(reported, dict) else None
    if not isinstance(error, dict):
        return "it is no router of this release"
    return plain_text(str(error.get("message")), MAX_WORD_CHARS)


def _outline(word: str) -> str:
    """Without figures, which differ in each round."""
    return "".join(char for char in word if not (char.isdigit() or char == "."))
