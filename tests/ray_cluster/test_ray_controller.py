"""The controller over units that a test commands, before the real router."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray import policy
from pd_cluster.launch.on_ray.cluster import Ledger, UnitDied
from pd_cluster.launch.on_ray.controller import ASK_AGAIN_S, CENSUS_PERIOD_S, DOUBT_MARGIN_S, MAX_SILENCE_S, Controller
from pd_cluster.launch.on_ray.policy import Placement, RayNode, RoutedNode
from pd_cluster.launch.on_ray.routers import Routers
from pd_cluster.launch.on_ray.spec import ClusterSpec, RoleSpec
from pd_cluster.launch.on_ray.unit import Secret, UnitPhase, UnitPlan, UnitReport
from tests.deadlines import HANG_S
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import KEY, Router, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

pytestmark = pytest.mark.anyio
SPEC = ClusterSpec(
    address="10.0.0.1:6379",
    prefill=RoleSpec(count=1),
    decode=RoleSpec(count=2),
    router=RoleSpec(count=1, flags={"port": 0}),
)
HOMES = [RayNode("a", "10.0.0.1", {"CPU": 9.0}), RayNode("b", "10.0.0.2", {"CPU": 9.0})]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class FakeWorld:
    """Units that come up as soon as they are asked, at addresses taken from `urls`; in `silent` they never answer."""

    urls: dict[str, list[str]]
    units: dict[str, UnitReport] = field(default_factory=dict)
    choices: dict[str, Placement] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)  # roles with processes that end at once
    strays: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    stopped: dict[str, float] = field(default_factory=dict)
    ledger: Ledger | None = None
    living: list[RayNode] = field(default_factory=lambda: list(HOMES))
    here: str = "head"
    asked: Counter[str] = field(default_factory=Counter)

    def ray_nodes(self) -> list[RayNode]:
        return self.living

    def find(self) -> list[str]:
        return list(self.units)

    def stray_groups(self) -> list[str]:
        return self.strays

    def create(self, plan: UnitPlan, key: Secret, bundle: Mapping[str, float], choice: Placement) -> None:
        assert self.ledger is not None
        assert plan.name == f"{plan.role}-{self.ledger.serial}"  # written before it is used
        self.choices[plan.name] = choice
        if plan.role in self.failing:
            report = UnitReport(UnitPhase.ENDED, 0.0, choice.target or "", "h", detail="exited with status 2")
        else:
            url = self.urls[plan.role].pop(0)
            report = UnitReport(UnitPhase.READY, 0.0, choice.target or "", "h", url, "e1", 4711)
        self.units[plan.name] = report

    def discard(self, name: str) -> None:
        report = self.units.pop(name, None)
        if report is not None and report.url:
            self.urls[name.partition("-")[0]].append(report.url)
        self.strays = [stray for stray in self.strays if stray != name]
        self.discarded.append(name)

    async def report(self, name: str) -> UnitReport:
        self.asked[name] += 1
        if name in self.dead or name not in self.units:
            raise UnitDied("its worker died")
        if name in self.silent:
            await asyncio.Event().wait()
        return self.units[name]

    def leave(self, name: str) -> None:
        self.units[name] = replace(self.units[name], phase=UnitPhase.LEAVING)

    def stop(self, name: str, grace_s: float) -> None:
        self.stopped[name] = grace_s
        self.units[name] = replace(self.units[name], phase=UnitPhase.ENDED, detail="stopped")

    def save(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def load(self) -> Ledger | None:
        return self.ledger


@dataclass
class Stage:
    """A controller with a clock that a test moves."""

    world: FakeWorld
    router: Router
    routers: Routers
    nodes: list[FakeNode] = field(default_factory=list)
    now_s: float = 1000.0
    spec: ClusterSpec = SPEC
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.controller = self.another("boot-1")

    def another(self, boot: str) -> Controller:
        return Controller(self.spec, Secret("s"), boot, self.world, lambda: self.now_s)

    async def rounds(self, number: int, step_s: float = 1.0) -> None:
        for _ in range(number):
            await self.controller.round(self.routers)
            self.now_s += step_s

    async def whole(self) -> None:
        """Rounds until the cluster is whole: the router asks a new node's health by itself."""
        async with asyncio.timeout(HANG_S):
            while not self.controller.status().whole:
                await self.rounds(1)

    async def lose(self, name: str) -> None:
        """Its machine is gone: it is silent, and the router sees that its node is down."""
        self.world.silent.add(name)
        (url,) = self.urls(name)
        for node in self.nodes:
            node.is_up = node.is_up and node.url != url
        await until(lambda: not self.is_healthy(url))

    def is_healthy(self, url: str) -> bool:
        return any(node.url == url and node.reachable for node in self.router.services.table.nodes)

    def known(self) -> set[str]:
        """What the router would send requests to."""
        return {node.url for node in self.router.services.table.nodes if node.state == "active"}

    def urls(self, *names: str) -> set[str]:
        return {self.world.units[name].url for name in names}


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr("pd_cluster.launch.on_ray.controller.ANSWER_S", 0.02)
    monkeypatch.setattr("pd_cluster.launch.on_ray.routers.DEADLINE_S", HANG_S)
    prefills = [FakeNode("prefill", fakes.prefill) for _ in range(2)]
    decodes = [FakeNode("decode", fakes.decode) for _ in range(4)]
    async with running(*prefills, *decodes), serving(start_empty=True, health_interval_s=0.02) as router:
        urls = {
            "prefill": [node.url for node in prefills], "decode": [node.url for node in decodes],
            "router": [router.url],
        }  # fmt: skip
        routers = Routers(KEY)
        try:
            yield Stage(FakeWorld(urls), router, routers, [*prefills, *decodes])
        finally:
            await routers.close()


async def test_it_comes_up_spread_and_the_router_knows_it(stage: Stage) -> None:
    await stage.whole()
    assert sorted(stage.world.units) == ["decode-2", "decode-3", "prefill-1", "router-4"]
    assert {stage.world.choices[name].target for name in ("decode-2", "decode-3")} == {"a", "b"}
    assert stage.known() == stage.urls("prefill-1", "decode-2", "decode-3")
    status = stage.controller.status()
    assert [unit.name for unit in status.units] == ["prefill-1", "decode-2", "decode-3", "router-4"]
    assert status.units[0].epoch == "e1"


async def test_scaling_down_drains_before_it_stops(stage: Stage) -> None:
    await stage.whole()
    await stage.controller.scale({"decode": 1})
    await stage.rounds(1)
    (leaving,) = (name for name, unit in stage.world.units.items() if unit.phase is UnitPhase.LEAVING)
    url = stage.world.units[leaving].url
    table = stage.router.services.table
    node = next(node for node in table.nodes if node.url == url)
    node.decode_sequences = 1  # a request is under way there
    await stage.rounds(3)
    assert node.draining
    assert leaving not in stage.world.stopped
    node.decode_sequences = 0
    await stage.rounds(4)
    assert stage.world.stopped[leaving] == SPEC.grace_s
    assert leaving in stage.world.discarded
    await stage.whole()
    assert url not in stage.known()
    assert stage.controller.status().problems == ()


async def test_a_silent_unit_leaves_the_router_and_is_replaced_elsewhere(stage: Stage) -> None:
    await stage.whole()
    home = stage.world.units["decode-2"].ray_node
    await stage.lose("decode-2")
    url = stage.world.units["decode-2"].url
    await stage.rounds(int(policy.SILENT_S) + 1)
    assert url not in stage.known()
    assert not stage.controller.status().whole
    assert "decode-2" in stage.world.units
    await stage.rounds(int(policy.LOST_S - policy.SILENT_S))
    assert stage.world.discarded == ["decode-2"]
    assert stage.world.choices["decode-5"].avoid == (home,)
    assert stage.controller.status().problems == ("decode-2: silent",)
    await stage.whole()


async def test_a_silent_unit_with_a_node_that_its_router_finds_healthy_is_kept(stage: Stage) -> None:
    """Its actor hangs, or Ray does: the node itself serves."""
    await stage.whole()
    known = stage.known()
    stage.world.silent.add("decode-2")
    (url,) = stage.urls("decode-2")
    await stage.rounds(int(policy.LOST_S) + 5)
    assert stage.known() == known
    status = stage.controller.status()
    assert (status.whole, status.doubt) == (False, "only 3 of 4 units answer this controller")
    await stage.lose("decode-2")
    await stage.rounds(int(policy.SILENT_S))  # the silence of before was perhaps Ray's
    assert not stage.world.discarded
    await stage.rounds(int(policy.LOST_S))
    assert stage.world.discarded == ["decode-2"]
    assert url not in stage.known()


async def test_a_controller_that_loses_contact_removes_and_kills_nothing(stage: Stage) -> None:
    await stage.whole()
    known = stage.known()
    stage.world.silent = {"prefill-1", "decode-2", "decode-3"}  # the router is heard, and would take orders
    await stage.rounds(int(policy.LOST_S) + 5)
    assert stage.known() == known
    assert not stage.world.discarded
    status = stage.controller.status()
    assert not status.whole
    assert status.doubt == "only 1 of 4 units answer this controller"
    assert len(status.problems) == 1
    assert status.problems[0].startswith(f"{status.doubt}: silent units are kept")
    assert [(unit.phase, unit.silent_s >= policy.LOST_S) for unit in status.units[:3]] == [(UnitPhase.READY, True)] * 3
    stage.world.silent.clear()  # contact is back
    await stage.lose("decode-2")
    await stage.rounds(int(ASK_AGAIN_S) + 1)
    status = stage.controller.status()
    assert status.doubt == ""
    assert status.problems[1].endswith("units answer this controller: silence counts again")
    assert not stage.world.discarded  # its silence before that was perhaps the controller's
    await stage.rounds(int(policy.LOST_S))
    assert stage.world.discarded == ["decode-2"]
    await stage.whole()


async def test_a_question_that_got_lost_is_asked_again(stage: Stage) -> None:
    """Else a unit that lost its answer would hear no question for `orphan_s`, and end."""
    await stage.whole()
    stage.world.silent = set(stage.world.units)
    asked = stage.world.asked["decode-2"]
    await stage.rounds(4 * int(ASK_AGAIN_S))
    assert stage.world.asked["decode-2"] - asked == 4
    stage.world.silent = set()
    await stage.rounds(int(ASK_AGAIN_S) + 1)
    await stage.whole()
    assert not stage.world.discarded


async def test_of_a_dead_machine_that_held_most_units_rays_word_is_believed(stage: Stage) -> None:
    await stage.whole()
    stage.world.silent = {"prefill-1", "decode-2", "decode-3"}
    lost = {name for name in stage.world.silent if stage.world.units[name].ray_node == "b"}
    assert lost
    assert lost < stage.world.silent
    await stage.rounds(int(policy.LOST_S) + 5)
    assert not stage.world.discarded
    stage.world.living = HOMES[:1]
    await stage.rounds(int(CENSUS_PERIOD_S) + 1)
    assert set(stage.world.discarded) == lost
    assert f"{min(lost)}: its Ray node is dead" in stage.controller.status().problems


async def test_doubt_ends_after_the_units_have_ended_by_themselves(stage: Stage) -> None:
    stage.spec = msgspec.structs.replace(SPEC, orphan_s=10.0)
    stage.controller = stage.another("boot-1")
    await stage.whole()
    stage.world.silent = {"prefill-1", "decode-2", "decode-3"}
    await stage.rounds(int((stage.spec.orphan_s + DOUBT_MARGIN_S) / MAX_SILENCE_S), step_s=MAX_SILENCE_S)
    assert not stage.world.discarded
    await stage.rounds(2, step_s=MAX_SILENCE_S)
    assert set(stage.world.discarded) == {"prefill-1", "decode-2", "decode-3"}


async def test_at_the_end_silence_counts(stage: Stage) -> None:
    await stage.whole()
    stage.world.silent = set(stage.world.units)
    await stage.controller.close()
    await stage.rounds(int(policy.LOST_S) + 1)
    assert len(stage.world.discarded) == 4


async def test_a_unit_that_answers_again_in_time_stays(stage: Stage) -> None:
    await stage.whole()
    await stage.lose("decode-2")
    await stage.rounds(int(policy.SILENT_S) + 1)
    assert stage.known() == stage.urls("prefill-1", "decode-3")
    stage.world.silent.clear()
    for node in stage.nodes:
        node.is_up = True
    stage.controller = stage.another("boot-1")  # the old one's question is still open
    await stage.controller.resume()
    await stage.whole()
    assert stage.known() == stage.urls("prefill-1", "decode-2", "decode-3")
    assert not stage.world.discarded


async def test_a_pause_of_the_controller_counts_as_silence_of_no_unit(stage: Stage) -> None:
    await stage.whole()
    stage.now_s += 600
    stage.world.silent = set(stage.world.units)
    await stage.rounds(1)
    assert MAX_SILENCE_S < policy.SILENT_S
    assert not stage.world.discarded
    assert len(stage.known()) == 3


async def test_a_dead_actor_is_replaced_at_once(stage: Stage) -> None:
    await stage.whole()
    stage.world.dead.add("prefill-1")
    await stage.rounds(1)
    assert stage.world.discarded == ["prefill-1"]
    assert "prefill-5" in stage.world.units
    assert stage.controller.status().problems == ("prefill-1: its worker died",)
    await stage.whole()
    assert stage.known() == stage.urls("prefill-5", "decode-2", "decode-3")


async def test_what_never_comes_up_is_tried_ever_more_seldom(stage: Stage) -> None:
    stage.world.failing = {"decode"}
    await stage.rounds(20)
    tried = [name for name in stage.world.discarded if name.startswith("decode")]
    assert len(tried) == 6, tried  # two each at once, after 4 s and after 16 s, though twenty rounds passed
    status = stage.controller.status()
    assert status.failures == {"decode": 6}
    assert "exited with status 2" in status.problems[-1]
    stage.world.failing = set()
    await stage.controller.scale({"decode": 1})  # the user waits: tried at once
    await stage.whole()
    assert stage.controller.status().failures == {}


async def test_the_next_controller_goes_on_where_one_died(stage: Stage) -> None:
    await stage.whole()
    await stage.controller.scale({"decode": 3})
    stage.controller = stage.another("boot-1")
    await stage.controller.resume()
    await stage.whole()
    assert sum(name.startswith("decode") for name in stage.world.units) == 3
    assert not stage.world.discarded
    stage.controller = stage.another("boot-2")  # a later cluster of the same name
    await stage.controller.resume()
    assert stage.controller.status().counts["decode"] == 2
    assert not stage.world.units  # they have another key
    await stage.whole()
    assert "prefill-6" in stage.world.units  # and no name comes twice


async def test_a_new_controller_knows_its_units_before_it_has_heard_them(stage: Stage) -> None:
    await stage.whole()
    known = stage.known()
    stage.controller = stage.another("boot-1")
    await stage.controller.resume()
    assert len(stage.controller.status().units) == 4  # `down` waits for them
    answer = stage.world.report

    async def slowly(name: str) -> UnitReport:
        await asyncio.sleep(0.1 if name == "decode-2" else 0)  # longer than an ordinary round waits
        return await answer(name)

    stage.world.report = slowly  # type: ignore[method-assign]
    await stage.rounds(1)
    assert stage.known() == known
    assert not stage.controller.status().problems


async def test_a_router_on_a_lost_machine_delays_no_round(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.whole()
    asked: list[str] = []
    read = stage.routers.read

    async def note(urls: Iterable[str]) -> dict[str, tuple[RoutedNode, ...]]:
        asked.extend(urls)
        return await read(asked)

    monkeypatch.setattr(stage.routers, "read", note)
    await stage.rounds(1)
    assert asked == [stage.router.url]
    asked.clear()
    stage.world.silent.add("router-4")
    await stage.rounds(1)
    assert not asked
    assert not stage.controller.status().whole


async def test_a_unit_that_ray_refuses_to_make_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr(stage.world, "create", refuse)
        running = asyncio.create_task(stage.controller.run())
        await until(lambda: stage.controller.status().problems)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert stage.controller.status().problems == ("controller: RuntimeError: the store is full",)
    await stage.whole()


async def test_an_unexpected_answer_counts_as_silence_and_is_logged(stage: Stage) -> None:
    await stage.whole()
    answer = stage.world.report

    async def fail(name: str) -> UnitReport:
        if name == "decode-2":
            raise RuntimeError("Ray has a fit")
        return await answer(name)

    stage.world.report = fail  # type: ignore[method-assign]
    await stage.rounds(int(policy.SILENT_S) + 1)
    assert set(stage.controller.status().problems) == {
        "decode-2: RuntimeError: Ray has a fit",
        "only 3 of 4 units answer this controller: silent units are kept, unless Ray reports them as dead",
    }
    assert stage.known() == stage.urls("prefill-1", "decode-2", "decode-3")  # the node itself answers the router
    stage.world.report = answer  # type: ignore[method-assign]
    await stage.whole()
    assert not stage.world.discarded


async def test_half_made_units_are_taken_away(stage: Stage) -> None:
    await stage.whole()
    stage.world.strays = ["decode-77"]
    await stage.rounds(int(CENSUS_PERIOD_S) + 1)
    assert stage.world.discarded == ["decode-77"]


async def test_closing_ends_the_router_before_the_nodes(stage: Stage) -> None:
    await stage.whole()
    assert await stage.controller.close() == SPEC.grace_s
    await stage.rounds(1)
    assert list(stage.world.stopped) == ["router-4"]
    await stage.rounds(6)
    assert not stage.world.units
    assert stage.controller.status().closing
    with pytest.raises(StartupError, match="is closing"):
        await stage.controller.scale({"decode": 3})
    assert not stage.controller.status().whole


async def test_what_cannot_serve_is_refused(stage: Stage) -> None:
    with pytest.raises(StartupError, match="decode or mixed must be at least 1"):
        await stage.controller.scale({"decode": 0})
    with pytest.raises(StartupError, match="there is no router"):
        await stage.controller.scale({"router": 0})
    assert stage.controller.status().counts["decode"] == 2


async def test_orders_with_another_key_are_told_as_a_problem(stage: Stage) -> None:
    stage.routers = Routers(b"x" * 32)
    await stage.rounds(2)
    assert "401" in stage.controller.status().problems[0]
    assert not stage.known()
    await stage.routers.close()
