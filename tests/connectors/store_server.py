"""LMCache's server in a process of its own, for tests: killed by id, started again on the same port."""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from pd_connectors.lmcache_server import serve
from tests.connectors.forked import start_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import TracebackType

READY_DEADLINE_S = 60.0

needs_lmcache = pytest.mark.skipif(find_spec("lmcache") is None, reason="LMCache is not installed: [lmcache]")


class StoreServer:
    """Runs from construction on. Use it in a `with` statement."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = max_bytes
        self._process: BaseProcess | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on the port that it had before. Empty, like every server of LMCache's."""
        assert self._process is None
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = start_process(_serve, theirs, self.port, self._max_bytes)
        theirs.close()
        with ours:
            assert ours.poll(READY_DEADLINE_S), "the server did not start"
            self.port = ours.recv()

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.join(READY_DEADLINE_S)
        assert self._process.exitcode is not None
        self._process = None

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()


def _serve(pipe: Connection, port: int, max_bytes: int) -> None:
    serve("127.0.0.1", port, max_bytes, lambda host, port: pipe.send(port))
