"""A request that two real nodes stand still with, in turn, before its first token there: no third one gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.integration.fault_cluster import fetch, parse_metrics, until
from tests.integration.gated_cluster import LONG, GatedCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

DECODES = ["d0", "d1", "strict"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedCluster]:
    with Launcher() as launcher:
        cluster = GatedCluster(launcher, tmp_path_factory.mktemp("gates"), "p0", *DECODES)
        yield cluster
        cluster.stop()


async def num_requests(cluster: GatedCluster, name: str) -> float:
    """Those that the node has, and has had."""
    told = await cluster.nodes[name].metrics()
    return sum(
        value for metric, value in told.items() if metric.startswith(("pd_requests_in_flight", "pd_requests_total"))
    )


async def test_a_request_that_two_nodes_stand_still_with_ends(cluster: GatedCluster) -> None:
    """The nodes stop by SIGSTOP once they have it. Their prefill node, which is held, gives it no first token."""
    router, names = cluster.new_router(["p0"], DECODES, "--health-timeout-s=1"), list(DECODES)

    async def find() -> bool:
        """Whether one of the nodes that run has the request; it is then the last of `names`."""
        for name in list(names):
            if await cluster.nodes[name].metric("pd_requests_in_flight"):
                names.remove(name)
                names.append(name)
                return True
        return False

    async def is_counted() -> bool:
        told = parse_metrics((await fetch(f"{router.url}/metrics")).text)
        return told["pd_router_requests_nodes_frozen_total"] == 1

    before = {name: await num_requests(cluster, name) for name in DECODES}
    try:
        with cluster.held():
            call = cluster.call(LONG, "d-first", stream=True, url=router.url)
            for _ in range(2):
                await until(find, "a decode node has the request")
                await cluster.nodes[names[-1]].kv()  # it answers after any check of /health that had begun before
                cluster.nodes[names.pop()].stop()
            outcome = await call.outcome()
            assert (outcome.status, outcome.error and outcome.error["code"]) == (500, "nodes_frozen")
            await until(is_counted, "the router counts it")
            assert await num_requests(cluster, names[0]) == before[names[0]]
    finally:
        cluster.go_on()
    await cluster.check_clean()
