"""The threads of a disk cache over the simulated world's host memory: they read and write at the worst moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from pd_cluster.engine.disk_tier import DiskTier
from pd_cluster.worker.disk_cache.disk_cache import BlockName, DiskRead, DiskWritten
from tests.scheduling.side_stream import GARBAGE

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.sequence import Request
    from pd_cluster.worker.disk_cache.disk_cache import DiskCache
    from tests.scheduling.world import World

    Block = tuple[int, int]  # (group, host block), in place of its memory


@dataclass
class SideDisk:
    """Blocks that are read hold garbage until the read ends; what is written is what lies there when a write ends.

    AssertionError where a step that has not retired copies a block that a thread fills, or fills one that a thread
    writes to a file.
    """

    world: World
    rng: random.Random
    files: dict[BlockName, dict[int, int]] = field(default_factory=dict)  # slot -> history
    reading: dict[str, tuple[Sequence[BlockName], list[Block]]] = field(default_factory=dict)
    writing: dict[BlockName, Block] = field(default_factory=dict)
    num_landed: int = 0
    is_up: bool = True
    _events: list[DiskRead | DiskWritten] = field(default_factory=list)

    def tier(self) -> DiskTier:
        """A tier that reads whatever is there. From now on prompts that come are looked for in files."""
        scheduler = self.world.scheduler
        host_block = cast("Callable[[int, int], memoryview]", lambda group, block: (group, block))
        tier = DiskTier(
            cast("DiskCache", self), self.world.blocks, scheduler, host_block, lambda num, start: 1e9, lambda: 0.0
        )

        def admit(request: Request) -> None:
            scheduler.park(request)
            if not tier.start(request, scheduler.fall_back_to_local):
                scheduler.fall_back_to_local(request)

        scheduler.add = admit  # type: ignore[method-assign]
        return tier

    # in place of DiskCache

    def has(self, name: BlockName) -> bool:
        return name in self.files

    def read(self, read_id: str, names: Sequence[BlockName], buffer: Callable[[int], memoryview]) -> None:
        blocks = [cast("Block", buffer(place)) for place in range(len(names))]
        self.reading[read_id] = names, blocks
        for batch, _ in self.world._running:
            self._expect_apart(batch)
        for group, block in blocks:
            self._fill(group, block, {})

    def write(self, name: BlockName, buffer: memoryview) -> bool:
        if name in self.files or name in self.writing:
            return False
        self.writing[name] = cast("Block", buffer)
        for batch, _ in self.world._running:
            self._expect_apart(batch)
        return True

    def poll(self) -> list[DiskRead | DiskWritten]:
        events, self._events = self._events, []
        return events

    # the test's side

    def advance(self, share: float = 0.5) -> None:
        """End some reads, each with some of its blocks, and some writes."""
        for read_id in [one for one in self.reading if self.rng.random() < share]:
            names, blocks = self.reading.pop(read_id)
            landed = tuple(name in self.files and self.rng.random() < 0.9 for name in names)
            for name, (group, block), is_there in zip(names, blocks, landed, strict=True):
                if is_there:
                    self._fill(group, block, self.files[name])
            self.num_landed += sum(landed)
            self._events.append(DiskRead(read_id, landed))
        for name in [one for one in self.writing if self.rng.random() < share]:
            group, block = self.writing.pop(name)
            host, size = self.world.worker.host, self.world.worker.groups[group].block_size
            self.files[name] = {slot: host.get((group, block, slot), GARBAGE) for slot in range(size)}
            self._events.append(DiskWritten(name, is_stored=True))

    def watch(self, batch: Batch) -> Batch:
        """Of a step that has begun."""
        self._expect_apart(batch)
        return batch

    def _expect_apart(self, batch: Batch) -> None:
        copies = batch.copies
        written = {copy[::2] for copy in [*copies.save, *copies.swap_out]}
        touched = written | {copy[:2] for copy in [*copies.load, *copies.swap_in]}
        filled = {block for _, blocks in self.reading.values() for block in blocks}
        assert not touched & filled, "a step copies a host block that a thread fills"
        assert not written & set(self.writing.values()), "a step fills a host block that a thread writes to a file"

    def _fill(self, group: int, block: int, content: dict[int, int]) -> None:
        for slot in range(self.world.worker.groups[group].block_size):
            self.world.worker.host[group, block, slot] = content.get(slot, GARBAGE)
