"""Requests of several clients at once, each with an answer that is known, and what the clients saw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import make_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (40, 130, 300)
ANSWER_S = 120.0


@dataclass(slots=True)
class Seen:
    """What clients saw."""

    num_requests: int = 0
    altered: list[Outcome] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # by code of the error
    routes: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0  # of a stream
    longest_s: float = 0.0  # of a request
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests in {self.seconds:.1f} s: {len(self.altered)} altered, "
            f"failed {dict(self.failed) or 0}, longest gap {self.longest_gap_s:.2f} s, "
            f"longest request {self.longest_s:.2f} s, {dict(self.routes)}"
        )


class Load:
    """Clients in a closed loop, each asking one of the known prompts with a salt of its own, so that P computes it."""

    def __init__(self, url: str, num_clients: int = 4, num_tokens: int = 24) -> None:
        self._url = url
        self._num_clients = num_clients
        self._num_tokens = num_tokens
        self._serial = 0
        self._expected: dict[int, Outcome] = {}

    def body(self, length: int) -> dict[str, Any]:
        self._serial += 1
        return {"prompt": make_prompt(length), "max_tokens": self._num_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "cache_salt": f"{id(self)}-{self._serial}"}  # fmt: skip

    async def learn(self) -> None:
        """The answers, undisturbed. Asserts that P and D give them together."""
        for length in LENGTHS:
            outcome = await Call(self._url, self.body(length), deadline_s=ANSWER_S).outcome()
            assert (outcome.status, outcome.error) == (200, None), outcome
            self._expected[length] = outcome

    async def ask(self, seen: Seen, route: str = "") -> Outcome:
        """One request more."""
        length = LENGTHS[self._serial % len(LENGTHS)]
        outcome = await Call(self._url, self.body(length), route, deadline_s=ANSWER_S).outcome()
        seen.num_requests += 1
        seen.routes[outcome.headers.get("x-pd-route", "none")] += 1
        seen.longest_gap_s = max(seen.longest_gap_s, outcome.longest_gap_s)
        seen.longest_s = max(seen.longest_s, outcome.seconds)
        expected = self._expected[length]
        if outcome.status != 200 or outcome.error is not None:
            seen.failed[str((outcome.error or {}).get("code", outcome.status))] += 1
        elif (outcome.text, outcome.finish_reason) != (expected.text, expected.finish_reason):
            seen.altered.append(outcome)
        return outcome

    async def run(self, is_over: Callable[[Seen], bool], seen: Seen) -> None:
        """Until `is_over` says so, and each client has its last answer."""
        started_s = time.monotonic()

        async def client() -> None:
            while not is_over(seen):
                await self.ask(seen)

        await asyncio.gather(*(client() for _ in range(self._num_clients)))
        seen.seconds = time.monotonic() - started_s
