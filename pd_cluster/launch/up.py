"""`pd-cluster up`: a whole cluster on one machine, as long as this process lives.

This process owns the addresses, and `Keeper` restarts a process that died at the same address. While the router is
down, new connections wait in its socket, which this process keeps open. While a node is down, connections to it are
refused at once, and the router asks another node (`sockets.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.launch import preflight
from pd_cluster.launch.balance_flags import BALANCE_READY
from pd_cluster.launch.display import Display
from pd_cluster.launch.flags import config_from, given_flags
from pd_cluster.launch.keeper import Keeper, Service
from pd_cluster.launch.model_path import resolve_model, served_name
from pd_cluster.launch.node_plan import DRAIN_S, NODE_HOST, plan_nodes, role_plans, role_problems, visible_gpus
from pd_cluster.launch.restarts import Restarts
from pd_cluster.launch.sockets import listen, port_of, reserve
from pd_cluster.launch.supervise import Supervisor, describe_death
from pd_cluster.launch.up_flags import OTHER_ROUTER_SETTINGS, POOL_CONNECTORS, POOL_READY, ROUTER_SETTINGS
from pd_connectors.protocol.keys import KEY_ENV
from pd_http.settings import refuse
from pd_router.admission.key_file import KeyFile
from pd_router.config import RouterConfig

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Mapping, Sequence

    from pd_cluster.config import NodeConfig
    from pd_cluster.launch.node_plan import NodePlan
    from pd_cluster.launch.supervise import Child

STOP_MARGIN_S = 15.0  # after the drain, for the engine's stop
ROUTER_DEADLINE_S = 60.0
POOL_DEADLINE_S = 60.0
HEALTH_TIMEOUT_S = 2.0
HEALTH_PERIOD_S = 0.1
QUESTION = "Mira 4831. Oskar 2210. Lena 7745. Oskar?"


def run_up(namespace: argparse.Namespace) -> int:
    """Run the cluster until Ctrl-C (returns 0) or until it can no longer serve (returns 1). Raises StartupError."""
    flags = given_flags(namespace, skip=("host", "port", "served_model_name", "tp", *ROUTER_SETTINGS))
    config = config_from(namespace)
    roles = role_plans(namespace, config.model.tp)
    key_file, machine = config.handoff.cluster_key_file, preflight.MachineFacts()
    problems = [
        *role_problems(roles, config, preflight.setting_problems),
        *role_problems(roles, config, lambda settings: preflight.machine_problems(settings, machine)),
    ]
    nodes = [plan.settings(config) for plan in roles.values() for _ in range(plan.count)]
    if namespace.balance and not (config.scheduler.slo_ttft_ms and config.scheduler.slo_tpot_ms):
        problems.append("--balance needs --slo-ttft-ms and --slo-tpot-ms: it predicts how many requests meet them")
    problems = problems or [*preflight.shared_memory_problems(nodes, machine)]
    problems += preflight.tls_problems(config)  # of the router: nodes get no certificate
    refuse([*problems, *(preflight.key_problems(key_file) if key_file else ())])
    if api_keys := getattr(namespace, "api_keys", ""):
        KeyFile(api_keys)  # its errors are told before anything starts
    with contextlib.ExitStack() as sockets:
        # opened before anything slow starts, so that a taken port is reported at once and early clients wait
        listener = sockets.enter_context(contextlib.closing(listen(namespace.host, namespace.port)))
        model = resolve_model(config.model.model)  # once here, so that not every node downloads it
        refuse(role_problems(roles, config, lambda settings: preflight.model_problems(settings, model)))
        gpus = [] if config.model.device == "cpu" else visible_gpus(os.environ)
        names = config.model.served_model_name or (served_name(config.model.model, model),)
        flags += [f"--model={model}", *(f"--served-model-name={name}" for name in names)]
        plans = plan_nodes(roles, flags, gpus, len(os.sched_getaffinity(0)))
        addresses = [sockets.enter_context(contextlib.closing(reserve(NODE_HOST))) for _ in plans]
        plans = [replace(plan, port=port_of(address)) for plan, address in zip(plans, addresses, strict=True)]
        display = sockets.enter_context(Display(quiet=namespace.quiet))
        return asyncio.run(_Cluster(namespace, config, plans, listener, names[0], display).run())


def abilities(plans: Sequence[NodePlan]) -> dict[str, list[str]]:
    """Tasks that the cluster must be able to do -> processes that can. The pool is not needed."""
    roles = {"prefill": ("prefill",), "decode": ("decode", "mixed")}
    able = {ability: [plan.name for plan in plans if plan.role in named] for ability, named in roles.items()}
    return {**{ability: names for ability, names in able.items() if names}, "route": ["router"]}


def stop_signals() -> list[signal.Signals]:
    """Signals that stop the cluster. SIGHUP is left out where it is ignored, as under nohup."""
    signals = [signal.SIGINT, signal.SIGTERM]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


class _Cluster:
    def __init__(
        self,
        namespace: argparse.Namespace,
        config: NodeConfig,
        plans: Sequence[NodePlan],
        listener: socket.socket,
        model_name: str,
        display: Display,
    ) -> None:
        self._namespace = namespace
        self._model_name = model_name
        self._config = config
        self._plans = plans
        self._listener = listener
        self._display = display
        self._drain_s = config.server.drain_s if hasattr(namespace, "drain_s") else DRAIN_S
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in stop_signals():
            loop.add_signal_handler(signum, self._on_signal)
        async with Supervisor(self._display.line) as supervisor:
            keeper = Keeper(supervisor, Restarts(abilities(self._plans)), self._display.say)
            stop = asyncio.create_task(self._stop.wait())
            start = asyncio.create_task(self._start(supervisor, keeper))
            keep: asyncio.Task[str] | None = None
            try:
                await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
                if start.done():
                    start.result()
                    self._greet()
                    keep = asyncio.create_task(keeper.run())
                    await asyncio.wait({keep, stop}, return_when=asyncio.FIRST_COMPLETED)
                    if not stop.done():
                        self._display.say(f"{keep.result()}: stopping the cluster")
            finally:
                tasks = [task for task in (start, keep) if task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._shut_down(supervisor)
            return 0 if stop.done() else 1

    async def _start(self, supervisor: Supervisor, keeper: Keeper) -> None:
        """Start all processes. Raises StartupError when one fails: first starts are not repeated."""
        key = {KEY_ENV: os.environ.get(KEY_ENV) or secrets.token_hex(32)}
        self._display.status(f"starting {', '.join(plan.name for plan in self._plans)}")
        pool_flags = await self._start_pool(supervisor, keeper)
        deadline_s = self._config.server.start_deadline_s
        nodes = [await keeper.start(self._node(plan, pool_flags, key)) for plan in self._plans]
        await supervisor.wait_ready(nodes, deadline_s)
        self._display.status("starting the router")
        await supervisor.wait_ready([await keeper.start(self._router(key))], ROUTER_DEADLINE_S)
        await self._wait_healthy(supervisor, self._url)
        if self._namespace.balance:
            await supervisor.wait_ready([await keeper.start(self._balance(key))], ROUTER_DEADLINE_S)

    async def _start_pool(self, supervisor: Supervisor, keeper: Keeper) -> tuple[str, ...]:
        """Start a pool for the nodes, unless they need none or have one. Returns the nodes' flags for it."""
        if self._config.handoff.connector not in POOL_CONNECTORS or self._config.handoff.pool_url:
            return ()
        max_gb = f"--max-gb={self._namespace.pool_gb:g}"
        arguments = (*_SELF, "pool", f"--connector={self._config.handoff.connector}", f"--host={NODE_HOST}", max_gb)
        pool = await keeper.start(Service("pool", (*arguments, "--port=0"), POOL_READY, POOL_DEADLINE_S))
        await supervisor.wait_ready([pool], POOL_DEADLINE_S)
        url = pool.ready.result().rpartition(" ")[2]
        keeper.revise("pool", (*arguments, f"--port={url.rpartition(':')[2]}"))  # the same port after a restart
        return (f"--pool-url={url}",)

    def _node(self, plan: NodePlan, pool_flags: Sequence[str], key: Mapping[str, str]) -> Service:
        environment = {**key} if plan.devices is None else {**key, "CUDA_VISIBLE_DEVICES": plan.devices}
        address = (f"--host={NODE_HOST}", f"--port={plan.port}")
        arguments = (*_SELF, plan.role, *address, *plan.flags, *pool_flags)
        return Service(plan.name, arguments, "ready: ", self._config.server.start_deadline_s, environment)

    def _balance(self, key: Mapping[str, str]) -> Service:
        limits, handoff, http = self._config.scheduler, self._config.handoff, self._config.http
        targets = (f"--slo-ttft-ms={limits.slo_ttft_ms:g}", f"--slo-tpot-ms={limits.slo_tpot_ms:g}")
        arguments = [*_SELF, "balance", f"--router={self._url}", *targets]
        arguments += [f"--cluster-key-file={handoff.cluster_key_file}"] if handoff.cluster_key_file else []
        arguments += [f"--tls-ca={http.tls_cert}"] if http.tls_cert else []
        return Service("balance", tuple(arguments), BALANCE_READY, ROUTER_DEADLINE_S, key)

    def _router(self, key: Mapping[str, str]) -> Service:
        fd = self._listener.fileno()
        arguments = [*_SELF, "router", f"--listen-fd={fd}", f"--drain-s={self._drain_s:g}", "--linger-s=0"]
        arguments += [f"--allowed-origins={origin}" for origin in self._config.http.allowed_origins]
        arguments += [f"--{plan.role}={plan.url}" for plan in self._plans]
        arguments += given_flags(self._namespace, OTHER_ROUTER_SETTINGS, (RouterConfig,))
        if self._config.scheduler.slo_ttft_ms:
            arguments.append(f"--slo-ttft-ms={self._config.scheduler.slo_ttft_ms:g}")
        if self._config.handoff.cluster_key_file:
            arguments.append(f"--cluster-key-file={self._config.handoff.cluster_key_file}")
        return Service("router", tuple(arguments), "router ready on ", ROUTER_DEADLINE_S, key, (fd,))

    @property
    def _url(self) -> str:
        host = self._namespace.host
        return f"{self._config.http.scheme}://{f'[{host}]' if ':' in host else host}:{port_of(self._listener)}"

    async def _wait_healthy(self, supervisor: Supervisor, url: str) -> None:
        death = asyncio.create_task(supervisor.first_death())
        try:
            async with asyncio.timeout(ROUTER_DEADLINE_S):
                while not await asyncio.to_thread(_healthy, url, len(self._plans)):
                    if death.done():
                        raise StartupError(f"{describe_death(death.result())} before the cluster was healthy")
                    await asyncio.sleep(HEALTH_PERIOD_S)
        except TimeoutError as error:
            raise StartupError(f"the router at {url} was not healthy after {ROUTER_DEADLINE_S:g} s") from error
        finally:
            death.cancel()

    def _greet(self) -> None:
        self._display.status("")
        url, name, demo = self._url, self._model_name, not self._config.model.model
        has_keys = hasattr(self._namespace, "api_keys")
        self._display.say(f"ready: {url} serves {name} on {', '.join(plan.name for plan in self._plans)}")
        self._display.say("try it:")
        self._display.say(f"  {curl_line(url, name, demo, has_keys=has_keys)}")
        if demo:
            self._display.say("  (the demo model answers: Oskar 2210)")
        self._display.say(f"see it: {url}/dashboard")
        self._display.say("Ctrl-C stops everything")

    async def _shut_down(self, supervisor: Supervisor) -> None:
        self._display.status("stopping (Ctrl-C again: at once)")
        self._listener.close()  # the router's copy is the last one then: its end refuses new connections
        drain_s = self._drain_s
        routers = [child for child in supervisor.children if child.name in ("router", "balance")]
        pools = [child for child in supervisor.children if child.name == "pool"]
        nodes = [child for child in supervisor.children if child not in (*routers, *pools)]
        killed: list[Child] = []
        # the router first, so that no new requests come while the nodes finish theirs
        for group in (routers, nodes, pools):
            killed += await supervisor.stop(group, drain_s + STOP_MARGIN_S, self._hurry)
        self._display.status("")
        names = ", ".join(child.name for child in killed)
        self._display.say(f"stopped; had to kill {names}" if killed else "stopped")

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()


_SELF = (sys.executable, "-P", "-m", "pd_cluster.launch.cli")


def curl_line(url: str, model: str, demo: bool, *, has_keys: bool = False) -> str:
    """A request to try, quoted for a shell. `has_keys`: the client's API key is in its variable KEY."""
    content = QUESTION if demo else "Tell me about the sea."
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 32, "temperature": 0}
    headers = "-H 'Content-Type: application/json'" + (' -H "Authorization: Bearer $KEY"' if has_keys else "")
    return f"curl {url}/v1/chat/completions {headers} -d {shlex.quote(json.dumps(body))}"


def _healthy(url: str, num_nodes: int) -> bool:
    """Whether the router serves, from all nodes: prefill nodes alone serve, too."""
    # The certificate need not name this address: the router listens on a socket that this process has opened
    own_router = ssl.create_default_context()
    own_router.check_hostname, own_router.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # none, whatever the environment names
        urllib.request.HTTPSHandler(context=own_router),
    )
    try:
        with opener.open(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            healthy: dict[str, int] = json.load(answer).get("healthy", {})
            return answer.status == 200 and sum(healthy.values()) >= num_nodes
    except (urllib.error.URLError, OSError, ValueError):
        return False
