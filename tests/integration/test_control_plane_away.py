"""Two routers and real nodes, asked without a pause, while the API server is away, errs, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.cluster import READY_DEADLINE_S, Launched, Launcher
from tests.router.fake_kubernetes import FakeKubernetes, kubernetes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio]
logger = logging.getLogger(__name__)
BODY = {"model": "demo_model", "prompt": "Mira 4831. Oskar 2210.", "max_tokens": 4, "temperature": 0}
NODE_FLAGS = ("--kv-cache-gb=0.05", "--max-model-len=512", "--max-num-seqs=16")
WAIT_S = 90.0
NUM_CLIENTS = 2  # of each router
AWAY_S, NOT_READY_S = 120.0, 60.0  # as on a real cluster, where kubelets needed 45 s
SHORT_S = 3.0  # three looks at an API server that is away


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Load:
    """Clients that ask each router again as soon as it has answered."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._session = session
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, url: str) -> None:
        self._tasks += [asyncio.create_task(self._ask(url)) for _ in range(NUM_CLIENTS)]

    async def _ask(self, url: str) -> None:
        begun_s = time.monotonic()
        while True:
            try:
                async with self._session.post(f"{url}/v1/completions", json=BODY) as answer:
                    text = await answer.text()
                    status: object = answer.status
            except aiohttp.ClientError as error:
                text, status = "", repr(error)
            if status == 200:
                self.answered[url] += 1
            else:
                self.failed.append(f"{time.monotonic() - begun_s:.1f} s: {url} {status} {text[:200]}")
                await asyncio.sleep(0.1)

    async def more(self, number: int = 8) -> None:
        """Until each router has answered so many requests more."""
        before = self.answered.copy()
        await until(lambda: all(self.answered[url] >= before[url] + number for url in before))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the routers are other processes
            await asyncio.sleep(0.05)


class Cluster:
    """Nodes in pods, and routers that find them there."""

    def __init__(self, launcher: Launcher, fake: FakeKubernetes, config: Path, session: aiohttp.ClientSession) -> None:
        self._launcher, self._config, self._session = launcher, config, session
        self.fake = fake
        self.load = Load(session)
        self.routers: list[Launched] = []
        self.names: list[str] = []

    async def start_nodes(self, num_decode: int) -> None:
        roles = {"p-0": "prefill"} | {f"d-{number}": "decode" for number in range(num_decode)}
        nodes = {
            name: self._launcher.node(role, *NODE_FLAGS, f"--node-id={name}", wait=False)
            for name, role in roles.items()
        }
        for name, node in nodes.items():
            await asyncio.to_thread(node.wait_line, "ready: ", READY_DEADLINE_S)
            await self.fake.put(name, roles[name], port=int(node.url.rpartition(":")[2]))
        self.names = sorted(nodes)

    async def start_router(self) -> Launched:
        router = self._launcher.command(
            "router", "--port=0", f"--kubernetes-namespace={self.fake.namespace}",
            environment={"KUBECONFIG": str(self._config)},
        )  # fmt: skip
        await asyncio.to_thread(router.wait_line, "router ready on ", READY_DEADLINE_S)
        self.routers.append(router)
        return router

    async def figure(self, url: str, name: str) -> float:
        """The gauge `name` of the router's source."""
        async with self._session.get(f"{url}/metrics") as answer:
            found = re.search(rf'^{name}{{source="kubernetes"}} (\S+)$', await answer.text(), re.MULTILINE)
        assert found, name
        return float(found[1])

    async def figures_reach(self, name: str, least: float, most: float = 1e9) -> None:
        for router in self.routers:
            async with asyncio.timeout(WAIT_S):
                while not least <= await self.figure(router.url, name) <= most:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.1)

    async def check(self) -> None:
        """Nothing has failed, and no router has ever let a node go."""
        await self.load.more()
        assert not self.load.failed, (len(self.load.failed), self.load.failed[:3], self.load.failed[-1])
        for router in self.routers:
            assert "was removed" not in router.output, router.output
            async with self._session.get(f"{router.url}/nodes") as answer:
                nodes: list[dict[str, Any]] = (await answer.json())["nodes"]
            assert sorted(node["node_id"] for node in nodes if node["healthy"]) == self.names


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, num_decode: int) -> AsyncIterator[Cluster]:
    with Launcher() as launcher:
        async with kubernetes() as (fake, _), aiohttp.ClientSession() as session:
            config = tmp_path / "kubeconfig"
            config.write_text(json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": fake.url}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }))  # fmt: skip
            made = Cluster(launcher, fake, config, session)
            await made.start_nodes(num_decode)
            try:
                for _ in range(2):
                    made.load.ask((await made.start_router()).url)
                await until(lambda: len(made.load.answered) == 2)
                yield made
            finally:
                await made.load.close()
                await asyncio.to_thread(launcher.close)


@pytest.mark.timeout(300)
async def test_no_trouble_of_the_api_server_fails_a_request(tmp_path: Path) -> None:
    """The quick tests of sources_away hold each of these troubles with a router in the process."""
    async with cluster(tmp_path, num_decode=1) as made:
        fake, load = made.fake, made.load
        await fake.leave()
        await made.figures_reach("pd_router_source_age_seconds", SHORT_S)
        await fake.mark_all(ready=False)
        await fake.come_back()
        await made.figures_reach("pd_router_source_age_seconds", 0.0, 1.0)
        load.ask((await made.start_router()).url)  # it has known no pod as ready
        await until(lambda: len(load.answered) == 3)
        await made.check()
        num_watches = len(fake.watches)
        await fake.put("web-0", part="router")
        fake.compact()
        await fake.end()  # 410 is the answer to the next watch
        await until(lambda: len(fake.watches) >= num_watches + 3)
        for _ in range(3):
            await fake.drop()
            await load.more()
        fake.failing_with = 403
        await fake.drop()
        await made.figures_reach("pd_router_source_age_seconds", SHORT_S)
        fake.failing_with, fake.lists_nothing = 0, True
        await made.figures_reach("pd_router_source_doubted", 1.0)
        await made.check()
        fake.lists_nothing = False
        await fake.drop()
        await made.figures_reach("pd_router_source_doubted", 0.0, 0.0)
        await fake.mark_all(ready=True)
        await made.check()


@pytest.mark.timeout(600)
async def test_an_outage_of_two_minutes_and_a_minute_of_pods_that_are_not_ready(tmp_path: Path) -> None:
    async with cluster(tmp_path, num_decode=2) as made:
        await made.fake.leave()
        await asyncio.sleep(AWAY_S)
        logger.info("away: %d answered, %d failed", made.load.answered.total(), len(made.load.failed))
        await made.fake.mark_all(ready=False)
        await made.fake.come_back()
        await asyncio.sleep(NOT_READY_S)
        await made.fake.mark_all(ready=True)
        await asyncio.sleep(SHORT_S)
        logger.info("in all: %d answered, %d failed", made.load.answered.total(), len(made.load.failed))
        await made.check()
