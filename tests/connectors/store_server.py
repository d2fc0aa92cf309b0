"""LMCache's server in a process of its own, for tests: killed by id, started again on the same port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.cluster import SOURCES

if TYPE_CHECKING:
    from types import TracebackType

READY_DEADLINE_S = 60.0
_SERVE = """
import sys
from pd_connectors.lmcache_server import serve
serve("127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), lambda host, port: print(f"serving {port}", flush=True))
"""

needs_lmcache = pytest.mark.skipif(find_spec("lmcache") is None, reason="LMCache is not installed: [lmcache]")


class StoreServer:
    """Runs from construction on. Use it in a `with` statement."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on the port that it had before. Empty, like every server of LMCache's."""
        assert self._process is None
        command = [sys.executable, "-c", _SERVE, str(self.port), str(self._max_bytes)]
        path = os.pathsep.join(part for part in (SOURCES, os.environ.get("PYTHONPATH", "")) if part)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("serving "), f"the server did not start: {line!r}"
        self.port = int(line.split()[1])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(READY_DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()


def closed_port() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
