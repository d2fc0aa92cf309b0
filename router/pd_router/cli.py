"""The router's command line; `pd-cluster router` uses it too."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from typing import TYPE_CHECKING

from pd_connectors.protocol.keys import load_cluster_key
from pd_http.errors import StartupError
from pd_http.server import server_config
from pd_http.settings import add_flags, given_values
from pd_http.sockets import bound, inherited
from pd_router.app import create_app
from pd_router.config import RouterConfig
from pd_router.farewell import Farewell
from pd_router.server import RouterServer
from pd_router.sources.make import make_sources
from pd_router.succession import Predecessor, Succession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_router.sources.base import NodeSource

FILES_PER_REQUEST = 3  # the client's connection, and one to a node for each leg


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of RouterConfig."""
    add_flags(parser, RouterConfig)


def config_from(args: argparse.Namespace) -> RouterConfig:
    """The configuration from the parsed flags and the environment. Raises StartupError."""
    return RouterConfig(**given_values(vars(args), RouterConfig, os.environ))


def run(args: argparse.Namespace, *, is_supervised: bool = False) -> int:
    """Serve until SIGINT or SIGTERM. Exit code: 0, 1 if the server did not start, 2 (and a message) for wrong settings.

    SIGHUP: a successor takes over the socket, then this router drains. `is_supervised`: it only drains, because the
    supervisor starts the next router. Call it from the main thread.
    """
    try:
        predecessor = Predecessor()
        config = config_from(args)
        sources = make_sources(config)
        try:
            key = load_cluster_key(config.cluster_key_file)
        except (OSError, ValueError) as error:
            where = f" (--cluster-key-file {config.cluster_key_file})" if config.cluster_key_file else ""
            raise StartupError(f"cannot read the cluster key{where}: {error}") from error
        listener = inherited(config.listen_fd) if config.listen_fd >= 0 else bound(config.host, config.port)
    except (StartupError, OSError) as error:
        sys.stderr.write(f"pd-cluster router: {error}\n")
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level != "debug":
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request to the Kubernetes API
    with listener:
        server = make_server(config, key, sources, predecessor)
        if not is_supervised:
            server.succession = Succession(listener, server.posted.heritage)
        gc.collect()
        gc.freeze()  # permanent objects are not searched for garbage while answers stream
        server.run(sockets=[listener])
    return 0 if server.started else 1


def make_server(
    config: RouterConfig, key: bytes, sources: Sequence[NodeSource], predecessor: Predecessor
) -> RouterServer:
    app = create_app(config, key, sources, heritage=predecessor.heritage)
    farewell = Farewell(app)
    settings = server_config(
        farewell,
        config,
        app.state.services.metrics.http,
        FILES_PER_REQUEST,
        loop="uvloop",
        log_level=config.log_level,
        backlog=2048,
        timeout_graceful_shutdown=max(1, round(config.drain_s)),
    )
    return RouterServer(app.state.posted, farewell, predecessor, settings)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pd_router", description="Route requests over prefill and decode nodes."
    )
    add_arguments(parser)
    return run(parser.parse_args())
