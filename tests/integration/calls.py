"""One request under way in a task, and how it ended: an answer, an error, or a connection that broke."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPLETIONS = "/v1/completions"
BROKEN = "connection_broken"  # code of an Outcome: the connection ended before the answer


@dataclass(slots=True)
class Outcome:
    """How a request ended: as an answer or as an error, never both."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    longest_gap_s: float = 0.0  # between two pieces of a streamed answer

    def check(self, expected: Outcome) -> None:
        """Asserts that it is the answer that `expected` is."""
        assert (self.status, self.error) == (200, None), self
        assert (self.text, self.finish_reason) == (expected.text, expected.finish_reason), (self, expected)


class Call:
    """One request, under way in a task from the start."""

    def __init__(self, url: str, body: dict[str, Any], route: str = "", *, deadline_s: float = HANG_S) -> None:
        self._has_text = asyncio.Event()
        self._url = url + COMPLETIONS
        self._body = body
        self._headers = {"x-pd-route": route} if route else {}
        self._deadline_s = deadline_s
        self._outcome = Outcome()
        self._last_s = 0.0
        self._task = asyncio.create_task(self._run())

    @property
    def has_text(self) -> bool:
        """Whether a streamed answer has begun to be told."""
        return self._has_text.is_set()

    @property
    def longest_gap_s(self) -> float:
        """So far."""
        return self._outcome.longest_gap_s

    @property
    def silent_s(self) -> float:
        """Since the last piece of a streamed answer that is under way."""
        return time.monotonic() - self._last_s if self._has_text.is_set() and not self.done else 0.0

    @property
    def done(self) -> bool:
        return self._task.done()

    async def begun(self) -> None:
        """Until a streamed answer has begun to be told. Asserts that it comes to that."""
        begun = asyncio.create_task(self._has_text.wait())
        await asyncio.wait({begun, self._task}, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        assert self._has_text.is_set(), f"no text; so far {self._outcome}"

    async def outcome(self) -> Outcome:
        """Its end. Asserts that it comes in time."""
        done, _ = await asyncio.wait({self._task}, timeout=self._deadline_s)
        assert done, f"no end within {self._deadline_s:g} s; so far {self._outcome}"
        return self._task.result()

    async def leave(self) -> None:
        """Close the connection in the middle of it."""
        assert not self._task.done(), f"it was over already: {self._task.result()}"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> Outcome:
        outcome, started_s = self._outcome, time.monotonic()
        try:
            await self._stream()
        except httpx.TransportError as error:
            if outcome.error is None:  # else its last words are the better explanation
                outcome.error = {"message": repr(error), "code": BROKEN}
        outcome.seconds = time.monotonic() - started_s
        return outcome

    async def _stream(self) -> None:
        outcome = self._outcome
        async with (
            httpx.AsyncClient(timeout=self._deadline_s, trust_env=False) as client,
            client.stream("POST", self._url, json=self._body, headers=self._headers) as response,
        ):
            outcome.status, outcome.headers = response.status_code, response.headers
            if response.headers["content-type"].startswith("text/event-stream"):
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self._take(orjson.loads(line[6:]))
            else:
                self._take(orjson.loads(await response.aread()))

    def _take(self, told: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if self._has_text.is_set():
            self._outcome.longest_gap_s = max(self._outcome.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self._outcome.error = told.get("error", self._outcome.error)
        for choice in told.get("choices", ()):
            self._outcome.text += choice["text"]
            self._outcome.finish_reason = choice["finish_reason"]
            self._has_text.set()
