"""`--workers 2`: one port, orders for all, and a worker that dies breaks only its own connections."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from typing import TYPE_CHECKING

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_connectors.protocol.keys import derive_key
from pd_router.process.worker_messages import WORKER_ENV
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import signed
from tests.router.test_succession import BODY, DEADLINE_S, HELD, KEY, decode, hammering, routers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.test_succession import Routers

pytestmark = [pytest.mark.anyio, pytest.mark.integration]
KEY_BYTES = derive_key(KEY)


def workers_of(router: Routers) -> dict[int, psutil.Process]:
    """The worker processes by number."""
    children = psutil.Process(router.processes[-1].pid).children()
    return {int(child.environ()[WORKER_ENV].split(":")[0]): child for child in children}


async def samples(router: Routers, session: aiohttp.ClientSession, name: str, **labels: str) -> dict[int, float]:
    """A metric's sample of each worker."""
    async with session.get(router.url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    found = (one for family in families for one in family.samples if one.name == name)
    return {int(one.labels["worker"]): one.value for one in found if labels.items() <= one.labels.items()}


async def until_samples(
    router: Routers, session: aiohttp.ClientSession, expected: dict[int, float], name: str, **labels: str
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await samples(router, session, name, **labels)) != expected:  # noqa: ASYNC110  # in other processes
            await asyncio.sleep(0.05)


async def order(router: Routers, session: aiohttp.ClientSession, method: str, path: str, *words: str) -> int:
    headers = signed(*words, key=KEY_BYTES)  # type: ignore[arg-type]
    async with session.request(method, router.url + path, headers=headers) as answer:
        return answer.status


async def test_orders_reach_all_workers_and_those_that_replace_them(tmp_path: Path) -> None:
    d, spare = FakeNode("decode", decode, node_id="d"), FakeNode("decode", fakes.decode, node_id="spare")
    async with (
        running(d, spare),
        routers(tmp_path, "--decode", d.url, "--workers", "2") as router,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        healthy = "pd_router_node_healthy"
        await until_samples(router, session, {0: 1.0, 1: 1.0}, healthy, url=d.url)
        assert await order(router, session, "POST", "/nodes", "add", spare.url, "decode") == 201
        assert set(await samples(router, session, healthy, url=spare.url)) == {0, 1}, "when the order is answered"
        await until_samples(router, session, {0: 1.0, 1: 1.0}, healthy, url=spare.url)
        assert await order(router, session, "POST", "/nodes/spare/drain", "drain", "spare") == 200
        assert await samples(router, session, healthy, url=spare.url) == {0: 0.0, 1: 0.0}
        async with session.post(router.url + "/v1/completions", json=HELD) as held:
            assert await held.content.readany() == fakes.chunk("a")
            in_flight = await samples(router, session, "pd_router_requests_in_flight")
            [busy] = [number for number, value in in_flight.items() if value]
            async with session.get(router.url + "/nodes") as answer:
                nodes = {node["node_id"]: node for node in (await answer.json())["nodes"]}
            assert nodes["d"]["outstanding"]["sequences"] == 1, "whichever worker answers"
            workers_of(router)[1 - busy].suspend()  # no order comes to notice it
            await router.wait_lines(f"worker {1 - busy} is frozen")
            await router.wait_lines(f"worker {1 - busy} ended with status -9")
            async with session.post(router.url + "/v1/completions", json=BODY) as answer:
                assert answer.status == 200, "the other one serves"
            await until_samples(router, session, {0: 0.0, 1: 0.0}, healthy, url=spare.url)
            frozen = await samples(router, session, "pd_router_frozen_workers_total")
            assert frozen == {busy: 0.0, 1 - busy: 1.0}
            assert await order(router, session, "DELETE", "/nodes/spare", "remove", "spare") == 200
            assert await samples(router, session, healthy, url=spare.url) == {}
            d.go_on.set()
            assert (await held.read()).endswith(b"data: [DONE]\n\n"), "its worker did not die"
        children = list(workers_of(router).values())
        router.processes[0].terminate()
        await router.wait_end(router.processes[0])
        assert router.first.returncode == 0
        assert not any(child.is_running() for child in children)


async def test_a_successor_with_workers_of_its_own_takes_over(tmp_path: Path) -> None:
    p, d = FakeNode("prefill", fakes.prefill, node_id="p"), FakeNode("decode", decode, node_id="d")
    async with (
        running(p, d),
        routers(tmp_path, "--prefill", p.url, "--decode", d.url, "--workers", "2") as router,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        assert await order(router, session, "POST", "/nodes/p/drain", "drain", "p") == 200
        async with hammering(router.url, keep_alive=False) as failures:
            async with session.post(router.url + "/v1/completions", json=HELD) as held:
                assert await held.content.readany() == fakes.chunk("a")
                await router.succeed()
                d.go_on.set()
                assert (await held.read()).endswith(b"data: [DONE]\n\n")
            await router.wait_end(router.processes[0])
        assert failures == []
        assert router.first.returncode == 0
        assert await samples(router, session, "pd_router_node_healthy", url=p.url) == {0: 0.0, 1: 0.0}, "still drained"
        children = list(workers_of(router).values())
        router.processes[1].send_signal(signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while any(child.is_running() for child in children):  # noqa: ASYNC110  # not this process's children
                await asyncio.sleep(0.02)


async def test_a_second_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    d = FakeNode("decode", decode, node_id="d")
    async with (
        running(d),
        routers(tmp_path, "--decode", d.url, "--workers", "2", "--drain-s", "1000") as router,
        aiohttp.ClientSession() as session,
        session.post(router.url + "/v1/completions", json=HELD) as held,
    ):
        assert await held.content.readany() == fakes.chunk("a")
        router.first.send_signal(signal.SIGINT)
        await router.wait_lines("leaving: ", 2)
        router.first.send_signal(signal.SIGHUP)  # too late for a successor
        router.first.send_signal(signal.SIGINT)
        await router.wait_end(router.processes[0])
        assert router.first.returncode == 0
        output = (tmp_path / "output").read_text()
        assert not [word for word in ("successor", "Traceback") if word in output]


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "workers"])
async def test_processes_that_start_while_a_source_errs_have_its_nodes(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A worker that replaces a dead one, and successors. An order to drain is not lost with the source either."""
    d, spare = FakeNode("decode", fakes.decode, node_id="d"), FakeNode("decode", fakes.decode, node_id="spare")
    path = tmp_path / "nodes.json"
    async with running(d, spare), aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        path.write_text(json.dumps([{"url": node.url, "role": "decode"} for node in (d, spare)]))
        async with routers(tmp_path, "--nodes-file", str(path), *flags) as router:
            assert await order(router, session, "POST", "/nodes/spare/drain", "drain", "spare") == 200
            path.write_text("[]")
            await router.wait_lines("source 'file' is doubted", 2 if flags else 1)
            if flags:
                workers_of(router)[0].kill()
                await router.wait_lines("source 'file' is doubted", 3)
            for _ in range(2):
                await router.succeed()
                for _ in range(8):  # the workers take turns
                    async with session.post(router.url + "/v1/completions", json=BODY) as answer:
                        assert (answer.status, answer.headers["x-pd-decode"]) == (200, "d")
            async with session.get(router.url + "/nodes") as answer:
                assert {node["state"] for node in (await answer.json())["nodes"]} == {"active", "draining"}


async def test_a_router_stops_with_its_terminal(tmp_path: Path) -> None:
    """It starts no successor, which would hold the port with no terminal to end it from."""
    d = FakeNode("decode", decode, node_id="d")
    terminal, stdin = pty.openpty()
    async with running(d), routers(tmp_path, "--decode", d.url, "--workers", "2", stdin=stdin) as router:
        os.close(stdin)
        os.close(terminal)
        router.first.send_signal(signal.SIGHUP)
        await router.wait_end(router.processes[0])
        assert router.first.returncode == 0
        assert "successor" not in (tmp_path / "output").read_text()
