"""A cluster on three Ray nodes of this machine: machines that die under load, and what is silent and does not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from pd_cluster.launch.on_ray.policy import LOST_S
from tests.deadlines import HANG_S
from tests.ray_cluster.machines import cmdline
from tests.ray_cluster.ray_clusters import Cluster, Load, ask, running, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# a busy machine needs minutes to start Ray nodes
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
HEAD_AWAY_S = 40.0
CLUSTER = """
name: three
placement: spread
grace_s: 60
flags: {kv-cache-gb: 0.1, num-threads: 1, device: cpu}
prefill: {count: 2, cpus: 0, gpus: 1}
decode: {count: 2, cpus: 0, gpus: 1}
router: {count: 1, cpus: 0, resources: {edge: 1}, flags: {port: 0, linger-s: 1}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """2 + 2 nodes and a router on a head and two workers."""
    with running(CLUSTER, workers=2) as cluster:
        yield cluster


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

            def are_silent(told: dict[str, Any]) -> bool:
                assert nodes.keys() <= {unit["name"] for unit in told["units"]}, told
                return bool(min(unit["silent_s"] for unit in told["units"] if unit["name"] in nodes) >= LOST_S + 5.0)

            told = cluster.await_status(are_silent)
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
            table = httpx.get(f"{url_of(told)}/nodes", timeout=HANG_S, trust_env=False).json()["nodes"]
            assert [node["healthy"] for node in table] == [True] * len(nodes), table
        finally:
            for process in head:
                process.resume()
        told = cluster.await_change(set())
    assert load.answered
    assert not load.failed
    assert {unit["name"]: unit["epoch"] for unit in told["units"] if unit["role"] != "router"} == nodes


def test_when_all_workers_die_at_once_rays_word_is_believed(cluster: Cluster) -> None:
    """One machine comes after the other, so each has room for half of the nodes: the first would get all."""
    told = cluster.status()
    lost = {unit["name"] for unit in told["units"] if unit["role"] != "router"}
    for machine in [machine for machine in cluster.machines.running if machine is not cluster.machines.head]:
        cluster.machines.kill(machine)
    for _ in range(2):
        cluster.machines.worker(len(lost) // 2)
    told = cluster.await_change(lost)
    assert "2210" in ask(url_of(told))
    assert len({unit["ray_node"] for unit in told["units"] if unit["role"] != "router"}) == 2
