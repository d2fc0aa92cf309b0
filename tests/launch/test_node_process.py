"""A node's life with a fake engine: ready line, serving, drain, the engine's death, the launcher's death."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from pd_cluster.launch.model_path import DEMO_MODEL
from tests.deadlines import HANG_S, wait_equal, wait_until

if TYPE_CHECKING:
    from tests.cluster import Launched, Launcher

pytestmark = pytest.mark.integration

MODULE = "tests.launch.fake_node"


def start(launcher: Launcher, behaviour: str, *flags: str, real: bool = False) -> Launched:
    """A node with a fake engine, ready if it can be. Forked, unless `real`: ten take 25 s of CPU else."""
    environment = {"FAKE_ENGINE": behaviour}
    if real:
        node = launcher.start("node", [sys.executable, "-m", MODULE, *flags], environment)
    else:
        node = launcher.module("node", MODULE, *flags, environment=environment)
    if behaviour not in ("silent", "refuse"):
        node.wait_line("ready: ")
    return node


def engine_of(node: Launched) -> psutil.Process:
    line = node.wait_line("fake engine ")
    return psutil.Process(int(line.rsplit(" ", 1)[1]))


def ask(url: str) -> httpx.Response:
    body = {"model": DEMO_MODEL.name, "prompt": [65, 66], "max_tokens": 3}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)


class Asking(threading.Thread):
    """One request in a thread. `answer` after `join`."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = ask(self._url)

    def result(self) -> httpx.Response:
        self.join(HANG_S)
        assert self.answer is not None
        return self.answer


def wait_in_flight(url: str) -> None:
    """Until the node says that a request is open."""
    with httpx.Client(timeout=HANG_S) as client:
        wait_equal(lambda: client.get(f"{url}/health").json().get("num_in_flight"), 1)


def test_ready_serve_stop(launcher: Launcher) -> None:
    """On an inherited socket, as with systemd's socket activation: its address counts, not --host and --port."""
    node = start(launcher, "", "--inherit", "--port=1", real=True)
    assert not node.url.endswith(":1")
    line = node.wait_line("ready: ")
    assert line.startswith(f"ready: mixed node n on {node.url} (engine fake, epoch 1, 8 blocks of 16 tokens")
    health = httpx.get(f"{node.url}/health", timeout=HANG_S)
    assert (health.status_code, health.json()["role"]) == (200, "mixed")
    answer = ask(node.url)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    mapped = [Path(file.path).name for file in psutil.Process(node.pid).memory_maps()]
    assert not [name for name in mapped if name.startswith("libtorch")], "the API process is small and starts fast"
    assert "tokenizers.abi3.so" in mapped
    assert node.stop(signal.SIGTERM) == 0
    assert "PyTorch was not found" not in node.output
    assert node.leftovers() == []


def test_health_is_503_while_the_engine_starts(launcher: Launcher) -> None:
    node = start(launcher, "silent")
    engine_of(node)
    port = next(c.laddr.port for c in psutil.Process(node.pid).net_connections("tcp") if c.status == "LISTEN")
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=HANG_S).status_code == 503
    assert node.stop(signal.SIGINT) == 0


def test_running_requests_are_finished(launcher: Launcher) -> None:
    node = start(launcher, "slow", f"--drain-s={HANG_S:g}")
    asking = Asking(node.url)
    wait_in_flight(node.url)
    engine = engine_of(node)
    with httpx.Client(timeout=HANG_S, trust_env=False) as client:
        assert client.get(f"{node.url}/health").status_code == 200
        node.send(signal.SIGTERM)
        node.wait_line("stopping")
        health = client.get(f"{node.url}/health")  # on the connection that was kept, which ends in good order
        assert (health.status_code, health.headers["connection"]) == (503, "close")
    health = httpx.get(f"{node.url}/health", timeout=HANG_S)  # on a new connection: a router probes with one
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    refused = ask(node.url)
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    engine.send_signal(signal.SIGUSR1)
    answer = asking.result()
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert node.wait() == 0


def test_a_router_under_load_loses_nothing_with_a_node_that_leaves(launcher: Launcher) -> None:
    """Requests that it had sent, and those on their way, are answered by this node or the other one."""
    nodes = [start(launcher, "", f"--node-id={name}") for name in "ab"]
    router = launcher.router(mixed=nodes)
    failures: list[str] = []
    counts = [0] * 8
    pauses_s = [0.01]  # without a pause they took 30 s of CPU until the node had left
    stop = threading.Event()

    def work(number: int) -> None:
        body = {"model": DEMO_MODEL.name, "prompt": [65, 66], "max_tokens": 3}
        with httpx.Client(timeout=HANG_S, trust_env=False) as client:
            while not stop.wait(pauses_s[-1]):
                try:
                    client.post(f"{router.url}/v1/completions", json=body).raise_for_status()
                    counts[number] += 1
                except httpx.HTTPError as error:
                    failures.append(repr(error))

    def until_served(more: int) -> None:
        wanted = sum(counts) + more
        wait_until(lambda: sum(counts) >= wanted or failures, lambda: f"{sum(counts)} of {wanted} answers")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(counts))]
    for thread in threads:
        thread.start()
    until_served(60)
    nodes[0].send(signal.SIGTERM)
    until_served(200)
    pauses_s.append(0.1)  # it takes seconds to leave, and the other one has almost all requests by now
    assert nodes[0].end(HANG_S) == 0
    until_served(40)
    stop.set()
    for thread in threads:
        thread.join(HANG_S)
    assert failures == []


def test_a_second_signal_ends_at_once(launcher: Launcher) -> None:
    node = start(launcher, "slow", "--drain-s=1000")
    asking = Asking(node.url)
    wait_in_flight(node.url)
    node.send(signal.SIGINT)
    node.wait_line("stopping")
    node.send(signal.SIGINT)
    assert node.wait() == 0
    assert asking.result().status_code >= 500
    assert "Traceback" not in node.output, "it delays the last words of the next answer"


def test_the_engine_dies(launcher: Launcher) -> None:
    node = start(launcher, "crash")
    answer = ask(node.url)
    assert answer.status_code == 503
    assert "status 77" in answer.json()["error"]["message"]
    assert node.wait() == 1
    assert "the engine is gone: the engine process ended with status 77" in node.output


def test_the_engine_cannot_start(launcher: Launcher) -> None:
    node = start(launcher, "refuse")
    assert node.wait() == 1
    assert "there is no such device" in node.output
    assert "Traceback" not in node.output


def test_the_engine_takes_too_long(launcher: Launcher) -> None:
    node = start(launcher, "silent", "--start-deadline-s=0.2")
    assert node.wait() == 2
    assert "not ready after 0.2 s: raise --start-deadline-s" in node.output


def test_no_engine_outlives_a_killed_api_process(launcher: Launcher) -> None:
    node = start(launcher, "slow")
    engine = engine_of(node)
    node.send(signal.SIGKILL)
    assert node.wait() == -signal.SIGKILL
    engine.wait(timeout=HANG_S)
    assert not engine.is_running()


def test_an_engine_that_does_not_stop_is_killed(launcher: Launcher) -> None:
    node = start(launcher, "stubborn")
    engine = engine_of(node)
    assert node.stop(signal.SIGTERM) == 0
    assert "the engine did not stop within 0.5 s" in node.output
    assert not engine.is_running()
