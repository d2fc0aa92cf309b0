"""All ranks of an engine. Rank 0, in the engine's process, decides everything.

Every rank runs the same phases and launches the same steps, so that their collectives meet. What depends on a rank's
memory is agreed on, and what is measured or chosen is rank 0's.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.models.shard import Shard
from pd_cluster.worker.collectives import open_store
from pd_cluster.worker.rank_frames import DrawLate, PhaseFrame, RankStart, StepFrame
from pd_cluster.worker.rank_link import RankLink, StepOnRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from pd_cluster.config import NodeConfig
    from pd_cluster.errors import PdError
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.collectives import GroupReduce
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.pending_step import PendingStep
    from pd_connectors.base import ConnectorContext
    from pd_connectors.rank_port import RankPort
    from pd_kernels.values import StepSize


class Ranks:
    """Rank 0's hold on all ranks. Its own device is in this process, each other rank is a process."""

    module = "pd_cluster.worker.rank"  # of a rank's process

    def __init__(
        self,
        config: NodeConfig,
        address: str,
        on_loss: Callable[[PdError], None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`, `on_loss`, `on_look`: see RankLink. Acquires nothing."""
        self.config, self._address = config, address
        self.shard = Shard(0, config.model.tp)
        self.link = RankLink(self.shard.size, address, on_loss, on_look)
        self.reduce: GroupReduce | None = None  # of rank 0; None: it has not joined the others
        self.has_failed = self._is_closed = False

    def start(self) -> Store:
        """Start the other ranks' processes. -> where all ranks join. Raises StartupError."""
        store, port = open_store(self.shard.size)
        self.link.start(lambda rank: self._spawn(rank, port))
        return store

    @contextmanager
    def phase(self, name: str, *arguments: Any) -> Iterator[list[Any]]:
        """Let the other ranks run a phase while the block does the same here. -> their results, after the block."""
        results: list[Any] = []
        self.link.rest()
        self.link.send(PhaseFrame(name, arguments))
        with self.noted():
            yield results
            results += self.link.results()

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        """See `Executor.connect`."""
        own = ("layout", "rank", "rank_ports")  # which each rank knows itself
        values = {field.name: getattr(context, field.name) for field in fields(context) if field.name not in own}
        with self.phase("connect", name, values):
            pass
        self.link.serve()
        return self.link.ports

    def lead(
        self,
        launch: Callable[[Batch, StepSize | None, Callable[[Staged], None]], PendingStep],
        batch: Batch,
        graph: StepSize | None,
        deadline_s: float,
    ) -> PendingStep:
        """Launch a step on all ranks, here by `launch` of ModelRunner. See `Executor.launch`."""
        number = 0

        def announce(staged: Staged) -> None:
            nonlocal number
            number = self.link.send_step(StepFrame.of(batch, graph, *staged), deadline_s)

        with self.noted():
            pending = launch(batch, graph, announce)
        pending.others = StepOnRanks(self.link, number)
        return pending

    def tell_late(self, absent: frozenset[int]) -> None:
        """Let the other ranks draw their late rows, except those of the sequences `absent`."""
        self.link.send(DrawLate(tuple(absent)))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a failure, and blame a lost rank for it."""
        try:
            with self.link.blamed():
                yield
        except BaseException:
            self.has_failed = True
            raise

    def close(self, release: Callable[[bool], None] | None) -> None:
        """Close all ranks. After a failure it does not wait for the device, where a collective may wait for its peers.

        `release`: releases what rank 0 has acquired, and waits for its device if told to; None: its start failed.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_well = release is not None and not self.has_failed and self.link.lost is None
        try:
            if is_well:
                self.link.dismiss()
            if release is not None:
                release(is_well)
            if is_well:
                self._leave()  # while the other ranks do
        finally:
            self.link.close(at_once=not is_well)
        if not is_well:
            self._leave()

    def _leave(self) -> None:
        if self.reduce is not None:
            self.reduce.close()

    def _spawn(self, rank: int, store_port: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", "-m", self.module], stdin=subprocess.PIPE)
        assert process.stdin is not None
        start = RankStart(self.config, rank, self._address, store_port)
        try:
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once, which the link reports
        return process
