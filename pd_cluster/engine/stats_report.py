"""What the API process is told of an engine's state for metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import HEARTBEAT_S, EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.engine.disk_tier import DiskTier
    from pd_cluster.engine.kv_transfers import KvTransfers
    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.engine.pipeline import Pipeline
    from pd_cluster.scheduling.adapter_places import AdapterPlaces
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_connectors.base import Connector

STATS_EVERY_S = 0.1  # while busy; always before sleeping


class StatsReport:
    """Counts steps, and sends statistics when they have changed, or HEARTBEAT_S after the last ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        pipeline: Pipeline,
        transfers: KvTransfers,
        connector: Connector,
        disk: DiskTier | None,
        mailbox: Mailbox,
        clock: Callable[[], float],
        adapters: AdapterPlaces,
    ) -> None:
        self._scheduler, self._blocks, self._pipeline, self._transfers = scheduler, blocks, pipeline, transfers
        self._connector, self._disk, self._mailbox, self._clock = connector, disk, mailbox, clock
        self._adapters = adapters
        self.num_steps = self._num_tokens = 0
        self._last: EngineStats | None = None
        self._sent_s = -STATS_EVERY_S

    @property
    def is_due(self) -> bool:
        """Whether a busy engine should send."""
        return self._clock() - self._sent_s >= STATS_EVERY_S

    @property
    def rest_s(self) -> float:
        """Seconds until the next heartbeat; below 0: it is late."""
        return self._sent_s + HEARTBEAT_S - self._clock()

    def note(self, batch: Batch) -> None:
        """Count a step that has retired."""
        self.num_steps += 1
        self._num_tokens += batch.num_tokens

    def send(self) -> None:
        """Send what is new."""
        stats, now_s = self._stats(), self._clock()
        if stats != self._last or now_s - self._sent_s >= HEARTBEAT_S:
            self._last = stats
            self._sent_s = now_s
            self._mailbox.send(stats)

    def _stats(self) -> EngineStats:
        scheduler = self._scheduler
        counters = {
            "engine_steps_total": float(self.num_steps),
            "engine_step_tokens_total": float(self._num_tokens),
            "engine_step_seconds_total": self._pipeline.total_s,
            **scheduler.counters,
            **self._transfers.counters,
        }
        gauges = {"orphaned_loads": float(self._transfers.num_orphans), **self._blocks.host.gauges}
        disk = {} if self._disk is None else self._disk.stats
        for name, value in (*self._connector.stats().items(), *disk.items()):
            (counters if name.partition("|")[0].endswith("_total") else gauges)[name] = value
        return EngineStats(
            kv=self._blocks.stats(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_for_remote_kv=scheduler.num_waiting_for_remote_kv,
            counters=counters,
            gauges=gauges,
            num_queued=scheduler.num_queued,
            adapters=self._adapters.tiers,
        )
