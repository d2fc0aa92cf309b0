"""The engine's mailbox over real sockets: what is sent together, and what is not held up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from pd_cluster.engine.ipc import EngineSockets
from pd_cluster.protocol.messages import Abort, EngineDied, FromEngine, StartupProgress, ToEngine
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOREVER_S = 3600.0  # pytest's own timeout ends a test that waits so long


class Line:
    """A mailbox, and the API process's end of it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.mailbox = EngineSockets(context, address)
        self._orders = context.socket(zmq.PUSH)
        self._orders.bind(f"{address}.in")
        self._replies = context.socket(zmq.PULL)
        self._replies.bind(f"{address}.out")

    def read(self) -> list[FromEngine]:
        assert self._replies.poll(int(1000 * HANG_S)), "nothing came"
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
    line.mailbox.wait(0.0)
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
    line.mailbox.wait(FOREVER_S)


def test_mail_that_was_not_taken_yet_ends_every_wait(line: Line) -> None:
    """Its descriptor has told of it only once."""
    for request_id in ("a", "b", "c"):
        line.order(request_id)
        found: list[ToEngine] = []
        while not found:
            assert line.mailbox.wait(FOREVER_S)
            assert line.mailbox.wait(FOREVER_S)
            found = line.mailbox.receive()
        assert found == [Abort(request_id)]
