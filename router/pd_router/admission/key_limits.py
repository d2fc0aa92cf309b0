"""How much of its limits a key has used, and the retries that it was promised. Pure: fed sizes and times.

A refused request is told when to come again, and its place is kept for it until then: other requests of the key stand
behind it. Without that, those that come meanwhile take the places, and most retries fail again.
Answers end irregularly, so under a limit of concurrency a retry that is due may find no place. It is then held for a
few mean times of the key, and gets the next place. Without that 21 to 32% of such retries were refused (simulated).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.admission.api_keys import ApiKey

MINUTE_S = 60.0
EARLY_S = 0.25  # by which a retry may be early: clocks, and clients that round
SWEEP_S = 0.25  # between two looks for places that lapse
GRACE_S = 2.0  # for which a place is kept beyond its time
LONGEST_S = 600.0  # of a Retry-After
MAX_PROMISES = 4096  # of a key; further refusals are told LONGEST_S
# Of refill by which a promised retry may exceed the limit on tokens: answers may have been longer than expected. The
# debt is paid before others are admitted.
DEBT_S = 6.0
RECENT = 0.1  # weight of the newest request in means
# A place becomes free within this many of the key's mean times, divided by its places. Retries that are due come a
# little slower than places become free, so few of them are held at once
PATIENCE = 1.25
HOLD = 4.0  # mean times of the key for which a retry is held
SHORTEST_HOLD_S = 1.0  # retries come in whole seconds, so several at once


class Bucket:
    """A budget that refills evenly and holds one minute's worth. It may fall below 0: what was used is known later."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.level = per_minute or inf
        self._per_minute = per_minute
        self._at_s = now_s

    def configure(self, per_minute: float) -> None:
        if per_minute != self._per_minute:
            is_limited = per_minute and self._per_minute
            self.level = min(self.level, per_minute) if is_limited else per_minute or inf
            self._per_minute = per_minute

    def has(self, amount: float, kept: float, slack_s: float, now_s: float) -> bool:
        """Whether `amount` may be taken, `kept` for others. What exceeds a minute's worth needs a full bucket."""
        if not (limit := self._per_minute):
            return True
        self.level = min(self.level + (now_s - self._at_s) * limit / MINUTE_S, limit)
        self._at_s = now_s
        return self.level + slack_s * limit / MINUTE_S - kept >= min(amount, limit)

    def take(self, amount: float) -> None:
        self.level -= amount

    def wait_s(self, amount: float, kept: float) -> float:
        """Until `amount` and what is kept for others are there."""
        if not self._per_minute:
            return 0.0
        return max(0.0, (min(amount, self._per_minute) + kept - self.level) * MINUTE_S / self._per_minute)


@dataclass(frozen=True, slots=True)
class _Promise:
    due_s: float
    tokens: float


class Promises:
    """Retries that were told a time, by the fingerprint of the request."""

    def __init__(self) -> None:
        self._by_print: dict[int, deque[_Promise]] = {}
        self._count = 0
        self._swept_s = 0.0
        self.tokens = 0.0  # of all of them

    def __len__(self) -> int:
        return self._count

    def promise(self, fingerprint: int, now_s: float, wait_s: float, tokens: float) -> int:
        """Keep a place for a refused request. -> whole seconds after which to come again."""
        if self._count >= MAX_PROMISES or wait_s > LONGEST_S:
            return round(LONGEST_S)
        seconds = max(1, ceil(wait_s))
        self._by_print.setdefault(fingerprint, deque()).append(_Promise(now_s + seconds, tokens))
        self._count += 1
        self.tokens += tokens
        return seconds

    def claim(self, fingerprint: int, now_s: float) -> bool:
        """Whether this request was told to come now. Its place is then its own."""
        places = self._by_print.get(fingerprint)
        if not places or now_s < places[0].due_s - EARLY_S:
            return False
        self._drop(fingerprint)
        return True

    def lapse(self, now_s: float) -> None:
        """Forget the places that were not taken in time."""
        if self._count and now_s >= self._swept_s + SWEEP_S:
            self._swept_s = now_s
            late = [one for one, places in self._by_print.items() if places[0].due_s + GRACE_S < now_s]
            for fingerprint in late:
                while (places := self._by_print.get(fingerprint)) and places[0].due_s + GRACE_S < now_s:
                    self._drop(fingerprint)

    def _drop(self, fingerprint: int) -> None:
        places = self._by_print[fingerprint]
        self.tokens -= places.popleft().tokens
        self._count -= 1
        if not places:
            del self._by_print[fingerprint]


@dataclass(slots=True, eq=False)
class Held:
    """A retry that is due and waits for a place. `go` is called when it is admitted."""

    tokens: float
    go: Callable[[], None]


class KeyLimits:
    """One key in one router process. `admit`, then `end` exactly once for each request that was admitted."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self.fields = _fields_of(key)
        self.running = 0
        self.elsewhere = 0  # under way in the router's other processes
        self.mean_s = 1.0  # of a request
        self.mean_output = 128.0  # tokens of an answer
        self.last_s = now_s  # when one was last admitted
        self._requests = Bucket(key.requests_per_minute, now_s)
        self._tokens = Bucket(key.tokens_per_minute, now_s)
        self._promises = Promises()
        self._held: deque[Held] = deque()
        self.late = Promises()  # to requests within the limits, for which the nodes had no time
        self._used_requests, self._used_tokens = 0, 0.0  # in this process
        self._told = (0, 0.0, 0)

    def configure(self, key: ApiKey) -> None:
        """Take another version of the key's line. What was used stays used."""
        self.key = key
        self.fields = _fields_of(key)
        self._requests.configure(key.requests_per_minute)
        self._tokens.configure(key.tokens_per_minute)
        self.let_held()

    def admit(self, tokens: float, fingerprint: Callable[[], int], now_s: float) -> tuple[str, int] | None:
        """None: the request is admitted. Else the limit that it exceeds, and after how many seconds to come again.

        0 seconds: it has come when it was told to, and is to be held (`hold`) until a place is free.
        `tokens`: expected, of prompt and answer. `fingerprint`: equal for a retry; asked for only when it matters.
        """
        promises, is_promised, places, kept = self._promises, False, 0, 0.0
        if len(promises):
            promises.lapse(now_s)
            is_promised = promises.claim(fingerprint(), now_s)
            places, kept = (0, 0.0) if is_promised else (len(promises), promises.tokens)
        if not self._requests.has(1, places + len(self._held), EARLY_S if is_promised else 0.0, now_s):
            return "requests", self._promise(tokens, fingerprint(), now_s)
        if not self._tokens.has(tokens, kept + self._held_tokens, DEBT_S if is_promised else 0.0, now_s):
            return "tokens", self._promise(tokens, fingerprint(), now_s)
        limit = self.key.concurrency
        if limit and self.running + self.elsewhere + len(self._held) + places >= limit:
            return "concurrency", 0 if is_promised else self._promise(tokens, fingerprint(), now_s)
        self._enter(tokens)
        self.last_s = now_s
        return None

    def _enter(self, tokens: float) -> None:
        self._count(1, tokens)
        self.running += 1

    @property
    def _held_tokens(self) -> float:
        """Of the held retries, which have passed the limit on tokens and are counted when they are admitted."""
        return sum(held.tokens for held in self._held)

    @property
    def hold_s(self) -> float:
        """For which a retry is held."""
        return max(SHORTEST_HOLD_S, HOLD * self.mean_s)

    def hold(self, tokens: float, go: Callable[[], None]) -> Held:
        """Admit a retry when a place is free, in turn, and call `go`. `release` it if that takes too long."""
        held = Held(tokens, go)
        self._held.append(held)
        self.let_held()  # a place may have become free since
        return held

    def release(self, held: Held) -> bool:
        """Hold the retry no longer. False: it has been admitted."""
        if held in self._held:
            self._held.remove(held)
            return True
        return False

    def refuse(self, tokens: float, fingerprint: int, now_s: float) -> int:
        """Promise a place to a request that was held in vain. -> seconds."""
        return self._promise(tokens, fingerprint, now_s)

    def let_held(self) -> None:
        """Admit held retries as far as there are places."""
        while self._held and self.running + self.elsewhere < (self.key.concurrency or inf):
            held = self._held.popleft()
            self._enter(held.tokens)
            held.go()

    def _promise(self, tokens: float, fingerprint: int, now_s: float) -> int:
        promises, limit = self._promises, self.key.concurrency
        slot_s = self._slot_s(len(promises), limit) if limit else 0.0
        requests_s = self._requests.wait_s(1, len(promises) + len(self._held))
        wait_s = max(requests_s, self._tokens.wait_s(tokens, promises.tokens + self._held_tokens), slot_s)
        return promises.promise(fingerprint, now_s, wait_s, tokens)

    def _slot_s(self, places: int, limit: int) -> float:
        over = self.running + self.elsewhere + len(self._held) + places + 1 - limit
        return max(0, over) * PATIENCE * self.mean_s / limit

    def news(self) -> tuple[int, float, int] | None:
        """Requests and tokens used here since the last call, and requests under way. None: as before."""
        before, self._told = self._told, (self._used_requests, self._used_tokens, self.running)
        if before == self._told:
            return None
        return self._used_requests - before[0], self._used_tokens - before[1], self.running

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
        self.let_held()


def _fields_of(key: ApiKey) -> dict[str, msgspec.Raw]:
    """The fields of a request that the key decides, if the client gives none of them."""
    fields = {"cache_salt": key.salted(""), "priority": key.priority}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items() if value}
