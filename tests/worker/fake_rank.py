"""A rank's process with an executor that computes nothing: a test says through the port when a step ends.

port message      effect
"end"             one more step may end
"fail"            the next launch fails
others            come back in capitals, with the number of steps that were launched before
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.worker.rank import RankProcess, main

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import Batch
    from pd_connectors.protocol.slabs import KvSlabs


@dataclass
class FakePending:
    """Ends when the test allows it. Its digest is the number of its step."""

    step: int
    may_end: threading.Semaphore
    is_launched: bool = True
    has_drafts: bool = False

    def wait(self) -> None:
        self.may_end.acquire()

    def digest(self) -> int:
        return self.step

    def result(self) -> None:
        return


@dataclass
class FakeExecutor:
    """The calls that a RankProcess makes."""

    rank: int
    may_end: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fails: bool = False
    launched: int = 0

    @property
    def num_host_blocks(self) -> int:
        return 10 * self.rank + self.launched

    def free_kv_bytes(self) -> int:
        return 1000 * self.rank

    def allocate(self, slabs: KvSlabs, num_host_blocks: int, num_later: int) -> None:
        raise StartupError(f"no room for {slabs.num_blocks(0)}, {num_host_blocks} and {num_later} blocks")

    def follow(self, batch: Batch, graph: object, staged: object) -> FakePending:
        if self.fails:
            raise ValueError("a kernel failed")
        self.launched += 1
        return FakePending(batch.step, self.may_end)

    def close(self) -> None:
        return

    use_device = close


class FakeRank(RankProcess):
    def _phase_describe(self) -> None:
        self._state = self._fake = FakeExecutor(self._start.rank)
        self._port.set_handler(self._handle)

    def _phase_echo(self, *arguments: Any) -> list[Any]:
        return [self._start.rank, *arguments]

    def _handle(self, message: bytes) -> None:
        if message == b"end":
            self._fake.may_end.release()
        elif message == b"fail":
            self._fake.fails = True
        else:
            self._port.send(message.upper() + b" %d" % self._fake.launched)


if __name__ == "__main__":
    sys.exit(main(FakeRank))
