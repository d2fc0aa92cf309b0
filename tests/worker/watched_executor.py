"""An executor that keeps its logits."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.pending_step import PendingStep


class WatchedExecutor:
    """Keeps the logits of every sample, by sequence."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self._executor = executor
        self.slabs, self.layout, self.block_size = executor.slabs, executor.layout, executor.block_size
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)

    def launch(self, batch: Batch) -> PendingStep:
        owners = [chunk.seq_id for chunk in batch.chunks if chunk.num_samples]

        def watch(logits: torch.Tensor) -> None:
            for owner, row in zip(owners, logits, strict=True):
                self.logits[owner].append(row.clone())

        self._executor.watch_logits(watch)
        return self._executor.launch(batch)
