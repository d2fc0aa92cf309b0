"""The control channel over TCP: ZeroMQ sockets with CURVE, and messages sealed with the cluster's key.

Frames that are not sealed with the key, or are of another protocol version, are dropped and counted.

What a process without the cluster's key can make a node hold: MAX_QUESTION_BYTES and some 20 KiB of ZeroMQ's own for
each of `max_readers` connections, for HANDSHAKE_MS. Limits after the handshake bound what a slow member can cost.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
import time
from itertools import count
from typing import TYPE_CHECKING, TypeGuard, get_args

import msgspec
import zmq

from pd_connectors.channel import Channel, FromOwner, FromReader, Incoming, OwnerLost
from pd_connectors.curve import CurveKeys
from pd_connectors.gate import Gate
from pd_connectors.protocol.errors import BadSignature, ConnectorUnavailable, ProtocolMismatch
from pd_connectors.protocol.messages import ToOwner, ToReader, open_sealed, seal

if TYPE_CHECKING:
    from pd_connectors.transport import Address

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 16 << 10  # reader to owner; the longest, a Hello, has some 300 bytes
MAX_ANSWER_BYTES = 8 << 20  # owner to reader; a snapshot of a 1M-token lease with 16-token blocks has 0.3 MB
MAX_PER_TURN = 256  # frames taken from one socket before timers get their turn
QUEUE_FRAMES = 1024  # longest queue of one connection and direction
HEARTBEAT_MS = 2000
HANDSHAKE_MS = 3000
DISCARD_PORT = 9
REPORT_EVERY_S = 60.0  # between two log lines of one kind of refusal; each refusal is counted

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=hi")  # of a monitor: event, value


class ZmqChannel(Channel):
    """One ROUTER for our own leases, one DEALER per owner that we read from, over TCP and CURVE.

    ZeroMQ reconnects by itself, so a peer that restarts under the same address is reached again. Heartbeats find
    connections with a peer that vanished without a FIN.
    max_readers: connections to the port at once.
    Raises ConnectorUnavailable when the port is taken, a reader cannot connect to `host`, or ZeroMQ has no CURVE.
    """

    def __init__(self, key: bytes, host: str, port: int, max_readers: int = 1024) -> None:
        _refuse_wildcard(host)
        self._key = key
        self._curve = CurveKeys(key)
        self._context = zmq.Context(io_threads=1)
        self._owners: dict[Address, zmq.Socket[bytes]] = {}
        self._monitors: dict[Address, zmq.Socket[bytes]] = {}
        self._serials = count(1)
        self._poller = zmq.Poller()
        self._awake, self._waker = socket.socketpair()
        self._counters = {"bad_frames_total": 0.0, "frames_dropped_total": 0.0, "handshakes_failed_total": 0.0}
        self._counters["protocol_mismatches_total"] = 0.0  # frames of another version; they are bad frames, too
        self._report_at: dict[str, float] = {}  # by counter: when to warn again
        self._closed = False
        self._router = self._context.socket(zmq.ROUTER)
        self._arrivals = self._monitor(self._router, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._gate = Gate(max_readers)
        try:
            self._gate.listen(host, port)
            self._bind()
            self._try_address(host)
        except (zmq.ZMQError, OSError, OverflowError) as error:
            self.close()
            raise ConnectorUnavailable(f"cannot listen for handoffs on {host}:{port}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._arrivals, zmq.POLLIN)
        self._poller.register(self._awake.fileno(), zmq.POLLIN)

    @property
    def port(self) -> int:
        return self._gate.port

    def ask(self, owner: Address, message: ToOwner) -> None:
        dealer = self._owners.get(owner)
        try:
            if dealer is None:
                dealer = self._connect(owner)
            dealer.send(seal(self._key, message), zmq.NOBLOCK)
        except zmq.ZMQError:  # Again: its queue is full; EINVAL: the ticket has an invalid address
            self._counters["frames_dropped_total"] += 1

    def reply(self, reader: bytes, message: ToReader) -> None:
        try:
            self._router.send_multipart([reader, seal(self._key, message)], zmq.NOBLOCK)
        except zmq.ZMQError:  # Again: its queue is full; EHOSTUNREACH: it left
            self._counters["frames_dropped_total"] += 1

    def receive(self) -> list[Incoming]:
        incoming: list[Incoming] = []
        self._watch_arrivals()
        for frames in self._drain(self._router):
            message = self._take(frames, 2)
            if _is_to_owner(message):
                incoming.append(FromReader(frames[0], message))
            elif message is not None:
                self._counters["bad_frames_total"] += 1
        for owner, dealer in self._owners.items():
            for frames in self._drain(dealer):
                message = self._take(frames, 1)
                if _is_to_reader(message):
                    incoming.append(FromOwner(owner, message))
                elif message is not None:
                    self._counters["bad_frames_total"] += 1
            if events := self._events(self._monitors[owner]):
                incoming.append(OwnerLost(owner))
                if any(event & _HANDSHAKE_FAILED for event in events):
                    self._count_handshake(f"the owner of leases at {owner[0]}:{owner[1]}")
        return incoming

    def forget(self, owner: Address) -> None:
        dealer = self._owners.pop(owner, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            monitor = self._monitors.pop(owner)
            self._poller.unregister(monitor)
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=0)

    def wait(self, timeout_s: float) -> None:
        ready = self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000))
        if any(item == self._awake.fileno() for item, _ in ready):
            self._drain_waker()

    def wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return  # full: it is awake already
        except OSError:
            return  # closed: the control thread has ended

    def stats(self) -> dict[str, float]:
        return {**self._counters, "control_connections": float(self._gate.num_open)}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for owner, dealer in self._owners.items():
            dealer.disable_monitor()
            self._monitors[owner].close(linger=0)
            dealer.close(linger=200)  # milliseconds: the last Release gets a chance
        self._router.disable_monitor()
        self._arrivals.close(linger=0)
        self._router.close(linger=200)
        self._context.term()
        self._gate.close()
        self._awake.close()
        self._waker.close()

    def _try_address(self, host: str) -> None:
        """Refuse an address that ZeroMQ cannot connect to.

        Tries another port than ours, which would count the attempt.
        """
        with self._context.socket(zmq.DEALER) as dealer:
            self._configure(dealer)
            try:
                dealer.connect(f"tcp://{_url_host(host)}:{DISCARD_PORT}")
            except zmq.ZMQError as error:
                raise ConnectorUnavailable(f"{host!r} is no address under which peers can reach this node") from error

    def _connect(self, owner: Address) -> zmq.Socket[bytes]:
        """Raises ZMQError, with nothing left open, when `owner` is no address."""
        dealer = self._context.socket(zmq.DEALER)
        monitor: zmq.Socket[bytes] | None = None
        try:
            self._configure(dealer)
            self._curve.ask(dealer)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
            events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _HANDSHAKE_FAILED
            monitor = self._monitor(dealer, events)
            dealer.connect(f"tcp://{_url_host(owner[0])}:{owner[1]}")
        except BaseException:
            if monitor is not None:
                dealer.disable_monitor()
                monitor.close(linger=0)
            dealer.close(linger=0)
            raise
        self._owners[owner] = dealer
        self._poller.register(dealer, zmq.POLLIN)
        self._monitors[owner] = monitor
        self._poller.register(monitor, zmq.POLLIN)
        return dealer

    def _bind(self) -> None:
        router = self._router
        self._configure(router)
        self._curve.serve(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reader that left is counted, not ignored
        router.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        router.setsockopt(zmq.USE_FD, self._gate.descriptor())
        router.bind("tcp://127.0.0.1:*")  # ZeroMQ ignores this address: the descriptor is bound already

    def _monitor(self, sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """A socket with the events of `sock`.

        Its queue has no limit, because ZeroMQ's IO thread would wait for room.
        """
        address = f"inproc://events-{next(self._serials)}"
        sock.monitor(address, events)
        receiver = self._context.socket(zmq.PAIR)
        receiver.setsockopt(zmq.RCVHWM, 0)
        receiver.connect(address)
        return receiver

    def _events(self, monitor: zmq.Socket[bytes]) -> list[int]:
        return [_EVENT.unpack(frames[0])[0] for frames in self._drain(monitor)]

    def _watch_arrivals(self) -> None:
        for event in self._events(self._arrivals):
            if event == zmq.EVENT_ACCEPTED:
                self._gate.accepted()
            elif event == zmq.EVENT_DISCONNECTED:
                self._gate.closed()
            else:
                self._count_handshake("a process that connected to the control port")

    def _count_handshake(self, peer: str) -> None:
        reasons = "it has another cluster key, runs a build without CURVE, is no node, or ended"
        self._refuse("handshakes_failed_total", f"{peer} failed the handshake: {reasons}")

    def _refuse(self, counter: str, reason: str) -> None:
        """Count a refused frame, and log the reason from time to time."""
        self._counters[counter] += 1
        now = time.monotonic()
        if now >= self._report_at.get(counter, 0.0):
            self._report_at[counter] = now + REPORT_EVERY_S
            total = self._counters[counter]
            logger.warning("%s (%d so far; logged at most once in %g s)", reason, total, REPORT_EVERY_S)

    def _configure(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, 1)
        sock.set_hwm(QUEUE_FRAMES)
        sock.setsockopt(zmq.RECONNECT_IVL, 50)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        sock.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)

    def _drain(self, sock: zmq.Socket[bytes]) -> list[list[bytes]]:
        taken: list[list[bytes]] = []
        try:
            while len(taken) < MAX_PER_TURN:
                taken.append(sock.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return taken
        return taken

    def _drain_waker(self) -> None:
        try:
            while self._awake.recv(4096):
                pass
        except BlockingIOError:
            return

    def _take(self, frames: list[bytes], num_frames: int) -> ToOwner | ToReader | None:
        """The message in a frame; None if the frame was refused, which is counted."""
        if len(frames) == num_frames:
            try:
                return open_sealed(self._key, frames[-1])
            except ProtocolMismatch as error:
                self._refuse("protocol_mismatches_total", f"{error}: run the same release on all nodes")
            except (BadSignature, msgspec.MsgspecError):
                pass  # counted below
        self._counters["bad_frames_total"] += 1
        return None


def _is_to_owner(message: ToOwner | ToReader | None) -> TypeGuard[ToOwner]:
    return isinstance(message, get_args(ToOwner))


def _is_to_reader(message: ToOwner | ToReader | None) -> TypeGuard[ToReader]:
    return isinstance(message, get_args(ToReader))


def _refuse_wildcard(host: str) -> None:
    """A wildcard can be listened on, and ZeroMQ connects to it, but each reader would find itself there."""
    if host.strip("[]") in ("", "*", "0.0.0.0", "::"):
        raise ConnectorUnavailable(f"{host!r} is no address under which peers can reach this node")


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
