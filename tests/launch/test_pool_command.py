"""`pd-cluster pool` as Kubernetes and compose treat it: asked by connecting, stopped by SIGTERM."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.connectors.mooncake_master import needs_mooncake
from tests.connectors.store_server import needs_lmcache
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from tests.cluster import Launcher

pytestmark = pytest.mark.integration
KINDS = [
    pytest.param("lmcache", "lm", marks=needs_lmcache),
    pytest.param("mooncake", "mooncake", marks=needs_mooncake),
]


@pytest.mark.parametrize(("connector", "scheme"), KINDS)
def test_probes_do_it_no_harm_and_sigterm_ends_it_in_good_order(
    launcher: Launcher, connector: str, scheme: str
) -> None:
    pool = launcher.command("pool", f"--connector={connector}", "--port=0", "--max-gb=0.1")
    address = pool.wait_line("pool ready on ").rpartition(f"{scheme}://")[2]
    host, _, port = address.partition(":")
    for _ in range(20):
        socket.create_connection((host, int(port)), timeout=HANG_S).close()
    with socket.create_connection((host, int(port)), timeout=HANG_S):  # a client that is still there
        assert pool.stop(signal.SIGTERM) == 0
    assert "Traceback" not in pool.output
    assert pool.leftovers() == []


@needs_mooncake
def test_it_does_not_outlive_mooncakes_master(launcher: Launcher) -> None:
    pool = launcher.command("pool", "--connector=mooncake", "--port=0")
    pool.wait_line("pool ready on ")
    [master] = [process for process in pool.family() if process.name().startswith("mooncake")]
    master.kill()
    assert pool.wait() == 1
    assert "mooncake_master ended with status -9" in pool.output
