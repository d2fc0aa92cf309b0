"""Streams that outlive their decode nodes, and end with their router: drain, SIGSTOP, kill -9 with answers under way.

Times are logged: `pytest -o log_cli=true --log-cli-level=INFO`. With more of all at once: `test_open_loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.integration.calls import BROKEN
from tests.integration.fault_cluster import DECODE_FLAGS, until, wait_clean
from tests.integration.stream_cluster import PROMPTS, StreamCluster, drain, kill, stop
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]
logger = logging.getLogger(__name__)

ROUTER_FLAGS = ("--prefill-on-decode=never", "--max-node-deaths=99", "--continue-wait-s=60", "--health-timeout-s=1")
NUM_STREAMS = 6
PREFILLED = 'pd_requests_total{endpoint="prefill",outcome="ok"}'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamCluster]:
    with Launcher() as launcher:
        directory = tmp_path_factory.mktemp("gates")
        model = f"--model={shallow_model()}"  # an answer is compared with that of a node alone
        cluster = StreamCluster(
            launcher, 1, 3, [40] * len(PROMPTS), prefill_flags=(model,), decode_flags=(*DECODE_FLAGS, model),
            router_flags=ROUTER_FLAGS, directory=directory,
        )  # fmt: skip
        asyncio.run(cluster.learn())
        yield cluster


async def test_a_killed_router_breaks_its_own_connections_only(three: StreamCluster) -> None:
    """Of twelve streams at two routers the six of the killed one break, and nothing of them is left on the nodes."""
    victim, survivor = three.new_router(), three.routers[0]
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as idle:
        assert (await idle.get(f"{survivor.url}/health")).status_code == 200
        with three.spoken(*three.decodes):
            lost = [three.call(number, victim) for number in range(NUM_STREAMS)]
            kept = [three.call(number, survivor) for number in range(NUM_STREAMS)]
            await asyncio.gather(*(call.begun() for call in (*lost, *kept)))
            assert not any(call.done for call in (*lost, *kept))
            victim.process.send(signal.SIGKILL)
            ends = [await call.outcome() for call in lost]
            assert [(end.error or {}).get("code") for end in ends] == [BROKEN] * NUM_STREAMS
        await asyncio.gather(*(three.check(number, call) for number, call in enumerate(kept)))
        assert (await idle.get(f"{survivor.url}/health")).status_code == 200
    assert await three.continued() == 0
    await asyncio.gather(*(wait_clean(node) for node in (*three.prefills, *three.decodes)))
    victim.process.wait()
    victim.start_again()
    await asyncio.gather(*(three.check(number, three.call(number, victim)) for number in range(NUM_STREAMS)))


async def test_streams_outlive_a_drain_a_stop_and_a_kill(three: StreamCluster) -> None:
    """Six streams at a time. Two nodes are left for those of the first, and so on: none is started again meanwhile."""
    d0, d1, d2 = three.decodes
    for fault, node in ((drain, d0), (stop, d1), (kill, d2)):
        before, legs = await three.continued(), await three.prefills[0].metric(PREFILLED)
        with three.spoken(node):
            calls = [three.call(number) for number in range(NUM_STREAMS)]
            await asyncio.gather(*(call.begun() for call in calls))
            await until(node.is_busy, f"{node.name} has streams")
            await fault(node)
            ends = await asyncio.gather(*(three.check(number, call) for number, call in enumerate(calls)))
        gap_s = max(end.longest_gap_s for end in ends)

        async def are_cut(before: int = before) -> bool:
            return await three.continued() > before

        await until(are_cut, "streams go on elsewhere")
        logger.info(
            "%s: %d of %d streams cut, longest gap %.2f s",
            fault.__name__, await three.continued() - before, NUM_STREAMS, gap_s,
        )  # fmt: skip
        # more than the prompts: KV after one comes from P
        await three.prefills[0].wait_more(PREFILLED, legs + NUM_STREAMS)
        if fault is not kill:
            assert await three.deaths() == 0
        if node is d1:
            await three.replace(d1)
