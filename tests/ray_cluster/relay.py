"""Passes orders of processes that this one has not started on to its fork server: those of `forked_node.py`."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster import FORK_SERVER
from tests.ray_cluster.forked_node import RELAY

if TYPE_CHECKING:
    from types import TracebackType

MAX_ORDER_BYTES = 1 << 20
NUM_FDS = 5


class Relay:
    """Listens at a path in `directory` during the block."""

    def __init__(self, directory: Path) -> None:
        path = directory / "relay"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._pass_on, name="relay", daemon=True)
        # the first `sitecustomize` of the path is Python's
        path_of_all = f"{Path(__file__).with_name('site')}{os.pathsep}{FORK_SERVER.environment['PYTHONPATH']}"
        self.environment = {RELAY: str(path), "PYTHONPATH": path_of_all}

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _pass_on(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # the end
                return
            with client, suppress(ConnectionError):
                order, fds, _, _ = socket.recv_fds(client, MAX_ORDER_BYTES, NUM_FDS, socket.MSG_CMSG_CLOEXEC)
                FORK_SERVER.order(order, fds)
                for fd in fds:
                    os.close(fd)
