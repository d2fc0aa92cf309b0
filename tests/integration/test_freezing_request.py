"""A request that two real nodes stand still with, in turn, before its first token there: no third one gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.integration.calls import Call
from tests.integration.fault_cluster import LONG, FaultCluster, fetch, parse_metrics, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_BEFORE = 6  # long prompts at p0, which has room for the KV of one: the request waits behind them
DECODES = ["d0", "d1", "strict"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultCluster]:
    with Launcher() as launcher:
        cluster = FaultCluster(launcher, "p0", *DECODES, environment={"UCX_TLS": "tcp"})
        yield cluster
        cluster.stop()


async def num_requests(cluster: FaultCluster, name: str) -> float:
    """Those that the node has, and has had."""
    told = await cluster.nodes[name].metrics()
    return sum(
        value for metric, value in told.items() if metric.startswith(("pd_requests_in_flight", "pd_requests_total"))
    )


async def test_a_request_that_two_nodes_stand_still_with_ends(cluster: FaultCluster) -> None:
    """The nodes stop by SIGSTOP once they have it. Their prefill node, which has a queue, gives it no first token."""
    router, names = cluster.new_router(["p0"], DECODES), list(DECODES)
    asks_ticket = {"kv_transfer_params": {"do_remote_decode": True}}
    queue = [Call(cluster.p0.url, cluster.body(LONG) | asks_ticket) for _ in range(NUM_BEFORE)]

    async def find() -> bool:
        """Whether one of the nodes that run has the request; it is then the last of `names`."""
        for name in list(names):
            if await cluster.nodes[name].metric("pd_requests_in_flight"):
                names.remove(name)
                names.append(name)
                return True
        return False

    before = {name: await num_requests(cluster, name) for name in DECODES}
    try:
        await until(cluster.p0.is_busy, "p0 computes")
        call = cluster.call(LONG, "d-first", stream=True, url=router.url)
        for _ in range(2):
            await until(find, "a decode node has the request")
            await cluster.nodes[names[-1]].kv()  # it answers behind any check of /health that had begun before
            cluster.nodes[names.pop()].stop()
        outcome = await call.outcome()
        assert (outcome.status, outcome.error and outcome.error["code"]) == (500, "nodes_frozen")
        assert await num_requests(cluster, names[0]) == before[names[0]]
        told = parse_metrics((await fetch(f"{router.url}/metrics")).text)
        assert told["pd_router_requests_nodes_frozen_total"] == 1
    finally:
        cluster.go_on()
        for one in queue:
            await one.leave() if not one.done else None
    await cluster.check_clean()
