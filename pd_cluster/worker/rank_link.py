"""Rank 0's side of the other ranks: their processes, the frames to them, and whether they still make progress.

A rank is lost when its process ends, when it reports a failure, when no heartbeat has come for SILENCE_S, or when a
step has not retired on it within the step's deadline. Then all ranks are killed and `on_loss` is called, on the thread
that watches them: rank 0's own thread may be in a collective, which no timeout of torch's ends in time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pd_cluster.errors import PdError, error_named
from pd_cluster.worker.rank_frames import (
    AdapterRead,
    CloseFrame,
    Heartbeat,
    PhaseDone,
    PortMessage,
    RankAnswer,
    RankFailed,
    RankLost,
    RankNews,
    StepFrame,
    StepRetired,
    ToRank,
)
from pd_cluster.worker.rank_port import LinkPort
from pd_connectors.protocol.clock import PatientClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("pd_cluster.ranks")

SILENCE_S = 3.0  # six heartbeats
START_SILENCE_S = 60.0  # a rank that imports, reads weights or compiles may hold the interpreter's lock
LOOK_S = 0.25  # between two looks at the ranks
CAUSE_S = 0.5  # from the error of a collective to the news of the rank that caused it
CLOSE_S = 5.0  # from the order to end to SIGKILL
KILL_S = 1.0  # from SIGKILL to the end, of all ranks together; a driver's call may hold a process longer


class RankLink:
    """Talks to ranks 1 to `size` - 1. `send` may be called from any thread, everything else from the step loop's."""

    def __init__(
        self,
        size: int,
        address: str,
        on_loss: Callable[[PdError], None],
        on_look: Callable[[], None] = lambda: None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`address`: prefix of the ipc sockets, in a directory that only this user can open. Acquires nothing.

        `on_look` is called every LOOK_S on the watching thread, while it watches.
        """
        self._ranks = range(1, size)
        self._address = address
        self._on_loss = on_loss
        self._on_look = on_look
        self._serving_silence_s, self._silence_s = silence_s, START_SILENCE_S
        self._encoder, self._lock = msgspec.msgpack.Encoder(), threading.Lock()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._retired: dict[int, deque[int]] = {rank: deque() for rank in self._ranks}  # digests that were not taken
        self._num_taken = 0
        self._host_blocks = dict.fromkeys(self._ranks, 0)  # that each rank's last retired step told of
        self.ports = tuple(LinkPort(rank, self._send_message) for rank in self._ranks)
        self.on_read: Callable[[str, str, int], None] = lambda digest, error, num_bytes: None  # by a rank, an adapter
        self.lost: PdError | None = None
        # The watching thread's
        self._clock = PatientClock(time.monotonic, patience_s=LOOK_S)
        self._received_s: dict[int, float] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._steps: deque[tuple[int, float, float]] = deque()  # under way: number, launched, deadline in s
        self._num_launched = 0
        self._since_s = 0.0  # the step before the oldest one retired
        self._bell = -1
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def start(self, spawn: Callable[[int], subprocess.Popen[bytes]]) -> None:
        """Start the ranks' processes with `spawn(rank)`. Each lives until its standard input closes, at the latest."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers = self._bound("answers")
        self._news = self._bound("news")
        for rank in self._ranks:
            socket = self._sockets[rank] = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)  # the frames of two steps at most, and what the connectors send
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"{self._address}.{rank}")  # keeps what is sent before the rank has bound it
            self._processes[rank] = spawn(rank)
            self._received_s[rank] = self._clock()
        self._watcher.start()

    def serve(self) -> None:
        """The start is over: from now on a rank may be silent for SILENCE_S only."""
        self._silence_s = self._serving_silence_s

    def rest(self) -> None:
        """Until `serve` a rank may be silent as at the start. What steps have told of host memory is forgotten."""
        self._silence_s = START_SILENCE_S
        self._host_blocks = dict.fromkeys(self._ranks, 0)

    def send(self, frame: ToRank) -> None:
        """Send a frame to every rank. Neither waits nor raises."""
        encoded = self._encoder.encode(frame)
        with self._lock:
            for socket in self._sockets.values():
                socket.send(encoded, zmq.NOBLOCK)

    def send_step(self, frame: StepFrame, deadline_s: float) -> int:
        """Send a step that must retire within `deadline_s` of the step before it. -> its number."""
        number = self._num_launched
        self._num_launched += 1
        if deadline_s < inf:
            self._steps.append((number, self._clock(), deadline_s))
        self.send(frame)
        return number

    @property
    def num_host_blocks(self) -> int:
        """Host blocks that are ready on every rank, as far as retired steps have told."""
        return min(self._host_blocks.values())

    def results(self) -> list[Any]:
        """Wait until every rank has ended its phase. -> their results, by rank. Raises `lost`."""
        results: dict[int, Any] = {}
        while len(results) < len(self._ranks):
            answer = self._receive()
            if isinstance(answer, PhaseDone):
                results[answer.rank] = answer.result
        return [results[rank] for rank in self._ranks]

    def has_retired(self, number: int) -> bool:
        """Whether a step has ended on every rank."""
        while self._answers.poll(0):
            self._receive()
        return all(len(own) > number - self._num_taken for own in self._retired.values())

    def take_retired(self) -> dict[int, int]:
        """Wait until the oldest step has ended on every rank. -> the ranks' digests. Raises `lost`."""
        while not all(self._retired.values()):
            self._receive()
        self._num_taken += 1
        return {rank: own.popleft() for rank, own in self._retired.items()}

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Raise `lost` in place of the error that a collective raises when a rank is gone."""
        try:
            yield
        except RuntimeError as error:
            self._watcher.join(CAUSE_S)  # it ends with the news
            if self.lost is not None:
                raise self.lost from error
            raise

    def dismiss(self) -> None:
        """Tell the ranks to end. From now on the end of one is no loss."""
        self._stop_watching()
        self.send(CloseFrame())

    def close(self, *, at_once: bool = False) -> None:
        """End the ranks: in order, else by SIGKILL after CLOSE_S. `at_once`: by SIGKILL now. Idempotent."""
        if self._bell < 0:
            return
        at_once = at_once or self.lost is not None
        if at_once:
            self._stop_watching()
        else:
            self.dismiss()
        ends_s = time.monotonic() + (0.0 if at_once else CLOSE_S)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends_s - time.monotonic()))
        self._kill()
        with self._lock:
            self._context.destroy(linger=0)
            self._sockets.clear()
        os.close(self._bell)
        self._bell = -1

    def _stop_watching(self) -> None:
        os.eventfd_write(self._bell, 1)
        if self._watcher.ident is not None:
            self._watcher.join()

    def _bound(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(f"{self._address}.{name}")
        return socket

    def _send_message(self, message: PortMessage) -> None:
        with self._lock:
            if message.rank in self._sockets:
                self._sockets[message.rank].send(self._encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> RankAnswer:
        while not self._answers.poll(int(LOOK_S * 1000)):
            if self.lost is not None:
                raise self.lost
        answer: RankAnswer = _ANSWERS.decode(self._answers.recv())
        if isinstance(answer, StepRetired):
            self._retired[answer.rank].append(answer.digest)
            self._host_blocks[answer.rank] = answer.num_host_blocks
        return answer

    # the watching thread

    def _watch(self) -> None:
        exits: dict[int, int] = {}
        poller = zmq.Poller()
        looks_at_s = self._clock()
        try:
            exits |= {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
            for source in (self._news, self._bell, *exits):
                poller.register(source, zmq.POLLIN)
            while self.lost is None:
                self._clock.sleep(LOOK_S)
                ready = dict(poller.poll(int(LOOK_S * 1000)))
                self._clock.resume()
                self._take_news()
                if self._bell in ready:
                    return
                ended = [exits[fd] for fd in ready if fd in exits]
                why = f"rank {ended[0]} has ended" if ended else self._judge(self._clock())
                if why and self.lost is None:
                    self.lost = RankLost(why)
                if self.lost is None and self._clock() >= looks_at_s:
                    self._on_look()
                    looks_at_s = self._clock() + LOOK_S
        except Exception as error:  # of a port's handler, for instance; ranks that nothing watches could hang unseen
            logger.exception("the watch of the ranks failed")
            self.lost = RankLost(f"the ranks cannot be watched: {error!r}")
        finally:
            for fd in exits:
                os.close(fd)
        self._kill()
        logger.error("%s", self.lost)
        self._on_loss(self.lost)

    def _take_news(self) -> None:
        while self._news.poll(0):
            message: RankNews = _NEWS.decode(self._news.recv())
            self._received_s[message.rank] = self._clock()
            match message:
                case Heartbeat():
                    self._beats[message.rank] = message
                case AdapterRead(rank, digest, error, num_bytes):
                    self.on_read(digest, error and f"rank {rank}: {error}", num_bytes)
                case PortMessage():
                    self.ports[message.rank - 1].deliver(message.message)
                case RankFailed():
                    self.lost = error_named(message.kind, f"rank {message.rank}: {message.message}")

    def _judge(self, now_s: float) -> str:
        """Why a rank is lost; "" if none is."""
        for rank, at_s in self._received_s.items():
            if now_s - at_s > self._silence_s:
                last = self._beats.get(rank)
                return f"rank {rank} has been silent for {now_s - at_s:.1f} s, in {last.phase if last else 'start'}"
        retired = min((self._beats[rank].retired if rank in self._beats else 0 for rank in self._ranks), default=0)
        while self._steps and self._steps[0][0] < retired:
            self._steps.popleft()
            self._since_s = now_s
        if self._steps:
            number, launched_s, deadline_s = self._steps[0]
            if now_s - max(launched_s, self._since_s) > deadline_s:
                late = [rank for rank in self._ranks if rank not in self._beats or self._beats[rank].retired <= number]
                return f"a step has not ended on rank {late[0]} within {deadline_s:.1f} s"
        return ""

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()  # also when it is stopped, or its device never ends a kernel
        ends_s = time.monotonic() + KILL_S
        for rank, process in self._processes.items():
            try:
                process.wait(max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("rank %d (process %d) has not ended after SIGKILL: a driver holds it", rank, process.pid)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


@dataclass(frozen=True, slots=True)
class StepOnRanks:
    """A step on the ranks > 0."""

    link: RankLink
    number: int

    @property
    def is_over(self) -> bool:
        return self.link.has_retired(self.number)

    def confirm(self, digest: int) -> None:
        """Wait for the step's end. Raises RankLost, also when a rank has drawn other tokens than rank 0."""
        for rank, theirs in self.link.take_retired().items():
            if theirs != digest:
                raise RankLost(f"rank {rank} has drawn other tokens than rank 0 in its step {self.number}")


_ANSWERS: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)
_NEWS: msgspec.msgpack.Decoder[RankNews] = msgspec.msgpack.Decoder(RankNews)
