"""Rank 0's part of the group of ranks: the other ranks' processes, and orders that all ranks obey at once."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pd_cluster.models.shard import Shard
from pd_cluster.worker.collectives import GroupReduce, open_store
from pd_cluster.worker.device_plan import resolve_device
from pd_cluster.worker.rank_frames import DrawLate, PhaseFrame, RankStart
from pd_cluster.worker.rank_link import RankLink
from pd_cluster.worker.rank_sampler import RankPlace
from pd_kernels.selection import select_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from pd_cluster.config import ModelConfig, NodeConfig
    from pd_cluster.errors import PdError
    from pd_cluster.worker.device_executor import DeviceState

Result = TypeVar("Result")
DeviceT = TypeVar("DeviceT", bound="DeviceState")


class Ranks:
    """All ranks of an engine, in one state. Rank 0's device is in this process, each other rank is a process."""

    module = "pd_cluster.worker.rank"  # of a rank's process

    def __init__(
        self,
        config: NodeConfig,
        address: str,
        on_loss: Callable[[PdError], None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`, `on_loss`, `on_look`: see RankLink. Acquires nothing."""
        self._config, self._address = config, address
        self._shard = Shard(0, config.model.tp)
        self.link = RankLink(self._shard.size, address, on_loss, on_look)
        self._place: RankPlace | None = None  # from `start` on
        self._own: DeviceState | None = None  # the present state of rank 0's device
        self.has_failed = self._is_closed = False

    def start(self, describe: Callable[[RankPlace], DeviceT]) -> DeviceT:
        """Start the other ranks' processes, join them, and describe the model on all. Raises StartupError."""
        store, port = open_store(self._shard.size)
        self.link.start(lambda rank: self._spawn(rank, port))

        def join() -> DeviceT:
            self._place = make_place(self._config.model, self._shard, store, self._tell_late)
            return describe(self._place)

        return self.move("describe", join)

    def move(self, phase: str, run: Callable[[], DeviceT], *arguments: Any) -> DeviceT:
        """Take all ranks to their next state, rank 0's device by `run`. -> the state of that device."""

        def keep() -> DeviceT:
            self._own = state = run()
            return state

        return self.on_all(phase, keep, *arguments)[0]

    def on_all(self, phase: str, run: Callable[[], Result], *arguments: Any) -> tuple[Result, ...]:
        """Run a phase on all ranks at once. -> rank 0's result and those of the others, by rank."""
        self.link.send(PhaseFrame(phase, arguments))
        with self.noted():
            own = run()
            return own, *self.link.results()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a failure, and blame a lost rank for it."""
        try:
            with self.link.blamed():
                yield
        except BaseException:
            self.has_failed = True
            raise

    def close(self) -> None:
        """Close all ranks. After a failure it does not wait for the device, where a collective may wait for its peers.

        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_well = self._own is not None and not self.has_failed and self.link.lost is None
        try:
            if is_well:
                self.link.dismiss()
            if self._own is not None:
                self._own.close(waits=is_well)
            if is_well:
                self._leave()  # while the other ranks do
        finally:
            self.link.close(at_once=not is_well)
        if not is_well:
            self._leave()

    def _leave(self) -> None:
        if self._place is not None:
            self._place.reduce.close()

    def _spawn(self, rank: int, store_port: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", "-m", self.module], stdin=subprocess.PIPE)
        assert process.stdin is not None
        start = RankStart(self._config, rank, self._address, store_port)
        try:
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once, which the link reports
        return process

    def _tell_late(self, absent: frozenset[int]) -> None:
        self.link.send(DrawLate(tuple(absent)))


def make_place(
    config: ModelConfig,
    shard: Shard,
    store: Store,
    tell_late: Callable[[frozenset[int]], None] | None = None,
) -> RankPlace:
    """Join the other ranks. Returns when all have joined. Raises StartupError if there is no device for the rank."""
    device = resolve_device(config, shard.rank)
    return RankPlace(shard, GroupReduce(shard, store, device, select_kernels(device)), tell_late)
