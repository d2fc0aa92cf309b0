"""How soon a node that stands still is judged, and by which checks of /health. In virtual time, so at the moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pd_connectors.protocol import clock
from pd_router.config import RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.nodes.upstream import Answer
from pd_router.watch.health import HealthPoller
from tests.router.admission_world import VirtualLoop, later

if TYPE_CHECKING:
    from collections.abc import Coroutine

INTERVAL_S, TIMEOUT_S = 4.0, 7.0
BEGIN_S = 41.0  # a second after a check
FOREVER_S = 1e6
HELD_UP_S = 100.0


class Stage:
    """One node behind a poller. Its /health is answered after `late_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = VirtualLoop()
        self.late_s = 0.0
        self.checks: list[float] = []
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=self.loop.time))
        settings: dict[str, Any] = {"health_interval_s": INTERVAL_S, "health_timeout_s": TIMEOUT_S}
        config = RouterConfig(mixed=("http://n:1",), **settings)
        table = NodeTable(config, self.loop.time)
        self.node = table.nodes[0]
        self._poller = HealthPoller(config, table, self)  # type: ignore[arg-type]

    async def get(self, _node: object, path: str, *_: object) -> Answer:
        """As an Upstream."""
        if path != "/health":
            return Answer(200, (), b'{"data": []}')
        self.checks.append(self.loop.time())
        await later(self.late_s)
        return Answer(200, (), b'{"epoch": 1}')

    @property
    def is_down(self) -> bool:
        return self.node.liveness.down is not None

    def hold_up(self) -> None:
        """This process does not run for a while."""
        self.loop.hold_up(HELD_UP_S)

    def run(self, story: Coroutine[None, None, None]) -> None:
        async def watched() -> None:
            following = asyncio.create_task(self._poller.follow(self.node))
            await story
            following.cancel()

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(watched())


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_node_that_falls_silent_is_out_within_interval_and_timeout_and_back_with_the_next_check(stage: Stage) -> None:
    async def story() -> None:
        await later(BEGIN_S)
        assert stage.checks == pytest.approx([INTERVAL_S * number for number in range(11)])
        stage.late_s = FOREVER_S
        await later(TIMEOUT_S - 0.1)
        assert not stage.is_down, "it has had no more than that"
        await later(INTERVAL_S + 0.2)
        assert stage.is_down
        stage.late_s = 0.0
        await later(INTERVAL_S)
        assert not stage.is_down

    stage.run(story())


def test_a_slow_node_is_no_silent_one(stage: Stage) -> None:
    async def story() -> None:
        stage.late_s = TIMEOUT_S - 0.3
        for _ in range(1000):
            await later(0.1)
            assert not stage.is_down
        assert len(stage.checks) == pytest.approx(100 / (INTERVAL_S + stage.late_s), abs=1)

    stage.run(story())


def test_a_router_that_was_held_up_itself_blames_no_node(stage: Stage) -> None:
    async def story() -> None:
        await later(BEGIN_S)
        stage.late_s = HELD_UP_S + TIMEOUT_S - 1.0  # while the router runs it is silent for less than it may be
        await later(5.0)
        stage.hold_up()
        await later(0.0)
        stage.late_s = 0.0
        for _ in range(100):
            await later(0.1)
            assert not stage.is_down

    stage.run(story())
