"""The executor of several ranks. Rank 0, in the engine's process, decides everything; each other rank is a process."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pd_cluster.models.shard import Shard
from pd_cluster.worker.collectives import GroupReduce, open_store
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.device_executor import DeviceExecutor, resolve_device
from pd_cluster.worker.rank_frames import DrawLate, PhaseFrame, RankStart, StepFrame
from pd_cluster.worker.rank_link import RankLink, StepOnRanks
from pd_cluster.worker.rank_sampler import RankPlace
from pd_kernels.selection import select_kernels
from pd_kernels.values import StepSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from pd_cluster.config import ModelConfig, NodeConfig
    from pd_cluster.errors import PdError
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.pending_step import PendingStep
    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort

Result = TypeVar("Result")


class RankedExecutor(DeviceExecutor):
    """The Executor of `config.model.tp` ranks: rank 0's device here, the others through a RankLink.

    Every rank runs the same phases and launches the same steps, so that their collectives meet. What depends on a
    rank's memory is agreed on, and what is measured or chosen is rank 0's.
    """

    def __init__(
        self,
        config: NodeConfig,
        progress: Callable[[str], None],
        address: str,
        on_loss: Callable[[PdError], None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`, `on_loss`, `on_look`: see RankLink. No process is started before `load`."""
        super().__init__(config, progress)
        self._shard = Shard(0, config.model.tp)
        self._address = address
        self._link = RankLink(self._shard.size, address, on_loss, on_look)
        self._has_failed = False

    def load(self) -> None:
        store, port = open_store(self._shard.size)
        self._link.start(lambda rank: self._spawn(rank, port))

        def load() -> None:
            self._place = make_place(self._config.model, self._shard, store, self._tell_late)
            super(RankedExecutor, self).load()

        self._on_all("load", load)
        self._on_all("adopt", lambda: None, msgspec.json.encode(self._config))

    def free_kv_bytes(self) -> int:
        return min(self._on_all("measure", super().free_kv_bytes))

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> tuple[CacheDescription, ...]:
        caches, *_ = self._on_all(
            "allocate", lambda: super(RankedExecutor, self).allocate(slabs, num_host_blocks), slabs, num_host_blocks
        )
        return caches

    def warm_up(self) -> tuple[StepSize, ...]:
        own, *others = self._on_all("capture", self.capture)
        common = set(own).intersection(*(msgspec.convert(sizes, set[StepSize]) for sizes in others))
        self._graph_sizes = GraphSizes(size for size in own if size in common)
        with self._noted():
            self.measure()
        self._on_all("clear", self.clear)
        return self._graph_sizes.sizes

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        own = ("layout", "rank", "rank_ports")  # which each rank knows itself
        values = {field.name: getattr(context, field.name) for field in fields(context) if field.name not in own}
        self._on_all("connect", lambda: None, name, values)
        self._link.serve()
        return self._link.ports

    def launch(self, batch: Batch, deadline_s: float = inf) -> PendingStep:
        graph, number = self._graph_sizes.choose(batch.chunks), 0

        def announce(staged: Staged) -> None:
            nonlocal number
            number = self._link.send_step(StepFrame.of(batch, graph, *staged), deadline_s)

        with self._noted():
            pending = self._runner.launch(batch, graph, announce)
        pending.others = StepOnRanks(self._link, number)
        pending.finish_late = self.draw_late  # notes a failure: the other ranks may wait in this draw's collectives
        return pending

    def draw_late(self) -> float:
        with self._noted():
            return super().draw_late()

    def close(self) -> None:
        """See Executor. After a failure it does not wait for the device, where a collective may wait for its peers."""
        is_well = self._place is not None and not self._has_failed and self._link.lost is None
        try:
            if is_well:
                self._link.dismiss()
                super().close()
                self.leave()  # while the other ranks do
            else:
                self._cleanup.close()
        finally:
            self._link.close(at_once=not is_well)
        if not is_well:
            self.leave()

    def _spawn(self, rank: int, store_port: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", "-m", "pd_cluster.worker.rank"], stdin=subprocess.PIPE)
        assert process.stdin is not None
        start = RankStart(self._config, rank, self._address, store_port)
        try:
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once, which the link reports
        return process

    def _on_all(self, phase: str, run: Callable[[], Result], *arguments: Any) -> tuple[Result, ...]:
        """Run a phase on all ranks at once. -> rank 0's result and those of the others, by rank."""
        self._link.send(PhaseFrame(phase, arguments))
        with self._noted():
            own = run()
            return own, *self._link.results()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note a failure, and blame a lost rank for it."""
        try:
            with self._link.blamed():
                yield
        except BaseException:
            self._has_failed = True
            raise

    def _tell_late(self, absent: frozenset[int]) -> None:
        self._link.send(DrawLate(tuple(absent)))


def make_place(
    config: ModelConfig,
    shard: Shard,
    store: Store,
    tell_late: Callable[[frozenset[int]], None] | None = None,
) -> RankPlace:
    """Join the other ranks. Returns when all have joined. Raises StartupError if there is no device for the rank."""
    device = resolve_device(config, shard.rank)
    return RankPlace(shard, GroupReduce(shard, store, device, select_kernels(device)), tell_late)
