"""`python -m tests.one_process`: a prefill node, a decode node and the router in one process, for a debugger.

All of them run in one event loop, on one thread: a breakpoint anywhere stops all three. The engines, the HTTP servers
and the router are the real ones. The engines are driven by the loop (`InLoopEngine`), instead of processes of their
own. KV goes from one engine's cache to the other's through the connector `loopback`, or through `nixl`: both allow
several nodes in a process. The connectors' control threads run on while a debugger holds the loop.

`--stop PLACE` calls `breakpoint()` at a place of STOPS, so PYTHONBREAKPOINT and a debugger that is attached decide what
it does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pd_cluster
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig, ServerConfig
from pd_cluster.launch.http_server import HttpServer
from pd_cluster.protocol.messages import EngineReady
from pd_cluster.server import app
from pd_cluster.server.requests import prefill_client
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors import p2p
from pd_connectors.base import ConnectorContext
from pd_connectors.loopback import LoopbackNetwork
from pd_connectors.protocol.keys import load_cluster_key
from pd_connectors.registry import create_connector
from pd_http.sockets import bound
from pd_router.policy.cost_policy import CostPolicy
from tests.deadlines import HANG_S, until
from tests.in_loop_engine import InLoopEngine
from tests.router.router_process import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence

    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.executor import Pending
    from pd_connectors.base import Connector
    from tests.router.router_process import Router

STOPS = {
    "router": "the router chooses the nodes of a request (`CostPolicy.choose`)",
    "prefill": "the prefill node launches the first step of a prompt (`DeviceExecutor.launch`)",
    "decode": "the decode node launches the first step of a sequence that it took over",
}
STOPPED_S = 600.0  # how long a stop may last: a ticket lives no longer
DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"


@dataclass(frozen=True)
class InLoopNode:
    """A node. `engine_id` of its connector, and its id for the router, are its role."""

    url: str
    engine: InLoopEngine
    executor: DeviceExecutor
    connector: Connector


@dataclass(frozen=True)
class OneProcess:
    """Everything that a debugger may want to look at."""

    router: Router
    prefill: InLoopNode
    decode: InLoopNode


class StoppingExecutor:
    """Wraps a DeviceExecutor: before a step with a sequence that is new to the worker it calls `stop`."""

    def __init__(self, executor: DeviceExecutor, stop: Callable[[], object]) -> None:
        self._executor, self._stop = executor, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, batch: Batch, deadline_s: float = inf) -> Pending:
        if batch.starts:
            self._stop()
        return self._executor.launch(batch, deadline_s)


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """While it lasts, no part takes another one for dead or frozen that a debugger has stopped."""
    with (
        mock.patch.object(p2p, "SILENCE_S", STOPPED_S),
        mock.patch.object(prefill_client, "PEER_SILENCE_S", STOPPED_S),
        mock.patch.object(app, "CONNECT_DEADLINE_S", STOPPED_S),
    ):
        yield


@contextlib.contextmanager
def stopping_policy(stop: Callable[[], object]) -> Iterator[None]:
    """While it lasts, a router calls `stop` before it chooses nodes."""
    choose = CostPolicy.choose

    def stop_and_choose(policy: CostPolicy, *args: Any) -> Any:
        stop()
        return choose(policy, *args)

    with mock.patch.object(CostPolicy, "choose", stop_and_choose):
        yield


@contextlib.asynccontextmanager
async def one_process(
    model: str,
    stops: Collection[str] = (),
    stop: Callable[[], object] = breakpoint,
    *,
    connector: str = "loopback",
    route: str = "p-first",
) -> AsyncIterator[OneProcess]:
    """`model`: its directory. `stop`: called at each place of `stops`. Raises StartupError."""
    network = LoopbackNetwork()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patient())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="one-process-")))
        (folder / "key").write_text("one process")
        nodes = []
        for role in ("prefill", "decode"):
            config = _config(model, role, str(folder / "key"), connector)
            nodes.append(await stack.enter_async_context(_node(config, network, stop if role in stops else None)))
        if "router" in stops:
            stack.enter_context(stopping_policy(stop))
        router = await stack.enter_async_context(
            serving(
                nodes[:1], nodes[1:], key=load_cluster_key(str(folder / "key")), route=route,
                decode_on_prefill="never", ticket_timeout_s=STOPPED_S, first_byte_timeout_s=STOPPED_S,
                response_timeout_s=STOPPED_S, idle_timeout_s=STOPPED_S, control_timeout_s=STOPPED_S,
                health_timeout_s=STOPPED_S, probe_timeout_s=STOPPED_S,
            )
        )  # fmt: skip
        yield OneProcess(router, *nodes)


def _config(model: str, role: str, key_file: str, connector: str) -> NodeConfig:
    return NodeConfig(
        model=ModelConfig(
            model=model, served_model_name=(Path(model).name,), device="cpu", dtype="float32", num_threads=1
        ),
        cache=CacheConfig(num_blocks=256, block_size=16),
        scheduler=SchedulerConfig(async_scheduling="off"),
        handoff=HandoffConfig(
            connector=connector, cluster_key_file=key_file, lease_ttl_s=STOPPED_S, load_deadline_s=STOPPED_S,
            read_deadline_s=STOPPED_S, min_remote_tokens=1,
        ),
        server=ServerConfig(role=role, node_id=role),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _node(
    config: NodeConfig, network: LoopbackNetwork, stop: Callable[[], object] | None
) -> AsyncIterator[InLoopNode]:
    role = config.server.role
    async with contextlib.AsyncExitStack() as stack:
        executor = DeviceExecutor.started(config, lambda text: None)
        stack.callback(executor.close)
        context = _context(executor, network)
        connector = create_connector(config.handoff.connector, context)
        stack.callback(connector.close)
        connector.register_kv_cache(executor.cache)
        stopping: Any = executor if stop is None else StoppingExecutor(executor, stop)
        engine = InLoopEngine(executor.config, stopping, connector)
        engine.ready = _ready(executor, context, connector.control_port)
        steps = asyncio.create_task(engine.run(), name=f"steps of {role}")
        stack.push_async_callback(_cancelled, steps)
        await until(lambda: engine.stats is not None, poll_s=0)
        server = HttpServer(executor.config, stack.enter_context(bound("127.0.0.1", 0)), engine)
        served = asyncio.create_task(server.run(), name=f"HTTP of {role}")
        stack.push_async_callback(server.cut, served, HANG_S)
        await until(lambda: server.up.is_set() or served.done(), poll_s=0)
        if served.done():
            served.result()
        yield InLoopNode(server.url, engine, executor, connector)


def _context(executor: DeviceExecutor, network: LoopbackNetwork) -> ConnectorContext:
    handoff, server = executor.config.handoff, executor.config.server
    options = (("network", network),) if handoff.connector == "loopback" else ()
    return ConnectorContext(
        engine_id=server.node_id, epoch=1, fingerprint=executor.model.fingerprint, layout=executor.cache.layout,
        cluster_key=load_cluster_key(handoff.cluster_key_file), host="127.0.0.1", port=0,
        lease_ttl_s=handoff.lease_ttl_s, read_deadline_s=STOPPED_S, connect_deadline_s=STOPPED_S, silence_s=STOPPED_S,
        confirm_deadline_s=STOPPED_S, options=options,
    )  # fmt: skip


def _ready(executor: DeviceExecutor, context: ConnectorContext, control_port: int) -> EngineReady:
    cache, scheduler = executor.config.cache, executor.config.scheduler
    return EngineReady(
        context.engine_id, context.epoch, cache.num_blocks, executor.block_size, executor.model.max_model_len,
        context.fingerprint, executor.config.handoff.connector, control_port, scheduler.max_num_seqs,
    )  # fmt: skip


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.one_process",
        description="A prefill node, a decode node and the router in one process, for a debugger.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="places:\n" + "".join(f"  {name:8}  {text}\n" for name, text in STOPS.items()),
    )
    parser.add_argument("--model", default=str(DEMO_MODEL), help="Model directory. Default: the demo model.")
    parser.add_argument("--connector", default="loopback", choices=("loopback", "nixl"), help="What moves the KV.")
    parser.add_argument("--route", default="p-first", choices=("p-first", "d-first"), help="See `pd-cluster router`.")
    parser.add_argument(
        "--stop", action="append", default=[], choices=STOPS, help="Call breakpoint() there; may be repeated."
    )
    args = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    async with one_process(args.model, args.stop, connector=args.connector, route=args.route) as cluster:
        sys.stdout.write(
            f"router {cluster.router.url}, prefill {cluster.prefill.url}, decode {cluster.decode.url}\n"
            f"curl {cluster.router.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
            """'{"messages": [{"role": "user", "content": "Mira 4831. Oskar 2210. Lena 7745. Oskar?"}]}'\n"""
        )
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
