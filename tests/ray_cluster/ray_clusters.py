"""A cluster of `pd-cluster ray up` on Ray nodes of this machine, a load on it, and what its status says.

with running(CLUSTER, workers=1, head_gpus=2) as cluster, Load(cluster.url):
    cluster.run("scale", "--decode=2")
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.cluster import REAL, Launcher
from tests.deadlines import HANG_S, POLL_S, wait_until
from tests.ray_cluster.machines import Machines, cmdline
from tests.ray_cluster.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster import Launched

COMMAND_DEADLINE_S = 300.0
GPUS_OF_A_WORKER = 5
PAUSE_S = 0.5  # between two requests of one thread: starting nodes need the cores too
QUESTION = {
    "model": "demo_model",
    "messages": [{"role": "user", "content": "Mira 4831. Oskar 2210. Lena 7745. Oskar?"}],
    "max_tokens": 32,
    "temperature": 0,
}


class Load:
    """Asks one question again and again from two threads, while the block runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, name=f"load {number}") for number in range(2)]
        self.answered = 0
        self.failed: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if exc == (None, None, None):
            wait_until(lambda: self.answered or self.failed, lambda: "no answer at all")
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self) -> None:
        while not self._over.wait(PAUSE_S):
            try:
                answer = ask(self._url)
            except (httpx.HTTPError, AssertionError) as error:
                self.failed.append(repr(error))
            else:
                assert "2210" in answer
                self.answered += 1


def ask(url: str) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=HANG_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


class Cluster:
    """Seen through the command line, and through one process that stays connected: a command takes 3 s of CPU."""

    def __init__(self, machines: Machines, file: Path, name: str) -> None:
        self.machines = machines
        self._file, self._name = str(file), name
        self._there = f"--address={machines.address}"
        self._watch: Launched | None = None
        self.url = ""  # of the router at first

    def up(self) -> Launched:
        return self.machines.ray("up", self._file, self._there)

    def run(self, command: str, *arguments: str, environment: dict[str, str] | None = None) -> Launched:
        launched = self.machines.ray(command, f"--name={self._name}", self._there, *arguments, environment=environment)
        launched.wait(COMMAND_DEADLINE_S)
        return launched

    def status(self) -> dict[str, Any]:
        """As the command tells it."""
        return told_in(self.run("status", "--json").output.splitlines())

    def await_change(self, gone: set[str]) -> dict[str, Any]:
        """The status once the cluster is whole without the units `gone`."""
        return self.await_status(lambda told: told["whole"] and not gone & {unit["name"] for unit in told["units"]})

    def await_status(self, is_wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first status from now on that is wanted."""
        watch = self._watch = self._watch or self.machines.start(
            "watch", [sys.executable, "-m", "tests.ray_cluster.watch", self._name, self.machines.address]
        )
        watch.wait_line("{")
        seen, found = len(watch.lines), dict[str, Any]()

        def is_there() -> bool:
            told = [line for line in watch.lines[seen:] if line.startswith("{")]
            found.update(told_in(told[-1:]) if told else {})
            return bool(found and is_wanted(found))

        end_s = time.monotonic() + COMMAND_DEADLINE_S
        while not is_there():
            assert time.monotonic() < end_s, watch.output[-4000:]
            time.sleep(POLL_S)
        return found

    def close(self) -> None:
        """In good order, and no process of a unit is left."""
        if self._watch is not None:
            self._watch.stop()
        down = self.run("down")
        assert down.returncode == 0, down.output
        down.wait_line("is down")
        shown = [cmdline(process) for machine in self.machines.running for process in machine.family()]
        assert not [line for line in shown if "pd_cluster.launch.cli" in line or "forked_node.py" in line]


def told_in(lines: list[str]) -> dict[str, Any]:
    """The status among lines, where Ray itself may have to say something of a dead machine."""
    told: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return told


def of_role(told: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [unit for unit in told["units"] if unit["role"] == role]


def url_of(told: dict[str, Any]) -> str:
    (router,) = of_role(told, "router")
    url: str = router["url"]
    return url


@contextlib.contextmanager
def running(spec: str, *, workers: int, head_gpus: int = 0, forked: bool = False) -> Iterator[Cluster]:
    """The cluster of this specification. Two `up` at once: one of them starts it.

    `forked`: its units start `forked_node.py`. A node that is executed takes 8 s of CPU, a forked one 2 s.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as root,
        Launcher() as launcher,
        Relay(Path(root)) as relay,
        Machines(launcher, Path(root), head_gpus, relay.environment if forked and not REAL else None) as machines,
    ):
        file = Path(root) / "cluster.yaml"
        file.write_text(spec)
        for _ in range(workers):
            machines.worker(GPUS_OF_A_WORKER)
        (name,) = re.findall(r"^name: (\w+)$", spec, re.MULTILINE)
        cluster = Cluster(machines, file, name)
        ups = [cluster.up(), cluster.up()]
        assert sorted(up.wait(COMMAND_DEADLINE_S) for up in ups) == [0, 2], ups[0].output + ups[1].output
        winner, loser = sorted(ups, key=lambda up: up.returncode or 0)
        assert "is up already" in loser.output
        cluster.url = next(word for word in winner.wait_line("ready: http").split() if word.startswith("http"))
        yield cluster
        cluster.close()
