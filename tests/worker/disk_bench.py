"""A DiskCache over a real directory, with blocks of random bytes to write and find again.

As a program it writes until it is killed: `python -m tests.worker.disk_bench FOLDER`. Nothing here imports torch.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.worker.disk_cache.disk_cache import BlockName, DiskCache, DiskRead, DiskWritten
from pd_connectors.base import ConnectorContext
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def two_kinds(dtype: str = "float32", window: int = 32, tp_size: int = 1) -> BlockLayout:
    """A group of blocks of 8 KiB, and one of windows, of 4 KiB."""
    full = KVGroup(KVKind.FULL, (0, 2), (2, 2, 2, 16, 16), dtype, 16)
    other = KVGroup(KVKind.WINDOW, (1,), (2, 1, 2, 16, 16), dtype, 16, window=window)
    return BlockLayout((full, other), tp_size)


DISK_CONTEXT = ConnectorContext("node", 1, "a model", two_kinds(), b"the cluster's key", "127.0.0.1", 0)
GB = 10**9


def block(name: BlockName, context: ConnectorContext = DISK_CONTEXT) -> bytearray:
    """The bytes of a block, which follow from its name."""
    size = context.layout.groups[name.group].rank_bytes(context.layout.tp_size)
    return bytearray(random.Random(name.hash + bytes([name.group])).randbytes(size))


def names_of(count: int, seed: int = 0) -> list[BlockName]:
    """Of both groups in turn."""
    return [BlockName(random.Random(f"{seed} {i}").randbytes(16), i % 2) for i in range(count)]


@dataclass
class DiskBench:
    """A node's disk cache, and its events."""

    disk: DiskCache
    woken: threading.Semaphore
    reads: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    written: dict[BlockName, bool] = field(default_factory=dict)

    def wait(self, what: str | BlockName) -> None:
        """Take events until this read, or this write, has ended."""
        wait_until(lambda: self._has(what), lambda: what, poll_s=0.002)

    def _has(self, what: str | BlockName) -> bool:
        for event in self.disk.poll():
            match event:
                case DiskRead(read_id, landed):
                    assert read_id not in self.reads
                    self.reads[read_id] = landed
                case DiskWritten(name, is_stored):
                    assert name not in self.written
                    self.written[name] = is_stored
        return what in self.reads or what in self.written

    def store(self, names: Sequence[BlockName]) -> list[bool]:
        """Write the blocks of these names, one after the other. Returns which ones are there."""
        for name in names:
            self.written.pop(name, None)
            if self.disk.write(name, memoryview(block(name))):
                self.wait(name)
        return [self.disk.has(name) for name in names]

    def begin(self, read_id: str, names: Sequence[BlockName]) -> list[bytearray]:
        """Begin to read into buffers of ones. Returns them."""
        buffers = [bytearray(b"\1" * len(block(name))) for name in names]
        self.disk.read(read_id, names, lambda place: memoryview(buffers[place]))
        return buffers

    def recall(self, names: Sequence[BlockName], read_id: str = "read") -> list[bool]:
        """Read blocks. Returns which ones came. Their bytes are right, and the others' buffers are as before."""
        self.reads.pop(read_id, None)
        buffers = self.begin(read_id, names)
        self.wait(read_id)
        self.compare(names, buffers, self.reads[read_id])
        return list(self.reads[read_id])

    @staticmethod
    def compare(names: Sequence[BlockName], buffers: Sequence[bytearray], landed: Sequence[bool]) -> None:
        for name, buffer, is_there in zip(names, buffers, landed, strict=True):
            assert buffer == (block(name) if is_there else b"\1" * len(buffer))

    def stat(self, name: str) -> float:
        return self.disk.stats()[name]

    def misses(self) -> dict[str, float]:
        """Reasons of misses that were counted."""
        prefix = "disk_misses_total|reason="
        return {name.removeprefix(prefix): n for name, n in self.disk.stats().items() if name.startswith(prefix) and n}


@contextmanager
def disk_bench(folder: Path, context: ConnectorContext = DISK_CONTEXT, max_bytes: int = GB) -> Iterator[DiskBench]:
    """A node's disk cache until the end of the block. Reads have as long as a busy machine needs."""
    woken = threading.Semaphore(0)
    disk = DiskCache(folder, max_bytes, context, woken.release)
    disk.deadline_s = HANG_S
    try:
        yield DiskBench(disk, woken)
    finally:
        disk.close()


def files(folder: Path) -> list[Path]:
    """The files of rank 0."""
    return sorted((folder / "rank-0").iterdir())


def _write_for_ever(folder: Path) -> None:
    """Write the blocks of seed 1, 2, ..., and print each seed when all its blocks are there."""
    with disk_bench(folder) as node:
        for seed in range(1, 100_000):
            node.store(names_of(8, seed))
            print(seed, flush=True)  # noqa: T201


if __name__ == "__main__":
    _write_for_ever(Path(sys.argv[1]))
