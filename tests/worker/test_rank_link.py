"""Frames, and RankLink with real processes of ranks that compute nothing (`fake_rank`).

Where workers share a fork server the ranks are forked: only the test of a killed rank 0 needs children of its own.
"""

from __future__ import annotations

import io
import itertools
import os
import queue
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import PdError, StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.worker.rank import ORPHAN_EXIT_CODE
from pd_cluster.worker.rank_frames import PhaseFrame, RankLost, RankStart, StepFrame, ToRank
from pd_cluster.worker.rank_link import LOOK_S, START_SILENCE_S, RankLink
from pd_cluster.worker.rank_link import SILENCE_S as RANK_SILENCE_S
from pd_cluster.worker.ranks import Ranks as ProductRanks
from pd_kernels.values import StepSize
from tests.deadlines import HANG_S, wait_until
from tests.fork_server import SHARED_ENV
from tests.worker.forked_ranks import fork_rank
from tests.worker.tables import slabs_of, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAKE = "tests.worker.fake_rank"
SILENCE_S = 1.5  # of a rank that is stopped; others are not judged by it
PARAMS = SamplingParams(max_tokens=5, temperature=0.5, logit_bias={7: 1.5}, grammar="start: /a/", stop_token_ids=(3,))
BATCH = Batch(
    7,
    (SequenceStart(2, (1, 2, 3), 2, table((4, 5)), PARAMS, -(1 << 63), (8, (1 << 63) - 1)),),
    (
        SequenceChunk(1, 9, 1, (NewBlocks(0, 2, (3,)), NewBlocks(1, 0, (7, 8))), 1),
        SequenceChunk(2, 0, 3, num_samples=2),
    ),
    (5, 6),
    BlockCopies(((0, 1, 2),), ((0, 3, 4),), ((0, 5, 6),)),
)


@pytest.mark.parametrize(
    "graph", [None, StepSize(4, 3, 2, has_decodes=True, is_far=True), StepSize(4, 3, 0, True, has_drafts=True)]
)
def test_a_step_arrives_as_it_was_sent(graph: StepSize | None) -> None:
    frame = StepFrame.of(BATCH, graph, (2,), (4,))
    arrived: StepFrame = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=ToRank)
    assert arrived == frame
    assert arrived.batch == BATCH


@dataclass
class Ranks:
    """A RankLink, its processes, and what it reported."""

    link: RankLink
    processes: dict[int, Any] = field(default_factory=dict)
    losses: queue.SimpleQueue[PdError] = field(default_factory=queue.SimpleQueue)
    looks: list[float] = field(default_factory=list)  # when the watching thread looked at the ranks

    def send(self, rank: int, message: bytes) -> None:
        self.link.ports[rank - 1].send(message)

    def launch(self, step: int, deadline_s: float = HANG_S) -> int:
        return self.link.send_step(StepFrame.of(Batch(step), None, (), ()), deadline_s)

    def loss(self) -> str:
        """Why a rank was lost. All ranks have got SIGKILL by then; on a busy machine they end later."""
        why = self.losses.get(timeout=HANG_S)
        for process in self.processes.values():
            process.wait(HANG_S)
        assert why is self.link.lost
        return str(why)


def execute_rank(start: RankStart) -> Any:
    """A child of this process."""
    process = subprocess.Popen([sys.executable, "-m", FAKE], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start) + b"\n")
    process.stdin.flush()
    return process


@contextmanager
def running_ranks(
    directory: Path, size: int = 3, silence_s: float = HANG_S, *, are_children: bool = False
) -> Iterator[Ranks]:
    losses: queue.SimpleQueue[PdError] = queue.SimpleQueue()
    looks: list[float] = []
    address = f"ipc://{directory}/r"
    link = RankLink(size, address, losses.put, lambda: looks.append(time.monotonic()), silence_s=silence_s)
    ranks = Ranks(link, losses=losses, looks=looks)

    def spawn(rank: int) -> Any:
        start = RankStart(NodeConfig(model=ModelConfig(tp=size)), rank, address, 0)
        is_child = are_children or SHARED_ENV not in os.environ
        ranks.processes[rank] = execute_rank(start) if is_child else fork_rank(FAKE, start)
        return ranks.processes[rank]

    try:
        ranks.link.start(spawn)
        ranks.link.send(PhaseFrame("describe"))
        ranks.link.results()
        ranks.link.serve()
        yield ranks
    finally:
        ranks.link.close()
    for process in ranks.processes.values():
        process.wait(HANG_S)


@pytest.mark.integration
def test_the_watching_thread_tells_that_it_looks(tmp_path: Path) -> None:
    """Whatever the step loop does."""
    with running_ranks(tmp_path) as ranks:
        wait_until(lambda: len(ranks.looks) > 2)
        assert all(later - earlier >= LOOK_S for earlier, later in itertools.pairwise(ranks.looks))


@pytest.mark.integration
def test_phases_steps_and_ports(tmp_path: Path) -> None:
    with running_ranks(tmp_path) as ranks:
        link = ranks.link
        link.send(PhaseFrame("echo", (3, "x", [b"y"])))
        assert link.results() == [[1, 3, "x", [b"y"]], [2, 3, "x", [b"y"]]]
        # Two steps are under way. A step has retired when it has ended on every rank
        first, second = ranks.launch(11), ranks.launch(12)
        ranks.send(1, b"end")
        ranks.send(1, b"end")
        wait_until(lambda: len(link._retired[1]) == 2 or link.has_retired(first))
        assert not link.has_retired(first)
        ranks.send(2, b"end")
        wait_until(lambda: link.has_retired(first))
        assert not link.has_retired(second)
        assert link.take_retired() == {1: 11, 2: 11}
        ranks.send(2, b"end")
        assert link.take_retired() == {1: 12, 2: 12}
        assert link.num_host_blocks == 12, "the least, by the last step"
        link.rest()
        assert link.num_host_blocks == 0, "the next phase may give the memory back"
        link.serve()
        # A message takes its place among the steps; those that came before a handler are kept
        ranks.send(2, b"early")
        heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        ranks.launch(13)
        ranks.send(2, b"late")
        link.ports[1].set_handler(heard.put)
        assert [heard.get(timeout=HANG_S) for _ in range(2)] == [b"EARLY 2", b"LATE 3"]
        ranks.send(1, b"end")
        ranks.send(2, b"end")
        assert link.take_retired() == {1: 13, 2: 13}
    assert [process.returncode for process in ranks.processes.values()] == [0, 0]  # told to close, not killed
    assert ranks.losses.empty()


@pytest.mark.integration
@pytest.mark.parametrize("rank", [1, 2])
def test_a_killed_rank_ends_all(tmp_path: Path, rank: int) -> None:
    with running_ranks(tmp_path) as ranks:
        ranks.launch(0)
        ranks.processes[rank].kill()
        with pytest.raises(RankLost, match=f"rank {rank} has ended"):
            ranks.link.take_retired()
        assert ranks.loss() == f"rank {rank} has ended"
        with pytest.raises(RankLost), ranks.link.blamed():  # a collective fails when its peer is gone
            raise RuntimeError("connection closed by peer")
        ranks.send(rank, b"to a rank that is gone")


@pytest.mark.integration
def test_a_stopped_rank_ends_all(tmp_path: Path) -> None:
    with running_ranks(tmp_path, silence_s=SILENCE_S) as ranks:
        psutil.Process(ranks.processes[1].pid).suspend()
        ranks.link.send(PhaseFrame("echo"))
        with pytest.raises(RankLost, match="rank 1 has been silent for"):
            ranks.link.results()
        assert "silent" in ranks.loss()


@pytest.mark.integration
def test_a_step_that_does_not_retire_ends_all(tmp_path: Path) -> None:
    with running_ranks(tmp_path) as ranks:
        ranks.launch(0)
        for rank in (1, 2):
            ranks.send(rank, b"end")
        ranks.link.take_retired()
        ranks.launch(1, 0.5)
        ranks.send(1, b"end")
        assert ranks.loss() == "a step has not ended on rank 2 within 0.5 s"
        with pytest.raises(RankLost):
            ranks.link.take_retired()


@pytest.mark.integration
def test_the_failure_of_a_rank_is_told(tmp_path: Path) -> None:
    with running_ranks(tmp_path) as ranks:
        ranks.link.send(PhaseFrame("allocate", (slabs_of(5), 6, 7)))
        with pytest.raises(StartupError, match=r"rank [12]: no room for 5, 6 and 7 blocks"):
            ranks.link.results()
        assert "no room for 5, 6 and 7 blocks" in ranks.loss()


@pytest.mark.integration
def test_a_launch_that_fails_ends_all(tmp_path: Path) -> None:
    with running_ranks(tmp_path, size=2) as ranks:
        ranks.send(1, b"fail")
        ranks.launch(0)
        with pytest.raises(RankLost, match="rank 1: ValueError: a kernel failed"):
            ranks.link.take_retired()


@pytest.mark.integration
def test_ranks_that_are_told_to_end_are_not_lost(tmp_path: Path) -> None:
    """Rank 0 still has work of its own then."""
    with running_ranks(tmp_path) as ranks:
        ranks.link.dismiss()
        assert {process.wait(HANG_S) for process in ranks.processes.values()} == {0}
    assert ranks.losses.empty()
    assert ranks.link.lost is None


@pytest.mark.integration
def test_a_rank_ends_with_rank_0(tmp_path: Path) -> None:
    with running_ranks(tmp_path) as ranks:
        ranks.link._stop_watching()  # else the end of the first one kills the second
        for process in ranks.processes.values():  # as the kernel does at rank 0's end
            assert process.stdin is not None
            process.stdin.close()
        assert {process.wait(HANG_S) for process in ranks.processes.values()} == {ORPHAN_EXIT_CODE}


@pytest.mark.integration
def test_a_stopped_rank_ends_with_a_killed_rank_0(tmp_path: Path) -> None:
    """It cannot read the end of its standard input, and would keep its GPU."""
    command = [sys.executable, "-m", "tests.worker.test_rank_link", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        rank = psutil.Process(int(rank_0.stdout.readline()))
        rank.suspend()
        rank_0.kill()
    try:
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    finally:
        if rank.is_running():
            rank.kill()


@pytest.mark.integration
def test_a_watch_that_fails_ends_all(tmp_path: Path) -> None:
    def fail(message: bytes) -> None:
        raise ValueError("a bug")

    with running_ranks(tmp_path, size=2) as ranks:
        ranks.link.ports[0].set_handler(fail)
        ranks.send(1, b"hello")
        assert "the ranks cannot be watched: ValueError('a bug')" in ranks.loss()


def test_a_rank_that_a_driver_holds_keeps_no_other_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pd_cluster.worker.rank_link.KILL_S", 0.1)
    link = RankLink(3, f"ipc://{tmp_path}/r", lambda _: None)
    held, other = (subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) for _ in range(2))
    kill = held.kill
    monkeypatch.setattr(held, "kill", lambda: None)  # SIGKILL waits until the driver's call returns
    try:
        link._processes = {1: held, 2: other}
        link._kill()
        assert "rank 1" in caplog.text
        assert held.poll() is None
        assert other.wait(HANG_S) == -signal.SIGKILL
    finally:
        kill()
        held.wait()


def test_a_rank_may_be_silent_for_long_while_the_engine_sleeps(tmp_path: Path) -> None:
    """It may read weights or compile again."""
    link = RankLink(2, f"ipc://{tmp_path}/r", lambda _: None)
    for change, silence_s in ((link.serve, RANK_SILENCE_S), (link.rest, START_SILENCE_S), (link.serve, RANK_SILENCE_S)):
        change()
        link._received_s = {1: 100.0}
        assert not link._judge(100.0 + silence_s)
        assert "rank 1 has been silent" in link._judge(100.1 + silence_s)


def test_a_link_that_was_not_started_closes(tmp_path: Path) -> None:
    link = RankLink(2, f"ipc://{tmp_path}/r", lambda _: None)
    link.close()
    link.close()


def test_the_product_executes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In clusters of tests it is forked (tests/forked_command.py)."""
    stdin = io.BytesIO()
    process: Any = SimpleNamespace(stdin=stdin)
    started: list[tuple[list[str], dict[str, Any]]] = []

    def popen(command: list[str], **more: Any) -> Any:
        started.append((command, more))
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    config = NodeConfig(model=ModelConfig(model="m", tp=2))
    found: Any = ProductRanks(config, "ipc:///r", lambda _: None)._spawn(1, 5)
    assert found is process
    command = [sys.executable, "-P", "-m", "pd_cluster.worker.rank"]  # -P: nothing of the folder that it starts in
    assert started == [(command, {"stdin": subprocess.PIPE})]
    [line] = stdin.getvalue().splitlines()
    assert msgspec.json.decode(line, type=RankStart) == RankStart(config, 1, "ipc:///r", 5)


def test_names_of_phases() -> Any:
    """The states over several ranks, and RankProcess, must know the same phases."""
    import re
    from pathlib import Path as FilePath

    import pd_cluster.worker.rank as rank
    from pd_cluster.worker import device_executor, ranks

    texts = "".join(FilePath(str(module.__file__)).read_text() for module in (device_executor, ranks))
    asked = re.findall(r'\.(?:_on_all|phase|_back_to)\("(\w+)"', texts)
    known = [name.removeprefix("_phase_") for name in vars(rank.RankProcess) if name.startswith("_phase_")]
    assert sorted(asked) == sorted([*known, *rank.MOVES])


if __name__ == "__main__":
    from pathlib import Path as Directory

    with running_ranks(Directory(sys.argv[1]), 2, are_children=True) as running:
        sys.stdout.write(f"{running.processes[1].pid}\n")
        sys.stdout.flush()
        sys.stdin.read()
