"""A cluster on three Ray nodes of this machine: up, a question, a machine's death under load, scaling, down."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from pd_cluster.launch.on_ray.policy import LOST_S
from tests.cluster import Launcher
from tests.ray_cluster.machines import Machines, cmdline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Launched

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
COMMAND_DEADLINE_S = 180.0
REQUEST_DEADLINE_S = 60.0
HEAD_AWAY_S = 40.0
PAUSE_S = 0.5  # between two requests of one thread: starting nodes need the cores too
QUESTION = {
    "model": "demo_model",
    "messages": [{"role": "user", "content": "Mira 4831. Oskar 2210. Lena 7745. Oskar?"}],
    "max_tokens": 32,
    "temperature": 0,
}
CLUSTER = """
name: three
placement: spread
grace_s: 20
flags: {kv-cache-gb: 0.1, num-threads: 1, device: cpu}
prefill: {count: 2, cpus: 1, gpus: 1}
decode: {count: 2, cpus: 1, gpus: 1}
router: {count: 1, cpus: 0, resources: {edge: 1}, flags: {port: 0}}
"""


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
    answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=REQUEST_DEADLINE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


class Cluster:
    """The cluster called `three`, seen through the command line."""

    def __init__(self, machines: Machines, file: Path) -> None:
        self.machines = machines
        self._file = str(file)
        self._there = f"--address={machines.address}"

    def up(self) -> Launched:
        return self.machines.ray("up", self._file, self._there)

    def run(self, command: str, *arguments: str) -> Launched:
        launched = self.machines.ray(command, "--name=three", self._there, *arguments)
        launched.wait(COMMAND_DEADLINE_S)
        return launched

    def status(self) -> dict[str, Any]:
        output = self.run("status", "--json").output  # with what Ray itself has to say of a dead machine
        told: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        return told

    def await_change(self, gone: set[str]) -> dict[str, Any]:
        """The status once the cluster is whole without the units `gone`."""
        end_s = time.monotonic() + COMMAND_DEADLINE_S
        while time.monotonic() < end_s:
            told = self.status()
            if told["whole"] and not gone & {unit["name"] for unit in told["units"]}:
                return told
        raise AssertionError(told)


def of_role(told: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [unit for unit in told["units"] if unit["role"] == role]


def url_of(told: dict[str, Any]) -> str:
    (router,) = of_role(told, "router")
    url: str = router["url"]
    return url


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """2 + 2 nodes and a router on a head and two workers. Two `up` at once: one of them starts it."""
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(CLUSTER)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as root,
        Launcher() as launcher,
        Machines(launcher, Path(root)) as machines,
    ):
        for _ in range(2):
            machines.worker(cpus=5, gpus=5)
        cluster = Cluster(machines, file)
        ups = [cluster.up(), cluster.up()]
        assert sorted(up.wait(COMMAND_DEADLINE_S) for up in ups) == [0, 2], ups[0].output + ups[1].output
        (loser,) = (up for up in ups if up.returncode == 2)
        assert "is up already" in loser.output
        yield cluster
        down = cluster.run("down")
        assert down.returncode == 0, down.output
        assert "is down" in down.output
        nodes = [p for m in machines.running for p in m.family() if "pd_cluster.launch.cli" in cmdline(p)]
        assert not nodes


def test_nodes_are_spread_and_answer(cluster: Cluster) -> None:
    told = cluster.status()
    assert told["whole"], told
    assert {role: len(of_role(told, role)) for role in told["counts"]} == told["counts"]
    for role in ("prefill", "decode"):
        assert len({unit["ray_node"] for unit in of_role(told, role)}) == 2, told
        assert all(unit["epoch"] for unit in of_role(told, role))
    assert cluster.machines.controller().is_running()
    seen = {unit["name"]: psutil.Process(unit["pid"]).environ()["CUDA_VISIBLE_DEVICES"] for unit in told["units"]}
    given = [(unit["ray_node"], seen[unit["name"]]) for unit in told["units"] if unit["role"] != "router"]
    assert len(set(given)) == 4, given  # on each Ray node, each has another GPU
    assert seen[of_role(told, "router")[0]["name"]] == ""
    assert ask(url_of(told)).startswith("Oskar 2210")


def test_another_token_is_refused(cluster: Cluster) -> None:
    here = f"--address={cluster.machines.address}"
    stranger = cluster.machines.ray("status", "--name=three", here, environment={"RAY_AUTH_TOKEN": "0" * 64})
    assert stranger.wait(COMMAND_DEADLINE_S) == 2
    assert "check that the token is this cluster's" in stranger.output


@pytest.mark.slow
def test_a_machine_that_dies_under_load_is_made_up_for(cluster: Cluster) -> None:
    told = cluster.status()
    victim = next(machine for machine in cluster.machines.running if machine is not cluster.machines.head)
    pids = {process.pid for process in victim.family()}
    lost = {unit["name"] for unit in told["units"] if unit["pid"] in pids}
    assert len(lost) == 2, told
    with Load(url_of(told)) as load:
        cluster.machines.kill(victim)
        told = cluster.await_change(lost)
    assert load.answered
    assert len(load.failed) <= 2, load.failed  # at most what was under way there
    homes = {unit["ray_node"] for unit in told["units"] if unit["role"] != "router"}
    assert len(homes) == 1, told
    with Load(url_of(told)) as load:
        assert "2210" in ask(url_of(told))
    assert not load.failed


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs minutes to start Ray nodes
def test_a_controller_that_hears_no_node_leaves_all_as_it_is(cluster: Cluster) -> None:
    """The actors of all nodes are stopped: they and Ray say nothing, while the nodes' own processes serve."""
    told = cluster.status()
    nodes = {unit["name"]: unit["epoch"] for unit in told["units"] if unit["role"] != "router"}
    actors = [psutil.Process(unit["pid"]).parent() for unit in told["units"] if unit["name"] in nodes]
    with Load(url_of(told)) as load:
        try:
            for actor in actors:
                assert actor is not None
                actor.suspend()
            end_s = time.monotonic() + COMMAND_DEADLINE_S
            while min(unit["silent_s"] for unit in told["units"] if unit["name"] in nodes) < LOST_S + 5.0:
                assert time.monotonic() < end_s, told
                told = cluster.status()
                assert nodes.keys() <= {unit["name"] for unit in told["units"]}, told
            assert told["doubt"].startswith("only 0 of 4 units answer"), told
        finally:
            for actor in actors:
                if actor is not None:
                    actor.resume()
        told = cluster.await_change(set())
    assert load.answered
    assert not load.failed
    assert {unit["name"]: unit["epoch"] for unit in told["units"] if unit["role"] != "router"} == nodes
    assert told["doubt"] == ""


@pytest.mark.slow
@pytest.mark.timeout(900)  # as above
def test_while_rays_head_is_away_all_nodes_serve(cluster: Cluster) -> None:
    """Its GCS and the controller stand still, shorter than the 60 s after which Ray's other machines give up."""
    told = cluster.status()
    nodes = {unit["name"]: unit["epoch"] for unit in told["units"] if unit["role"] != "router"}
    family = cluster.machines.head.family()
    head = [process for process in family if "gcs_server" in cmdline(process)] + [cluster.machines.controller()]
    assert len(head) == 2
    with Load(url_of(told)) as load:
        try:
            for process in head:
                process.suspend()
            time.sleep(HEAD_AWAY_S)
            table = httpx.get(f"{url_of(told)}/nodes", timeout=REQUEST_DEADLINE_S, trust_env=False).json()["nodes"]
            assert [node["healthy"] for node in table] == [True] * len(nodes), table
        finally:
            for process in head:
                process.resume()
        told = cluster.await_change(set())
    assert load.answered
    assert not load.failed
    assert {unit["name"]: unit["epoch"] for unit in told["units"] if unit["role"] != "router"} == nodes


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs minutes to start Ray nodes
def test_when_all_workers_die_at_once_rays_word_is_believed(cluster: Cluster) -> None:
    told = cluster.status()
    lost = {unit["name"] for unit in told["units"] if unit["role"] != "router"}
    for machine in [machine for machine in cluster.machines.running if machine is not cluster.machines.head]:
        cluster.machines.kill(machine)
    for _ in range(2):
        cluster.machines.worker(cpus=5, gpus=5)
    told = cluster.await_change(lost)
    assert "2210" in ask(url_of(told))
    assert len({unit["ray_node"] for unit in of_role(told, "decode")}) == 2


def test_scaling_fails_no_request_even_when_the_controller_has_died(cluster: Cluster) -> None:
    with Load(url_of(cluster.status())) as load:
        cluster.machines.controller().kill()
        for number in (3, 2):
            scaled = cluster.run("scale", f"--decode={number}")
            assert scaled.returncode == 0, scaled.output
            assert scaled.lines[-1] == f"whole: 2 prefill, {number} decode, 1 router"
    assert load.answered
    assert not load.failed


def test_a_router_ends_with_its_actor_and_the_next_one_learns_all(cluster: Cluster) -> None:
    told = cluster.status()
    (router,) = of_role(told, "router")
    process = psutil.Process(router["pid"])
    actor = process.parent()
    assert actor is not None
    actor.kill()
    told = cluster.await_change({router["name"]})
    process.wait(COMMAND_DEADLINE_S)
    assert "2210" in ask(url_of(told))
