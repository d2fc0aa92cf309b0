"""The tier on disk, after host memory: blocks are written before the host gives them up, and read into it.

A prompt that goes on in files parks its request while they are read. Then that goes on as if it had just come, and
finds in host memory what has landed. If it ends first, its blocks are cached all the same.

What the host has got is written in that order, which is nearly the one in which it gives it up: so writes may lag by
the minutes that blocks stay there. One that is not written when the host gives it up is lost, and counted.

Threads and steps share host blocks, and no stream orders them:

    a read writes     blocks that it has taken. A step that was launched before may still load or swap them in, or swap
                      a sequence out to them that has ended since: so the threads begin when all such steps have retired
    a write reads     a cached block that its save has filled: it has no pin of a step, and is pinned until it is
                      written, so that nothing takes it
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.worker.disk_cache.cache_folder import MAX_FILES
from pd_cluster.worker.disk_cache.disk_cache import DEADLINE_S, BlockName, DiskRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.sequence import Request
    from pd_cluster.worker.disk_cache.disk_cache import DiskCache

MOST_WRITES, WRITE_BYTES = 32, 256 << 20  # at once, and of them together: so many host blocks are pinned
PINNED_SHARE = 4  # and at most 1 / PINNED_SHARE of a small host memory, or one
ROOM_SHARE = 2  # a read takes at most 1 / ROOM_SHARE of what host memory can give up: others come
# At least believed until a read has told, and again after BELIEVED_S without one: a slow disk is tried again
DISK_GB_S = 2.0
BELIEVED_S = 60.0


@dataclass(slots=True, eq=False)
class _Reading:
    """`go_on` is called once with the request, which is still parked then; None: it has ended."""

    request: Request | None
    go_on: Callable[[Request], None]
    taken: list[tuple[int, bytes, int]]  # (group, hash, host block)
    num_bytes: int
    fence: int = -1  # so many steps retire before it begins; -1: not known yet
    begin_s: float = inf


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
        self._gb_s, self._told_s = DISK_GB_S, clock()

    @property
    def stats(self) -> dict[str, float]:
        """See `Connector.stats`."""
        return {**self._disk.stats(), "disk_unwritten_total": float(self._num_unwritten)}

    def start(self, request: Request, go_on: Callable[[Request], None]) -> bool:
        """Read blocks of a parked prompt, if that is sooner than to compute them in their turn.

        Returns False, and never calls `go_on`, if there are none.
        """
        hashes, _ = self._scheduler.missing(request) if self._disk.is_up else ((), ())
        lacking = self._affordable(hashes) if hashes else []
        if not lacking:
            return False
        taken = [(group, one, self._host.take(group, 1)[0]) for group, one in lacking]
        read_id = f"{request.request_id}@{next(self._serials)}"
        self._reads[read_id] = _Reading(request, go_on, taken, self._bytes_of(lacking))
        return True

    def _affordable(self, hashes: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """The (group, hash) to read: up to the largest boundary for which time and host memory suffice.

        Nothing if the prompt is computed up to there sooner, in its turn.
        """
        blocks, start = self._blocks, self._blocks.num_cached(hashes) // self._blocks.block_size
        if self._clock() - self._told_s > BELIEVED_S:
            self._gb_s = max(self._gb_s, DISK_GB_S)
        ahead = sum(reading.num_bytes for reading in self._reads.values())
        most_bytes = self._gb_s * 1e9 * DEADLINE_S - ahead
        held = [[one for one in hashes if one in own.cached] for own in self._host.groups]
        rooms = [
            (own.num_takeable - len(ours)) // ROOM_SHARE for own, ours in zip(self._host.groups, held, strict=True)
        ]
        trees = [pool for pool in blocks.pools if pool.is_tree]  # all of them, so that a long prompt is not looked up
        tree_bytes = sum(pool.group.block_bytes / pool.ratio for pool in trees) or 1.0
        most = min([most_bytes / tree_bytes, *(rooms[pool.index] * pool.ratio for pool in trees)])
        end = int(max(start, min(len(hashes), start + most)))
        while True:
            end, lacking = blocks.lacking(hashes[:end], lambda group, one: self._disk.has(BlockName(one, group)))
            if not lacking:
                return []
            num_bytes, counts = self._bytes_of(lacking), Counter(group for group, _ in lacking)
            share = min([most_bytes / num_bytes, *(rooms[group] / counts[group] for group in counts)])
            if share >= 1:
                break
            end = start + int(0.9 * max(0.0, share) * (end - start))  # of windows a part is needed at any end
        if not self._is_sooner(ahead + num_bytes, start * blocks.block_size, end * blocks.block_size):
            return []
        for own, ours in zip(self._host.groups, held, strict=True):  # it must not go for what is read
            for one in ours:
                own.cached.move_to_end(one)
        return lacking

    def _bytes_of(self, lacking: Iterable[tuple[int, bytes]]) -> int:
        return sum(self._blocks.pools[group].group.block_bytes for group, _ in lacking)

    def _is_sooner(self, num_bytes: int, start: int, end: int) -> bool:
        """Whether a prompt's tokens from `start` to `end` are read before they would be computed, after what waits."""
        compute_s = self._prefill_s(end - start, start) + self._prefill_s(self._scheduler.load.queued_tokens, 0)
        return num_bytes < self._gb_s * 1e9 * compute_s

    def forget(self, request: Request) -> None:
        """Forget a request that has ended. Idempotent."""
        for reading in self._reads.values():
            if reading.request is request:
                reading.request = None

    def turn(self, num_launched: int, num_retired: int) -> None:
        """Take what the disk has done, and give it more to do. Call it between plans, with the steps up to now."""
        for event in self._disk.poll():
            if isinstance(event, DiskRead):
                self._take_read(event)
            else:
                self._host.groups[event.name.group].unpin(self._writes.pop(event.name))
        for read_id, reading in self._reads.items():
            if reading.fence < 0:
                reading.fence = num_launched
            if reading.begin_s == inf and num_retired >= reading.fence:
                self._begin(read_id, reading)
        self._write()

    def _begin(self, read_id: str, reading: _Reading) -> None:
        reading.begin_s, taken = self._clock(), reading.taken
        names = [BlockName(block_hash, group) for group, block_hash, _ in taken]
        self._disk.read(read_id, names, lambda place: self._host_block(taken[place][0], taken[place][2]))

    def _take_read(self, event: DiskRead) -> None:
        reading, landed = self._reads.pop(event.read_id), 0
        for (group, block_hash, block), has_landed in zip(reading.taken, event.landed, strict=True):
            if has_landed:
                self._host.add(group, block_hash, block)
                landed += self._blocks.pools[group].group.block_bytes
            else:
                self._host.groups[group].give_back([block])
        now_s = self._clock()
        busy_s = now_s - max(reading.begin_s, self._told_s)  # threads read in order: the one before was ahead of it
        self._gb_s = (1 - min(1.0, busy_s)) * self._gb_s + landed / 1e9 / max(1.0, busy_s)  # of the last second's reads
        self._told_s = now_s
        if reading.request is not None:
            reading.go_on(reading.request)

    def _write(self) -> None:
        most = min(self._most_writes, max(1, min(one.num_blocks for one in self._host.groups) // PINNED_SHARE))
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

    def _note_evicted(self, group: int, block_hash: bytes) -> None:
        self._num_unwritten += not self._disk.has(BlockName(block_hash, group))
        self._give_up(group, block_hash)
