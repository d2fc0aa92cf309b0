"""A prefill node, a decode node and a router, each on a host of its own: the commands of a real cluster."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cluster import CLI, REAL, base_environment
from tests.deadlines import COMMAND_S, HANG_S, until
from tests.integration.fault_cluster import LOAD_DEADLINE_S, parse_metrics
from tests.integration.two_hosts.network import HostNetwork, NoNamespaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.cluster import Launched, Launcher
    from tests.integration.two_hosts.load import Load, Seen

NAMES = ("p", "d", "r")
ENTERED = "tests.integration.two_hosts.entered"
ROLES = {"p": "prefill", "d": "decode"}
HTTP_PORT, CONTROL_PORT, KV_PORTS = 8100, 8101, (45010, 45019)
SUMMARY = "GITHUB_STEP_SUMMARY"  # a file: what a CI job shows
HELD = ("pd_num_running", "pd_num_waiting", "pd_num_waiting_for_remote_kv", "pd_loads_open", "pd_leases_open",
        *(f'pd_kv_blocks{{state="{state}"}}' for state in ("in_use", "leased", "quarantined")))  # fmt: skip


@contextlib.contextmanager
def three_hosts() -> Iterator[HostNetwork]:
    """The hosts; this thread is at their hub. Skips the test where they cannot be made, and has CI's summary say so."""
    network = HostNetwork(*NAMES)
    try:
        network.__enter__()
    except NoNamespaces as error:
        reason = f"no network namespaces here: {error}"
        if os.environ.get(SUMMARY):
            with open(os.environ[SUMMARY], "a") as summary:
                summary.write(f"- **Skipped: two hosts** (`tests/integration/two_hosts`): {reason}\n")
        pytest.skip(reason)
    with contextlib.closing(network), network.entered():
        yield network


class HostCluster:
    """`family`: "v4", "v6", or "name": how nodes are advertised and told to the router.

    `advertised`: other addresses that nodes tell. `starts`: False for a cluster of which only `check` runs.
    """

    def __init__(
        self,
        launcher: Launcher,
        network: HostNetwork,
        family: str = "v4",
        *,
        advertised: Mapping[str, str] | None = None,
        starts: bool = True,
    ) -> None:
        self.network = network
        self._launcher = launcher
        self._family = family
        if not starts:
            return
        told = {name: self._host(name) for name in ROLES} | dict(advertised or {})
        nodes = {name: self.start_node(name, told[name]) for name in ROLES}
        for node in nodes.values():
            node.wait_line("ready: ")
        self.router = self.start_router()
        self.processes: dict[str, Launched] = {**nodes, "r": self.router}
        self._families = {name: sorted(one.pid for one in node.family()) for name, node in nodes.items()}

    def start_node(self, name: str, advertised: str) -> Launched:
        """`advertised`: the address that it tells others."""
        listen = self.network.address(name, v6=self._family == "v6")
        arguments = [
            ROLES[name], f"--host={listen}", f"--port={HTTP_PORT}", f"--advertise-host={advertised}",
            f"--control-port={CONTROL_PORT}", f"--kv-ports={KV_PORTS[0]}-{KV_PORTS[1]}", f"--node-id={ROLES[name]}",
            "--num-threads=1", "--device=cpu", "--kv-cache-gb=0.15", f"--load-deadline-s={LOAD_DEADLINE_S:g}",
            "--max-num-seqs=16", "--min-remote-tokens=1",
        ]  # fmt: skip
        return self._launch(name, name, arguments)

    def start_router(self) -> Launched:
        listen = self.network.address("r", v6=self._family == "v6")
        nodes = [f"--{role}=http://{_bracketed(self._host(name))}:{HTTP_PORT}" for name, role in ROLES.items()]
        flags = [f"--host={listen}", "--port=8000", "--linger-s=1", "--prefill-on-decode=never"]
        router = self._launch("router", "r", ["router", *flags, *nodes])
        router.wait_line("router ready on ")
        return router

    def _launch(self, name: str, host: str, arguments: Sequence[str]) -> Launched:
        """`pd-cluster` on a host, forked: see entered.py."""
        if REAL:
            return self._launcher.start(name, self.network.command(host, [*CLI, *arguments]))
        return self._launcher.module(name, ENTERED, self.network.namespace(host), *arguments)

    def url(self, name: str) -> str:
        """As the hub reaches it."""
        host = _bracketed(self.network.address(name, v6=self._family == "v6"))
        return f"http://{host}:{8000 if name == 'r' else HTTP_PORT}"

    def check(self, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """`pd-cluster check` on a host."""
        advertised = f"--advertise-host={self._host(name)}"
        command = [*CLI, "check", "--skip-model", advertised, f"--kv-ports={KV_PORTS[0] + 5}-{KV_PORTS[1]}", *flags]
        return subprocess.run(
            self.network.command(name, command), capture_output=True, text=True, env=base_environment(),
            timeout=COMMAND_S,
        )  # fmt: skip

    def offer_link(self, name: str) -> Launched:
        command = [*CLI, "check", "--offer-link", f"--advertise-host={self._host(name)}",
                   f"--kv-ports={KV_PORTS[0] + 5}-{KV_PORTS[1]}"]  # fmt: skip
        return self._launcher.start("offer", self.network.command(name, command))

    def listening(self, name: str) -> set[tuple[str, int]]:
        """Address and port of every TCP socket on which anything of the host listens."""
        done = subprocess.run(
            self.network.command(name, ["ss", "-Hltn"]), capture_output=True, text=True, check=True
        ).stdout
        places = (line.split()[3].rpartition(":") for line in done.splitlines())
        return {(address.strip("[]"), int(port)) for address, _, port in places}

    def restarted(self) -> list[str]:
        """Hosts of which a process has ended or is another than at the start."""
        ended = [name for name, process in self.processes.items() if process.returncode is not None]
        now = {name: sorted(one.pid for one in self.processes[name].family()) for name in ROLES}
        return ended + [name for name, pids in now.items() if pids != self._families[name]]

    # in a thread that has entered the hub

    async def metrics(self, name: str) -> dict[str, float]:
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
            return parse_metrics((await client.get(f"{self.url(name)}/metrics")).raise_for_status().text)

    async def fallbacks(self) -> float:
        """How often D did without the KV of P, so far."""
        told = await self.metrics("d")
        return sum(value for name, value in told.items() if name.startswith("pd_handoff_fallbacks_total"))

    async def has_continued(self) -> bool:
        """Whether a stream went on at another node."""
        return (await self.metrics("r")).get('pd_router_continuations_total{outcome="continued"}', 0) > 0

    async def hands_over_again(self, load: Load, seen: Seen) -> None:
        """Ask until D has read KV of P."""
        before = (await self.metrics("d"))["pd_loads_done_total"]

        async def is_read() -> bool:
            await load.ask(seen)
            return (await self.metrics("d"))["pd_loads_done_total"] > before

        await until(is_read, lambda: f"P hands nothing over to D: {seen}")

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """The router's view, by role."""
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
            told = (await client.get(f"{self.url('r')}/nodes")).raise_for_status().json()["nodes"]
        return {node["role"]: node for node in told}

    async def wait_clean(self) -> None:
        """Until neither node holds anything for a request."""
        found: dict[str, dict[str, float]] = {}

        async def is_clean() -> bool:
            for name in ROLES:
                told = await self.metrics(name)
                found[name] = {metric: told[metric] for metric in HELD if told.get(metric)}
            return not any(found.values())

        await until(is_clean, lambda: f"blocks or requests are held: {found}")

    async def wait_healthy(self, role: str, healthy: bool = True) -> None:
        async def agrees() -> bool:
            return bool((await self.nodes())[role]["healthy"] is healthy)

        await until(agrees, f"the router takes {role} for {'healthy' if healthy else 'down'}")

    def _host(self, name: str) -> str:
        network = self.network
        return network.hostname(name) if self._family == "name" else network.address(name, v6=self._family == "v6")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
