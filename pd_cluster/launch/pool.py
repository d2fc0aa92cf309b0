"""`pd-cluster pool`: runs the server of a KV pool that nodes share."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from pd_cluster.errors import StartupError
from pd_cluster.launch.lifeline import hold_lifeline
from pd_cluster.launch.up_flags import POOL_READY
from pd_connectors import lmcache_server, mooncake_master


def run_pool(connector: str, host: str, port: int | None, max_gb: float) -> int:
    """Serve nodes of this connector until SIGTERM. Call it from the main thread.

    Raises StartupError, and ConnectorUnavailable when the connector's package is missing.
    """
    if not 0 < max_gb < 1e6 or not 0 <= (port or 0) < 65536:
        raise StartupError(f"--max-gb {max_gb:g} --port {port}: write more than 0 GB, and a port from 0 to 65535")
    hold_lifeline()
    # Explicit, because the first process of a container ignores SIGTERM by default. There is nothing to finish, and
    # Mooncake's master ends with this process.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    try:
        if connector == "mooncake":
            port = mooncake_master.DEFAULT_PORT if port is None else port
            status = mooncake_master.serve(host, port, partial(_say_ready, "mooncake"))
            sys.stderr.write(f"pd-cluster pool: mooncake_master ended with status {status}\n")
            return 1
        port = lmcache_server.DEFAULT_PORT if port is None else port
        lmcache_server.serve(host, port, int(max_gb * 1e9), partial(_say_ready, "lm"))
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from error
    return 0


def _say_ready(scheme: str, host: str, port: int) -> None:
    sys.stdout.write(f"{POOL_READY}{scheme}://{f'[{host}]' if ':' in host else host}:{port}\n")
    sys.stdout.flush()
