"""Mooncake's master in a process of its own, for tests: killed by id, started again on the same port."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_connectors.mooncake import MooncakeClient
from pd_connectors.mooncake_master import start_master
from pd_connectors.protocol.errors import ConnectorUnavailable
from tests.deadlines import HANG_S
from tests.ports import free_port

if TYPE_CHECKING:
    import subprocess
    from types import TracebackType


def why_not() -> str:
    """Why Mooncake cannot be used here; empty when it can."""
    try:
        MooncakeClient(("127.0.0.1", 1), "127.0.0.1", 0)
    except ConnectorUnavailable as error:
        return str(error)
    return ""


# No condition, which the collection would evaluate: the library starts threads, and workers are forked after that
needs_mooncake = pytest.mark.needs_mooncake


class MooncakeMaster:
    """Runs from construction on. Use it in a `with` statement."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on the port that it had before. It knows of no object; nodes bring their segments by themselves."""
        assert self._process is None
        self._process = start_master("127.0.0.1", self.port, "--client_ttl=5")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(HANG_S)
        self._process = None

    def __enter__(self) -> MooncakeMaster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()
