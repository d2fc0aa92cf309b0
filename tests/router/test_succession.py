"""SIGHUP on a real router: a successor takes over its socket, its open streams end well, and no connection fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import psutil
import pytest

from pd_connectors.protocol.keys import derive_key
from pd_http.sockets import bound
from pd_router.process.succession import OLD_ROUTER_ENV, OldRouter
from pd_router.sources.node_change import RestartState
from tests.deadlines import HANG_S
from tests.http.answer import PROMPT
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import signed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aiohttp import web

    from tests.router.fake_nodes import Seen

pytestmark = pytest.mark.anyio
KEY = "a key that only this test knows"
BODY = PROMPT | {"max_tokens": 2}
DEADLINE_S = HANG_S
PAUSE_S = 0.01  # between two requests of a client: without, four took a core from the successor that they wait for
HELD = {**BODY, "prompt": "held", "stream": True}


async def decode(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Answers at once, except for one prompt that waits to be told."""
    script = fakes.decode_until_told if seen.body.get("prompt") == "held" else fakes.decode
    return await script(node, request, seen)


class Routers:
    """A router process and its successors, which all write to `output`."""

    def __init__(self, output: Path, *flags: str, stdin: int = subprocess.DEVNULL) -> None:
        self._output = output
        with output.open("wb") as stream:
            self.first = subprocess.Popen(
                [sys.executable, "-m", "pd_router", "--port", "0", "--drain-s", "20", "--linger-s", "1", *flags],
                stdin=stdin, stdout=stream, stderr=stream, env=os.environ | {"PD_CLUSTER_KEY": KEY},
            )  # fmt: skip
        self.processes = [psutil.Process(self.first.pid)]
        self.url = ""

    async def wait_lines(self, text: str, count: int = 1) -> list[str]:
        """The lines that have this in them, as soon as there are `count`."""
        async with asyncio.timeout(DEADLINE_S):
            while len(found := [line for line in self._output.read_text().splitlines() if text in line]) < count:
                assert psutil.pid_exists(self.processes[-1].pid), self._output.read_text()
                await asyncio.sleep(0.02)
        return found

    async def wait_ready(self) -> None:
        ready = await self.wait_lines("router ready on ", len(self.processes))
        self.url = self.url or ready[0].split()[-1]
        assert {line.split()[-1] for line in ready} == {self.url}

    async def succeed(self) -> None:
        """Hang the present router up; wait until its successor serves and it has ended."""
        present = self.processes[-1]
        present.send_signal(signal.SIGHUP)
        number = len(self.processes)
        [line] = (await self.wait_lines(" serves now; this router drains", number))[number - 1 :]
        self.processes.append(psutil.Process(int(line.rpartition("process ")[2].split()[0])))
        await self.wait_ready()

    async def wait_end(self, process: psutil.Process) -> None:
        """Until it has ended. The first one is this process's child; its exit status is then known."""
        async with asyncio.timeout(DEADLINE_S):
            while self._runs(process):  # noqa: ASYNC110  # only a parent is told of an end
                await asyncio.sleep(0.02)

    def _runs(self, process: psutil.Process) -> bool:
        return self.first.poll() is None if process.pid == self.first.pid else process.is_running()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.first.wait()


@contextlib.asynccontextmanager
async def routers(tmp_path: Path, *flags: str, stdin: int = subprocess.DEVNULL) -> AsyncIterator[Routers]:
    running = Routers(tmp_path / "output", *flags, stdin=stdin)
    try:
        await running.wait_ready()
        yield running
    finally:
        running.kill()


@contextlib.asynccontextmanager
async def hammering(url: str, *, keep_alive: bool) -> AsyncIterator[list[str]]:
    """Requests one after the other from several clients. Yields what went wrong, and checks that much went right."""
    failures: list[str] = []
    stop = asyncio.Event()
    num_right = 0

    async def work() -> None:
        nonlocal num_right
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=not keep_alive)) as session:
            while not stop.is_set():
                try:
                    async with session.post(f"{url}/v1/completions", json=BODY) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()
                        num_right += 1
                except (aiohttp.ClientError, OSError, AssertionError) as error:
                    failures.append(repr(error))
                await asyncio.sleep(PAUSE_S)

    workers = [asyncio.create_task(work()) for _ in range(4)]
    try:
        yield failures
    finally:
        stop.set()
        await asyncio.gather(*workers)
    assert num_right > 50


@pytest.mark.integration
@pytest.mark.parametrize("keep_alive", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "kept"])
async def test_no_connection_fails(keep_alive: bool, tmp_path: Path) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", decode)
    async with (
        running(p, d),
        routers(tmp_path, "--prefill", p.url, "--decode", d.url) as router,
        aiohttp.ClientSession() as session,
    ):
        async with hammering(router.url, keep_alive=keep_alive) as failures:
            async with session.post(router.url + "/v1/completions", json=HELD) as held:
                assert await held.content.readany() == fakes.chunk("a")
                await router.succeed()
                assert router.first.poll() is None, "it has an open stream"
                d.go_on.set()
                assert (await held.read()).endswith(b"data: [DONE]\n\n"), "which is seen through"
            await router.wait_end(router.processes[0])
            assert router.first.returncode == 0
            await router.succeed()
            await router.wait_end(router.processes[1])
        assert failures == []


@pytest.mark.integration
async def test_what_was_ordered_is_handed_over(tmp_path: Path) -> None:
    d, spare = FakeNode("decode", fakes.decode, node_id="d"), FakeNode("decode", fakes.decode, node_id="spare")
    key = derive_key(KEY)
    async with running(d, spare), routers(tmp_path, "--decode", d.url) as router, aiohttp.ClientSession() as session:
        async with session.post(router.url + "/nodes", headers=signed("add", spare.url, "decode", key=key)) as answer:
            assert answer.status == 201
        async with session.post(f"{router.url}/nodes/d/drain", headers=signed("drain", "d", key=key)) as answer:
            assert answer.status == 200
        await router.succeed()
        await router.wait_end(router.processes[0])
        async with session.get(router.url + "/nodes") as answer:
            told = {node["node_id"]: (node["state"], node["healthy"]) for node in (await answer.json())["nodes"]}
        assert told == {"d": ("draining", False), "spare": ("active", True)}


@pytest.mark.integration
async def test_a_successor_that_fails_changes_nothing(tmp_path: Path) -> None:
    d = FakeNode("decode", fakes.decode)
    nodes = tmp_path / "nodes.json"
    nodes.write_text("[]")
    async with (
        running(d),
        routers(tmp_path, "--decode", d.url, "--nodes-file", str(nodes)) as router,
        aiohttp.ClientSession() as session,
    ):
        nodes.unlink()
        router.processes[0].send_signal(signal.SIGHUP)
        await router.wait_lines("there is no successor, this router continues: it ended before it served")
        async with session.post(router.url + "/v1/completions", json=BODY) as answer:
            assert answer.status == 200
        headers = signed("drain", "fake-decode", key=derive_key(KEY))
        async with session.post(f"{router.url}/nodes/fake-decode/drain", headers=headers) as answer:
            assert answer.status == 200, "orders are taken again"
        router.processes[0].terminate()
        await router.wait_end(router.processes[0])
        assert router.first.returncode == 0


def test_a_heritage_is_told_whole() -> None:
    restart_state = RestartState((("http://a:1", "decode"),), {"http://b:2": 7, "http://c:3": None})
    assert RestartState.from_line(restart_state.to_line()) == restart_state


def test_a_router_without_an_old_router_has_no_state(capsys: pytest.CaptureFixture[str]) -> None:
    old_router = OldRouter({})
    with bound("127.0.0.1", 0) as listener:
        old_router.serving(listener)
    assert capsys.readouterr().out.startswith("router ready on http://127.0.0.1:")
    assert old_router.restart_state == RestartState()


@pytest.mark.parametrize("line", [b"", b"{}\n", b'{"posted": 1, "drained": {}}\n'])
def test_a_heritage_that_cannot_be_read_is_an_error(line: bytes) -> None:
    own, theirs = socket.socketpair()
    own.sendall(line)
    own.close()
    with pytest.raises(OSError, match="the router before this one sent"):
        OldRouter({OLD_ROUTER_ENV: str(theirs.detach())})
