"""A control plane that is away or errs takes no healthy node from a router: requests go on, and the log stays short."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pd_router.config import RouterConfig
from pd_router.nodes.node import NodeSpec, Role
from pd_router.nodes.node_table import NodeTable
from pd_router.sources.discovery import Discovery
from pd_router.sources.kubernetes import RETRY_S, KubernetesPods
from pd_router.sources.membership import GONE_S
from tests.router import fake_nodes as fakes
from tests.router.fake_kubernetes import kubernetes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until
from tests.router.test_node_health import Traffic, port_of
from tests.router.test_sources_file import listing
from tests.router.test_sources_kubernetes import LABELS, Naps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pd_router.nodes.node import Node
    from tests.router.fake_kubernetes import FakeKubernetes
    from tests.router.router_process import Router

pytestmark = pytest.mark.anyio
SETTINGS: dict[str, Any] = {"health_interval_s": 0.05, "start_empty": True}
NUM_TRIES = 40  # of a source that is away: at 2 s each more than a minute


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pd_router")
    monkeypatch.setattr("pd_router.sources.kubernetes.LIST_S", 0.05)
    monkeypatch.setattr("pd_router.sources.discovery.LOOK_S", 0.05)


@pytest.fixture
def nodes() -> list[FakeNode]:
    return [FakeNode("decode", fakes.decode, node_id=name) for name in ("d-0", "d-1")]


class Stage:
    """A router that knows two nodes as pods, and asks them without a pause."""

    def __init__(self, fake: FakeKubernetes, router: Router, naps: Naps, nodes: list[FakeNode]) -> None:
        self.fake, self.router, self.naps, self.nodes = fake, router, naps, nodes
        self.traffic = Traffic(router)
        self.known = self.in_use()

    def in_use(self) -> tuple[Node, ...]:
        return self.router.services.table.nodes

    def doubted(self) -> float:
        return self.router.count("pd_router_source_doubted", source="kubernetes")

    async def goes_on(self) -> None:
        """Both nodes serve requests that are sent from now on, and no request has failed."""
        for node in self.nodes:
            await self.traffic.hears_from(node)
        assert self.in_use() == self.known
        assert self.traffic.statuses == {200}

    async def tries(self, number: int = NUM_TRIES) -> None:
        seen = len(self.naps.taken)
        await until(lambda: len(self.naps.taken) >= seen + number)


@contextlib.asynccontextmanager
async def staged(nodes: list[FakeNode], **settings: Any) -> AsyncIterator[Stage]:
    async with running(*nodes), kubernetes() as (fake, api):
        for node in nodes:
            await fake.put(node.node_id, port=port_of(node))
        naps = Naps()
        pods = KubernetesPods("serving", LABELS, api, naps)
        async with serving(sources=[pods], **SETTINGS | settings) as router:
            await fake.until_watches(1)
            stage = Stage(fake, router, naps, nodes)
            try:
                await stage.goes_on()
                yield stage
            finally:
                await stage.traffic.close()


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["refuses", "hangs", "403", "503", "watch 403", "410"])
async def test_an_api_server_that_is_away_and_back_with_all_pods_not_ready(
    trouble: str, nodes: list[FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(nodes) as stage:
        fake = stage.fake
        match trouble:
            case "refuses":
                await fake.leave()
            case "hangs":
                fake.hangs = True
            case "watch 403":
                fake.failing_watches_with = 403
            case "410":
                fake.failing_watches_with = 410
            case status:
                fake.failing_with = int(status)
        caplog.clear()
        await fake.drop()
        await stage.tries(8 if trouble == "hangs" else NUM_TRIES)
        await stage.goes_on()
        told = [record for record in caplog.records if "in a row" in record.getMessage()]
        assert 2 <= len(told) <= 7, "one line for the 1st, 2nd, 4th ... failure"
        await fake.mark_all(ready=False)
        fake.hangs, fake.failing_with, fake.failing_watches_with = False, 0, 0
        if trouble == "refuses":
            await fake.come_back()
        await fake.until_watches(2)
        await stage.goes_on()
        await fake.mark_all(ready=True)
        await until(lambda: caplog.text.count("followed again") == 1)
        await fake.delete("d-1")
        await until(lambda: [node.node_id for node in stage.in_use()] == ["d-0"])
        assert stage.traffic.statuses == {200}
        assert stage.doubted() == 0.0


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("Ready",), ("Ready", "ContainersReady")], ids=["controller-manager", "kubelets"])
async def test_all_pods_are_marked_not_ready_while_they_are_watched(
    kinds: tuple[str, ...], nodes: list[FakeNode]
) -> None:
    """Kubelets that start again take containers for not ready until their next probe."""
    async with staged(nodes) as stage:
        await stage.fake.mark_all(ready=False, kinds=kinds)
        await stage.fake.put("d-2", port=1)  # told after the others
        await until(lambda: len(stage.in_use()) == 3)
        await stage.fake.delete("d-2")
        await until(lambda: len(stage.in_use()) == 2)
        await stage.goes_on()
        nodes[0].is_up = False  # in earnest: the router sees that itself
        await until(lambda: [node.reachable for node in stage.in_use()] == [False, True])
        await stage.traffic.hears_from(nodes[1])
        nodes[0].is_up = True
        await stage.goes_on()


@pytest.mark.long
async def test_a_list_without_a_pod_is_doubted_while_the_nodes_answer(
    nodes: list[FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(nodes) as stage:
        fake = stage.fake
        fake.lists_nothing = True
        fake.compact()
        await fake.drop()
        await until(lambda: stage.doubted() == 1.0)
        await until(lambda: "'kubernetes' is doubted" in caplog.text)
        for watches in (2, 3, 4):  # it says so again
            await fake.until_watches(watches)
            await fake.drop()
            await fake.until_watches(watches + 1)
            await stage.goes_on()
        assert caplog.text.count("is doubted") == 1
        await fake.delete("d-1")  # of this one it knows the end
        await until(lambda: [node.node_id for node in stage.in_use()] == ["d-0"])
        assert stage.doubted() == 1.0
        fake.lists_nothing = False
        await fake.drop()
        await until(lambda: stage.doubted() == 0.0)
        await until(lambda: "believed again" in caplog.text)
        assert [node.node_id for node in stage.in_use()] == ["d-0"]
        assert stage.traffic.statuses == {200}


@pytest.mark.long
@pytest.mark.parametrize("boot", [8, None], ids=["another boot", "a stranger that tells none"])
async def test_nodes_that_have_ended_leave_a_doubted_source(nodes: list[FakeNode], boot: int | None) -> None:
    async with staged(nodes) as stage:
        stage.fake.lists_nothing = True
        await stage.fake.drop()
        await until(lambda: stage.doubted() == 1.0)
        nodes[1].facts = {"epoch": boot}  # another process is at this address
        await until(lambda: [node.node_id for node in stage.in_use()] == ["d-0"])
        [last] = stage.in_use()
        await stage.traffic.close()
        await nodes[0].stop()
        await until(lambda: last.down_since_s is not None)
        assert stage.in_use() == (last,)
        last.down_since_s = stage.router.services.table.clock() - GONE_S
        await until(lambda: stage.in_use() == ())
        assert stage.doubted() == 0.0


@pytest.mark.long
async def test_a_pod_that_takes_the_place_of_another_is_admitted_by_its_own_readiness(nodes: list[FakeNode]) -> None:
    async with staged(nodes) as stage:
        fake, port = stage.fake, port_of(nodes[1])
        await fake.put("d-1", port=port, uid="uid-2", ready=False)  # the same address: the host's network
        await until(lambda: [node.node_id for node in stage.in_use()] == ["d-0"])
        await fake.put("d-1", port=port, uid="uid-2")
        await until(lambda: [node.node_id for node in stage.in_use()] == ["d-0", "d-1"])
        await fake.put("d-1", port=port, uid="uid-2", phase="Failed")
        await until(lambda: [node.node_id for node in stage.in_use()] == ["d-0"])


@pytest.mark.long
@pytest.mark.parametrize("is_watched", [True, False])
async def test_pods_that_all_have_another_address_are_at_the_old_one_no_more(
    is_watched: bool, nodes: list[FakeNode]
) -> None:
    """Though something answers there: it may be of another release."""
    async with staged(nodes) as stage:
        if not is_watched:
            stage.fake.failing_with = 503
            await stage.fake.drop()
        for node in nodes:
            await stage.fake.put(node.node_id, port=1)
        stage.fake.failing_with = 0
        await until(lambda: {node.url for node in stage.in_use()} == {"http://127.0.0.1:1"})
        assert stage.doubted() == 0.0


@pytest.mark.long
@pytest.mark.parametrize(("containers_ready", "known"), [(True, ["d-0", "d-1"]), (False, [])])
async def test_a_router_that_starts_while_all_pods_are_not_ready(
    containers_ready: bool, known: list[str], nodes: list[FakeNode]
) -> None:
    """The controller-manager's mark is no reason to refuse requests; that of a kubelet is: the pod may be starting."""
    async with running(*nodes), kubernetes() as (fake, api):
        for node in nodes:
            await fake.put(node.node_id, port=port_of(node), ready=False, containers_ready=containers_ready)
        async with serving(sources=[KubernetesPods("serving", LABELS, api)], **SETTINGS) as router:
            assert [node.node_id for node in router.services.table.nodes if node.reachable] == known
            async with router.session.get(router.url + "/health") as answer:
                assert answer.status == (200 if known else 503)


@pytest.mark.long
async def test_watches_that_close_at_once_are_not_begun_without_a_pause(nodes: list[FakeNode]) -> None:
    async with staged(nodes) as stage:
        stage.fake.closes_watches = True
        await stage.fake.end()
        await stage.tries()
        taken = stage.naps.taken[-NUM_TRIES:]
        assert set(taken) == {RETRY_S}
        begun = len(stage.fake.watches)
        await stage.tries()
        assert len(stage.fake.watches) - begun <= NUM_TRIES + 1
        await stage.goes_on()


@pytest.mark.long
async def test_bookmarks_are_heard_and_name_no_pod(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    async with staged(nodes) as stage:
        for _ in range(3):
            await stage.fake.bookmark()
        await stage.fake.delete("d-1")
        await until(lambda: len(stage.in_use()) == 1)
        assert "failed" not in caplog.text


@pytest.mark.long
async def test_a_nodes_file_that_is_empty_broken_or_absent_for_a_moment(
    nodes: list[FakeNode], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_router.sources.file.LOOK_EVERY_S", 0.01)
    path = tmp_path / "nodes.json"
    async with running(*nodes):
        whole = listing(*(NodeSpec(node.url, Role.DECODE) for node in nodes))
        path.write_text(whole)
        async with serving(nodes_file=str(path), **SETTINGS) as router:
            known = router.services.table.nodes
            traffic = Traffic(router)

            def doubted() -> float:
                return router.count("pd_router_source_doubted", source="file")

            def age_s() -> float:
                return router.count("pd_router_source_age_seconds", source="file")

            for content in ("[]", "", whole[: len(whole) // 2], None):
                caplog.clear()
                if content is None:
                    path.unlink()
                else:
                    path.write_text(content)
                await until(lambda: doubted() == 1.0 or "stay unchanged" in caplog.text)
                if content != "[]":
                    await until(lambda: age_s() > 0.05)  # it is read each 0.01 s
                for node in nodes:
                    await traffic.hears_from(node)
                assert router.services.table.nodes == known
                path.write_text(whole)
                await until(lambda: doubted() == 0.0)
            path.write_text(listing(NodeSpec(nodes[0].url, Role.DECODE)))
            await until(lambda: len(router.services.table.nodes) == 1)
            assert traffic.statuses == {200}
            await traffic.close()


async def test_a_source_with_a_bug_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"

        def watch(self) -> Any:
            raise RuntimeError("a bug")

    naps = Naps()
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    following = asyncio.ensure_future(Discovery([Broken()], table, naps).run())
    await until(lambda: len(naps.taken) >= 64)
    following.cancel()
    await asyncio.wait([following])
    assert 6 <= len([record for record in caplog.records if record.levelno == logging.ERROR]) <= 8


TROUBLES = ("drop", "410", "away", "empty", "back")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
async def test_in_any_history_living_pods_stay_and_deleted_ones_go(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The router's own look is played: what lives answers."""
    draw = Random(seed)
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    used_ports = itertools.count(2)
    ready: set[str] = set()  # pods that live and have been ready
    seen: dict[str, Node] = {}  # the nodes of those, once they have answered
    async with kubernetes() as (fake, api):

        def look() -> set[str]:
            alive = {url_of(pod) for pod in fake.pods.values()}
            for node in table.nodes:
                node.epoch = 1
                table.set_up(node) if node.url in alive else table.set_down(node)
            return {node.node_id for node in table.nodes}

        following = asyncio.ensure_future(Discovery([KubernetesPods("serving", LABELS, api, Naps())], table).run())
        for step in range(80):
            name, uid = f"d-{draw.randrange(5)}", f"uid-{step}"
            what = draw.choice(["ready", "starting", "delete", "unready", "replace", *TROUBLES])
            if what in ("ready", "starting") and name not in fake.pods:
                await fake.put(name, port=next(used_ports), ready=what == "ready", uid=uid)
                ready |= {name} if what == "ready" else set()
            elif what in ("delete", "replace") and name in fake.pods:
                ready.discard(name)
                seen.pop(name, None)
                if what == "delete":
                    await fake.delete(name)
                else:
                    await fake.put(name, port=next(used_ports), ready=False, uid=uid)
            elif what == "unready":
                await fake.mark_all(ready=False, kinds=draw.choice([("Ready",), ("Ready", "ContainersReady")]))
            elif what in ("drop", "410"):
                if what == "410":
                    fake.compact()
                await fake.drop()
            fake.failing_with = {"away": 503, "back": 0}.get(what, fake.failing_with)
            fake.lists_nothing = what == "empty" or (what != "back" and fake.lists_nothing)
            asked = fake.num_asked
            await fake.drop()
            await fake.until_asked(asked + 1)
            look()
            seen |= {node.node_id: node for node in table.nodes if node.reachable and node.node_id in ready}
            assert set(seen.values()) <= set(table.nodes), (step, what, name)
        fake.failing_with, fake.lists_nothing = 0, False
        await fake.drop()
        await fake.mark_all(ready=True, kinds=("Ready", "ContainersReady"))
        await until(lambda: look() == fake.pods.keys())
        assert "Traceback" not in caplog.text
        following.cancel()
        await asyncio.wait([following])


def url_of(pod: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{pod['spec']['containers'][0]['ports'][0]['containerPort']}"
