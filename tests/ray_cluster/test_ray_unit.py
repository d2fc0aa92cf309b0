"""One unit with a real process: a router, which starts in a moment."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from pd_cluster.launch.on_ray import unit as unit_module
from pd_cluster.launch.on_ray.unit import Place, Secret, Unit, UnitPhase, UnitPlan, UnitReport

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.anyio, pytest.mark.integration]
DEADLINE_S = 60.0
POLL_S = 0.02
PLACE = Place("ray-node", "127.0.0.1", ("GPU-7",))
SECRET = "not for command lines"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make(*arguments: str, orphan_s: float = 600.0, abandon: Callable[[], None] = lambda: None) -> Unit:
    plan = UnitPlan("router-1", "router", ("--port=0", "--start-empty", *arguments), DEADLINE_S, orphan_s)
    unit = Unit(plan, Secret(SECRET), PLACE, abandon)
    unit.begin()
    return unit


async def reach(unit: Unit, phase: UnitPhase) -> UnitReport:
    async with asyncio.timeout(DEADLINE_S):
        while (report := unit.report()).phase is not phase:  # noqa: ASYNC110  # a unit is polled
            await asyncio.sleep(POLL_S)
    return report


async def test_it_starts_serves_and_stops() -> None:
    unit = make()
    assert unit.report().phase is UnitPhase.STARTING
    report = await reach(unit, UnitPhase.READY)
    assert (report.ray_node, report.host) == ("ray-node", "127.0.0.1")
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{report.url}/nodes")).json() == {"nodes": []}
    process = psutil.Process(report.pid)
    assert SECRET not in " ".join(process.cmdline())
    environment = process.environ()
    assert environment["PD_CLUSTER_KEY"] == SECRET
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert environment["RAY_AUTH_TOKEN"] == ""
    unit.stop(5.0)
    assert (await reach(unit, UnitPhase.ENDED)).detail == "stopped"
    assert not process.is_running()


async def test_the_key_is_not_shown() -> None:
    assert SECRET not in repr(Secret(SECRET))


async def test_a_process_that_dies_says_how() -> None:
    unit = make()
    report = await reach(unit, UnitPhase.READY)
    os.kill(report.pid, signal.SIGKILL)
    assert (await reach(unit, UnitPhase.ENDED)).detail.startswith("router-1 was killed by SIGKILL")


async def test_one_that_cannot_start_gives_its_own_words() -> None:
    detail = (await reach(make("--nodes-file=/none.json"), UnitPhase.ENDED)).detail
    assert "exited with status 2" in detail
    assert "--nodes-file /none.json" in detail


async def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "HUNG_S", 1.0)
    monkeypatch.setattr(unit_module, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(unit_module, "HEALTH_PERIOD_S", 0.1)
    unit = make()
    report = await reach(unit, UnitPhase.READY)
    os.kill(report.pid, signal.SIGSTOP)
    assert (await reach(unit, UnitPhase.ENDED)).detail.startswith("gave no answer for 1 s")


async def test_one_that_hangs_while_it_stops_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "STOP_MARGIN_S", 0.2)
    unit = make()
    report = await reach(unit, UnitPhase.READY)
    os.kill(report.pid, signal.SIGSTOP)
    unit.stop(0.1)
    assert (await reach(unit, UnitPhase.ENDED)).detail == "had to be killed"


async def test_without_a_controller_it_gives_up_its_place() -> None:
    abandoned = asyncio.Event()
    unit = make(orphan_s=4.0, abandon=abandoned.set)
    await reach(unit, UnitPhase.READY)
    async with asyncio.timeout(DEADLINE_S):
        await abandoned.wait()
    assert unit.report().detail.startswith("no controller asked for its state")


async def test_an_ended_unit_gives_up_its_place_without_being_removed() -> None:
    abandoned = asyncio.Event()
    unit = make("--nodes-file=/none.json", orphan_s=4.0, abandon=abandoned.set)
    await reach(unit, UnitPhase.ENDED)
    assert not abandoned.is_set()
    async with asyncio.timeout(DEADLINE_S):
        await abandoned.wait()


async def test_stopping_before_it_is_ready_is_no_failure() -> None:
    unit = make()
    unit.leave()  # does nothing: it has no requests
    unit.stop(5.0)
    assert (await reach(unit, UnitPhase.ENDED)).detail in ("stopped", "had to be killed")
