"""A rank > 0 of a tensor-parallel engine: `python -m pd_cluster.worker.rank`, started by rank 0 (`RankLink`).

The first line of standard input is a RankStart; the end of standard input tells that rank 0 is gone, and ends the
process at once. The main thread takes the frames in their order: it launches step n + 1 without waiting for step n. One
thread waits for the ends of steps and acknowledges them, one sends heartbeats.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pd_cluster.config import NodeConfig
from pd_cluster.errors import PdError
from pd_cluster.models.shard import Shard
from pd_cluster.worker.rank_frames import (
    HEARTBEAT_S,
    AdapterFrame,
    AdapterRead,
    CloseFrame,
    DrawLate,
    Heartbeat,
    PhaseDone,
    PhaseFrame,
    PortMessage,
    RankAnswer,
    RankFailed,
    RankLost,
    RankNews,
    RankStart,
    StepFrame,
    StepRetired,
    ToRank,
)
from pd_cluster.worker.rank_port import LinkPort
from pd_connectors.base import ConnectorContext
from pd_connectors.protocol.errors import HandoffError
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from pd_cluster.worker.pending_step import PendingStep
    from pd_cluster.worker.rank_sampler import RankPlace
    from pd_connectors.base import Closes

logger = logging.getLogger("pd_cluster.ranks")

ORPHAN_EXIT_CODE = 3
# Phases that take the executor's state to the next one, with the types of their arguments
MOVES: dict[str, Any] = dict.fromkeys(("unload", "capture", "free", "sleep"), tuple[()])
MOVES |= {"load": tuple[NodeConfig], "allocate": tuple[KvSlabs, int, int]}
PR_SET_PDEATHSIG = 1
SWITCH_INTERVAL_S = 0.0001  # an acknowledgement must not wait 5 ms for a launch, see `engine/process.py`


class RankSockets:
    """A rank's ends of the sockets to rank 0. `answer` belongs to one thread at a time, `report` to any thread."""

    def __init__(self, rank: int, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._news_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # ends before the other, see `report_last`
        self._frames = self._context.socket(zmq.PULL)
        self._frames.set_hwm(0)
        self._frames.bind(f"{address}.{rank}")
        self._answers, self._news = self._context.socket(zmq.PUSH), self._news_context.socket(zmq.PUSH)
        for socket, name in ((self._answers, "answers"), (self._news, "news")):
            socket.set_hwm(0)
            socket.connect(f"{address}.{name}")
        self._lock = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self) -> ToRank:
        """Wait for the next frame."""
        return self._decoder.decode(self._frames.recv())

    def answer(self, message: RankAnswer) -> None:
        with self._lock:
            self._answers.send(self._encoder.encode(message), zmq.NOBLOCK)

    def report(self, message: RankNews) -> None:
        with self._lock:
            if not self._news.closed:
                self._news.send(self._encoder.encode(message), zmq.NOBLOCK)

    def report_last(self, message: RankNews) -> None:
        """Wait until rank 0 has the message, at most a second. There is no news after it."""
        self.report(message)
        with self._lock:
            self._news.close(linger=1000)
            self._news_context.term()


class RankProcess:
    """Runs one rank's executor as rank 0's frames say."""

    def __init__(self, start: RankStart, sockets: RankSockets) -> None:
        self._start, self._sockets = start, sockets
        self._state: Any = None  # of this rank's executor: one of DeviceDescribed to DeviceExecutor
        self._pending: deque[PendingStep] = deque()  # launched, and their tokens were not read
        self._retiring: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()
        self._phase = "start"
        self._reader: Closes | None = None  # of the connector
        self._place: RankPlace | None = None  # of a described model
        self._num_launched = self._num_retired = 0
        self._port = LinkPort(start.rank, sockets.report)
        for run in (self._beat, self._retire):
            threading.Thread(target=run, daemon=True).start()

    def run(self) -> None:
        """Take frames until rank 0 says to close."""
        while True:
            match self._sockets.receive():
                case StepFrame() as frame:
                    self._launch(frame)
                case DrawLate(absent):
                    self._draw_late(absent)
                case AdapterFrame(digest, ""):
                    self._state.drop_adapter(digest)
                case AdapterFrame(digest, path):
                    self._state.read_adapter(digest, path, self._tell_read)
                case PortMessage(message=message):
                    self._port.deliver(message)
                case PhaseFrame(name, arguments):
                    self._phase = name
                    if name in MOVES:
                        result = self._move(name, arguments)
                    else:
                        result = getattr(self, f"_phase_{name}")(*arguments)
                    self._phase = "steps"
                    self._sockets.answer(PhaseDone(self._start.rank, result))
                case CloseFrame():
                    return self._close()

    def fail(self, error: Exception) -> None:
        """Tell rank 0 why this rank cannot go on."""
        expected = isinstance(error, PdError | HandoffError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        kind = type(error) if isinstance(error, PdError) else RankLost
        self._sockets.report_last(RankFailed(self._start.rank, kind.__name__, text))

    # phases: the names after "_phase_", and MOVES; the results are plain values

    def _phase_describe(self) -> None:
        # Imported here, because they import torch: rank 0 learns of this process before
        from pd_cluster.worker.collectives import connect_store
        from pd_cluster.worker.device_executor import DeviceDescribed
        from pd_cluster.worker.device_plan import make_place

        config, shard = self._start.config, Shard(self._start.rank, self._start.config.model.tp)
        self._place = make_place(config.model, shard, connect_store(shard.size, self._start.store_port))
        self._state = DeviceDescribed.of(config, lambda _: None, self._place)

    def _move(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self._read_steps(keep=0)
        self._close_reader()
        self._state = getattr(self._state, name)(*msgspec.convert(arguments, MOVES[name]))
        if name != "capture":
            return None
        gc.collect()
        gc.freeze()
        return self._state.graph_sizes

    def _phase_free_kv_bytes(self) -> Any:
        return self._state.free_kv_bytes()

    def _phase_clear(self) -> None:
        self._read_steps(keep=0)
        self._state.clear()

    def _phase_connect(self, name: str, values: dict[str, Any]) -> None:
        from pd_connectors.registry import rank_reader

        values["options"] = tuple(map(tuple, values["options"]))
        values["kv_ports"] = values["kv_ports"] and tuple(values["kv_ports"])
        context = ConnectorContext(layout=self._state.layout, rank=self._start.rank, **values)
        self._reader = rank_reader(name, context, self._state.cache, self._port)
        self._state.pin_rest()

    # steps

    def _close(self) -> None:
        self._close_reader()
        if self._state is not None:
            self._state.close()
            if self._place is not None:
                self._place.reduce.close()

    def _close_reader(self) -> None:
        """End the connector's part here. It holds the cache, as the port does by its handler."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._port = LinkPort(self._start.rank, self._sockets.report)

    def _read_steps(self, keep: int) -> None:
        while len(self._pending) > keep:  # rank 0 has read them, so they have ended
            self._pending.popleft().result()

    def _launch(self, frame: StepFrame) -> None:
        # Where a sequence with drafts goes on is known when its step is read. Rank 0 has read it
        self._read_steps(keep=0 if self._pending and self._pending[-1].has_drafts else 1)
        pending = self._state.follow(frame.batch, frame.graph, (frame.changed, frame.late))
        self._num_launched += 1
        self._pending.append(pending)
        if pending.is_launched:
            self._retiring.put(pending)

    def _draw_late(self, absent: tuple[int, ...]) -> None:
        self._read_steps(keep=1)
        self._state.follow_late(absent)
        self._retiring.put(self._pending[-1])

    def _retire(self) -> None:
        """Acknowledge each step when it has ended on this rank's device."""
        try:
            while True:
                pending = self._retiring.get()
                if not self._num_retired:
                    self._state.use_device()
                pending.wait()
                self._num_retired += 1
                num_host_blocks = self._state.num_host_blocks
                self._sockets.answer(StepRetired(self._start.rank, pending.digest(), num_host_blocks))
                del pending  # it holds the cache, which may be freed before the next step
        except Exception as error:
            logger.exception("a step failed")
            self.fail(error)
            os._exit(1)

    def _tell_read(self, digest: str, error: str, num_bytes: int) -> None:
        self._sockets.report(AdapterRead(self._start.rank, digest, error, num_bytes))

    def _beat(self) -> None:
        waits = threading.Event()
        while True:
            self._sockets.report(Heartbeat(self._start.rank, self._phase, self._num_launched, self._num_retired))
            waits.wait(HEARTBEAT_S)


def _end_with_rank_0() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(ORPHAN_EXIT_CODE)


def main(kind: type[RankProcess] = RankProcess) -> int:
    """Entry point of the process."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
    logging.basicConfig(
        level=start.config.server.log_level.upper(),
        format=f"%(asctime)s %(levelname)s rank {start.rank} %(name)s: %(message)s",
    )
    for signum in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; rank 0 decides
        signal.signal(signum, signal.SIG_IGN)
    # The lifeline's thread does not run while this process is stopped, or while a call holds the interpreter's lock.
    # The signal comes when the thread that started this process ends: rank 0's main thread
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_rank_0, name="lifeline", daemon=True).start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rank = kind(start, RankSockets(start.rank, start.address))
    try:
        rank.run()
    except Exception as error:
        if not isinstance(error, PdError):
            logger.exception("the rank died")
        rank.fail(error)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # at once: the destructor of a group may wait for ranks that are gone
