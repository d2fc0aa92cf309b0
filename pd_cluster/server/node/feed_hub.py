"""The node's side of the feed: what changes, batched, to each router that reads.

While no router reads, the engine reports nothing and prompts get no names. For LINGER_S after the last one has left,
both go on, so that a router that restarts finds the names of cached blocks.
"""

from __future__ import annotations

import asyncio
from datetime import date
from math import inf
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.errors import EngineUnavailable, Overloaded
from pd_connectors.protocol.feed import HEARTBEAT_S, FeedDelta, FeedSnapshot
from pd_connectors.protocol.stream_codec import encode_message
from pd_connectors.protocol.text_chain import AS_ALWAYS

if TYPE_CHECKING:
    from pd_cluster.engine.client import EngineClient
    from pd_cluster.server.node.node_adapters import NodeAdapters
    from pd_cluster.server.node.node_role import NodeRole
    from pd_connectors.protocol.text_chain import LastTurn

# Between two messages. A change after a longer silence leaves at once: waiting for more costs three routers 6% of mean
# TTFT in the simulator (1.19 x one router's, 1.12 without)
BATCH_S = 0.005
LINGER_S = 60.0
FIRST_NEWS_S = 10.0  # the engine says its load between two steps
MAX_READERS = 64  # routers; each costs an encoded message for each batch
MAX_UNREAD_BYTES = 8 << 20  # of one reader: more than a snapshot of MAX_NAMED blocks, 25 bytes each
MAX_NAMED = 1 << 18  # named blocks of a snapshot, the newest; routers keep no more
MAX_NAME_CHARS = 64


class FeedReader:
    """One router that reads: what was written for it and not sent yet."""

    def __init__(self, router: str, wait_s: float = BATCH_S, place: str = "", serial: int = 0) -> None:
        """`wait_s`: that the router wants between two messages. `place`: default is the router's name.

        Of one place the reader with the highest `serial` reads.
        """
        self.router = router
        self.wait_s = wait_s
        self.place = place or router
        self.serial = serial
        self.charges: list[int] = []  # for the next message
        self.is_cut = False
        self._unread = bytearray()
        self._has_news = asyncio.Event()

    def write(self, data: bytes) -> None:
        """Queue a message. Too many end the feed: the router connects again and reads a snapshot."""
        self._unread += data
        if len(self._unread) > MAX_UNREAD_BYTES:
            self.cut()
        self._has_news.set()

    def cut(self) -> None:
        """End the feed without what is unread."""
        self._unread.clear()
        self.end()

    def end(self) -> None:
        """End the feed after what is unread."""
        self.is_cut = True
        self._has_news.set()

    async def next(self) -> bytes:
        """What there is to send; b"" when the feed ends. Returns within HEARTBEAT_S, because of the heartbeats."""
        if not self.is_cut:
            await self._has_news.wait()
        self._has_news.clear()
        data = bytes(self._unread)
        self._unread.clear()
        return data


class ChargeMark:
    """One request's charge on its router. Without a name, all calls do nothing."""

    def __init__(self, hub: FeedHub, name: str) -> None:
        router, _, number = name.rpartition(".")
        self._hub = hub
        self._router = router[:MAX_NAME_CHARS]
        self._number = int(number) if number.isascii() and number.isdecimal() and len(number) < 19 and router else -1
        self._is_included = False

    def include(self) -> None:
        """Say that the node's load has the request from now on. Idempotent."""
        if self._number >= 0 and not self._is_included:
            self._is_included = True
            self._hub.include(self._router, self._number)

    def end(self) -> None:
        """Say that the request has ended, whether it was admitted or not."""
        self.include()
        if self._number >= 0:
            self._hub.end(self._router, self._number)


class FeedHub:
    """The readers of one node's feed, and the charges that the node's load includes."""

    def __init__(
        self, engine: EngineClient, role: NodeRole, adapters: NodeAdapters, last_turn: LastTurn = AS_ALWAYS
    ) -> None:
        """`last_turn`: of the chat template; names follow from it."""
        self._engine = engine
        self.last_turn = last_turn
        self._role = role
        self._adapters = adapters
        role.on_change = adapters.on_change = self._changed
        engine.on_freeze = self._flush
        self._readers: set[FeedReader] = set()
        self._live: dict[str, set[int]] = {}  # router -> charges of requests that are admitted and have not ended
        self._number = 0  # of the last message
        self._sent_s = -inf
        self._batch: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._has_load = asyncio.Event()
        self._day = date.min
        self._is_closed = False

    @property
    def is_on(self) -> bool:
        """Whether prompts should get names."""
        return self._engine.news.is_on

    async def open(self, reader: FeedReader) -> None:
        """Give a reader a snapshot, and what follows. `leave` ends it. Raises Overloaded, EngineUnavailable.

        All readers get the same messages, so the one that wants the longest wait decides for all.
        """
        self._check_room(reader)
        self._switch_on()
        try:
            async with asyncio.timeout(FIRST_NEWS_S):
                while self._engine.news.load is None:  # `begin_day` may have forgotten it meanwhile
                    await self._has_load.wait()
            if (older := self._check_room(reader)) is not None:
                older.cut()
                self._readers.discard(older)
            self._admit(reader)
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine has not said its load within {FIRST_NEWS_S:g} s") from error
        finally:
            self._linger_on()

    def _check_room(self, reader: FeedReader) -> FeedReader | None:
        """The reader that has to leave its place for this one. An order that was overheard takes none from a newer."""
        if self._is_closed or not self._engine.alive:
            raise EngineUnavailable("this node is shutting down, or its engine is gone")
        older = next((one for one in self._readers if one.place == reader.place), None)
        if older is not None and older.serial >= reader.serial:
            raise Overloaded("this order, or a newer one of the same router, has opened a feed")
        if older is None and len(self._readers) >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} routers read this node's feed, the most allowed")
        return older

    def _admit(self, reader: FeedReader) -> None:
        self._flush()  # so that the next delta has nothing that is older than the snapshot
        news, ready = self._engine.news, self._engine.ready
        assert news.load is not None
        assert ready is not None
        charges = tuple(self._live.get(reader.router, ()))
        stored = tuple(news.stored.values())[-MAX_NAMED:]
        snapshot = FeedSnapshot(
            ready.epoch, self._number, news.load, stored, charges, self._role.name, self._role.changes, self.last_turn,
            self._adapters.states(),
        )  # fmt: skip
        reader.write(encode_message(snapshot))
        self._readers.add(reader)
        self._stop_linger()  # another router's `open` may have ended while this one waited
        if self._beat is None:  # no message has been sent yet that the next heartbeat follows
            self._beat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._flush)

    def leave(self, reader: FeedReader) -> None:
        """Idempotent."""
        self._readers.discard(reader)
        self._linger_on()

    def close(self) -> None:
        """End all feeds and refuse new ones. Idempotent.

        The last message says that the node ends by order, unless its engine has died. It is on its way before the port
        closes, so a router has read it when it finds the node gone, however late it looks.
        """
        self._is_closed = True
        self._flush(is_last=self._engine.alive)
        for reader in self._readers:
            reader.end()
        self._readers.clear()

    def begin_day(self, today: date) -> None:
        """Forget the names of another day. For chat templates that write the date."""
        if today != self._day:
            self._day = today
            for reader in self._readers:
                reader.cut()
            self._readers.clear()
            self._switch(is_on=True)
            self._linger_on()

    # charges

    def include(self, router: str, number: int) -> None:
        self._live.setdefault(router, set()).add(number)
        for reader in self._readers:
            if reader.router == router:
                reader.charges.append(number)
                self._changed()

    def end(self, router: str, number: int) -> None:
        if live := self._live.get(router):
            live.discard(number)
            if not live:
                del self._live[router]

    # news

    def _switch_on(self) -> None:
        self._stop_linger()
        if not self.is_on:
            self._engine.news.on_change = self._changed
            self._switch(is_on=True)

    def _linger_on(self) -> None:
        if not self._readers and self._linger is None and self.is_on:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._switch, False)

    def _stop_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _switch(self, is_on: bool) -> None:
        self._stop_linger()
        self._has_load.clear()
        self._engine.send(self._engine.news.switch(is_on=is_on))

    def _changed(self) -> None:
        if self._engine.news.load is not None:
            self._has_load.set()
        if self._batch is None:
            loop = asyncio.get_running_loop()
            wait_s = max((BATCH_S, *(reader.wait_s for reader in self._readers)))
            self._batch = loop.call_at(max(loop.time(), self._sent_s + wait_s), self._flush)

    def _flush(self, *, is_last: bool = False) -> None:
        """Send one delta to each reader. One that reads too slowly is cut and reads a snapshot when it is back."""
        for timer in (self._batch, self._beat):
            if timer is not None:
                timer.cancel()
        self._batch = self._beat = None
        load, (evicted, stored, moved) = self._engine.news.load, self._engine.news.take_news()
        if load is None or not self._readers:
            return
        self._number += 1
        self._sent_s = asyncio.get_running_loop().time()
        delta = FeedDelta(
            self._number, load, evicted, stored, role=self._role.name, role_changes=self._role.changes, is_last=is_last,
            is_frozen=bool(self._engine.frozen), moved=moved, adapters=self._adapters.changed_states(),
        )  # fmt: skip
        plain = encode_message(delta)
        for reader in tuple(self._readers):
            charges, reader.charges = tuple(reader.charges), []
            reader.write(encode_message(msgspec.structs.replace(delta, charges=charges)) if charges else plain)
            if reader.is_cut:
                self._readers.discard(reader)
        self._beat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._flush)
