"""A cluster on two Ray nodes of this machine: up, a question, scaling under load, what takes a dead part's place, down.

Deaths of machines are in `test_ray_machines.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.deadlines import wait_until
from tests.ray_cluster.ray_clusters import COMMAND_DEADLINE_S, Cluster, Load, ask, of_role, running, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
CLUSTER = """
name: two
placement: spread
grace_s: 60
flags: {kv-cache-gb: 0.1, num-threads: 1, device: cpu}
prefill: {count: 1, cpus: 0, gpus: 1}
decode: {count: 1, cpus: 0, gpus: 1}
router: {count: 1, cpus: 0, resources: {edge: 1}, flags: {port: 0, linger-s: 1}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A prefill node, a decode node and a router on a head and a worker. Nodes are executed in test_ray_machines.py."""
    with running(CLUSTER, workers=1, head_gpus=3, forked=True) as cluster:
        yield cluster


def test_nodes_are_there_and_answer(cluster: Cluster) -> None:
    told = dict[str, Any]()

    def is_whole() -> bool:
        told.update(cluster.status())
        return bool(told["whole"])

    wait_until(is_whole, lambda: told)  # on a busy machine a unit may be silent for a moment
    assert {role: len(of_role(told, role)) for role in told["counts"]} == told["counts"]
    assert all(unit["epoch"] for role in ("prefill", "decode") for unit in of_role(told, role))
    assert cluster.machines.controller().is_running()
    assert ask(url_of(told)).startswith("Oskar 2210")


def test_another_token_is_refused(cluster: Cluster) -> None:
    stranger = cluster.run("status", environment={"RAY_AUTH_TOKEN": "0" * 64})
    assert stranger.returncode == 2
    assert "check that the token is this cluster's" in stranger.output


def test_scaling_fails_no_request_even_when_the_controller_has_died(cluster: Cluster) -> None:
    """Nodes are spread: two of a role are on two Ray nodes, and those on one Ray node have a GPU each."""
    with Load(cluster.url) as load:
        cluster.machines.controller().kill()
        scaled = cluster.run("scale", "--decode=2")
        assert scaled.returncode == 0, scaled.output
        scaled.wait_line("whole: 1 prefill, 2 decode, 1 router")
        told = cluster.await_change(set())
        assert len({unit["ray_node"] for unit in of_role(told, "decode")}) == 2, told
        seen = {unit["name"]: psutil.Process(unit["pid"]).environ()["CUDA_VISIBLE_DEVICES"] for unit in told["units"]}
        given = [(unit["ray_node"], seen[unit["name"]]) for unit in told["units"] if unit["role"] != "router"]
        assert len(set(given)) == 3, given
        assert seen[of_role(told, "router")[0]["name"]] == ""
        scaled = cluster.run("scale", "--decode=1")
        assert scaled.returncode == 0, scaled.output
        scaled.wait_line("whole: 1 prefill, 1 decode, 1 router")
    assert load.answered
    assert not load.failed


def test_a_router_ends_with_its_actor_and_the_next_one_learns_all(cluster: Cluster) -> None:
    told = cluster.await_change(set())
    (router,) = of_role(told, "router")
    process = psutil.Process(router["pid"])
    actor = process.parent()
    assert actor is not None
    actor.kill()
    told = cluster.await_change({router["name"]})
    process.wait(COMMAND_DEADLINE_S)
    assert "2210" in ask(url_of(told))
