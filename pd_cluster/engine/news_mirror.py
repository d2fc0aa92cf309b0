"""What the API process knows of its engine's load and named blocks, exact also for requests on their way to it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd_cluster.protocol.messages import ReportNews, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.protocol.messages import AddRequest, EngineNews
    from pd_connectors.protocol.feed import NodeLoad, StoredBlock


class _Untaken(NamedTuple):
    """An AddRequest that the engine had not taken when it sent its last news."""

    number: int
    num_tokens: int  # that the engine will compute, as far as is known here
    num_sequences: int


class NewsMirror:
    """Takes the engine's news, and the AddRequests that are sent to it. `on_change` is called after each."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = _ignore
        self.is_on = False
        self._serial = -1  # of the last ReportNews; -1: none was sent
        self._num_sent = 0
        self._start()

    def _start(self) -> None:
        self.stored: dict[int, StoredBlock] = {}  # all named blocks, by `block`
        self._load: NodeLoad | None = None
        self._untaken: deque[_Untaken] = deque()
        self._new: dict[int, StoredBlock] = {}  # since the last `take_news`
        self._evicted: list[int] = []
        self._moved: dict[int, int] = {}  # block -> tier, of those that are not new

    def switch(self, *, is_on: bool) -> ReportNews:
        """Forget everything, and keep up with the engine from its next news on, or not. Send it what this returns."""
        self._start()
        self.is_on = is_on
        self._serial += 1
        return ReportNews(is_on, self._serial)

    @property
    def load(self) -> NodeLoad | None:
        """None: the engine has not said it yet."""
        load, untaken = self._load, self._untaken
        if load is None or not untaken:
            return load
        return msgspec.structs.replace(
            load,
            queued_tokens=load.queued_tokens + sum(one.num_tokens for one in untaken),
            queued_keys=load.queued_keys + sum(one.num_tokens**2 // 2 for one in untaken),
            num_waiting=load.num_waiting + sum(one.num_sequences for one in untaken),
        )

    def take_news(self) -> tuple[tuple[int, ...], tuple[StoredBlock, ...], tuple[tuple[int, int], ...]]:
        """Evicted and stored blocks since the last call, and (block, tier) of those that moved, in this order."""
        evicted, stored, moved = tuple(self._evicted), tuple(self._new.values()), tuple(self._moved.items())
        self._evicted, self._new, self._moved = [], {}, {}
        return evicted, stored, moved

    def note_sent(self, request: AddRequest) -> None:
        """Count a request until the engine says that it has taken it."""
        self._num_sent += 1
        if self.is_on:
            num_tokens = 0 if request.work is Work.TAKE_OVER else len(request.prompt_token_ids)
            self._untaken.append(_Untaken(self._num_sent, num_tokens, request.num_sequences))
            self.on_change()

    def take(self, news: EngineNews) -> None:
        """Take a message of the engine. One that was sent before the engine had the last ReportNews is ignored.

        No eviction would be told of the blocks that it names.
        """
        if not self.is_on or news.serial != self._serial:
            return
        self._load = news.load
        while self._untaken and self._untaken[0].number <= news.num_taken:
            self._untaken.popleft()
        for block in news.evicted:
            self._moved.pop(block, None)
            if self.stored.pop(block, None) is not None and self._new.pop(block, None) is None:
                self._evicted.append(block)
        for stored in news.stored:
            self.stored[stored.block] = self._new[stored.block] = stored
        for block, tier in news.moved:
            self._move(block, tier)
        self.on_change()

    def _move(self, block: int, tier: int) -> None:
        if (before := self.stored.get(block)) is None:
            return
        self.stored[block] = moved = msgspec.structs.replace(before, tier=tier)
        if block in self._new:
            self._new[block] = moved
        else:
            self._moved[block] = tier


def _ignore() -> None:
    """Nothing listens."""
