"""The engine's mailbox over real sockets: what is sent together, and what is not held up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from pd_cluster.engine.ipc import EngineSockets
from pd_cluster.protocol.messages import Abort, EngineDied, FromEngine, StartupProgress, ToEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_MS = 20_000


class Line:
    """A mailbox, and the API process's end of it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.mailbox = EngineSockets(context, address)
        self._orders = context.socket(zmq.PUSH)
        self._orders.bind(f"{address}.in")
        self._replies = context.socket(zmq.PULL)
        self._replies.bind(f"{address}.out")

    def read(self) -> list[FromEngine]:
        assert self._replies.poll(DEADLINE_MS), "nothing came"
        return msgspec.msgpack.decode(self._replies.recv(), type=list[FromEngine])

    def order(self, request_id: str) -> None:
        self._orders.send(msgspec.msgpack.encode(Abort(request_id)))

    def is_silent(self) -> bool:
        return not self._replies.poll(0)

    def close(self) -> None:
        self.mailbox.close()
        self._orders.close(linger=0)
        self._replies.close(linger=0)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = Line(context, f"ipc://{tmp_path}/engine")
    yield line
    line.close()
    context.term()


def test_messages_travel_together_and_once(line: Line) -> None:
    some: list[FromEngine] = [StartupProgress("a"), StartupProgress("b")]
    for message in some:
        line.mailbox.send(message)
    line.mailbox.flush()
    line.mailbox.flush()
    line.mailbox.send(EngineDied("c"))
    line.mailbox.wait(0.001)
    assert line.read() == some
    assert line.read() == [EngineDied("c")]
    assert line.is_silent()


def test_what_cannot_be_encoded_does_not_hold_up_the_last_words(line: Line) -> None:
    unknown: Any = object()
    line.mailbox.send(StartupProgress(unknown))
    with pytest.raises(TypeError, match="unsupported"):
        line.mailbox.flush()
    line.mailbox.send(EngineDied("TypeError"))
    line.mailbox.close()
    assert line.read() == [EngineDied("TypeError")]


def test_a_bell_that_rang_before_the_wait_ends_it(line: Line) -> None:
    line.mailbox.wake()
    started_s = time.monotonic()
    line.mailbox.wait(DEADLINE_MS / 1000)
    assert time.monotonic() - started_s < DEADLINE_MS / 2000


def test_mail_that_was_not_taken_yet_ends_every_wait(line: Line) -> None:
    """Its descriptor has told of it only once."""
    for request_id in ("a", "b", "c"):
        line.order(request_id)
        found: list[ToEngine] = []
        while not found:
            started_s = time.monotonic()
            assert line.mailbox.wait(DEADLINE_MS / 1000)
            assert line.mailbox.wait(DEADLINE_MS / 1000)
            assert time.monotonic() - started_s < DEADLINE_MS / 2000
            found = line.mailbox.receive()
        assert found == [Abort(request_id)]
