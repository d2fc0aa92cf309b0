"""A fake engine process for launch tests: answers every prompt with the same tokens, or misbehaves on purpose.

Run as a program it is the engine process; `spawn_fake` starts it and has the signature of `spawn_engine`.
`$FAKE_ENGINE` says how it behaves: "" (well), "silent" (never ready), "refuse" (cannot start), "crash" (exits without a
word on the first request), "slow" (tokens only after SIGUSR1), "stubborn" (does not stop when told to).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import zmq

from pd_cluster.config import NodeConfig
from pd_cluster.engine.ipc import EngineSockets
from pd_cluster.engine.process import ParentWatch
from pd_cluster.protocol.messages import (
    HEARTBEAT_S,
    Abort,
    AddRequest,
    EngineDied,
    EngineReady,
    EngineStats,
    FinishReason,
    KvStats,
    SequenceTokens,
    StartupProgress,
    TokensOut,
)
from pd_connectors.protocol.messages import SampledToken

CRASH_STATUS = 77
POLL_S = 0.05


def spawn_fake(config: NodeConfig, address: str) -> subprocess.Popen[bytes]:
    """Like `spawn_engine`."""
    process = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    return process


class FakeEngine:
    """The process's loop."""

    def __init__(self, mailbox: EngineSockets, behaviour: str) -> None:
        self._mailbox = mailbox
        self._behaviour = behaviour
        self._held: list[AddRequest] = []
        self._release = threading.Event()
        self._beat_at = 0.0
        signal.signal(signal.SIGUSR1, lambda *_: self._release.set())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def run(self) -> None:
        self._mailbox.send(StartupProgress(f"fake engine {os.getpid()}"))
        if self._behaviour == "refuse":
            self._mailbox.send(EngineDied("there is no such device"))
            return
        if self._behaviour != "silent":
            self._mailbox.send(EngineReady("fake", 1, 8, 16, 256, "f", "none", 0, 4))
        while True:
            if self._behaviour != "silent" and time.monotonic() >= self._beat_at:
                self._beat_at = time.monotonic() + HEARTBEAT_S
                self._mailbox.send(EngineStats(KvStats(8, 8, 0, 0, 0, 0), 0, 0, 0, {}, {}))
            self._mailbox.wait(POLL_S)
            for message in self._mailbox.receive():
                if isinstance(message, AddRequest):
                    self._held.append(message)
                elif isinstance(message, Abort):
                    self._held = [held for held in self._held if held.request_id != message.request_id]
            if self._held and self._behaviour == "crash":
                os._exit(CRASH_STATUS)
            if self._behaviour != "slow" or self._release.is_set():
                self._answer()

    def _answer(self) -> None:
        for request in self._held:
            token = SampledToken(request.prompt_token_ids[0])
            tokens = SequenceTokens(0, (token,) * 3, FinishReason.LENGTH)
            self._mailbox.send(TokensOut(request.request_id, (tokens,), finished=True))
        self._held.clear()


def main() -> None:
    msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mailbox = EngineSockets(context, sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    behaviour = os.environ.get("FAKE_ENGINE", "")
    if behaviour != "stubborn":
        ParentWatch()
    FakeEngine(mailbox, behaviour).run()
    mailbox.close()
    context.term()


if __name__ == "__main__":
    main()
