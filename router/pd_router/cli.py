"""The router's command line; `pd-cluster router` uses it too."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from pd_connectors.protocol.keys import load_cluster_key
from pd_http.errors import StartupError
from pd_http.server import server_config
from pd_http.settings import add_flags, given_values
from pd_http.sockets import bound, inherited
from pd_router.admission.key_file import KeyFile
from pd_router.app import create_app
from pd_router.config import RouterConfig
from pd_router.edge.client_connection import token_path
from pd_router.process.succession import OldRouter, Succession
from pd_router.process.worker_channel import WorkerChannel
from pd_router.process.worker_supervisor import WorkerSupervisor
from pd_router.records.otlp import check_exporter
from pd_router.server import RouterServer
from pd_router.sources.make import make_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_router.lifespan import RequestPort
    from pd_router.sources.base import NodeSource
    from pd_router.sources.node_change import RestartState

BACKLOG = 2048  # connections that wait to be accepted
FILES_PER_REQUEST = 3  # the client's connection, and one to a node for each leg

# New objects between two searches for garbage. Python's 700 cost 7% of the router's CPU; requests leave no cycles.
YOUNG_OBJECTS = 50_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of RouterConfig."""
    add_flags(parser, RouterConfig)


def config_from(args: argparse.Namespace, kind: type[RouterConfig] = RouterConfig) -> RouterConfig:
    """The configuration from the parsed flags and the environment. Raises StartupError."""
    return kind(**given_values(vars(args), kind, os.environ))


def run(
    args: argparse.Namespace,
    *,
    is_supervised: bool = False,
    name: str = "router",
    kind: type[RouterConfig] = RouterConfig,
    ports: Sequence[RequestPort] = (),
) -> int:
    """Serve until SIGINT or SIGTERM. Exit code: 0, 1 if the server did not start, 2 (and a message) for wrong settings.

    SIGHUP: a successor takes over the socket, then this router drains. `is_supervised`: it only drains, because the
    supervisor starts the next router. `name`: of the command. `ports`: see `create_app`. Call it from the main thread.
    """
    try:
        worker = WorkerChannel.inherited()
        old_router = OldRouter()
        config = config_from(args, kind)
        if config.otlp_url:
            check_exporter()
        sources = make_sources(config)
        config.check_tls()
        if config.api_keys:
            KeyFile(config.api_keys)  # its errors are reported before anything starts
        try:
            key = load_cluster_key(config.cluster_key_file)
        except (OSError, ValueError) as error:
            where = f" (--cluster-key-file {config.cluster_key_file})" if config.cluster_key_file else ""
            raise StartupError(f"cannot read the cluster key{where}: {error}") from error
        listener = inherited(config.listen_fd) if config.listen_fd >= 0 else bound(config.host, config.port)
    except (StartupError, OSError) as error:
        sys.stderr.write(f"pd-cluster {name}: {error}\n")
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level != "debug":
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request to the Kubernetes API
    with listener:
        if worker is None and config.workers > 1:
            listener.listen(BACKLOG)
            supervisor = WorkerSupervisor(
                config.workers, listener, old_router, config.drain_s, scheme=config.scheme, is_supervised=is_supervised
            )
            return asyncio.run(supervisor.run())
        on_serving = worker.serving if worker is not None else partial(old_router.serving, listener, config.scheme)
        server = make_server(config, key, sources, old_router.restart_state, worker, on_serving, ports)
        if worker is None and not is_supervised:
            server.succession = Succession(listener, server.posted.restart_state)
        gc.collect()
        gc.freeze()  # permanent objects are not searched for garbage while answers stream
        gc.set_threshold(YOUNG_OBJECTS)
        server.run(sockets=[listener])
    return 0 if server.started else 1


def make_server(
    config: RouterConfig,
    key: bytes,
    sources: Sequence[NodeSource],
    restart_state: RestartState,
    worker: WorkerChannel | None,
    on_serving: Callable[[], None],
    ports: Sequence[RequestPort] = (),
) -> RouterServer:
    app = create_app(config, key, sources, restart_state=restart_state, worker=worker, ports=ports)
    services = app.state.services
    settings = server_config(
        app,
        config,
        services.metrics.http,
        FILES_PER_REQUEST,
        token_path(app.state.proxy),
        loop="uvloop",
        log_level=config.log_level,
        backlog=BACKLOG,
    )
    server = RouterServer(app.state.posted, services.leaving, on_serving, settings, config)
    server.has_successor = not ports
    if worker is not None:
        worker.on_lost = partial(setattr, server, "should_exit", True)
    return server


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pd_router", description="Route requests over prefill and decode nodes."
    )
    add_arguments(parser)
    return run(parser.parse_args())
