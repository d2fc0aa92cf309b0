"""`pd-cluster pool`: the server that a pool's nodes share."""

from __future__ import annotations

import sys

from pd_cluster.errors import StartupError
from pd_cluster.launch.lifeline import hold_lifeline
from pd_cluster.launch.up_flags import POOL_READY
from pd_connectors.lmcache_server import serve


def run_pool(host: str, port: int, max_gb: float) -> int:
    """Serve until killed. Raises StartupError, and ConnectorUnavailable without LMCache."""
    if not 0 < max_gb < 1e6 or not 0 <= port < 65536:
        raise StartupError(f"--max-gb {max_gb:g} --port {port}: no memory to serve, or no port")
    hold_lifeline()
    try:
        serve(host, port, int(max_gb * 1e9), _say_ready)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from error
    return 0


def _say_ready(host: str, port: int) -> None:
    sys.stdout.write(f"{POOL_READY}lm://{f'[{host}]' if ':' in host else host}:{port}\n")
    sys.stdout.flush()
