"""The engine's sockets to its API process, and the event that other threads wake it with."""

from __future__ import annotations

import contextlib
import os
import select

import msgspec
import zmq

from pd_cluster.engine.mailbox import Mailbox
from pd_cluster.protocol.messages import FromEngine, SignOfLife, ToEngine

_SIGN = msgspec.msgpack.encode([SignOfLife()])
LAST_WORDS_MS = 200  # for the API process to connect and to take the last message


def send_last_words(address: str, message: FromEngine) -> None:
    """Send a message from another thread than the step loop's, which may never run again. See EngineSockets."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        socket.connect(f"{address}.out")
        socket.send(msgspec.msgpack.encode([message]), zmq.NOBLOCK)


class SignsOfLife:
    """Sends SignOfLife from another thread than the step loop's. Close it when that thread has ended."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(1)
        self._socket.connect(f"{address}.out")

    def send(self) -> None:
        with contextlib.suppress(zmq.Again):  # the API process does not read: it misses nothing
            self._socket.send(_SIGN, zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


class EngineSockets(Mailbox):
    """`address`: the prefix of the two ipc sockets that the API process has bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._in = context.socket(zmq.PULL)
        self._in.set_hwm(0)
        self._in.connect(f"{address}.in")
        self._out = context.socket(zmq.PUSH)
        self._out.set_hwm(0)
        self._out.setsockopt(zmq.LINGER, 1000)  # ms for the last messages; an absent reader cannot block the exit
        self._out.connect(f"{address}.out")
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._unsent: list[FromEngine] = []
        self._closed = False

    def wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._bell, 1)

    def wait(self, timeout_s: float) -> bool:
        self.flush()
        # Select, because poll rounds to whole milliseconds and a step takes five. ZMQ's descriptor signals changes
        # only, so the socket is polled first. Both descriptors are below select's limit: the process opens them early
        has_mail = bool(self._in.poll(0))
        ready, _, _ = select.select((self._in.fileno(), self._bell), (), (), 0.0 if has_mail else timeout_s)
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return has_mail or bool(ready)

    def receive(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._in.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self._unsent.append(message)

    def flush(self) -> None:
        """Without a high-water mark this cannot block."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []  # first: if encoding fails, EngineDied can still be sent
            self._out.send(self._encoder.encode(unsent), zmq.NOBLOCK)

    def close(self) -> None:
        """Send the queued messages and close the sockets. Idempotent."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._in.close(linger=0)
            self._out.close()
            os.close(self._bell)
