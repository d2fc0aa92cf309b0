"""Streams that a prefill node keeps, because the decode node would miss the target of time per token.

Each has a target of its own: no node on a CPU keeps the decode node's, and any keeps the prefill node's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.integration.fault_cluster import DECODE_FLAGS, wait_clean
from tests.integration.stream_cluster import PROMPTS, StreamCluster, kill

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(300)]

PREFILL_FLAGS = ("--slo-tpot-ms=1000",)
KEPT = "direct; reason=decode-late"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def cluster() -> Iterator[StreamCluster]:
    with Launcher() as launcher:
        cluster = StreamCluster(
            launcher, 1, 1, [200] * len(PROMPTS), prefill_flags=PREFILL_FLAGS,
            decode_flags=("--slo-tpot-ms=1", *DECODE_FLAGS),
            router_flags=("--prefill-on-decode=never", "--continue-wait-s=60"),
        )  # fmt: skip
        asyncio.run(cluster.learn())
        yield cluster


async def test_a_kept_stream_is_the_same_and_outlives_its_node(cluster: StreamCluster) -> None:
    prefill = cluster.prefills[0]
    for number in range(3):  # so that it knows its steps; a GPU measures them at the start
        await cluster.check(number, cluster.call(number, prefill))
    calls = [cluster.call(number) for number in range(3, 7)]
    await asyncio.gather(*(call.begun() for call in calls))
    await kill(prefill)
    ends = await asyncio.gather(*(cluster.check(number, call) for number, call in enumerate(calls, 3)))
    kept = [end for end in ends if end.headers["x-pd-route"] == KEPT]
    assert {end.headers["x-pd-decode"] for end in kept} == {"p0"}
    assert await cluster.continued() == len(kept) >= 1
    await asyncio.gather(*(wait_clean(node) for node in cluster.decodes))
