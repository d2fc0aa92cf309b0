"""Harnesses for connectors that have a pool: the source is its server and a node that stores."""

from __future__ import annotations

import os
import signal
from abc import abstractmethod
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, ClassVar

from pd_connectors.base import CachedBlock
from pd_connectors.lmcache import LMCacheProtocol, LMCacheStore
from pd_connectors.mooncake import MooncakeClient, MooncakeStore
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from pd_connectors.store import ObjectName, Sealer, StoreUnavailable
from tests.conformance.harness import FOREVER_S, LOAD_DEADLINE_S, NUM_SOURCE_BLOCKS, SIZE, Harness, Prompt, Reader
from tests.connectors.mooncake_master import MooncakeMaster
from tests.connectors.remote_node import LAYOUT, RemoteNode, context, remote_node
from tests.connectors.store_server import StoreServer
from tests.deadlines import wait_until

if TYPE_CHECKING:
    from types import TracebackType

    from pd_connectors.store import KVStore


def hashes_of(prompt: Prompt, num_blocks: int, salt: str = "") -> list[bytes]:
    """The chained hashes of its first blocks."""
    tokens = [prompt.version * 100_000 + index for index in range(num_blocks * SIZE)]
    return extend_hashes(root_hash(salt), tokens, SIZE)


class PoolHarness(Harness):
    """`server` is the pool's; `source` a node in a process of its own, which stores. Prompts are whole blocks."""

    waits_for_the_rest = False
    parts = ("server", "source")
    server: StoreServer | MooncakeMaster
    source: RemoteNode

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._source_stack = ExitStack()
        self._epoch = 0

    @abstractmethod
    def make_server(self) -> StoreServer | MooncakeMaster:
        """A server that runs."""

    @abstractmethod
    def open_store(self) -> KVStore:
        """A client of it."""

    @abstractmethod
    def remove(self, names: list[ObjectName]) -> None:
        """These are evicted."""

    def options(self) -> tuple[tuple[str, Any], ...]:
        return (("pool_url", self.server.url), ("pool_deadline_s", FOREVER_S), ("handoff", "none"))

    def reader_options(self, is_quick: bool) -> tuple[tuple[str, Any], ...]:
        return (*self.options(), ("pool_deadline_s", 0.5)) if is_quick else self.options()  # the last one counts

    def source_options(self) -> tuple[tuple[str, Any], ...]:
        return self.options()

    def names(self, prompt: Prompt) -> list[ObjectName]:
        """The first object of each of its blocks."""
        return self._objects(prompt)[:: sum(map(len, Sealer(context("any")).parts))]

    def _objects(self, prompt: Prompt) -> list[ObjectName]:
        sealer = Sealer(context("any"))
        groups = range(len(LAYOUT.groups))
        return [n for one in hashes_of(prompt, prompt.num_blocks) for group in groups for n in sealer.names(one, group)]

    def ask(
        self, reader: Reader, prompt: Prompt, load_id: str, first_block: int = 0, deadline_s: float = LOAD_DEADLINE_S
    ) -> None:
        assert reader.node.connector.pool is not None
        reader.node.connector.pool.find(
            load_id, hashes_of(prompt, prompt.num_blocks), (first_block,) * len(LAYOUT.groups)
        )

    def cancel(self, reader: Reader, load_id: str) -> None:
        assert reader.node.connector.pool is not None
        reader.node.connector.pool.cancel(load_id)

    def offer(self, prompt: Prompt, num_blocks: int | None = None) -> None:
        prompt.num_offered = prompt.num_blocks if num_blocks is None else num_blocks
        for block_id in prompt.source_blocks[: prompt.num_offered]:
            self.source.call("stamp", block_id, prompt.version)
        hashes = hashes_of(prompt, prompt.num_offered)
        blocks = prompt.source_blocks[: prompt.num_offered]
        pairs = list(zip(hashes, blocks, strict=True))
        cached = tuple(CachedBlock(*pair, group) for group in range(len(LAYOUT.groups)) for pair in pairs)

        def are_there() -> bool:
            """Not at once where something has just died: a server, or a node with memory that is still counted on."""
            self.source.call("store", cached)
            try:
                with closing(self.open_store()) as store:
                    names = self._objects(prompt)
                    return all(store.contains(names[: prompt.num_offered * len(names) // prompt.num_blocks]))
            except StoreUnavailable:
                return False

        wait_until(are_there, lambda: "nothing can be stored")

    def evict(self, prompt: Prompt) -> None:
        self.remove(self.names(prompt))

    def damage(self, prompt: Prompt, block: int, position: int) -> None:
        """Flip a bit of what is stored for this block."""
        name = self.names(prompt)[block]
        with closing(self.open_store()) as store:
            sealed = bytearray(next(store.get([name])) or b"")
            sealed[position] ^= 4
            assert store.put([(name, bytes(sealed))]) == 1

    def bytes_read(self, reader: Reader) -> float:
        return reader.node.connector.stats()["pool_read_bytes_total"]

    def stop(self, part: str) -> None:
        os.kill(self._process(part).pid, signal.SIGSTOP)

    def resume(self, part: str) -> None:
        os.kill(self._process(part).pid, signal.SIGCONT)

    def kill(self, part: str) -> None:
        self._process(part).kill()

    def _process(self, part: str) -> StoreServer | MooncakeMaster | RemoteNode:
        return self.server if part == "server" else self.source

    def restart(self, part: str) -> None:
        if part == "server":
            self.server.start()
            return
        self._source_stack.close()
        self._epoch += 1
        settings = context("P", self._epoch, options=self.source_options())
        self.source = self._source_stack.enter_context(remote_node(self.connector, settings, NUM_SOURCE_BLOCKS))

    def __enter__(self) -> PoolHarness:
        self._stack.callback(self._source_stack.close)
        self.server = self.make_server()
        self._stack.callback(self.server.__exit__, None, None, None)
        try:
            self.restart("source")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class LMCacheHarness(PoolHarness):
    """Small enough to be filled."""

    connector: ClassVar[str] = "lmcache"
    capacity_bytes: ClassVar[int] = 8 << 20

    def make_server(self) -> StoreServer:
        return StoreServer(self.capacity_bytes)

    def open_store(self) -> LMCacheStore:
        return LMCacheStore(("127.0.0.1", self.server.port), LMCacheProtocol())

    def remove(self, names: list[ObjectName]) -> None:
        """By filling the server: it evicts what was used least recently. What is read meanwhile is used."""
        fillers = [(ObjectName("filler", bytes([index]) * 16), bytes(1 << 20)) for index in range(8)]
        with closing(self.open_store()) as store:
            for _ in range(20):
                store.put(fillers)
                if not any(store.contains(names)):
                    return
        raise AssertionError("the server evicts nothing")


class RankedLMCacheHarness(LMCacheHarness):
    """The source has one rank, the reader two."""

    reader_ranks = 2


class MooncakeHarness(PoolHarness):
    """All blocks lie in the source's segment: the readers lend none."""

    connector: ClassVar[str] = "mooncake"

    def __init__(self) -> None:
        super().__init__()
        self._client: MooncakeClient | None = None

    def make_server(self) -> MooncakeMaster:
        return MooncakeMaster()

    def options(self) -> tuple[tuple[str, Any], ...]:
        return (*super().options(), ("pool_segment_gb", 0.0))

    def source_options(self) -> tuple[tuple[str, Any], ...]:
        return (*super().options(), ("pool_segment_gb", 0.064))

    def open_store(self) -> MooncakeStore:
        return MooncakeStore(self._mooncake())

    def remove(self, names: list[ObjectName]) -> None:
        with self._mooncake().call() as store:
            for name in names:
                store.remove(str(name), True)

    def _mooncake(self) -> MooncakeClient:
        if self._client is None:
            self._client = MooncakeClient(("127.0.0.1", self.server.port), "127.0.0.1", 0)
            self._stack.callback(self._client.close)
        return self._client
