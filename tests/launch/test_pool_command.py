"""`pd-cluster pool` as Kubernetes and compose treat it: asked by connecting, stopped by SIGTERM."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.connectors.store_server import needs_lmcache

if TYPE_CHECKING:
    from tests.cluster import Launcher

pytestmark = [pytest.mark.integration, needs_lmcache]


def test_probes_do_it_no_harm_and_sigterm_ends_it_in_good_order(launcher: Launcher) -> None:
    pool = launcher.command("pool", "--port=0", "--max-gb=0.1")
    address = pool.wait_line("pool ready on ").rpartition("lm://")[2]
    host, _, port = address.partition(":")
    for _ in range(20):
        socket.create_connection((host, int(port)), timeout=30.0).close()
    with socket.create_connection((host, int(port)), timeout=30.0):  # a client that is still there
        assert pool.stop(signal.SIGTERM) == 0
    assert "Traceback" not in pool.output
