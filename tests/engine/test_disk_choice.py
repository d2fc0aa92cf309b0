"""What the tier on disk reads: as much as time and host memory allow, if that is sooner than to compute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from pd_cluster.engine.disk_tier import BELIEVED_S, PINNED_SHARE, ROOM_SHARE, DiskTier
from pd_cluster.worker.disk_cache.disk_cache import DEADLINE_S, BlockName, DiskRead, DiskWritten
from tests.scheduling.kv_groups import FULL_WINDOW, ONE_FULL, GroupSet
from tests.scheduling.test_host_tier import manager, step
from tests.scheduling.test_shared_kv_memory import SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.sequence import Request
    from pd_cluster.worker.disk_cache.disk_cache import DiskCache

BLOCK_S = 0.0042  # in which a disk of DISK_GB_S reads a block of an 8B model, 8 MiB


def prompt_of(family: int, num_blocks: int) -> list[bytes]:
    return [blake2b(f"{family}/{i}".encode(), digest_size=16).digest() for i in range(num_blocks)]


@dataclass
class Disk:
    """A disk that has every block, and has read what the test says."""

    is_up: bool = True
    asked: dict[str, int] = field(default_factory=dict)  # reads under way -> blocks
    events: list[DiskRead | DiskWritten] = field(default_factory=list)
    num_looks: int = 0
    lacks: set[bytes] = field(default_factory=set)
    written: list[BlockName] = field(default_factory=list)

    def has(self, name: BlockName) -> bool:
        self.num_looks += 1
        return name.hash not in self.lacks

    def read(self, read_id: str, names: Sequence[BlockName], _: Callable[[int], memoryview]) -> None:
        self.asked[read_id] = len(names)

    def write(self, name: BlockName, _: memoryview) -> bool:
        self.written.append(name)
        return True

    def poll(self) -> list[DiskRead | DiskWritten]:
        events, self.events = self.events, []
        return events

    def end(self, read_id: str, num_landed: int) -> None:
        self.events.append(DiskRead(read_id, tuple(i < num_landed for i in range(self.asked.pop(read_id)))))


class ChoiceBench:
    """A tier of an engine that computes a block in `compute_s`, on a virtual clock."""

    def __init__(self, num_host: int = 4000, compute_s: float = 0.0055, kv: GroupSet = ONE_FULL) -> None:
        self.now_s, self.disk, self.ended, self.hashes = 0.0, Disk(), list[str](), list[bytes]()
        self.blocks = manager(12, num_host, kv)
        self.scheduler = SimpleNamespace(missing=lambda _: (self.hashes, (0,)), load=SimpleNamespace(queued_tokens=0))
        self.tier = DiskTier(
            cast("DiskCache", self.disk), self.blocks, cast("Scheduler", self.scheduler),
            lambda group, block: memoryview(b""), lambda num, start: num / SIZE * compute_s, lambda: self.now_s,
        )  # fmt: skip
        self.tier._gb_s = self.block_bytes / BLOCK_S / 1e9  # for 8 MiB that would be DISK_GB_S

    @property
    def block_bytes(self) -> int:
        return self.blocks.pools[0].group.block_bytes

    def ask(self, name: str, hashes: list[bytes], launched: int = 0, retired: int = 0) -> int:
        """Ask for a prompt. Returns for how many of its blocks the disk is asked, in a read that has begun or waits."""
        self.hashes, before = hashes, set(self.tier._reads)
        request = cast("Request", SimpleNamespace(request_id=name))
        started = self.tier.start(request, lambda _: self.ended.append(name))
        self.tier.turn(launched, retired)
        new = [reading for read_id, reading in self.tier._reads.items() if read_id not in before]
        assert started == bool(new)
        return sum(len(reading.taken) for reading in new)

    def end(self, num_landed: int, after_s: float) -> None:
        """End the oldest read."""
        self.now_s += after_s
        self.disk.end(next(iter(self.disk.asked)), num_landed)
        self.tier.turn(0, 0)


def test_a_read_begins_when_the_steps_before_it_have_retired() -> None:
    bench = ChoiceBench()
    assert bench.ask("a", prompt_of(1, 100), launched=7, retired=5)
    assert not bench.disk.asked
    bench.tier.turn(8, 6)
    assert not bench.disk.asked
    bench.tier.turn(9, 7)  # those that were launched later copy none of its blocks
    assert bench.disk.asked


def test_a_block_that_a_step_still_loads_is_not_filled() -> None:
    """Case by case: what the walks of `test_disk_walks` find."""
    bench = ChoiceBench(num_host=10)
    host = bench.blocks.host
    for block_hash in prompt_of(5, 10):
        host.add(0, block_hash, host.take(0, 1)[0])
    table = bench.blocks.open_table()
    assert bench.blocks.match_host(table, prompt_of(5, 4), 0, 5 * SIZE) == 4
    loads = step(bench.blocks).load
    bench.ask("a", prompt_of(1, 100), launched=1, retired=0)
    [reading] = bench.tier._reads.values()
    assert {block for *_, block in reading.taken} & {source for _, source, _ in loads}, "they may be taken"
    assert not bench.disk.asked, "but not be filled"
    bench.tier.turn(1, 1)
    assert bench.disk.asked


def test_a_slow_disk_is_asked_once_and_again_after_a_while() -> None:
    bench, asked = ChoiceBench(), 0
    for number in range(100):
        if bench.ask(str(number), prompt_of(number, 128)):
            asked += 1
            bench.end(num_landed=12, after_s=DEADLINE_S)  # an eighth of what was believed
    assert asked == 1
    bench.now_s += BELIEVED_S + 1
    assert bench.ask("later", prompt_of(101, 128))


def test_a_disk_that_brings_nothing_is_not_asked() -> None:
    bench = ChoiceBench()
    assert bench.ask("a", prompt_of(1, 128))
    bench.end(num_landed=0, after_s=DEADLINE_S)
    assert bench.tier._gb_s == 0
    assert not bench.ask("b", prompt_of(2, 128))


def test_the_speed_is_that_of_the_last_second_of_reading() -> None:
    bench = ChoiceBench(compute_s=1.0)
    speed_s = 0.002  # a block: faster than was believed
    for number in range(20):
        num_blocks = bench.ask(str(number), prompt_of(number, 100))
        assert num_blocks == 100
        bench.end(num_blocks, after_s=100 * speed_s)
    gb_s = bench.block_bytes / speed_s / 1e9
    assert abs(bench.tier._gb_s - gb_s) < 0.05 * gb_s
    bench.ask("small", prompt_of(50, 1))
    bench.end(1, after_s=0.01)  # hardly changes it
    assert abs(bench.tier._gb_s - gb_s) < 0.1 * gb_s


def test_what_is_computed_sooner_is_not_read() -> None:
    assert not ChoiceBench(compute_s=0.004).ask("a", prompt_of(1, 100))
    assert ChoiceBench(compute_s=0.0044).ask("a", prompt_of(1, 100)) == 100
    bench = ChoiceBench(compute_s=0.004)
    bench.scheduler.load.queued_tokens = 100 * SIZE
    assert bench.ask("after others", prompt_of(1, 100)) == 100


def test_no_more_is_asked_than_comes_within_the_deadline_and_reads_ahead_count() -> None:
    bench = ChoiceBench()
    most = int(DEADLINE_S / BLOCK_S)
    first = bench.ask("long", prompt_of(1, 900))
    assert most - 2 <= first <= most
    assert not bench.ask("short", prompt_of(2, 32)), "it would be parked after the long one"
    bench = ChoiceBench()
    assert bench.ask("middle", prompt_of(1, 100)) == 100
    assert not bench.ask("short", prompt_of(2, 32)), "100 blocks are ahead of it, and it is computed sooner"
    assert bench.ask("long", prompt_of(3, 600)) <= most - 100
    bench.end(100, after_s=100 * BLOCK_S)
    bench.end(bench.disk.asked[next(iter(bench.disk.asked))], after_s=1.0)
    assert bench.ask("short", prompt_of(2, 32)) == 32


def test_a_long_prompt_is_not_looked_up_to_its_end() -> None:
    bench = ChoiceBench(num_host=20_000)
    assert bench.ask("a", prompt_of(1, 8000))
    assert bench.disk.num_looks < 3 * DEADLINE_S / BLOCK_S


def test_prompts_share_the_host_memory() -> None:
    bench = ChoiceBench(num_host=400, compute_s=1e6)
    sizes = [bench.ask(str(number), prompt_of(number, 450)) for number in range(3)]
    assert sizes == [400 // ROOM_SHARE, 100, 50]
    bench.blocks.check()


def test_what_a_prompt_has_there_does_not_go_for_what_it_lacks() -> None:
    bench = ChoiceBench(num_host=100, compute_s=1e6)
    host, hashes = bench.blocks.host, prompt_of(1, 200)
    for block_hash in [*hashes[:60], *prompt_of(2, 40)]:
        host.add(0, block_hash, host.take(0, 1)[0])
    assert bench.ask("a", hashes) == 20
    assert all(one in host.groups[0].cached for one in hashes[:60])


def test_windows_are_read_with_what_is_before_them() -> None:
    bench = ChoiceBench(num_host=40, compute_s=1e6, kv=FULL_WINDOW)
    assert bench.ask("a", prompt_of(1, 200)) > 10
    [reading] = bench.tier._reads.values()
    assert {group for group, *_ in reading.taken} == {0, 1}
    bench.blocks.check()


def test_what_is_in_a_file_is_not_lost_while_the_tier_is_down() -> None:
    bench = ChoiceBench(num_host=2)
    host = bench.blocks.host
    bench.disk.is_up = False
    bench.disk.lacks = set(prompt_of(2, 1))
    for block_hash in [*prompt_of(1, 1), *prompt_of(2, 1), *prompt_of(3, 2)]:
        host.add(0, block_hash, host.take(0, 1)[0])
    assert bench.tier._num_unwritten == 1


def test_a_tier_that_is_down_is_not_asked() -> None:
    bench: Any = ChoiceBench()
    bench.disk.is_up = False
    assert not bench.ask("a", prompt_of(1, 100))
    assert not bench.disk.num_looks


def test_no_more_host_memory_is_pinned_for_writes_than_the_bound() -> None:
    bench, hashes = ChoiceBench(num_host=100), prompt_of(1, 60)
    host = bench.blocks.host
    for block_hash in hashes:
        host.add(0, block_hash, host.take(0, 1)[0])
        host.on_saved(0, block_hash)
    for done in range(0, 40, 10):
        bench.tier.turn(0, 0)
        assert [name.hash for name in bench.disk.written] == hashes[: done + 100 // PINNED_SHARE]
        assert len(host.groups[0].pins) == 100 // PINNED_SHARE
        bench.disk.events += [DiskWritten(name, is_stored=True) for name in bench.disk.written[done : done + 10]]
