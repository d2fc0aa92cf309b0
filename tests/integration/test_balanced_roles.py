"""Roles of real nodes follow a load that turns: no request fails, and every answer is what a node alone says.

The balance is the product's, over a real router's feeds and orders. Its forecast goes by lengths alone: what steps take
on a machine that tests share would decide otherwise each time.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd_cluster.balancing import decision
from pd_cluster.balancing.balancer import Balancer
from pd_cluster.balancing.estimate import Forecast
from tests.balancing.snapshots import TARGETS
from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import Member, make_prompt, start, until, wait_clean
from tests.integration.test_role_change import FLAGS, KEY, Load, crossed, learn, roles
from tests.patient_node import PATIENT
from tests.router.router_process import serving
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.balancing.snapshot import GroupLoad
    from pd_cluster.planning.role_counts import RoleCounts

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(600)]

PROMPTS: list[dict[str, Any]] = [
    {"prompt": make_prompt(length), "max_tokens": 4, "ignore_eos": True, "stream": True, "temperature": 0}
    for length in (300, 350, 400)
]
ANSWERS: list[dict[str, Any]] = [
    {"prompt": make_prompt(length), "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    for length in (30, 40, 50)
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def members() -> Iterator[list[Member]]:
    with Launcher() as launcher:
        flags = (f"--model={shallow_model()}", *FLAGS)
        roles = ("prefill", "prefill", "decode", "decode")
        found = [Member(launcher, f"n{i}", role, *flags, environment=PATIENT) for i, role in enumerate(roles)]
        start(found)
        yield found


def by_lengths(load: GroupLoad, roles: RoleCounts) -> Forecast:
    """Three prefill nodes are best where prompts are long, one where answers are."""
    wanted = 3 if fmean(one.prompt_tokens - 4 * one.answer_tokens for one in load.seen) > 0 else 1
    return Forecast(*[1.0 - 0.2 * abs(roles.prefill - wanted)] * 3)


async def test_roles_follow_a_load_that_turns(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "SETTLE_S", 1.0)
    monkeypatch.setattr(decision, "KEPT_S", 1.0)
    told = {name: [[one] for one in await learn(members[2].url, bodies)] for name, bodies in
            (("prompts", PROMPTS), ("answers", ANSWERS))}  # fmt: skip
    settings: dict[str, Any] = {"key": KEY, "health_interval_s": 0.2, "health_timeout_s": HANG_S}
    async with (
        serving(members[:2], members[2:], **settings) as router,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        balance = Balancer(client, [router.url], KEY, TARGETS, forecast=by_lengths)

        async def follows(wanted: dict[str, int]) -> None:
            async def is_there() -> bool:
                await balance.round()
                return Counter(roles(router).values()) == wanted

            await until(is_there, f"roles are {wanted}")

        num_answers = 0
        for name, bodies, prefills in (("prompts", PROMPTS, 3), ("answers", ANSWERS, 1), ("prompts", PROMPTS, 3)):
            async with Load([router.url], told[name], bodies) as load:
                await follows({"prefill": prefills, "decode": 4 - prefills})
                await load.until_new(lambda prefill, decode: prefill != decode, "a handover after the change")
            num_answers += len(load.answered)
        orders = [node.role_order for node in router.services.table.nodes]
        assert any("as a prefill node gains 0.20" in one.reason for one in orders if one is not None)
        assert router.count("pd_router_role_orders_total", sender="balance", result="obeyed") == 5
        assert num_answers > 60
    for member in members:
        await wait_clean(member)
        assert await crossed(member) == 0
