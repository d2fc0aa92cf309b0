"""The router's command line; `pd-cluster router` uses it too."""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import uvicorn

from pd_connectors.protocol.keys import load_cluster_key
from pd_http.errors import StartupError
from pd_http.files import raise_file_limit
from pd_http.gate import HttpGate
from pd_http.inheritance import listening_socket
from pd_router.app import create_app
from pd_router.config import RouterConfig
from pd_router.farewell import Farewell
from pd_router.server import RouterServer
from pd_router.sources.make import make_sources
from pd_router.succession import Predecessor, Succession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_http.limits import HttpLimits
    from pd_router.metrics import RouterMetrics
    from pd_router.sources.base import NodeSource

FILES_PER_REQUEST = 3  # the client's connection, and one to a node for each leg
_PARSERS = {"int": int, "float": float, "str": str}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of RouterConfig."""
    for field in fields(RouterConfig):
        options: dict[str, Any] = {"help": field.metadata["help"].replace("%", "%%"), "default": field.default}
        if field.type == "tuple[str, ...]":
            options.update(nargs="+", action="extend", metavar=field.metadata["metavar"], default=None)
        elif field.type == "bool":
            options.update(action=argparse.BooleanOptionalAction)
        else:
            options["type"] = _PARSERS[str(field.type)]
            if "choices" in field.metadata:
                options["choices"] = field.metadata["choices"]
            if field.default != "":
                options["help"] += " Default: %(default)s."
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Raises StartupError."""
    values: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(RouterConfig)}
    for name in ("prefill", "decode", "mixed"):
        values[name] = tuple(values[name] or ())
    return RouterConfig(**values)


def run(args: argparse.Namespace, *, is_supervised: bool = False) -> int:
    """Serve until SIGINT or SIGTERM. The exit code: 0, or 2 with a message when the router cannot start as told.

    SIGHUP: a successor takes the socket over, then this router drains. `is_supervised`: it only drains, since what has
    started it starts the next one. Call it from the main thread.
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
        listener = inherited(config.listen_fd) if config.listen_fd >= 0 else listen(config.host, config.port)
    except (StartupError, OSError) as error:
        sys.stderr.write(f"pd-cluster router: {error}\n")
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level != "debug":
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # tells every request to the Kubernetes API
    with listener:
        server = make_server(config, key, sources, predecessor)
        if not is_supervised:
            server.succession = Succession(listener, server.posted.heritage)
        gc.collect()
        gc.freeze()  # what lives for good is not searched for garbage while answers stream
        server.run(sockets=[listener])
    return 0 if server.started else 1


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any free one. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.set_inheritable(True)
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error}. "
            "Choose another --port (0 takes any free one), or stop what uses it."
        ) from error
    return listener


def inherited(fd: int) -> socket.socket:
    """The listening socket that the process before this one has left open as `fd`. Raises StartupError."""
    try:
        return listening_socket(fd)
    except OSError as error:
        raise StartupError(f"--listen-fd {fd}: {error}") from error


def make_server(
    config: RouterConfig, key: bytes, sources: Sequence[NodeSource], predecessor: Predecessor
) -> RouterServer:
    app = create_app(config, key, sources, heritage=predecessor.heritage)
    gate = make_gate(config, app.state.services.metrics, raise_file_limit())
    farewell = Farewell(app)
    return RouterServer(
        app.state.posted,
        farewell,
        predecessor,
        uvicorn.Config(
            farewell,
            loop="uvloop",
            http=gate.protocol,
            ws="none",
            lifespan="on",
            log_level=config.log_level,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=round(config.client_keepalive_s),
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        ),
    )


def make_gate(limits: HttpLimits, metrics: RouterMetrics, num_files: int) -> HttpGate:
    """The bounds of the router's HTTP server, counted in `metrics`. `num_files`: what the process may open."""
    gate = HttpGate(limits, num_files, FILES_PER_REQUEST, lambda word: metrics.http_refusals.labels(word).inc())
    metrics.add_gate(gate)
    return gate


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pd_router", description="Route requests over prefill and decode nodes."
    )
    add_arguments(parser)
    return run(parser.parse_args())
