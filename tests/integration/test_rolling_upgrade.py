"""A rolling upgrade under load: a cluster of the last release of protocol version 2 becomes one of this tree.

The order is that of docs/operations.md: what posts orders, the router, then nodes in pairs. One decode node goes back
to the old release in between.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pd_connectors.protocol.ticket import Offer, sign
from tests.cluster import Launcher
from tests.deadlines import until_equal
from tests.integration.calls import COMPLETIONS, Call
from tests.integration.fault_cluster import fetch, make_prompt
from tests.integration.test_role_change import KEY, Load, learn
from tests.integration.upgraded_cluster import FALLBACKS, Upgraded, extract, samples, version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.calls import Outcome

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]

logger = logging.getLogger(__name__)
COMMIT = "730e21ca86178fc64c06d5c39f8648b0be5b7681"
OFFER_S = 600.0
ROUNDS = 5
PREFIX = make_prompt(96)  # of some prompts; six blocks
PROMPTS = (make_prompt(40), make_prompt(150), make_prompt(300), PREFIX + make_prompt(31), PREFIX + make_prompt(90))
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 20 + 20 * at, "ignore_eos": True, "stream": at != 1} | sampling
    for sampling in SAMPLINGS
    for at, prompt in enumerate(PROMPTS)
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of COMMIT."""
    folder = tmp_path_factory.mktemp("old")
    if why := extract(COMMIT, folder):
        pytest.skip(f"no code of commit {COMMIT}: {why}")
    return folder


class SharedLoad(Load):
    """Ten requests in a row, one of each body, have a salt in common: what they share is found in prefix caches."""

    def salt(self, number: int) -> str:
        return f"salt {number // len(BODIES)}"

    def check_versions(self) -> None:
        """Asserts that no answer is by nodes of both releases, and that each release has answered by pairs."""
        versions = Counter(
            "".join(sorted({version(name) for name in (*prefill.split(","), decode) if name}))
            for prefill, decode in self.answered
        )
        assert set(versions) == {"old", "new"}, versions


async def answers(load: Load, prefill: str, decode: str) -> None:
    """Until ROUNDS more requests are answered by two nodes of names that begin so."""
    for _ in range(ROUNDS):
        await load.until_new(
            lambda p, d: p.startswith(prefill) and d.startswith(decode), f"{decode} answers what {prefill} has read"
        )


async def cross(cluster: Upgraded, prefill: str, decode: str, number: int, expected: Outcome) -> dict[str, float]:
    """Do what our routers never do: hand KV over to a node of the other release, by a ticket and by an offer.

    Asserts that D reads the prompt itself, with the right answer. Returns what it counts then.
    """
    p, d = cluster.nodes[prefill], cluster.nodes[decode]
    body = BODIES[number] | {"cache_salt": f"from {prefill} to {decode}"}
    asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    params = (await fetch(p.url + COMPLETIONS, asked)).json()["kv_transfer_params"]
    (await Call(d.url, body | {"kv_transfer_params": params}).outcome()).check(expected)
    await fetch(f"{p.url}/pd/release", {"ticket": params["ticket"]})
    offer = {"do_remote_prefill": True, "offer": sign(KEY, Offer((p.url,), time.time() + OFFER_S))}
    again = {"cache_salt": f"{body['cache_salt']} again", "kv_transfer_params": offer}
    (await Call(d.url, body | again).outcome()).check(expected)
    wanted = {f'{FALLBACKS}{{reason="{kind}_protocol_mismatch"}}': 1.0 for kind in ("ticket", "peer")}

    async def counted() -> dict[str, float]:
        return mismatches(await d.counts())

    await until_equal(counted, wanted)
    return wanted


def mismatches(counts: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in counts.items() if "mismatch" in name}


async def upgrade_nodes(cluster: Upgraded, load: SharedLoad) -> None:
    """The first pair. Its decode node goes back to the old release, and forth again."""
    await cluster.replace("old-p0", "new-p0")
    await answers(load, "old-p1", "old-d")
    await cluster.replace("old-d0", "new-d0")
    await answers(load, "new-p0", "new-d0")
    await answers(load, "old-p1", "old-d1")
    await cluster.replace("new-d0", "old-d2")
    await answers(load, "old-p1", "old-d2")
    await cluster.replace("old-d2", "new-d2")
    await answers(load, "new-p0", "new-d2")
    await answers(load, "old-p1", "old-d1")


async def upgrade_others(cluster: Upgraded, load: SharedLoad) -> None:
    """The second pair."""
    await cluster.replace("old-p1", "new-p1")
    await answers(load, "new-p", "new-d2")
    await cluster.replace("old-d1", "new-d1")
    await answers(load, "new-p1", "new-d")
    await answers(load, "new-p", "new-d1")
    for name in ("new-d1", "new-d2"):
        await cluster.wait_bytes(name)
    assert len({row["kv_version"] for row in await cluster.rows()}) == 1


async def test_a_cluster_is_upgraded_under_load(old_tree: Path, tmp_path: Path) -> None:
    with Launcher() as launcher, Upgraded(launcher, old_tree, tmp_path) as cluster:
        await cluster.start("old-p0", "old-p1", "old-d0", "old-d1")
        expected = await learn(cluster.nodes["old-d0"].url, BODIES)
        url = await cluster.start_router(old_tree)
        async with SharedLoad([url], [[outcome] for outcome in expected], BODIES) as load:
            await answers(load, "old-p", "old-d")
            await cluster.upgrade_router()
            await answers(load, "old-p", "old-d")
            await upgrade_nodes(cluster, load)
            assert [told for told in (await cluster.all_counts()).values() if mismatches(told)] == []
            crossed = {
                "new-d2": await cross(cluster, "old-p1", "new-d2", 2, expected[2]),
                "old-d1": await cross(cluster, "new-p0", "old-d1", 7, expected[7]),
            }
            await upgrade_others(cluster, load)
        load.check_versions()
        counts = await cluster.all_counts()
        logger.info("answers %s; %s", Counter(load.answered), Counter(load.reasons))
        logger.info("nodes counted %s", counts)
        assert {name: found for name, told in counts.items() if (found := mismatches(told))} == crossed
        outcomes = await samples(url, "pd_router_requests_total")
        logger.info("the router counted %s", outcomes)
        assert {'outcome="ok"' in name for name in outcomes} == {True}, outcomes
