"""`pd-cluster balance`: keeps the roles of a router's nodes to the load, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from typing import TYPE_CHECKING

import httpx

from pd_cluster.balancing.balancer import Balancer
from pd_cluster.balancing.snapshot import BalanceTargets
from pd_cluster.errors import StartupError
from pd_cluster.launch.balance_flags import BALANCE_READY
from pd_connectors.protocol.keys import load_cluster_key
from pd_http.tls import TlsFiles

if TYPE_CHECKING:
    import argparse


def run_balance(namespace: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; returns 0. Raises StartupError."""
    if namespace.slo_ttft_ms <= 0 or namespace.slo_tpot_ms <= 0:
        raise StartupError("--slo-ttft-ms and --slo-tpot-ms must be above 0: the balance predicts how many meet them")
    try:
        key = load_cluster_key(namespace.cluster_key_file)
        tls = TlsFiles(tls_ca=namespace.tls_ca)
        trusted = tls.client_context() if tls.tls_ca else httpx.create_ssl_context()
        routers = [str(httpx.URL(url)).rstrip("/") for url in namespace.router]
    except (OSError, ValueError, httpx.InvalidURL) as error:
        raise StartupError(f"--router, or the cluster key: {error}") from error
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    targets = BalanceTargets(namespace.slo_ttft_ms / 1e3, namespace.slo_tpot_ms / 1e3)
    asyncio.run(_serve(routers, key, trusted, targets, is_dry=namespace.dry_run))
    return 0


async def _serve(routers: list[str], key: bytes, trusted: object, targets: BalanceTargets, *, is_dry: bool) -> None:
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:  # type: ignore[arg-type]
        running = asyncio.create_task(Balancer(client, routers, key, targets, is_dry=is_dry).run())
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, running.cancel)
        sys.stdout.write(f"{BALANCE_READY}{', '.join(routers)}\n")
        sys.stdout.flush()
        with contextlib.suppress(asyncio.CancelledError):
            await running
