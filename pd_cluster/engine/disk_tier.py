"""The tier on disk, after host memory: blocks are written before the host gives them up, and read into it.

A prompt that goes on in files parks its request while they are read. Then that goes on as if it had just come, and
finds in host memory what has landed. If it ends first, its blocks are cached all the same.

What the host has got is written in that order, which is nearly the one in which it gives it up: so writes may lag by
the minutes that blocks stay there. A block is pinned while a thread reads it. One that is not written when the host
gives it up is lost, and counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from pd_cluster.worker.disk_cache.cache_folder import MAX_FILES
from pd_cluster.worker.disk_cache.disk_cache import BlockName, DiskRead

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.sequence import Request
    from pd_cluster.worker.disk_cache.disk_cache import DiskCache

MOST_WRITES, WRITE_BYTES = 32, 256 << 20  # at once, and of them together: so many host blocks are pinned
PINNED_SHARE = 4  # and at most 1 / PINNED_SHARE of a small host memory
DISK_GB_S = 2.0  # until a read was measured
SLOWEST_GB_S = 0.5  # that is believed: so that the disk is tried again
MEASURED_BYTES = 64 << 20  # of a read that tells how fast the disk is


@dataclass(slots=True, eq=False)
class _Reading:
    """`go_on` is called once with the request, which is still parked then; None: it has ended."""

    request: Request | None
    go_on: Callable[[Request], None]
    taken: list[tuple[int, bytes, int]]  # (group, hash, host block)
    begin_s: float


class DiskTier:
    """Runs on the step loop's thread. `host_block`: the memory of a (group, host block)."""

    def __init__(
        self,
        disk: DiskCache,
        blocks: BlockManager,
        scheduler: Scheduler,
        host_block: Callable[[int, int], memoryview],
        prefill_s: Callable[[int, int], float],
        clock: Callable[[], float],
    ) -> None:
        """`prefill_s`: the predicted seconds of so many tokens of a prompt, after so many others."""
        self._disk, self._blocks, self._scheduler = disk, blocks, scheduler
        self._host_block, self._prefill_s, self._clock = host_block, prefill_s, clock
        self._host = blocks.host
        self._give_up, self._host.on_evicted = self._host.on_evicted, self._note_evicted
        self._serials = count(1)
        self._reads: dict[str, _Reading] = {}
        self._writes: dict[BlockName, int] = {}  # -> the pinned host block
        self._most_writes = max(1, min(MOST_WRITES, WRITE_BYTES // max(p.group.block_bytes for p in blocks.pools)))
        self._unwritten: deque[tuple[int, bytes]] = deque(maxlen=MAX_FILES)  # (group, hash) that the host has got
        self._host.on_saved = lambda group, block_hash: self._unwritten.append((group, block_hash))
        self._num_unwritten = 0
        self._gb_s = DISK_GB_S

    @property
    def stats(self) -> dict[str, float]:
        """See `Connector.stats`."""
        return {**self._disk.stats(), "disk_unwritten_total": float(self._num_unwritten)}

    def start(self, request: Request, go_on: Callable[[Request], None]) -> bool:
        """Read blocks of a parked prompt, if that is sooner than to compute them in their turn.

        Returns False, and never calls `go_on`, if there are none.
        """
        blocks, size = self._blocks, self._blocks.block_size
        hashes, _ = self._scheduler.missing(request)
        if not hashes:
            return False
        end, lacking = blocks.lacking(hashes, lambda group, one: self._disk.has(BlockName(one, group)))
        num_bytes = sum(blocks.pools[group].group.block_bytes for group, _ in lacking)
        if not lacking or not self._is_sooner(num_bytes, blocks.num_cached(hashes), end * size):
            return False
        for group, own in enumerate(self._host.groups):  # what it has there must not go for what it lacks
            for one in hashes:
                if one in own.cached:
                    own.cached.move_to_end(one)
            if sum(index == group for index, _ in lacking) > own.num_takeable:
                return False
        taken = [(group, one, self._host.take(group, 1)[0]) for group, one in lacking]
        read_id = f"{request.request_id}@{next(self._serials)}"
        self._reads[read_id] = _Reading(request, go_on, taken, self._clock())
        names, buffers = (
            [BlockName(one, group) for group, one in lacking],
            [self._host_block(g, b) for g, _, b in taken],
        )
        self._disk.read(read_id, names, buffers)
        return True

    def _is_sooner(self, num_bytes: int, start: int, end: int) -> bool:
        """Whether a prompt's tokens from `start` to `end` are read before they would be computed, after what waits."""
        compute_s = self._prefill_s(end - start, start) + self._prefill_s(self._scheduler.load.queued_tokens, 0)
        return num_bytes / (self._gb_s * 1e9) < compute_s

    def forget(self, request: Request) -> None:
        """Forget a request that has ended. Idempotent."""
        for reading in self._reads.values():
            if reading.request is request:
                reading.request = None

    def turn(self) -> None:
        """Take what the disk has done, and give it more to write. Call it between plans."""
        for event in self._disk.poll():
            if isinstance(event, DiskRead):
                self._take_read(event)
            else:
                self._host.groups[event.name.group].unpin(self._writes.pop(event.name))
        self._write()

    def _take_read(self, event: DiskRead) -> None:
        reading = self._reads.pop(event.read_id)
        for (group, block_hash, block), has_landed in zip(reading.taken, event.landed, strict=True):
            if has_landed:
                self._host.add(group, block_hash, block)
            else:
                self._host.groups[group].give_back([block])
        num_bytes = sum(self._blocks.pools[group].group.block_bytes for group, *_ in reading.taken)
        if all(event.landed) and num_bytes >= MEASURED_BYTES:
            gb_s = num_bytes / 1e9 / max(1e-6, self._clock() - reading.begin_s)
            self._gb_s = max(SLOWEST_GB_S, 0.8 * self._gb_s + 0.2 * gb_s)
        if reading.request is not None:
            reading.go_on(reading.request)

    def _write(self) -> None:
        most = min(self._most_writes, self._host.num_blocks // PINNED_SHARE)
        while self._unwritten and len(self._writes) < most:
            group, block_hash = self._unwritten[0]
            own = self._host.groups[group]
            block = own.cached.get(block_hash)
            if block in own.pins:
                return  # till its save has retired
            self._unwritten.popleft()
            name = BlockName(block_hash, group)
            if block is not None and self._disk.write(name, self._host_block(group, block)):
                own.pin(block)
                self._writes[name] = block

    def _note_evicted(self, group: int, block_hash: bytes, block: int) -> None:
        self._num_unwritten += not self._disk.has(BlockName(block_hash, group))
        self._give_up(group, block_hash, block)
