"""KV blocks of one rank on the machine's own disk: written and read by threads, so no step waits for the disk.

A file's name has the block's chained hash, its group, the rank, and the scope: the model's fingerprint, layout, cluster
key, degree, and the release, because what a release computes for a hash may change with its kernels. Its digest is
keyed and covers the name: as with objects of a pool, what lies there is not trusted.

    write    the buffer must stay as it is until DiskWritten
    read     blocks land in the buffers, each when its digest was checked, until DiskRead and never after it. A deadline
             ends a read, too: a thread that hangs in the disk has a buffer of its own, and what it brings is dropped
    off      an error of the disk, a full one too, or a write that hangs, ends the tier until the next start: nothing is
             read or written

Each read, and each write that was taken, ends with one event. Deadlines are looked at by `poll`, which an idle step
loop calls once in a heartbeat.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from mmap import mmap
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pd_cluster import __version__
from pd_cluster.errors import StartupError
from pd_cluster.worker.disk_cache.cache_folder import PAGE_BYTES, CacheFolder, aligned
from pd_connectors.store import HEADER_BYTES, ObjectName, Seal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pd_connectors.base import ConnectorContext

    _Job = Callable[[memoryview], None]  # (the thread's pages)

logger = logging.getLogger(__name__)

FILE_MAGIC = b"pd-kv-file/1\0\0\0\0"  # another one also where KV of a hash changes within a release
NUM_THREADS = 4  # that read, and as many that write: one digests 0.9 GB/s; 8B loads sooner than it computes above 2.0
DEADLINE_S = 2.0  # of a read: what has landed by then is found
WRITE_DEADLINE_S = 30.0  # of one block: a disk that takes longer hangs
CLOSE_S = 3.0


class BlockName(NamedTuple):
    """A block by its content."""

    hash: bytes  # of the prompt up to the block's end
    group: int = 0


@dataclass(frozen=True, slots=True)
class DiskRead:
    """A read is over: which of its blocks are whole in their buffers. The other buffers are as they were."""

    read_id: str
    landed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class DiskWritten:
    """The disk does not need the buffer of this block any more."""

    name: BlockName
    is_stored: bool


class _Read:
    """Its lock puts the end and each landing in an order."""

    def __init__(
        self, read_id: str, names: Sequence[BlockName], buffer: Callable[[int], memoryview], due_s: float
    ) -> None:
        self.read_id, self.names, self.buffer, self.due_s = read_id, names, buffer, due_s
        self.landed, self.num_left = [False] * len(names), len(names)
        self.miss = "late"  # why what is left has not come, when it is over
        self.is_over = False
        self._lock = threading.Lock()

    def land(self, place: int, content: memoryview | None) -> None:
        """Copy a block into its buffer; None: it is a miss."""
        with self._lock:
            if self.is_over:
                return
            if content is not None:
                # without the interpreter's lock, for which a step would wait 1 ms a block
                np.copyto(np.frombuffer(self.buffer(place), np.uint8), np.frombuffer(content, np.uint8))
                self.landed[place] = True
            self.num_left -= 1

    def finish(self) -> None:
        """Nothing lands after this."""
        with self._lock:
            self.is_over = True

    def refuse(self) -> None:
        self.finish()
        self.miss, self.due_s = "unavailable", -inf


class DiskCache:
    """`wake` is called when there is an event. Raises StartupError. One thread calls it, the step loop's."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        context: ConnectorContext,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = context.layout
        self._block_bytes = [group.rank_bytes(layout.tp_size) for group in layout.groups]
        self._file_bytes = [aligned(PAGE_BYTES + num_bytes) for num_bytes in self._block_bytes]
        if max_bytes < NUM_THREADS * max(self._file_bytes):
            raise StartupError(f"the disk cache needs {NUM_THREADS * max(self._file_bytes) / 1e9:.3g} GB at least")
        self._seal = Seal(FILE_MAGIC, context, b"%d" % layout.tp_size, __version__.encode())
        self._spaces = [
            ObjectName(self._seal.scope, b"", group, context.rank).space for group in range(len(layout.groups))
        ]
        self._wake, self._clock = wake, clock
        self.deadline_s = DEADLINE_S
        self._folder = CacheFolder(folder / f"rank-{context.rank}", max_bytes)
        self._reads: dict[str, _Read] = {}
        self._writing: set[BlockName] = set()
        self._lock = threading.Lock()  # of what follows, but for the queues
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._is_off = self._was_late = False
        self._begun_s: list[float | None] = [
            None for _ in range(2 * NUM_THREADS)
        ]  # when each thread began what it works on
        self._written: deque[DiskWritten] = deque()
        self._to_read: SimpleQueue[_Job | None] = SimpleQueue()
        self._to_write: SimpleQueue[_Job | None] = SimpleQueue()
        if self._folder.failure is not None:
            self._switch_off(self._folder.failure)
        queues = [self._to_read] * NUM_THREADS + [self._to_write] * NUM_THREADS
        self._threads = [
            threading.Thread(target=self._run, args=(index, jobs), name=f"pd-disk-{index}", daemon=True)
            for index, jobs in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    # the step loop's side

    @property
    def is_up(self) -> bool:
        """Whether the tier works: it is not off, and not every reading thread hangs."""
        late_s = self._clock() - self.deadline_s
        return not self._is_off and any(begun is None or begun > late_s for begun in self._begun_s[:NUM_THREADS])

    def has(self, name: BlockName) -> bool:
        """Whether the block has a file. It may be gone, or no good, when it is read."""
        return self._file_name(name) in self._folder

    def read(self, read_id: str, names: Sequence[BlockName], buffer: Callable[[int], memoryview]) -> None:
        """Read blocks, in this order. Ends with DiskRead, for which buffers must stay.

        `buffer`: called by threads with an index into `names`. Returns memory of the block's size.
        """
        assert read_id not in self._reads, read_id
        self._reads[read_id] = read = _Read(read_id, names, buffer, self._clock() + self.deadline_s)
        if not self.is_up:
            read.refuse()
            self._wake()
            return
        for place in range(len(names)):
            self._to_read.put(partial(self._read_block, read, place))

    def write(self, name: BlockName, buffer: memoryview) -> bool:
        """Store a block. False, and no event: it is stored or being stored already, or the tier is off, counted.

        The caller bounds how many wait: their buffers are its own.
        """
        size = self._block_bytes[name.group]
        assert buffer.nbytes == size, (buffer.nbytes, size)
        if name in self._writing or self.has(name):
            return False
        if self._is_off:
            self._count(_UNWRITTEN)
            return False
        self._writing.add(name)
        self._to_write.put(partial(self._write_block, name, buffer))
        return True

    def poll(self) -> list[DiskRead | DiskWritten]:
        """The events since the last call. What is late ends here."""
        now_s = self._clock()
        writes_begun_s = [begun for begun in self._begun_s[NUM_THREADS:] if begun is not None]
        if not self._is_off and min(writes_begun_s, default=inf) <= now_s - WRITE_DEADLINE_S:
            self._switch_off(TimeoutError(f"a write takes more than {WRITE_DEADLINE_S:g} s"))
            with suppress(Empty):  # threads that hang do not take what waits. Being off, it touches no file
                while job := self._to_write.get_nowait():
                    job(memoryview(b""))
        written = [self._written.popleft() for _ in range(len(self._written))]
        for event in written:
            self._writing.remove(event.name)
            self._count("disk_written_total" if event.is_stored else _UNWRITTEN)
        over = [read for read in [*self._reads.values()] if not read.num_left or read.due_s <= now_s]
        return [*written, *map(self._end, over)]

    def stats(self) -> dict[str, float]:
        """Counters and gauges by the names of their metrics."""
        folder = self._folder
        return {
            **self._counts,
            "disk_up": float(self.is_up),
            "disk_files": float(len(folder)),
            "disk_bytes": float(folder.num_bytes),
            "disk_backlog_bytes": float(sum(self._block_bytes[name.group] for name in self._writing)),
            "disk_evicted_total": float(folder.num_evicted),
        }

    def close(self) -> None:
        """End every read, drop what was not written, join the threads. Idempotent."""
        if not self._threads:
            return
        self._is_off = True
        for read in [*self._reads.values()]:
            read.refuse()
        self._wake()
        for _ in range(NUM_THREADS):
            self._to_read.put(None)
            self._to_write.put(None)
        end_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.error("the disk cache did not end within %g s", CLOSE_S)  # its lock ends with the process
        else:
            self._folder.close()
        self._threads.clear()

    def _end(self, read: _Read) -> DiskRead:
        read.finish()
        del self._reads[read.read_id]
        self._count(f"disk_misses_total|reason={read.miss}", read.num_left)
        if not read.num_left:
            self._was_late = False
        elif read.miss == "late" and not self._was_late:
            self._was_late = True
            what = f"{sum(read.landed)} of {len(read.landed)} blocks within {self.deadline_s:g} s"
            logger.warning("the disk cache %s is slow: it brought %s", self._folder.path, what)
        return DiskRead(read.read_id, tuple(read.landed))

    # threads

    def _file_name(self, name: BlockName) -> str:
        return f"{self._spaces[name.group]}-{name.hash.hex()}"

    def _count(self, name: str, number: float = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def _run(self, index: int, jobs: SimpleQueue[_Job | None]) -> None:
        pages = memoryview(mmap(-1, max(self._file_bytes)))
        while (job := jobs.get()) is not None:
            self._begun_s[index] = self._clock()
            try:
                job(pages)
            except Exception as error:  # of the disk, or a bug, which must not leave a request waiting
                self._switch_off(error)
            self._begun_s[index] = None

    def _read_block(self, read: _Read, place: int, pages: memoryview) -> None:
        if read.is_over:
            return
        content = None
        try:
            content = self._load(read.names[place], pages)
        except OSError:
            self._count("disk_misses_total|reason=unavailable")
            raise
        finally:
            read.land(place, content)
            if not read.num_left:
                self._wake()

    def _load(self, name: BlockName, pages: memoryview) -> memoryview | None:
        """The block's bytes, in the thread's pages. None: there is no such block, any more."""
        file_name, start_s, size = self._file_name(name), self._clock(), self._block_bytes[name.group]
        content = pages[PAGE_BYTES : PAGE_BYTES + size]
        if not self._folder.read(file_name, pages[: self._file_bytes[name.group]]):
            self._count("disk_misses_total|reason=lost")
            return None
        if not self._seal.is_of(pages[:HEADER_BYTES], file_name, content):
            self._folder.discard(file_name)
            self._count("disk_misses_total|reason=damaged")
            return None
        self._count("disk_read_bytes_total", size)
        self._count("disk_read_seconds_total", self._clock() - start_s)
        return content

    def _write_block(self, name: BlockName, source: memoryview, pages: memoryview) -> None:
        is_stored = False
        try:
            is_stored = not self._is_off and self._store(name, source, pages)
        finally:
            self._written.append(DiskWritten(name, is_stored))
            self._wake()

    def _store(self, name: BlockName, source: memoryview, pages: memoryview) -> bool:
        file_name, content = self._file_name(name), pages[PAGE_BYTES : PAGE_BYTES + source.nbytes]
        np.copyto(np.frombuffer(content, np.uint8), np.frombuffer(source, np.uint8))
        pages[:HEADER_BYTES] = self._seal.header(file_name, content)
        return self._folder.write(file_name, pages[: self._file_bytes[name.group]])

    def _switch_off(self, error: Exception) -> None:
        with self._lock:
            was_off, self._is_off = self._is_off, True
        if not was_off:
            trace = error if not isinstance(error, OSError) else None
            logger.error("the disk cache %s is off until the next start: %s", self._folder.path, error, exc_info=trace)


_UNWRITTEN = "disk_dropped_total"
_COUNTS = (
    *(f"disk_misses_total|reason={miss}" for miss in ("lost", "damaged", "late", "unavailable")),
    _UNWRITTEN,
    *(f"disk_{name}_total" for name in ("read_bytes", "read_seconds", "written")),
)
