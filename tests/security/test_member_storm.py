"""8 MB of the smallest members against a cluster of 2P + 2D, with times: for a machine with nothing else to do.

Of each place in each API's body (`smallest_members`), to the router, to a prefill node and to a decode node; what the
bounds of members just allow, too. $PD_STORM_HEALTH_S, $PD_STORM_GAP_S: other limits, for a slower machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.security.member_storm import REVIEW, Seen, StormedCluster, drawn, largest, mixed, same

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.security.smallest_members import Body

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]
HEALTH_S = float(os.environ.get("PD_STORM_HEALTH_S", "0.2"))
GAP_S = float(os.environ.get("PD_STORM_GAP_S", "1.0"))
TIMES_ALONE = 3.0  # /health beside load: at most so many times what it is without the attack
ALONE_S = 20.0
NUM_AT_ONCE = 8
NUM_SAMPLES = 120  # of the places, for each of two sizes
TARGETS = ("router", "prefill-0", "decode-0")


@pytest.fixture(scope="module")
def launcher_of_nodes() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")
def nodes(launcher_of_nodes: Launcher) -> StormedCluster:
    return StormedCluster(launcher_of_nodes)


@pytest.fixture
async def cluster(nodes: StormedCluster) -> AsyncIterator[StormedCluster]:
    async with nodes:
        yield nodes


def check(seen: Seen, name: str, health_s: float | None = HEALTH_S) -> None:
    sys.stdout.write(f"\n{seen.line(name)}\n")
    sys.stdout.flush()
    assert (seen.num_frozen, seen.broken) == (0, []), seen.line(name)
    assert not seen.odd, seen.line(name)
    assert seen.longest_gap_s <= GAP_S, seen.line(name)
    assert health_s is None or seen.longest_health_s <= health_s, seen.line(name)


@pytest.mark.parametrize("make", [drawn, largest])
@pytest.mark.parametrize("target", TARGETS)
async def test_one_after_the_other(cluster: StormedCluster, target: str, make: Callable[[int], Iterator[Body]]) -> None:
    seen = await cluster.seen(partial(make, TARGETS.index(target)), num_victims=0, to=target)
    check(seen, f"{make.__name__} to {target}")


@pytest.mark.parametrize("at_once", [1, NUM_AT_ONCE])
@pytest.mark.parametrize("target", TARGETS)
async def test_the_bodies_of_the_review(cluster: StormedCluster, target: str, at_once: int) -> None:
    for name in REVIEW:
        seen = await cluster.seen(partial(same, name, at_once), at_once, num_victims=0, to=target)
        check(seen, f"{at_once} x {name} to {target}")


@pytest.mark.parametrize("num_streams", [0, 4])
@pytest.mark.parametrize("at_once", [1, NUM_AT_ONCE])
async def test_all_kinds_beside_a_constant_load(cluster: StormedCluster, at_once: int, num_streams: int) -> None:
    """The streams that are the load go on, and /health takes at most TIMES_ALONE times as long beside them."""
    async with cluster.watched(num_streams) as alone:
        await asyncio.sleep(ALONE_S)
    check(alone, f"nothing beside {num_streams} streams", None)
    seen = await cluster.seen(partial(mixed, at_once, NUM_SAMPLES), at_once, num_streams)
    limit_s = max(HEALTH_S, TIMES_ALONE * alone.longest_health_s) if num_streams else HEALTH_S
    check(seen, f"{at_once} at once beside {num_streams} streams", limit_s)
