"""Mooncake's master in a process of its own, for tests: killed by id, started again on the same port."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pd_connectors.mooncake import MooncakeClient
from pd_connectors.protocol.errors import ConnectorUnavailable
from tests.connectors.store_server import closed_port

if TYPE_CHECKING:
    from types import TracebackType


def why_not() -> str:
    """Why Mooncake cannot be used here; empty when it can."""
    try:
        MooncakeClient(("127.0.0.1", 1), "127.0.0.1", 0)
    except ConnectorUnavailable as error:
        return str(error)
    return ""


needs_mooncake = pytest.mark.skipif(bool(why_not()), reason=f"Mooncake: {why_not()}")


class MooncakeMaster:
    """Runs from construction on. Use it in a `with` statement. Clients wait for it by trying."""

    def __init__(self) -> None:
        self.port = closed_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on the port that it had before. It knows of no object; nodes bring their segments by themselves."""
        import mooncake

        assert self._process is None
        binary = Path(mooncake.__file__ or "").parent / "mooncake_master"
        command = [str(binary), f"--rpc_port={self.port}", f"--metrics_port={closed_port()}", "--client_ttl=5"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def __enter__(self) -> MooncakeMaster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()
