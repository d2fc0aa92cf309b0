"""The states of the executor of several ranks. Rank 0, in the engine's process, decides everything. See `executor`."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.device_executor import (
    DeviceCached,
    DeviceDescribed,
    DeviceExecutor,
    DeviceLoaded,
    DeviceState,
)
from pd_cluster.worker.rank_frames import StepFrame
from pd_cluster.worker.rank_link import StepOnRanks
from pd_cluster.worker.state import ExecutorState
from pd_kernels.values import StepSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import NodeConfig
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.executor import ModelDescription
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.pending_step import PendingStep
    from pd_cluster.worker.ranks import Ranks
    from pd_connectors.base import ConnectorContext
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort

Own = TypeVar("Own", bound=DeviceState)


class RankedState(ExecutorState, Generic[Own]):
    """A state of the executor of several ranks: all of them are in this state.

    Every rank runs the same phases and launches the same steps, so that their collectives meet. What depends on a
    rank's memory is agreed on, and what is measured or chosen is rank 0's.
    """

    def __init__(self, own: Own, ranks: Ranks) -> None:
        """`own`: the state of rank 0's device."""
        self.layout = own.layout
        self._own, self._ranks = own, ranks

    def close(self) -> None:
        """See DescribedState."""
        if not self.is_left:
            self._ranks.close()


class RankedDescribed(RankedState[DeviceDescribed]):
    """See DescribedState."""

    @classmethod
    def of(cls, config: NodeConfig, progress: Callable[[str], None], ranks: Ranks) -> Self:
        """Start `ranks`. `progress` gets rank 0's lines. Raises StartupError, and then ends the ranks."""
        try:
            return cls(ranks.start(lambda place: DeviceDescribed.of(config, progress, place)), ranks)
        except BaseException:
            ranks.close()
            raise

    def load(self) -> RankedLoaded:
        own = self._ranks.move("load", self._own.load, msgspec.json.encode(self._own.config))
        return self.left_for(RankedLoaded(own, self._ranks))


class RankedLoaded(RankedState[DeviceLoaded]):
    """See LoadedState."""

    def free_kv_bytes(self) -> int:
        return min(self._ranks.on_all("free_kv_bytes", self._own.free_kv_bytes))

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> RankedCached:
        own = self._ranks.move("allocate", lambda: self._own.allocate(slabs, num_host_blocks), slabs, num_host_blocks)
        return self.left_for(RankedCached(own, self._ranks))

    def unload(self) -> RankedDescribed:
        return self.left_for(RankedDescribed(self._ranks.move("unload", self._own.unload), self._ranks))


class RankedCached(RankedState[DeviceCached]):
    """See CachedState."""

    def warm_up(self) -> RankedExecutor:
        ranks = self._ranks
        own, *others = ranks.on_all("capture", self._own.capture)
        common = set(own.graph_sizes).intersection(*(msgspec.convert(sizes, set[StepSize]) for sizes in others))
        executor = RankedExecutor(own, ranks, GraphSizes(size for size in own.graph_sizes if size in common))
        with ranks.noted():
            own.measure(executor.launch)

        def finish() -> DeviceExecutor:
            own.clear()
            return self._own.left_for(own)

        ranks.move("clear", finish)
        return self.left_for(executor)

    def free(self) -> RankedLoaded:
        return self.left_for(RankedLoaded(self._ranks.move("free", self._own.free), self._ranks))


class RankedExecutor(RankedState[DeviceExecutor]):
    """The Executor of `config.model.tp` ranks."""

    def __init__(self, own: DeviceExecutor, ranks: Ranks, graph_sizes: GraphSizes) -> None:
        """`graph_sizes`: those that every rank has captured."""
        super().__init__(own, ranks)
        self._graph_sizes = graph_sizes
        # What only rank 0 does
        self.slabs, self.num_host_blocks, self.block_size = own.slabs, own.num_host_blocks, own.block_size
        self.cache, self.check, self.ready, self.watch_logits = own.cache, own.check, own.ready, own.watch_logits
        self.start_profile, self.stop_profile = own.start_profile, own.stop_profile

    @property
    def config(self) -> NodeConfig:
        return self._own.config

    @property
    def model(self) -> ModelDescription:
        return self._own.model

    def sleep(self) -> RankedLoaded:
        self._ranks.link.rest()
        return self.left_for(RankedLoaded(self._ranks.move("sleep", self._own.sleep), self._ranks))

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
