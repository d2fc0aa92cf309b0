"""The states of the executor of several ranks. Rank 0, in the engine's process, decides everything. See `executor`."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any, Self

import msgspec

from pd_cluster.models.shard import Shard
from pd_cluster.worker.collectives import GroupReduce, open_store
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.device_executor import DeviceDescribed, DeviceExecutor
from pd_cluster.worker.device_plan import resolve_device
from pd_cluster.worker.rank_frames import DrawLate, PhaseFrame, RankStart, StepFrame
from pd_cluster.worker.rank_link import RankLink, StepOnRanks
from pd_cluster.worker.rank_sampler import RankPlace
from pd_cluster.worker.state import ExecutorState
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
    from pd_connectors.base import ConnectorContext
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort


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
        self.own: Any = None  # the present state of rank 0's device, from DeviceDescribed to DeviceExecutor
        self.has_failed = self._is_closed = False

    def start(self, progress: Callable[[str], None]) -> None:
        """Start the other ranks' processes, join them, and describe the model on all. Raises StartupError."""
        store, port = open_store(self._shard.size)
        self.link.start(lambda rank: self._spawn(rank, port))

        def describe() -> None:
            self._place = make_place(self._config.model, self._shard, store, self._tell_late)
            self.own = DeviceDescribed.of(self._config, progress, self._place)

        self.on_all("describe", describe)

    def move(self, phase: str, *arguments: Any) -> tuple[Any, ...]:
        """Take all ranks to their next state, by a method of their states. -> the other ranks' results, by rank."""

        def run() -> None:
            self.own = getattr(self.own, phase)(*arguments)

        return self.on_all(phase, run, *arguments)[1:]

    def on_all(self, phase: str, run: Callable[[], Any], *arguments: Any) -> tuple[Any, ...]:
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
        is_well = self.own is not None and not self.has_failed and self.link.lost is None
        try:
            if is_well:
                self.link.dismiss()
            if self.own is not None:
                self.own.close(waits=is_well)
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


class RankedState(ExecutorState):
    """A state of the executor of several ranks: all of them are in this state.

    Every rank runs the same phases and launches the same steps, so that their collectives meet. What depends on a
    rank's memory is agreed on, and what is measured or chosen is rank 0's.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.layout, self._ranks = ranks.own.layout, ranks

    def close(self) -> None:
        self._ranks.close()


class RankedDescribed(RankedState):
    """See DescribedState."""

    @classmethod
    def of(cls, ranks: Ranks, progress: Callable[[str], None]) -> Self:
        """Start `ranks`. `progress` gets rank 0's lines. Raises StartupError, and then ends the ranks."""
        try:
            ranks.start(progress)
            return cls(ranks)
        except BaseException:
            ranks.close()
            raise

    def load(self) -> RankedLoaded:
        self._ranks.move("load", self._ranks.own.config)
        return self.left_for(RankedLoaded(self._ranks))


class RankedLoaded(RankedState):
    """See LoadedState."""

    def free_kv_bytes(self) -> int:
        num_bytes: int = min(self._ranks.on_all("free_kv_bytes", self._ranks.own.free_kv_bytes))
        return num_bytes

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> RankedCached:
        self._ranks.move("allocate", slabs, num_host_blocks)
        return self.left_for(RankedCached(self._ranks))

    def unload(self) -> RankedDescribed:
        self._ranks.move("unload")
        return self.left_for(RankedDescribed(self._ranks))


class RankedCached(RankedState):
    """See CachedState."""

    def warm_up(self) -> RankedExecutor:
        others = [msgspec.convert(sizes, set[StepSize]) for sizes in self._ranks.move("capture")]
        with self._ranks.noted():
            self._ranks.own.measure(RankedExecutor(self._ranks, others).launch)
        self._ranks.on_all("clear", self._ranks.own.clear)
        return self.left_for(RankedExecutor(self._ranks, others))

    def free(self) -> RankedLoaded:
        self._ranks.move("free")
        return self.left_for(RankedLoaded(self._ranks))


class RankedExecutor(RankedState):
    """The Executor of `config.model.tp` ranks."""

    def __init__(self, ranks: Ranks, others: list[set[StepSize]]) -> None:
        """`others`: the sizes that each other rank has captured."""
        super().__init__(ranks)
        self._own: DeviceExecutor = ranks.own
        own = self._own
        self._graph_sizes = GraphSizes(size for size in own.graph_sizes if all(size in sizes for sizes in others))
        self.config, self.model, self.cache = own.config, own.model, own.cache
        self.slabs, self.num_host_blocks, self.block_size = own.slabs, own.num_host_blocks, own.block_size
        self.check, self.ready, self.watch_logits = own.check, own.ready, own.watch_logits
        self.start_profile, self.stop_profile = own.start_profile, own.stop_profile

    def sleep(self) -> RankedLoaded:
        self._ranks.link.rest()
        del self.cache  # else its memory would not be free when rank 0 gives it to the device
        self._ranks.move("sleep")
        return self.left_for(RankedLoaded(self._ranks))

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        own = ("layout", "rank", "rank_ports")  # which each rank knows itself
        values = {field.name: getattr(context, field.name) for field in fields(context) if field.name not in own}
        self._ranks.on_all("connect", lambda: None, name, values)
        self._ranks.link.serve()
        return self._ranks.link.ports

    def launch(self, batch: Batch, deadline_s: float = inf) -> PendingStep:
        graph, number, link = self._graph_sizes.choose(batch.chunks), 0, self._ranks.link

        def announce(staged: Staged) -> None:
            nonlocal number
            number = link.send_step(StepFrame.of(batch, graph, *staged), deadline_s)

        with self._ranks.noted():
            pending = self._own.lead(batch, graph, announce)
        pending.others = StepOnRanks(link, number)
        pending.finish_late = self.draw_late  # notes a failure: the other ranks may wait in this draw's collectives
        return pending

    def draw_late(self) -> float:
        with self._ranks.noted():
            return self._own.draw_late()


def make_place(
    config: ModelConfig,
    shard: Shard,
    store: Store,
    tell_late: Callable[[frozenset[int]], None] | None = None,
) -> RankPlace:
    """Join the other ranks. Returns when all have joined. Raises StartupError if there is no device for the rank."""
    device = resolve_device(config, shard.rank)
    return RankPlace(shard, GroupReduce(shard, store, device, select_kernels(device)), tell_late)
