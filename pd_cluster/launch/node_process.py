"""A node: this API process, and the engine process that it starts, watches and stops.

The life of a node:

    listen -> engine spawned, app built -> HTTP up (/health 503) -> engine ready, the ready line is printed -> serving
      SIGTERM, SIGINT       drain: new requests get 503; running requests and leases get drain_s; engine stopped; exit 0
      a second signal       no waiting, exit 0
      the engine dies       its requests fail, exit 1
      the launcher dies     no waiting (lifeline.py); the end of its standard input stops the engine
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop
import zmq.asyncio

from pd_cluster.adapters.adapter_directory import named_directories
from pd_cluster.engine.client import ZmqEngineClient
from pd_cluster.errors import EngineUnavailable, StartupError
from pd_cluster.launch.engine_process import end_of_engine, running_engine
from pd_cluster.launch.http_server import HttpServer
from pd_cluster.launch.kv_network import check_network
from pd_cluster.launch.lifeline import hold_lifeline
from pd_cluster.launch.model_path import resolve_model, served_name
from pd_cluster.launch.preflight import model_problems
from pd_cluster.launch.socket_dir import socket_directory
from pd_cluster.launch.sockets import listen, port_of
from pd_cluster.protocol.messages import HEARTBEAT_S
from pd_http.names import MAX_NAME_CHARS, is_name
from pd_http.settings import refuse
from pd_http.sockets import inherited, watch_path

if TYPE_CHECKING:
    import socket
    import subprocess
    import threading

    from pd_cluster.config import NodeConfig
    from pd_cluster.launch.engine_process import SpawnEngine

logger = logging.getLogger("pd_cluster.node")

FLUSH_S = 2.0  # limit for sending the last bytes of requests that were cut
LEASE_POLL_S = 0.05


def run_node(config: NodeConfig, spawn: SpawnEngine) -> int:
    """Run a node until it gets a signal to stop or its engine dies. Returns the exit status.

    `spawn` starts the engine process; see `pd_cluster.engine.process.spawn_engine`. Raises StartupError, or
    ConnectorUnavailable when this machine's network does not fit the handoff's settings.
    """
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    check_network(config.handoff)
    orphaned = hold_lifeline()
    server = config.server
    opened = inherited(server.listen_fd) if server.listen_fd >= 0 else listen(server.host, server.port)
    with contextlib.closing(opened) as listener:
        watch_path(listener)
        completed = complete(config, port_of(listener))  # torch describes a model that transformers alone knows
        if not config.server.output_parser:  # a user's module may import anything
            leave_out_torch()
        node = NodeProcess(completed, listener, orphaned, spawn)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(node.run())


def leave_out_torch() -> None:
    """Let this process find no torch from now on, unless it has imported torch already.

    The API process has transformers for the tokenizer alone, and transformers imports torch wherever it finds it: the
    process took 5.4 s of CPU to start instead of 3.2 s, and 300 MB instead of 110 MB.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's sign for a module that is not there
        logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def complete(config: NodeConfig, port: int) -> NodeConfig:
    """`config` with the model resolved to a directory, and with port and node id. Raises StartupError."""
    model, server = config.model, config.server
    path, own = resolve_model(model.model), named_directories(config.lora.lora)
    refuse(model_problems(config, path))
    names = model.served_model_name or (served_name(model.model, path),)
    node_id = server.node_id or f"{server.role}-{server.host}-{port}"
    if not is_name(node_id):
        raise StartupError(f"--node-id: 1 to {MAX_NAME_CHARS} printable characters of ASCII are needed")
    if max(map(len, names)) > MAX_NAME_CHARS:
        raise StartupError(f"--served-model-name: a name may have {MAX_NAME_CHARS} characters")
    lora = replace(config.lora, lora=tuple(f"{name}={directory}" for name, directory in own.items()))
    return replace(
        config,
        lora=lora,
        model=replace(model, model=str(path), served_model_name=names),
        server=replace(server, port=port, node_id=node_id),
    )


class NodeProcess:
    """Owns the engine process, the client to it, and the HTTP server. `run` is called once."""

    def __init__(
        self, config: NodeConfig, listener: socket.socket, orphaned: threading.Event, spawn: SpawnEngine
    ) -> None:
        self._config = config
        self._listener = listener
        self._orphaned = orphaned
        self._spawn = spawn
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit status. Raises StartupError when the node cannot come up as configured."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)
        context = zmq.asyncio.Context()
        try:
            with socket_directory() as directory:
                address = f"ipc://{directory}/engine"
                client = ZmqEngineClient(context, address, lambda text: logger.info("engine: %s", text))
                try:
                    async with running_engine(self._spawn, self._config, address) as process:
                        return await self._serve(client, process)
                finally:
                    client.close()
        finally:
            context.destroy(linger=0)

    async def _serve(self, client: ZmqEngineClient, process: subprocess.Popen[bytes]) -> int:
        server = HttpServer(self._config, self._listener, client)
        engine = asyncio.create_task(end_of_engine(client, process), name="engine")
        http = asyncio.create_task(server.run(), name="http")
        ready = asyncio.create_task(self._announce(client, server), name="ready")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        lives = {engine, http, stop}
        try:
            await asyncio.wait({*lives, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain(client, server, http)
                return 0
            if http.done():
                http.result()
                raise StartupError("the HTTP server ended unexpectedly")
            logger.error("the engine is gone: %s", engine.result())
            server.drain(0.0)
            server.stop_accepting()
            await asyncio.wait({http}, timeout=FLUSH_S)
            await server.cut(http, FLUSH_S)
            return 1
        finally:
            tasks = (engine, http, ready, stop)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce(self, client: ZmqEngineClient, server: HttpServer) -> None:
        """Print the ready line. Never returns when the engine dies first: `_serve` watches for that."""
        deadline_s = self._config.server.start_deadline_s
        try:
            ready = await client.wait_ready(deadline_s)
            await server.up.wait()
            await server.load_adapters()
        except EngineUnavailable:
            await asyncio.Event().wait()
            return
        except TimeoutError as error:
            raise StartupError(f"the engine was not ready after {deadline_s:g} s: raise --start-deadline-s") from error
        gc.collect()
        gc.freeze()  # 100,000s of objects of libraries: a collection that reads them delays all streams
        role, node_id = self._config.server.role, self._config.server.node_id
        sys.stdout.write(
            f"ready: {role} node {node_id} on {server.url} (engine {ready.engine_id}, epoch {ready.epoch:x}, "
            f"{ready.num_blocks} blocks of {ready.block_size} tokens, connector {ready.connector})\n"
        )
        sys.stdout.flush()

    async def _drain(self, client: ZmqEngineClient, server: HttpServer, http: asyncio.Task[None]) -> None:
        drain_s = 0.0 if self._orphaned.is_set() or not client.alive else self._config.server.drain_s
        logger.info("stopping: running requests and leases have %g s; a second signal ends them at once", drain_s)
        server.drain()
        idle = asyncio.create_task(_to_end(server, http, client))
        hurry = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait({idle, hurry}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (idle, hurry):
                task.cancel()
        await server.cut(http, FLUSH_S)

    def _on_signal(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()


async def _to_end(server: HttpServer, http: asyncio.Task[None], client: ZmqEngineClient) -> None:
    """Wait for the last request, then until no other node has blocks of this node to read, then for the server.

    This order is needed: a prefill's answer ends when it is computed, and its blocks are leased after that. So older
    statistics do not count. The engine has `news_s` to send new ones; it sends none when nothing has changed.
    """
    news_s = 2 * HEARTBEAT_S if server.is_busy else LEASE_POLL_S
    # polled, because neither the requests nor the leases, which show in the statistics only, set an event
    while server.is_busy:  # noqa: ASYNC110
        await asyncio.sleep(LEASE_POLL_S)
    last = client.stats
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(news_s):
            while client.alive and client.stats is last:  # noqa: ASYNC110
                await asyncio.sleep(LEASE_POLL_S)
    while client.alive and client.stats is not None and client.stats.kv.leased > 0:  # noqa: ASYNC110
        await asyncio.sleep(LEASE_POLL_S)
    server.stop_accepting()
    await asyncio.wait({http})
