"""The engine with the real worker on CPU, a tiny cache, a tiny host memory, and files: no answer is altered."""

from __future__ import annotations

import os
import threading
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.messages import Abort, AddRequest
from pd_cluster.protocol.orders import ResetCache
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.disk_cache import disk_cache
from pd_cluster.worker.disk_cache.cache_folder import CacheFolder
from pd_cluster.worker.disk_cache.disk_cache import NUM_THREADS, DiskCache
from pd_connectors.base import ConnectorContext
from tests.deadlines import HANG_S, wait_until
from tests.engine.drafting_node import Node, Told, expect_same, roomy
from tests.engine.host_nodes import host_node, tenants_requests
from tests.worker.driver import poison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.drafting_node import Answered

__all__ = ["roomy"]

HOST_GB = 0.001


@pytest.fixture(scope="module")
def small() -> Iterator[Node]:
    """A cache of 14 blocks, and about as many in host memory."""
    yield from host_node(HOST_GB)


@pytest.fixture(scope="module")
def least() -> Iterator[Node]:
    """The same with host memory of the least size, for a device's block and one that leaves it."""
    yield from host_node(0.0002)


ASKED = tenants_requests(24, 1, 6, (48, 64), 8)


class DiskedBench(Told):
    """A node on a directory, with NaN in all its host memory, that reads whatever is there. Close it."""

    def __init__(self, node: Node, folder: Path, mode: str = "off", key: bytes = b"k" * 32) -> None:
        for tensor in node.executor._cache.hosts:
            poison(tensor)
        context = ConnectorContext(
            "node", 1, node.executor.model.fingerprint, node.executor.layout, key, "127.0.0.1", 0
        )
        self.disk: DiskCache

        def open_disk(wake: Callable[[], None]) -> DiskCache:
            self.disk = DiskCache(folder, 10**9, context, wake)
            self.disk.deadline_s = HANG_S  # a busy machine may take long
            return self.disk

        super().__init__(node.executor, node.connector, mode, host_cache_gb=HOST_GB, open_disk=open_disk)
        host, tier = self.core._blocks.host, self.core._disk
        assert tier is not None
        host.gb_s, self.core._blocks.copies.wait_s = inf, 0.0
        tier._gb_s = 1e9

    def serve(self, asked: list[AddRequest], wave: int = 6) -> Answered:
        """The answers to requests of which so many are open at once. All that is to be written is."""
        for first in range(0, len(asked), wave):
            for one in asked[first : first + wave]:
                self.send(one)
            self.run()
            self._let_write()
        return self.settled()

    def _let_write(self) -> None:
        """Turn until the threads have nothing to do: what they have not written is found in no file."""
        tier = self.core._disk
        assert tier is not None
        while tier._reads or tier._writes:
            self.mailbox.wait(0.05)
            self.core.turn()

    def settled(self) -> Answered:
        self._let_write()
        assert self.core._blocks.host.idle
        self.core.settle()
        return self.answered()

    def counter(self, name: str) -> float:
        assert self.stats is not None
        return {**self.stats.counters, **self.stats.gauges}[name]

    def close(self) -> None:
        self.disk.close()


@pytest.fixture(scope="module")
def single(roomy: Node) -> Answered:
    """Without any cache of prefixes."""
    bench = roomy.bench(prefix_caching=False)
    for one in ASKED:
        bench.send(one)
    bench.run()
    return bench.answered()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_files_alter_no_answer_and_are_found_after_a_restart(
    small: Node, single: Answered, mode: str, tmp_path: Path
) -> None:
    bench = DiskedBench(small, tmp_path, mode)
    expect_same(bench.serve(ASKED), single)
    assert bench.counter("disk_written_total") > 20
    assert bench.counter("disk_read_bytes_total") > 0
    bench.close()
    bench = DiskedBench(small, tmp_path, mode)
    expect_same(bench.serve(ASKED, wave=1), single)  # several have the host's few blocks from each other
    assert bench.counter("host_cache_hit_tokens_total") > 300
    assert bench.counter("disk_read_bytes_total") > 0
    bench.close()


def test_the_least_host_memory_gives_blocks_to_files(least: Node, tmp_path: Path) -> None:
    """A fourth of it, so many may be written at once, is less than a block."""
    with_files = DiskedBench(least, tmp_path)
    assert 2 <= with_files.core._blocks.host.num_blocks < 4
    try:
        with_files.serve(ASKED)
        assert with_files.disk.stats()["disk_written_total"] > 0
    finally:
        with_files.close()


def test_files_of_another_key_are_not_read(small: Node, single: Answered, tmp_path: Path) -> None:
    bench = DiskedBench(small, tmp_path)
    bench.serve(ASKED)
    bench.close()
    bench = DiskedBench(small, tmp_path, key=b"o" * 32)
    bench.serve(ASKED[:1])
    assert bench.counter("disk_read_bytes_total") == 0
    bench.close()


def hang(method: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on calls of this method of CacheFolder wait for the event, and then do what they do."""
    gate, real = threading.Event(), getattr(CacheFolder, method)

    def wait(*args: Any) -> bool:
        assert gate.wait(HANG_S)
        is_done: bool = real(*args)
        return is_done

    monkeypatch.setattr(CacheFolder, method, wait)
    return gate


def _damage(folder: Path) -> None:
    for number, path in enumerate(sorted((folder / "rank-0").iterdir())):
        if number % 3 == 0:
            os.truncate(path, 100)
        elif number % 3 == 1:
            with path.open("r+b") as file:
                file.seek(5000)
                file.write(b"\xff" * 200)


def test_damaged_files_alter_no_answer(small: Node, single: Answered, tmp_path: Path) -> None:
    bench = DiskedBench(small, tmp_path)
    bench.serve(ASKED)
    bench.close()
    _damage(tmp_path)
    bench = DiskedBench(small, tmp_path)
    expect_same(bench.serve(ASKED), single)
    assert bench.counter("disk_misses_total|reason=damaged") > 0
    assert bench.counter("disk_misses_total|reason=lost") > 0
    assert bench.counter("disk_up") == 1
    bench.close()


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_disk_that_hangs_fails_no_request(
    small: Node, single: Answered, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "read":
        bench = DiskedBench(small, tmp_path)
        bench.serve(ASKED)
        bench.close()
    gate = hang(method, monkeypatch)
    bench = DiskedBench(small, tmp_path)
    bench.disk.deadline_s = 0.05
    monkeypatch.setattr(disk_cache, "WRITE_DEADLINE_S", 0.05)
    for one in ASKED:
        bench.send(one)
    bench.run()  # every request ends

    def is_down() -> bool:
        bench.run()
        return not bench.counter("disk_up")

    wait_until(is_down)
    if method == "read":
        assert bench.counter("disk_misses_total|reason=late") > 0
    else:
        assert 0 < sum(len(own.pins) for own in bench.core._blocks.host.groups) <= NUM_THREADS
        assert bench.counter("disk_written_total") == 0
    gate.set()
    expect_same(bench.settled(), single)
    bench.close()


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_disk_that_fails_fails_no_request(
    small: Node, single: Answered, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise OSError(5, "the disk is broken")

    if method == "read":
        bench = DiskedBench(small, tmp_path)
        bench.serve(ASKED)
        bench.close()
    monkeypatch.setattr(CacheFolder, method, fail)
    bench = DiskedBench(small, tmp_path)
    expect_same(bench.serve([*ASKED]), single)
    assert bench.counter("disk_up") == 0
    bench.close()


def test_a_request_that_ends_while_it_is_read_leaves_its_blocks(
    small: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DiskedBench(small, tmp_path)
    bench.serve(ASKED)
    bench.close()
    gate = hang("read", monkeypatch)
    bench = DiskedBench(small, tmp_path)
    bench.disk.deadline_s = HANG_S
    bench.send(ASKED[0])
    bench.core.turn()
    tier = bench.core._disk
    assert tier is not None
    assert len(tier._reads) == 1
    assert len(bench.disk._reads) == 1  # no step is under way
    bench.send(Abort(ASKED[0].request_id))
    bench.run()
    assert not bench.core._blocks.host.idle
    gate.set()
    bench.settled()
    assert bench.core._blocks.host.num_cached > 0
    bench.send(ResetCache())
    bench.run()
    bench.close()


def test_a_read_begins_when_the_steps_under_way_have_retired(
    small: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DiskedBench(small, tmp_path, "on")
    bench.serve(ASKED[:6])
    bench.close()
    bench = DiskedBench(small, tmp_path, "on")
    core, read, begun_at = bench.core, bench.disk.read, list[int]()

    def note(*args: Any) -> None:
        begun_at.append(core._pipeline.num_retired)
        read(*args)

    monkeypatch.setattr(bench.disk, "read", note)
    bench.send(AddRequest("long", [7] * 20, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    while not len(core._pipeline):
        core.turn()
    bench.send(ASKED[0])
    num_launched = core._pipeline.num_retired + len(core._pipeline)
    bench.run()
    bench.settled()
    assert begun_at[0] >= num_launched
    bench.close()
