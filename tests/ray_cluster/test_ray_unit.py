"""One unit with a real process: a router, or a program in its place, which starts in a moment."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from pd_cluster.launch.on_ray import unit as unit_module
from pd_cluster.launch.on_ray.unit import Place, Secret, Unit, UnitPhase, UnitPlan, UnitReport
from tests.deadlines import HANG_S, until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.anyio, pytest.mark.integration]
PLACE = Place("ray-node", "127.0.0.1", ("GPU-7",))
SECRET = "not for command lines"
ORPHAN_S = 600.0
# what a unit asks of a router: its ready line, an answer over HTTP, and an end at SIGTERM
STAND_IN = """
import http.server

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(f"router ready on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    """Seconds, which a test may skip."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router takes a second of CPU to start, and a unit knows no more of it than this program does."""
    monkeypatch.setattr(unit_module, "_PROGRAM", (sys.executable, "-c", STAND_IN))


def make(
    *arguments: str, clock: Callable[[], float] = time.monotonic, abandon: Callable[[], None] = lambda: None
) -> Unit:
    plan = UnitPlan("router-1", "router", ("--port=0", "--start-empty", *arguments), HANG_S, ORPHAN_S)
    unit = Unit(plan, Secret(SECRET), PLACE, abandon, clock)
    unit.begin()
    return unit


async def reach(unit: Unit, phase: UnitPhase) -> UnitReport:
    await until(lambda: unit.report().phase is phase, lambda: str(unit.report()))
    return unit.report()


async def freeze(pid: int) -> None:
    """A signal that follows at once could be taken before this one."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


async def test_it_starts_serves_and_stops() -> None:
    unit = make()
    assert unit.report().phase is UnitPhase.STARTING
    report = await reach(unit, UnitPhase.READY)
    assert (report.ray_node, report.host) == ("ray-node", "127.0.0.1")
    async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
        assert (await client.get(f"{report.url}/nodes")).json() == {"nodes": [], "balance": None}
    process = psutil.Process(report.pid)
    assert SECRET not in " ".join(process.cmdline())
    environment = process.environ()
    assert environment["PD_CLUSTER_KEY"] == SECRET
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert environment["RAY_AUTH_TOKEN"] == ""
    unit.stop(HANG_S)
    assert (await reach(unit, UnitPhase.ENDED)).detail == "stopped"
    assert not process.is_running()


async def test_the_key_is_not_shown() -> None:
    assert SECRET not in repr(Secret(SECRET))


@pytest.mark.usefixtures("stand_in")
async def test_a_process_that_dies_says_how() -> None:
    unit = make()
    report = await reach(unit, UnitPhase.READY)
    os.kill(report.pid, signal.SIGKILL)
    assert (await reach(unit, UnitPhase.ENDED)).detail.startswith("router-1 was killed by SIGKILL")


async def test_one_that_cannot_start_gives_its_own_words() -> None:
    detail = (await reach(make("--nodes-file=/none.json"), UnitPhase.ENDED)).detail
    assert "exited with status 2" in detail
    assert "--nodes-file /none.json" in detail


@pytest.mark.usefixtures("stand_in")
async def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "HEALTH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(unit_module, "HEALTH_PERIOD_S", 0.1)
    unit = make()
    report = await reach(unit, UnitPhase.READY)
    await freeze(report.pid)
    monkeypatch.setattr(unit_module, "HUNG_S", 0.5)  # from now on: a busy machine answers late
    assert (await reach(unit, UnitPhase.ENDED)).detail.startswith("gave no answer for 0.5 s")


@pytest.mark.usefixtures("stand_in")
async def test_one_that_hangs_while_it_stops_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "STOP_MARGIN_S", 0.1)
    unit = make()
    report = await reach(unit, UnitPhase.READY)
    await freeze(report.pid)
    unit.stop(0.1)
    assert (await reach(unit, UnitPhase.ENDED)).detail == "had to be killed"


@pytest.mark.usefixtures("stand_in")
async def test_without_a_controller_it_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "ORPHAN_PERIOD_S", 0.02)
    abandoned, clock = asyncio.Event(), Clock()
    unit = make(clock=clock, abandon=abandoned.set)
    await reach(unit, UnitPhase.READY)
    clock.skipped_s = ORPHAN_S
    async with asyncio.timeout(HANG_S):
        await abandoned.wait()
    assert unit.report().detail.startswith("no controller asked for its state")


async def test_an_ended_unit_gives_up_its_place_without_being_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "ORPHAN_PERIOD_S", 0.02)
    monkeypatch.setattr(unit_module, "_PROGRAM", ("/none",))
    abandoned, clock = asyncio.Event(), Clock()
    unit = make(clock=clock, abandon=abandoned.set)
    await reach(unit, UnitPhase.ENDED)
    assert not abandoned.is_set()
    clock.skipped_s = ORPHAN_S
    async with asyncio.timeout(HANG_S):
        await abandoned.wait()


@pytest.mark.usefixtures("stand_in")
async def test_stopping_before_it_is_ready_is_no_failure() -> None:
    unit = make()
    unit.leave()  # does nothing: it has no requests
    unit.stop(HANG_S)
    assert (await reach(unit, UnitPhase.ENDED)).detail in ("stopped", "had to be killed")
