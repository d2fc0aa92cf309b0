"""The adapters of this node: what each name means, by orders and by the command line.

    prepare     the files are read, and every rank of the engine has them; no request can name them yet
    hold        the record becomes the name's; one that is older than the name's changes nothing
    drop        ends a prepare

A prepared record is forgotten after PENDING_S, and for a later order after YIELDS_S: its router has died.
docs/adapters.md says what routers do.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_cluster.errors import AdapterConflict, BadAdapter, EngineLost, StartupError
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter, UnloadAdapter
from pd_connectors.protocol.adapters import (
    MAX_PATH_CHARS,
    MAX_RECORDS,
    ON_FILE,
    AdapterRecord,
    AdapterState,
    newer,
    trim,
)
from pd_connectors.protocol.ticket import NOT_SEEN
from pd_http.names import MAX_NAME_CHARS, is_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from pd_cluster.config import LoraConfig
    from pd_cluster.engine.client import EngineClient

logger = logging.getLogger("pd_cluster.server")
PENDING_S = 600.0  # more than a router's order takes to all nodes
YIELDS_S = 30.0  # from a prepare until a later order takes its place: its router may have died
# After a name has another adapter: requests that found the one before are then at the engine, which lets them end
REPLACED_S = 10.0
ENGINE_DEADLINE_S = 130.0  # for every rank to read the files: READ_DEADLINE_S and some seconds
LOOK_EVERY_S = 0.2  # between two looks at an engine that loads an adapter


class NodeAdapters:
    """Records by name. `on_change`: called when a record, or its tier, has changed."""

    def __init__(self, config: LoraConfig, engine: EngineClient, model_names: Collection[str]) -> None:
        """`model_names`: which no adapter may have."""
        self.on_change: Callable[[], None] = lambda: None
        self.is_ready = not config.lora  # the adapters of the command line are there
        self._in_use: Counter[str] = Counter()  # name -> requests under way
        self._config = config
        self._engine = engine
        engine.on_adapter = self._answered
        self._model_names = frozenset(model_names)
        self._records: dict[str, AdapterRecord] = {}
        self._pending: dict[str, tuple[AdapterRecord, asyncio.TimerHandle]] = {}
        self._turn = asyncio.Lock()  # a load holds all bytes of the files
        # The order under way, which keeps its digest loaded, and the engine's error, or ""
        self._loading: tuple[LoadAdapter, asyncio.Future[str]] | None = None
        self._num_orders = 0
        self._told: dict[str, AdapterState] = {}
        self._tiers: dict[str, int] | None = None  # of `_told`; None: a record has changed since

    @property
    def num_slots(self) -> int:
        """0: no adapters are served here."""
        return self._config.lora_slots

    @property
    def live(self) -> list[AdapterRecord]:
        """Those that requests may name."""
        return [record for record in self._records.values() if record.is_live]

    @property
    def in_use(self) -> list[str]:
        """Names of which requests are under way."""
        return sorted(self._in_use)

    def begin_request(self, name: str) -> None:
        """`name`: "" of the base model."""
        if name:
            self._in_use[name] += 1

    def end_request(self, name: str) -> None:
        """Once after each `begin_request`."""
        if name and self._in_use[name] > 1:
            self._in_use[name] -= 1
        else:
            del self._in_use[name]

    def digest_of(self, name: str | None) -> str:
        """Of the adapter of this name; "": there is none."""
        record = self._records.get(name or "")
        return "" if record is None else record.digest

    def states(self) -> tuple[AdapterState, ...]:
        """All records, each with the tier of its adapter."""
        tiers = self._engine_tiers
        return tuple(AdapterState(record, tiers.get(record.digest, ON_FILE)) for record in self._records.values())

    @property
    def _engine_tiers(self) -> dict[str, int]:
        return {} if (stats := self._engine.stats) is None else stats.adapters

    def changed_states(self) -> tuple[AdapterState, ...]:
        """Those of `states` that differ from what this call has returned before."""
        if self._tiers == self._engine_tiers:
            return ()
        self._tiers = self._engine_tiers
        states = self.states()
        found = tuple(one for one in states if self._told.get(one.record.name) != one)
        self._told = {one.record.name: one for one in states}
        return found

    # --- orders

    async def prepare(self, record: AdapterRecord, seen_stamp: int = NOT_SEEN) -> AdapterRecord:
        """Read the files. Returns the record with their digest. Raises BadAdapter, AdapterConflict.

        `seen_stamp`: of what the router knows of the name, free there: another router may have loaded it since.
        """
        self._check(record)
        known = self._records.get(record.name)
        if known is not None and known.is_live and NOT_SEEN != seen_stamp < known.stamp:
            raise AdapterConflict(f"the adapter {record.name!r} is loaded already; load_inplace: true replaces it")
        if not newer(self._records, record):
            raise AdapterConflict(f"a newer order about the adapter {record.name!r} has been obeyed")
        if (other := self._pending.get(record.name)) is not None and other[0].stamp != record.stamp:
            age_s = asyncio.get_running_loop().time() + PENDING_S - other[1].when()
            if age_s < YIELDS_S or record.stamp < other[0].stamp:
                raise AdapterConflict(f"another order about the adapter {record.name!r} is under way")
            self.drop(other[0])  # if its router lives, its hold reads the files again
        if record.name not in self._pending:
            self._pend(record)
        try:
            async with self._loaded(record) as found:
                pending = self._pending.get(record.name)
                if pending is None or pending[0].stamp != record.stamp:
                    raise AdapterConflict(f"the order about the adapter {record.name!r} was dropped")
                self._pend(found)
                return found
        except BaseException:
            self.drop(record)
            raise

    async def hold(self, record: AdapterRecord) -> AdapterRecord:
        """Give the name its meaning. Returns the record that it has now. Raises BadAdapter, AdapterConflict."""
        if newer(self._records, record) and record.is_live:
            self._check(record)
            pending = self._pending.get(record.name)
            if pending is None or pending[0] != record:
                async with self._loaded(record):
                    return self._adopt(record)
        return self._adopt(record)

    def drop(self, record: AdapterRecord) -> None:
        """End the prepare of this record. Idempotent."""
        pending = self._pending.get(record.name)
        if pending is not None and pending[0].stamp == record.stamp:
            del self._pending[record.name]
            pending[1].cancel()
            self._let_go(pending[0].digest)

    async def load_own(self) -> None:
        """Load those of the command line. Raises StartupError."""
        for text in self._config.lora:
            name, _, directory = text.partition("=")
            try:
                self._check_name(name)
                async with self._loaded(AdapterRecord(name, directory), is_own=True) as found:
                    self._adopt(found)
            except (BadAdapter, AdapterConflict) as error:
                raise StartupError(f"--lora {text}: {error}") from error
        self.is_ready = True

    # --- what orders share

    def _check(self, record: AdapterRecord) -> None:
        """Raises BadAdapter for what no order may ask of this node."""
        if not self.num_slots:
            raise BadAdapter("this node serves no adapters: start it with --lora-slots")
        if not self._config.lora_dir:
            raise BadAdapter("this node was started without --lora-dir, below which orders may load adapters")
        self._check_name(record.name)
        if not record.path or len(record.path) > MAX_PATH_CHARS:
            raise BadAdapter(f"the path of an adapter has 1 to {MAX_PATH_CHARS} characters")
        if len({record.name, *self._pending, *(one.name for one in self.live)}) > MAX_RECORDS:
            raise BadAdapter(f"this node has {MAX_RECORDS} adapters, the most allowed")

    def _check_name(self, name: str) -> None:
        if not is_name(name) or "," in name:  # a comma separates names in metrics
            raise BadAdapter(f"the name of an adapter has 1 to {MAX_NAME_CHARS} printable ASCII characters, no comma")
        if name in self._model_names:
            raise BadAdapter(f"{name!r} is the name of the model")

    def _pend(self, record: AdapterRecord) -> None:
        before = self._pending.get(record.name)
        if before is not None:
            before[1].cancel()
        timer = asyncio.get_running_loop().call_later(PENDING_S, self.drop, record)
        self._pending[record.name] = record, timer

    @asynccontextmanager
    async def _loaded(self, record: AdapterRecord, *, is_own: bool = False) -> AsyncIterator[AdapterRecord]:
        """The record with the digest of its files, which the engine has while this is entered. Raises BadAdapter."""
        async with self._turn:
            if not newer(self._records, record):  # another router's order was first
                yield record
                return
            path, digest = await asyncio.to_thread(self._read, record.path, is_own)
            if record.digest and digest != record.digest:
                raise BadAdapter(
                    f"the files of the adapter {record.path!r} have the digest {digest}, not {record.digest}: all "
                    "nodes need the same files"
                )
            try:
                await self._load_into_engine(digest, path)
                yield msgspec.structs.replace(record, digest=digest)
            finally:
                self._loading = None
                self._let_go(digest)

    def _read(self, given: str, is_own: bool) -> tuple[str, str]:
        """The directory and the digest. `is_own`: of the command line, so it may be anywhere."""
        root, most = self._config.lora_dir, int(self._config.lora_host_gb * 1e9)
        directory, below = (Path(given), None) if is_own else (Path(root, given), Path(root).resolve())
        digest = read_adapter(directory, most, below=below).digest
        return os.path.realpath(directory), digest  # a link may lead to other files when they are read again

    async def _load_into_engine(self, digest: str, path: str) -> None:
        self._num_orders += 1
        order, answer = self._loading = LoadAdapter(digest, path, self._num_orders), asyncio.Future()
        self._engine.send(order)
        try:
            async with asyncio.timeout(ENGINE_DEADLINE_S):
                while not answer.done():
                    if not self._engine.alive:  # else the end of this process cancels what waits here
                        raise EngineLost("the engine has died while it read an adapter")
                    await asyncio.wait((answer,), timeout=LOOK_EVERY_S)
            error = answer.result()
        except TimeoutError:
            error = f"the engine has not loaded it within {ENGINE_DEADLINE_S:g} s"
        if error:
            raise BadAdapter(error)

    def _answered(self, message: AdapterLoaded) -> None:
        """An answer to an order that was cancelled says nothing of the one under way, also of the same files."""
        if self._loading is not None and message.number == self._num_orders and not self._loading[1].done():
            self._loading[1].set_result(message.error)

    def _adopt(self, record: AdapterRecord) -> AdapterRecord:
        """Make `record` its name's, unless that has a newer one. Returns the name's."""
        before = self._records.get(record.name)
        if newer(self._records, record):
            logger.info("adapter %s: %s", record.name, record.digest or "unloaded")
            self._records[record.name] = record
            pending = self._pending.get(record.name)
            if pending is not None and pending[0].stamp <= record.stamp:
                self.drop(pending[0])
            if before is not None and record.is_live:
                asyncio.get_running_loop().call_later(REPLACED_S, self._let_go, before.digest)
            elif before is not None:
                self._let_go(before.digest)
            trim(self._records)
            self._tiers = None
            self.on_change()
        else:
            self._let_go(record.digest)
        return self._records.get(record.name, record)

    def _let_go(self, digest: str) -> None:
        """Unload what neither a record, a prepare nor a load needs. Requests that run keep it."""
        records = (*self._records.values(), *(record for record, _ in self._pending.values()))
        using = "" if self._loading is None else self._loading[0].digest
        if digest not in ("", using) and all(record.digest != digest for record in records):
            self._engine.send(UnloadAdapter(digest))
