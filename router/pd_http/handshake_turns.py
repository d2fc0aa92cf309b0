"""Which TLS handshakes may be under way at once, and which ones end for others. No sockets."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from pd_http.connection_table import network_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

Key = TypeVar("Key", bound="Hashable")
_LOOKED_AT = 64  # networks that wait, for each turn


class HandshakeTurns(Generic[Key]):
    """At most `most` at once. The next turn is of the network that has the fewest under way.

    Of clients that come at once each has its turn, however slow their program is: a handshake ends for another one if
    it has stood for `slow_s`, or for `silent_s` without any handshake that ended well.
    """

    def __init__(self, most: int, silent_s: float, slow_s: float) -> None:
        self._most, self._silent_s, self._slow_s = most, silent_s, slow_s
        self._begun: dict[Key, tuple[float, str]] = {}  # oldest first: since when, and its network
        self._waiting: dict[str, dict[Key, None]] = {}  # by network
        self._network_of: dict[Key, str] = {}  # of those that wait
        self._num_begun: Counter[str] = Counter()
        self._ended_s = -inf  # when the last one ended well

    def wait(self, key: Key, host: str) -> None:
        network = self._network_of[key] = network_of(host)
        self._waiting.setdefault(network, {})[key] = None

    def ended(self, now_s: float) -> None:
        """Note that a handshake ended well. It leaves, too."""
        self._ended_s = now_s

    def leave(self, key: Key) -> None:
        """Remove `key`, if it is here."""
        if (begun := self._begun.pop(key, None)) is not None:
            self._num_begun[begun[1]] -= 1
            if not self._num_begun[begun[1]]:
                del self._num_begun[begun[1]]
        if (network := self._network_of.pop(key, None)) is not None:
            of_network = self._waiting.pop(network)
            del of_network[key]
            if of_network:
                self._waiting[network] = of_network  # after the others

    def begin(self, now_s: float) -> Iterator[Key]:
        """Those that may begin now."""
        while self._waiting and len(self._begun) < self._most:
            network = min(islice(self._waiting, _LOOKED_AT), key=self._num_begun.__getitem__)
            key = next(iter(self._waiting[network]))
            self.leave(key)
            self._begun[key] = now_s, network
            self._num_begun[network] += 1
            yield key

    def slow(self, now_s: float) -> list[Key]:
        """Those that stand for too long, as far as others wait."""
        least_s = self._silent_s if now_s - self._ended_s >= self._silent_s else self._slow_s
        slow = [key for key, (since_s, _) in self._begun.items() if now_s - since_s >= least_s]
        return slow[: len(self._network_of)]
