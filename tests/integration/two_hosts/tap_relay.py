"""A relay over TAP between a host and the bridge: it delays frames and reorders some. For kernels without netem.

    to-p ── far bridge ── tap "far" ── this process ── tap "near" ── bridge

It copies each frame in Python, so it is a slow cable: of 1,500 bytes a frame, since a TAP device takes no larger ones.
What is measured through it says nothing about bandwidth.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
FRAME_BYTES = 65536
REORDERED_S = 0.003  # that a frame is late which others pass


class TapRelay:
    """Two devices of the network that the making thread has entered, and the thread that copies between them."""

    def __init__(self, near: str, far: str, delay_s: float, reordered: float = 0.0) -> None:
        """`reordered`: share of the frames that are REORDERED_S later than the others."""
        self._taps = [_open(near), _open(far)]
        self._delay_s = delay_s
        self._reordered = reordered
        self._chance = random.Random(near)
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"relay {near}", daemon=True)

    def start(self) -> None:
        """Once both devices are up."""
        self._thread.start()

    def close(self) -> None:
        os.close(self._end)
        self._thread.join()
        for descriptor in (*self._taps, self._wake):
            os.close(descriptor)

    def _run(self) -> None:
        late: list[tuple[float, int, int, bytes]] = []  # due, number, to which, frame
        number, others = 0, dict(zip(self._taps, reversed(self._taps), strict=True))
        while True:
            rest_s = max(0.0, late[0][0] - time.monotonic()) if late else None
            ready, _, _ = select.select([*self._taps, self._wake], [], [], rest_s)
            if self._wake in ready:
                return
            for tap in ready:
                frame, number = os.read(tap, FRAME_BYTES), number + 1
                more_s = REORDERED_S if self._chance.random() < self._reordered else 0.0
                heapq.heappush(late, (time.monotonic() + self._delay_s + more_s, number, others[tap], frame))
            while late and late[0][0] <= time.monotonic():
                _, _, there, frame = heapq.heappop(late)
                os.write(there, frame)


def _open(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor
