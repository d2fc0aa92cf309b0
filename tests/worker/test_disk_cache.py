"""What the tier on disk gives back, and what it does with files, disks and neighbours that are no good."""

from __future__ import annotations

import errno
import os
import random
import resource
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.errors import StartupError
from pd_cluster.worker.disk_cache import cache_folder, disk_cache
from pd_cluster.worker.disk_cache.cache_folder import CacheFolder
from pd_cluster.worker.disk_cache.disk_cache import NUM_THREADS
from tests.deadlines import HANG_S, wait_until
from tests.worker.disk_bench import DISK_CONTEXT, block, disk_bench, files, names_of, two_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_connectors.base import ConnectorContext

ROOT = Path(__file__).parents[2]


def test_every_bit_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    names = names_of(20)
    with disk_bench(tmp_path / "kv") as node:
        assert not any(map(node.disk.has, names))
        assert all(node.store(names))
        assert all(node.recall(names[::-1]))
        assert not node.disk.write(names[0], memoryview(block(names[0])))  # it is there
        assert node.stat("disk_written_total") == 20
        while node.woken.acquire(blocking=False):
            pass
        node.begin("woken", names)
        assert node.woken.acquire(timeout=HANG_S)
        assert [event.landed for event in node.disk.poll()] == [(True,) * 20]  # type: ignore[union-attr]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path / "kv")} == {0o600}
    assert {stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) for name in (".", "rank-0")} == {0o700}
    with disk_bench(tmp_path / "kv") as node:
        assert node.stat("disk_bytes") == sum(path.stat().st_size for path in files(tmp_path / "kv"))
        assert all(node.recall(names))
        assert node.misses() == {}


def test_a_file_system_without_direct_io_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.open` stands in for such a file system."""
    real = os.open

    def refuse(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    names = names_of(3)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        assert all(node.recall(names))


OTHERS: dict[str, ConnectorContext] = {
    "key": replace(DISK_CONTEXT, cluster_key=b"another key of 32 bytes in all.."),
    "model": replace(DISK_CONTEXT, fingerprint="another model"),
    "dtype": replace(DISK_CONTEXT, layout=two_kinds(dtype="bfloat16")),
    "layout": replace(DISK_CONTEXT, layout=two_kinds(window=64)),
    "degree": replace(DISK_CONTEXT, layout=two_kinds(tp_size=2)),
}


@pytest.mark.parametrize("what", [*OTHERS, "release"])
def test_nothing_is_found_of_another(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(6)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        num_bytes = int(node.stat("disk_bytes"))
    if what == "release":
        monkeypatch.setattr(disk_cache, "__version__", "0.0.0")
    context = OTHERS.get(what, DISK_CONTEXT)
    with disk_bench(tmp_path, context, max_bytes=num_bytes) as node:
        assert node.recall(names) == [False] * 6
        before = set(files(tmp_path))
        own = names_of(1, seed=9)
        node.disk.write(own[0], memoryview(block(own[0], context)))
        node.wait(own[0])
        assert set(files(tmp_path)) - before, "a file of its own"
        assert before - set(files(tmp_path)), "the other's files count for the bound, and leave"
        assert node.stat("disk_bytes") <= num_bytes


def _truncate(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _empty(path: Path, _: Path) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def _flip(path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 + 100] ^= 1
    path.write_bytes(content)


def _flip_digest(path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


def _exchange(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def _remove(path: Path, _: Path) -> None:
    path.unlink()


def _link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("spoil", [_truncate, _empty, _lengthen, _flip, _flip_digest, _exchange, _remove, _link])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_that_is_no_good_is_a_miss(
    spoil: Callable[[Path, Path], None], is_restarted: bool, tmp_path: Path
) -> None:
    names = names_of(6)[::2]  # of one group, so that the files have one size
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        bad, other = (next(path for path in files(tmp_path) if name.hash.hex() in path.name) for name in names[:2])
        if not is_restarted:
            spoil(bad, other)
            assert node.recall(names) == [False, True, True]
            assert not os.path.lexists(bad)
            assert not node.disk.has(names[0])
            assert sum(node.misses().values()) == 1
            assert node.stat("disk_bytes") == sum(path.stat().st_size for path in files(tmp_path))
            assert all(node.store(names))  # it can be stored anew
            assert all(node.recall(names))
            return
    spoil(bad, other)
    with disk_bench(tmp_path) as node:
        assert node.recall(names) == [False, True, True]
        assert all(node.store(names))
        assert all(node.recall(names))


def test_a_kill_while_it_writes_leaves_no_file_that_is_believed(tmp_path: Path) -> None:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "draft-1").write_bytes(b"half of a block")
    for last in (3, 5):
        command = [sys.executable, "-m", "tests.worker.disk_bench", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < last:
                pass
            process.kill()
        with disk_bench(tmp_path) as node:
            assert not [path for path in files(tmp_path) if path.name.startswith("draft-")]
            for seed in range(1, last + 1):
                assert all(node.recall(names_of(8, seed)))
            node.recall(names_of(8, last + 1))  # `recall` compares what was found of those under way
            assert node.stat("disk_up") == 1


def test_a_directory_is_one_nodes(tmp_path: Path) -> None:
    with disk_bench(tmp_path) as node:
        with pytest.raises(StartupError, match=r"another node has the disk cache [^\n]*$"), disk_bench(tmp_path):
            pass
        assert all(node.store(names_of(1)))
        with disk_bench(tmp_path, replace(DISK_CONTEXT, rank=1)) as other:  # a rank of the same node
            assert not other.disk.has(names_of(1)[0])
    with disk_bench(tmp_path) as node:
        assert all(node.recall(names_of(1)))


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot use .*file"), disk_bench(tmp_path / "file"):
        pass
    with pytest.raises(StartupError, match=r"needs 4\.92e-05 GB at least"), disk_bench(tmp_path, max_bytes=1):
        pass


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "rank-0").mkdir()
    note = tmp_path / "rank-0" / "note.txt"
    note.write_text("of the operator")
    with disk_bench(tmp_path) as node:
        assert all(node.store(names_of(1)))
    assert note.read_text() == "of the operator"


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A full disk: this process can write no file beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 4096])
def test_a_full_disk_switches_the_tier_off(num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = names_of(4)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names[:2]))
        with largest_file(num_bytes):
            node.store(names[2:])
        assert node.written[names[2]] is False
        assert node.recall(names) == [False] * 4
        assert node.stat("disk_up") == 0
        assert node.stat("disk_dropped_total") == 2
        assert node.misses() == {"unavailable": 4}
        assert len(files(tmp_path)) == 2
        lines = [record for record in caplog.records if "is off until the next start" in record.getMessage()]
        assert len(lines) == 1
        assert "\n" not in lines[0].getMessage()
        assert lines[0].exc_info is None
    with disk_bench(tmp_path) as node:
        assert all(node.recall(names[:2]))


def test_a_failing_disk_switches_the_tier_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.readv` stands in for the disk."""
    names = names_of(4)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "the disk is broken")

        monkeypatch.setattr(os, "readv", fail)
        assert node.recall(names) == [False] * 4
        assert node.stat("disk_up") == 0
        assert node.misses() == {"unavailable": 4}
        assert node.recall(names) == [False] * 4
        assert not node.disk.write(names_of(1, 7)[0], memoryview(block(names_of(1, 7)[0])))


class Gate:
    """A disk that hangs: calls of a method of CacheFolder wait before they do what they did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.gate, self.real, self.num_waiting = threading.Event(), getattr(CacheFolder, method), 0
        monkeypatch.setattr(CacheFolder, method, lambda *args: self.call(*args))

    def call(self, *args: object) -> object:
        self.num_waiting += 1
        assert self.gate.wait(HANG_S)
        self.num_waiting -= 1
        return self.real(*args)


def test_a_late_read_touches_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = names_of(NUM_THREADS + 2)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        gate = Gate(monkeypatch, "read")
        node.disk.deadline_s = 0.05
        buffers = node.begin("late", names)
        node.wait("late")
        assert node.reads["late"] == (False,) * len(names)
        assert node.misses() == {"late": len(names)}
        wait_until(lambda: gate.num_waiting == NUM_THREADS)
        wait_until(lambda: not node.disk.is_up)  # every thread hangs: nothing is promised
        node.begin("later", names)
        node.wait("later")
        node.begin("refused", names)
        node.wait("refused")
        assert node.reads["refused"] == (False,) * len(names)
        assert node.stat("disk_up") == 0
        assert [one.getMessage() for one in caplog.records if "is slow" in one.getMessage()] == [
            f"the disk cache {tmp_path / 'rank-0'} is slow: it brought 0 of {len(names)} blocks within 0.05 s"
        ]
        node.disk.deadline_s = HANG_S
        gate.gate.set()
        wait_until(lambda: node.disk.is_up)
        wait_until(lambda: not gate.num_waiting)
        assert all(node.recall(names))  # the threads read again, so what they had is dropped
        node.compare(names, buffers, [False] * len(names))


def test_what_landed_before_the_deadline_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO in a file's place: `open` waits for its writer."""
    names = names_of(3)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        path = next(path for path in files(tmp_path) if names[1].hash.hex() in path.name)
        path.unlink()
        os.mkfifo(path)
        try:
            node.disk.deadline_s = 1.0
            buffers = node.begin("late", names)
            node.disk.deadline_s = HANG_S
            node.wait("late")
            landed = node.reads["late"]
            assert not landed[1]
            node.compare(names, buffers, landed)
            assert node.disk.is_up  # other threads are left
            assert node.recall([names[0], names[2]]) == [True, True]
        finally:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # the thread goes on
        wait_until(lambda: not node.disk.has(names[1]))
        assert not os.path.lexists(path)


def test_writes_that_hang_switch_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = names_of(NUM_THREADS + 3)
    with disk_bench(tmp_path) as node:
        gate = Gate(monkeypatch, "write")
        for name in names:
            assert node.disk.write(name, memoryview(block(name)))
        wait_until(lambda: gate.num_waiting == NUM_THREADS)
        assert node.disk.poll() == []
        assert not node.disk.write(names[0], memoryview(block(names[0])))  # it is being written
        assert node.stat("disk_up") == 1
        assert node.stat("disk_backlog_bytes") == 4 * 8192 + 3 * 4096
        now_s = time.monotonic() + disk_cache.WRITE_DEADLINE_S
        monkeypatch.setattr(node.disk, "_clock", lambda: now_s)
        for name in names[NUM_THREADS:]:  # what no thread had
            node.wait(name)
        assert node.stat("disk_up") == 0
        lines = [one.getMessage() for one in caplog.records if "is off until the next start" in one.getMessage()]
        assert len(lines) == 1
        assert "a write takes more than 30 s" in lines[0]
        gate.gate.set()
        for name in names:
            node.wait(name)
        assert node.stat("disk_backlog_bytes") == 0


def test_waiting_reads_need_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(2)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        gate, before = Gate(monkeypatch, "read"), set(threading.enumerate())
        for number in range(50):
            node.begin(str(number), names)
        assert set(threading.enumerate()) <= before
        gate.gate.set()
        for number in range(50):
            node.wait(str(number))


@pytest.mark.parametrize("method", ["unlink", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_the_start_leaves_a_node_without_it(
    method: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`os.unlink` and `os.mkdir` stand in for the disk."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, "the disk is broken")

    names = names_of(2)
    monkeypatch.setattr(os, method, fail)
    with disk_bench(tmp_path) as node:
        assert node.stat("disk_up") == 0
        assert node.recall(names) == [False] * 2
        assert not node.disk.write(names[0], memoryview(block(names[0])))
        lines = [one.getMessage() for one in caplog.records if "is off until the next start" in one.getMessage()]
        assert len(lines) == 1


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.geteuid` stands in for the other user: only root could make its directory."""
    own = os.geteuid()
    (tmp_path / "rank-0").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(StartupError, match=rf"belongs to another user \({own}\)"), disk_bench(tmp_path):
        pass


def test_no_file_is_one_that_was_there(tmp_path: Path) -> None:
    """Another process may have made a draft's name, with its own mode, and hold it open; or linked it elsewhere."""
    folder = CacheFolder(tmp_path / "kv", 10**9)
    draft, outside = tmp_path / "kv" / f"draft-{threading.get_ident()}", tmp_path / "outside"
    name, page = f"pd-{'0' * 32}-0-0-{'0' * 32}", memoryview(mmap(-1, 4096))
    draft.touch()
    draft.chmod(0o666)
    with draft.open("rb") as held:
        assert folder.write(name, page)
        assert held.read() == b""
    assert stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) == 0o600
    draft.symlink_to(outside)
    assert folder.write(name, page)
    assert not outside.exists()
    folder.close()


def test_the_end_ends_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(NUM_THREADS + 3)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        gate, more = Gate(monkeypatch, "read"), names_of(NUM_THREADS + 3, 5)
        slow = Gate(monkeypatch, "write")
        buffers = node.begin("read", names)
        for name in more:
            assert node.disk.write(name, memoryview(block(name)))
        wait_until(lambda: (gate.num_waiting, slow.num_waiting) == (NUM_THREADS, NUM_THREADS))
        ending = threading.Thread(target=node.disk.close)
        ending.start()
        node.wait("read")  # while the disk hangs
        assert node.reads["read"] == (False,) * len(names)
        gate.gate.set()
        slow.gate.set()
        ending.join(HANG_S)
        for name in more:
            node.wait(name)
        assert sum(node.written[name] for name in more) == NUM_THREADS  # what was under way
        node.compare(names, buffers, [False] * len(names))


def test_the_bound_holds_for_bytes_and_files_and_the_oldest_leave(tmp_path: Path) -> None:
    """Beside a model of the order, over random reads, writes, losses and restarts."""
    draw, page = random.Random(7), mmap(-1, 4096 * 5)
    order: list[tuple[str, int]] = []  # the newest is the last
    most_bytes, most_files, stamps = 4096 * 20, 9, count(1)
    open_folder = partial(CacheFolder, tmp_path / "rank-0", most_bytes, most_files)
    folder = open_folder()
    for _ in range(400):
        name, pages = f"pd-{'0' * 32}-0-0-{draw.randrange(14):032x}", memoryview(page)[: 4096 * draw.randint(1, 5)]
        sizes = dict(order)
        match draw.choice(("write", "write", "read", "discard", "restart")):
            case "write" if name not in sizes:
                while sum(sizes.values()) + len(pages) > most_bytes or len(sizes) >= most_files:
                    del sizes[order.pop(0)[0]]
                assert folder.write(name, pages)
                order.append((name, len(pages)))
            case "read" if name in sizes:
                assert folder.read(name, memoryview(page)[: sizes[name]])
                order.append(order.pop(order.index((name, sizes[name]))))
            case "discard" if name in sizes:
                folder.discard(name)
                order.remove((name, sizes[name]))
            case "restart":
                folder.close()
                for stamp, (one, _) in zip(stamps, order, strict=False):  # a coarse clock may give equal times
                    os.utime(tmp_path / "rank-0" / one, ns=(stamp, stamp))
                if len(order) == most_files:
                    order.pop(0)
                folder = open_folder()
        there = {path.name: path.stat().st_size for path in files(tmp_path)}
        assert there == dict(order)
        assert sum(there.values()) == folder.num_bytes <= most_bytes
        assert len(there) == len(folder) <= most_files
    folder.close()


def test_a_lower_bound_holds_from_the_start(tmp_path: Path) -> None:
    names = names_of(20)
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        used = node.stat("disk_bytes")
        for index, path in enumerate(sorted(files(tmp_path), key=lambda path: names.index(_name(path, names)))):
            os.utime(path, ns=(index, index))
    with disk_bench(tmp_path, max_bytes=int(used * 0.6)) as node:
        assert node.stat("disk_bytes") <= used * 0.6
        found = [node.disk.has(name) for name in names]
        assert found == sorted(found)  # the oldest have left
        assert sum(found) == 12
    assert cache_folder.MAX_FILES == 262_144


def test_what_was_read_last_stays_after_a_restart(tmp_path: Path) -> None:
    names = names_of(20)[::2]  # of one size
    with disk_bench(tmp_path) as node:
        assert all(node.store(names))
        used = node.stat("disk_bytes")
        for path in files(tmp_path):
            os.utime(path, ns=(1, 1))
        assert all(node.recall(names[:5]))
    with disk_bench(tmp_path, max_bytes=int(used / 2)) as node:
        assert [node.disk.has(name) for name in names] == [True] * 5 + [False] * 5


def _name(path: Path, names: list[Any]) -> Any:
    return next(name for name in names if name.hash.hex() in path.name)
