"""A prefill node, a decode node and a router on hosts of their own: addresses, right answers, one cut of each kind.

The cases at length, with figures: test_partitions.py. Both need root, for network namespaces. Where they may not be
made, the reason stands in pytest's summary, and in that of a CI job.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.deadlines import until
from tests.integration.calls import Call
from tests.integration.fault_cluster import make_prompt
from tests.integration.two_hosts.cluster import CONTROL_PORT, HTTP_PORT, KV_PORTS, HostCluster, three_hosts
from tests.integration.two_hosts.load import Load, Seen
from tests.integration.two_hosts.network import in_thread

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# 200 s beside jobs that took nine tenths of two cores
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
pytest.importorskip("nixl_cu13")


def test_a_cluster_on_three_hosts_is_parted_and_heals() -> None:
    """One start of the real commands for all: it takes 10 s of CPU."""

    def work() -> None:
        with three_hosts() as network, Launcher() as launcher:
            cluster = HostCluster(launcher, network)
            check_listeners(cluster)
            asyncio.run(check_cuts(cluster))
            assert cluster.restarted() == []

    in_thread(work)


def check_listeners(cluster: HostCluster) -> None:
    """Nothing of a host listens elsewhere than on the address that it was given, and KV on a port of its range."""
    for name in ("p", "d"):
        places = cluster.listening(name)
        assert {address for address, _ in places} == {cluster.network.address(name)}
        (kv,) = {port for _, port in places} - {HTTP_PORT, CONTROL_PORT}
        assert KV_PORTS[0] <= kv <= KV_PORTS[1]
    assert cluster.listening("r") == {(cluster.network.address("r"), 8000)}


async def check_cuts(cluster: HostCluster) -> None:
    network, load, seen = cluster.network, Load(cluster.url("r"), num_tokens=6), Seen()
    await load.learn()
    assert await cluster.fallbacks() == 0
    with network.parted("p", "d"):
        await load.ask(seen)
        await until(cluster.fallbacks, "D hears nothing of P, and computes the prompt")
    await cluster.hands_over_again(load, seen)
    await downed(cluster, network.cut("p", "r"), "prefill", load, seen, "direct; reason=no-prefill-node")
    await downed(cluster, network.parted("d", "r"), "decode", load, seen, "direct; reason=no-decode-node")
    assert (seen.altered, seen.failed) == ([], {})
    await cluster.wait_clean()


@pytest.mark.slow
def test_a_stream_with_a_decode_node_that_is_cut_off_goes_on_at_the_prefill_node() -> None:
    """Apart, for its CPU: the steps of three long streams."""

    async def check(cluster: HostCluster) -> None:
        load, seen = Load(cluster.url("r"), num_tokens=6), Seen()
        await load.learn()
        expected = await Call(cluster.url("r"), long_stream()).outcome()
        cut = Call(cluster.url("r"), long_stream())
        await cut.begun()
        parted = cluster.network.parted("d", "r")
        await downed(cluster, parted, "decode", load, seen, "direct; reason=no-decode-node")
        (await cut.outcome()).check(expected)
        await until(cluster.has_continued, "P went on with the stream")
        assert (seen.altered, seen.failed) == ([], {})
        await cluster.wait_clean()

    def work() -> None:
        with three_hosts() as network, Launcher() as launcher:
            asyncio.run(check(HostCluster(launcher, network)))

    in_thread(work)


def long_stream() -> dict[str, Any]:
    """Longer than it takes to cut a network."""
    return {"prompt": make_prompt(40), "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


async def downed(
    cluster: HostCluster, fault: AbstractContextManager[None], role: str, load: Load, seen: Seen, route: str
) -> None:
    """While the router hears nothing of a node the other one serves; afterwards both do."""
    with contextlib.ExitStack() as until_healed:
        until_healed.enter_context(fault)
        await cluster.wait_healthy(role, healthy=False)
        outcome = await load.ask(seen)
        assert outcome.headers["x-pd-route"] == route
    await cluster.wait_healthy(role)
    await cluster.hands_over_again(load, seen)
