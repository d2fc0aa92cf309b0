"""How much of its limits a key has used. Pure: fed sizes and times.

A limit refuses only while it has no room now. Nothing is kept of a refused request: its Retry-After is an estimate.
Places kept for retries would be lost with each client that does not come back: those kept a key out for good.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pd_router.admission.api_keys import ApiKey

# By the key's name: requests and tokens since the last report to other workers, and requests under way
KeyUsage = dict[str, tuple[int, float, int]]
MINUTE_S = 60.0
LONGEST_S = 60  # of a Retry-After: OpenAI's SDK does not heed a longer one, and comes back at once
# The most that a budget may be below zero. Answers may be longer than expected, and reports of nodes may be wrong.
MOST_DEBT_MINUTES = 10
# Requests above a limit of concurrency that wait for one of the key's to end. Without them random arrivals leave a
# quarter of a limit of 8 unused at its own load (Erlang's loss formula), half of a limit of 1; 16 of them: 3 and 6%.
MAY_WAIT = 16
RECENT = 0.1  # weight of the newest request in means


class Bucket:
    """A budget that refills evenly and holds one minute's worth. It may fall below 0: what was used is known later."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.level = per_minute or inf
        self._per_minute = per_minute
        self._at_s = now_s

    def configure(self, per_minute: float) -> None:
        if per_minute != self._per_minute:
            is_limited = per_minute and self._per_minute
            self._per_minute = per_minute
            self.level = min(self.level, per_minute) if is_limited else per_minute or inf
            self.take(0)

    def has(self, amount: float, now_s: float) -> bool:
        """Whether `amount` may be taken. What exceeds a minute's worth needs a full bucket."""
        if not (limit := self._per_minute):
            return True
        self.level = min(self.level + (now_s - self._at_s) * limit / MINUTE_S, limit)
        self._at_s = now_s
        return self.level >= min(amount, limit)

    def fits(self, amount: float) -> bool:
        """Whether a minute refills as much."""
        return not self._per_minute or amount <= self._per_minute

    def take(self, amount: float) -> None:
        self.level = max(self.level - amount, -MOST_DEBT_MINUTES * self._per_minute)

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there."""
        if not self._per_minute:
            return 0.0
        return max(0.0, (min(amount, self._per_minute) - self.level) * MINUTE_S / self._per_minute)


class KeyLimits:
    """One key in one router process. `admit`, then `end` exactly once for each request that was admitted."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self.fields = _fields_of(key)
        self.running = 0  # admitted here, those that wait for their turn included
        self.inside = 0  # of them, those that have gone to the nodes
        self.elsewhere = 0  # those that the router's other processes have let go to the nodes
        self.mean_s = 1.0  # of a request
        self.mean_output = 128.0  # tokens of an answer
        self.last_s = now_s  # when one was last admitted
        self._requests = Bucket(key.requests_per_minute, now_s)
        self._tokens = Bucket(key.tokens_per_minute, now_s)
        self._used_requests, self._used_tokens = 0, 0.0  # in this process
        self._reported = (0, 0.0, 0)

    def configure(self, key: ApiKey) -> None:
        """Take another version of the key's line. What was used stays used."""
        self.key = key
        self.fields = _fields_of(key)
        self._requests.configure(key.requests_per_minute)
        self._tokens.configure(key.tokens_per_minute)

    @property
    def has_place(self) -> bool:
        """Whether one more may go to the nodes."""
        return not self.key.concurrency or self.inside + self.elsewhere < self.key.concurrency

    def place_s(self, more: int = 0) -> float:
        """Until those admitted here and `more` have places, estimated."""
        limit = self.key.concurrency
        return max(0, self.running + self.elsewhere + more - limit) * self.mean_s / limit if limit else 0.0

    def admit(self, tokens: float, now_s: float) -> tuple[str, int] | None:
        """None: the request is admitted. Else the limit that it exceeds, and after how many seconds to come again.

        `tokens`: expected, of prompt and answer.
        """
        if (reason := self._exceeded(tokens, now_s)) is not None:
            budgets_s = max(self._requests.wait_s(1), self._tokens.wait_s(tokens))
            return reason, whole_seconds(max(budgets_s, self.place_s(1)))
        self._count(1, tokens)
        self.running += 1
        self.last_s = now_s
        return None

    def _exceeded(self, tokens: float, now_s: float) -> str | None:
        under_way, limit = self.running + self.elsewhere, self.key.concurrency
        if limit and under_way >= limit + MAY_WAIT:
            return "concurrency"
        has_request, has_tokens = self._requests.has(1, now_s), self._tokens.has(tokens, now_s)
        if has_request and has_tokens:
            return None
        # However large its debt, a key without requests gets one a minute that fits its budgets
        if not under_way and now_s >= self.last_s + MINUTE_S and self._requests.fits(1) and self._tokens.fits(tokens):
            return None
        return "tokens" if has_request else "requests"

    @property
    def is_reported(self) -> bool:
        """Whether other processes know how many requests are at the nodes."""
        return self._reported[2] == self.inside

    def news(self) -> tuple[int, float, int] | None:
        """Requests and tokens used here since the last call, and requests at the nodes. None: as before."""
        before, self._reported = self._reported, (self._used_requests, self._used_tokens, self.inside)
        if before == self._reported:
            return None
        return self._used_requests - before[0], self._used_tokens - before[1], self.inside

    def _count(self, requests: int, tokens: float) -> None:
        self._used_requests += requests
        self._used_tokens += tokens
        self.take(requests, tokens)

    def take(self, requests: int, tokens: float) -> None:
        """Count what was used, here or in another process."""
        self._requests.take(requests)
        self._tokens.take(tokens)

    def uncount(self) -> None:
        """Give the request itself back: it was refused for another reason than this key's limits."""
        self._count(-1, 0.0)

    def end(self, expected: float, used: tuple[int, int] | None, took_s: float) -> None:
        """Note the end of a request. `used`: tokens of prompt and answer; None: not known, so what was expected."""
        self.running -= 1
        if used is not None:
            self._count(0, sum(used) - expected)
        if used is None or used[1]:
            self.mean_s += RECENT * (took_s - self.mean_s)
        if used is not None and used[1]:
            self.mean_output += RECENT * (used[1] - self.mean_output)


def whole_seconds(wait_s: float) -> int:
    """The Retry-After for an estimate."""
    return max(1, ceil(min(LONGEST_S, wait_s)))


def _fields_of(key: ApiKey) -> dict[str, msgspec.Raw]:
    """The fields of a request that the key decides, if the client gives none of them."""
    fields = {"cache_salt": key.salted(""), "priority": key.priority}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items() if value}
