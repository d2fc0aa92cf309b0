"""Attacks of a process without the cluster's key on the control port, while handoffs go on through it."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq

from tests.connectors.remote_node import Node, RemoteNode, context, remote_node
from tests.deadlines import HANG_S, wait_until
from tests.security.handover import NUM_BLOCKS, hand_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.integration

MAX_GROWTH_BYTES = 64 << 20  # of any process under any attack
ENDLESS_BYTES = 200 << 20
FRAME = bytes(8 << 20)
HANDOFFS = 10  # when all is sent: what is held is held, and what is taken from the kernel late is there
NUM_FRAMES, NUM_CUTS = 5, 20  # of each connection, and of each thread
NUM_HELLOS = 300


def greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.1's first 64 bytes, of a client."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


# what a client of ZeroMQ's NULL mechanism says next
READY = bytes([4, 28]) + b"\5READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"


def long_frame(num_bytes: int) -> bytes:
    """The header of a frame that others follow."""
    return b"\3" + num_bytes.to_bytes(8, "big")


class Attack:
    """What strangers do, until it is told to stop."""

    def __init__(self, port: int) -> None:
        self.address = ("127.0.0.1", port)
        self.stop = threading.Event()
        self.over: list[str] = []  # threads that have sent all that they are to send
        self.num_bytes = 0  # that the node has taken, or the kernel for it
        self.num_connections = 0

    def send(self, *parts: bytes, most: int) -> None:
        """One connection: the parts, then the last of them over and over, until it is cut or `most` is sent."""
        with socket.create_connection(self.address, HANG_S) as stranger, suppress(OSError):
            self.num_connections += 1
            for part in parts[:-1]:
                stranger.sendall(part)
            while self.num_bytes < most and not self.stop.is_set():
                stranger.sendall(parts[-1])
                self.num_bytes += len(parts[-1])
        self.end()

    def end(self) -> None:
        """Note that this thread has sent all."""
        self.over.append(threading.current_thread().name)


def endless_message(attack: Attack) -> None:
    """A message of many frames that never ends."""
    chunk = long_frame(1 << 16) + bytes(1 << 16)
    attack.send(greeting(b"NULL"), READY, chunk * 16, most=ENDLESS_BYTES)


def long_frames(attack: Attack) -> None:
    """Frames of 8 MiB over ZeroMQ itself, one connection after the other: each until it is cut, or so many are sent."""
    with zmq.Context() as own:
        for _ in range(NUM_CUTS):
            if not attack.stop.is_set():
                with own.socket(zmq.DEALER) as stranger:
                    send_frames(attack, stranger)
    attack.end()


def send_frames(attack: Attack, stranger: zmq.Socket[bytes]) -> None:
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.SNDHWM, 1)  # what is taken beyond that is under way
    with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) as cuts:
        stranger.connect(f"tcp://127.0.0.1:{attack.address[1]}")
        attack.num_connections += 1
        num_sent = 0
        while num_sent < NUM_FRAMES and not cuts.poll(0) and not attack.stop.is_set():
            # Copied: what pyzmq does not copy it gives back through one PUSH socket of the process. Threads that send
            # their first frames at once make several of it, and all but one are found unclosed
            if stranger.poll(10, zmq.POLLOUT):
                with suppress(zmq.Again):  # it was cut since
                    stranger.send(FRAME, zmq.NOBLOCK)
                    num_sent += 1
        stranger.disable_monitor()


def unfinished_hellos(attack: Attack) -> None:
    """Connections that begin the right handshake with a frame of the greatest length, and send all of it but a byte."""
    with ExitStack() as held:
        while not attack.stop.is_set() and attack.num_connections < NUM_HELLOS:
            with suppress(ConnectionError):
                stranger = held.enter_context(socket.create_connection(attack.address, HANG_S))
                attack.num_connections += 1
                stranger.sendall(greeting(b"CURVE") + b"\6" + (16000).to_bytes(8, "big") + bytes(15999))
        attack.end()
        attack.stop.wait(HANG_S)


@pytest.fixture(scope="module")
def prefill() -> Iterator[RemoteNode]:
    with remote_node("nixl", context("P", lease_ttl_s=HANG_S), NUM_BLOCKS) as node:
        yield node


@pytest.fixture(scope="module")
def decode() -> Iterator[Node]:
    node = Node.start("nixl", context("D", connect_deadline_s=HANG_S, confirm_deadline_s=HANG_S), NUM_BLOCKS)
    yield node
    node.connector.close()


@contextmanager
def under(attack: Attack, run: Callable[[Attack], None], number: int) -> Iterator[None]:
    threads = [threading.Thread(target=run, args=(attack,)) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        attack.stop.set()
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("run", "number"),
    [(endless_message, 1), (long_frames, 4), (unfinished_hellos, 1)],
    ids=["endless-message", "long-frames", "unfinished-hellos"],
)
def test_a_stranger_costs_no_memory_and_no_handoff(
    run: Callable[[Attack], None], number: int, prefill: RemoteNode, decode: Node
) -> None:
    process = psutil.Process(prefill.pid)
    hand_over(prefill, decode)
    before, most = process.memory_info().rss, 0
    attack = Attack(prefill.port)
    num_behind = 0
    with under(attack, run, number):
        while num_behind < HANDOFFS:
            hand_over(prefill, decode)
            num_behind += len(attack.over) == number
            most = max(most, process.memory_info().rss)
    assert attack.num_connections >= number
    assert most - before < MAX_GROWTH_BYTES, f"{(most - before) >> 20} MiB more, {attack.num_bytes >> 20} MiB sent"
    stats = prefill.call("stats")
    assert stats["bad_frames_total"] == 0, "a stranger's bytes were taken for a message"

    def is_alone() -> bool:
        return bool(prefill.call("stats")["control_connections"] <= 1)

    wait_until(is_alone, lambda: f"strangers are still connected: {prefill.call('stats')}")
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES / 2, "it does not come back"
