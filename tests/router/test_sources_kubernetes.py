"""Nodes from Kubernetes, against a fake API server: list, watch, and every way in which a watch ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from lightkube.resources.core_v1 import Pod

from pd_http.errors import StartupError
from pd_router.config import RouterConfig
from pd_router.nodes.node import NodeSpec, Role
from pd_router.nodes.node_table import NodeTable
from pd_router.sources.base import NamedNode
from pd_router.sources.discovery import Discovery
from pd_router.sources.kubernetes import MAX_RETRY_S, RETRY_S, KubernetesPods, nodes_of
from pd_router.sources.make import make_sources
from tests.router import fake_nodes as fakes
from tests.router.fake_kubernetes import kubernetes, make_pod
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from lightkube.config.kubeconfig import SingleConfig

LABELS = {"pd-cluster/part": "node"}


class Naps:
    """Waits no time, and notes how long it should have been."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await asyncio.sleep(0)


def source(api: SingleConfig, naps: Naps | None = None, relist_s: float = 60.0) -> KubernetesPods:
    return KubernetesPods("serving", LABELS, api, naps or Naps(), relist_s)


@contextlib.asynccontextmanager
async def followed(pods: KubernetesPods) -> AsyncIterator[NodeTable]:
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    discovery = Discovery([pods], table)
    following = asyncio.ensure_future(discovery.run())
    try:
        await discovery.received_all(fakes.WAIT_S)
        yield table
    finally:
        following.cancel()
        await asyncio.wait([following])


def names(table: NodeTable) -> list[str]:
    return [node.node_id for node in table.nodes]


def found(pod: dict[str, Any]) -> tuple[NamedNode, ...]:
    typed = Pod.from_dict(pod)
    assert isinstance(typed, Pod)
    return nodes_of(typed)


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"port": 8100}, "http://127.0.0.1:8100"),
        ({"port": 8100, "ip": "fd00::1"}, "http://[fd00::1]:8100"),
        ({"port": 8100, "scheme": "https"}, "https://127.0.0.1:8100"),
        ({"port": 8100, "scheme": "ftp"}, None),
        ({"terminating": True}, None),
        ({"phase": "Succeeded"}, None),
        ({"phase": "Failed"}, None),
        ({"ip": ""}, None),
        ({"port_name": "web"}, None),
        ({"role": "encode"}, None),
    ],
)
def test_which_pods_are_nodes(fields: dict[str, Any], url: str | None) -> None:
    spec = NodeSpec(url or "", Role.DECODE, "d-0")
    assert found(make_pod("d-0", **fields)) == (() if url is None else (NamedNode(spec, "uid-d-0"),))


@pytest.mark.parametrize(
    ("fields", "ready"),
    [
        ({"ready": True}, True),
        ({"ready": False}, False),  # by its kubelet
        ({"ready": False, "containers_ready": True}, True),  # by the controller-manager
        ({"ready": False, "containers_ready": True, "gates": {"lb": False}}, False),  # by its kubelet again
        ({"ready": False, "containers_ready": True, "gates": {"lb": True, "mesh": False}}, False),
        ({"ready": False, "containers_ready": True, "gates": {"lb": True}}, True),
        ({"ready": False, "containers_ready": False, "gates": {"lb": True}}, False),
    ],
)
def test_the_word_of_the_kubelet_counts(fields: dict[str, Any], ready: bool) -> None:
    [node] = found(make_pod("d-0", **fields))
    assert node.is_ready is ready


def test_a_pod_may_hold_a_prefill_and_a_decode_node() -> None:
    told: dict[str, Any] = dict(make_pod("host-0", "prefill", port=8100))
    sidecar = {"name": "mesh", "ports": [{"name": "http-envoy-prom", "containerPort": 15090}]}
    ports = [{"name": "http-decode", "containerPort": 8102}, {"name": "control-decode", "containerPort": 8103}]
    told["spec"]["containers"] += [{"name": "decode", "ports": ports}, sidecar]
    assert [node.spec for node in found(told)] == [
        NodeSpec("http://127.0.0.1:8100", Role.PREFILL, "host-0"),
        NodeSpec("http://127.0.0.1:8102", Role.DECODE, "host-0-decode"),
    ]
    told["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert [node.is_ready for node in found(told)] == [False, False]


@pytest.mark.long
@pytest.mark.anyio
async def test_pods_come_and_go() -> None:
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        await fake.put("web-0", port=9, part="router")  # not of the selector
        async with followed(source(api)) as table:
            assert names(table) == ["d-0"]
            await fake.put("d-1", port=2, ready=False)
            await fake.put("p-0", "prefill", port=3)
            await until(lambda: names(table) == ["d-0", "p-0"])
            assert [n.role for n in table.nodes] == [Role.DECODE, Role.PREFILL]
            await fake.put("d-1", port=2)
            await until(lambda: names(table) == ["d-0", "d-1", "p-0"])
            await fake.put("d-0", port=1, terminating=True)
            await until(lambda: names(table) == ["d-1", "p-0"])
            await fake.put("p-0", "prefill", port=3, part="retired")
            await until(lambda: names(table) == ["d-1"])
            await fake.put("d-1", port=2, ip="127.0.0.2")  # made anew elsewhere
            await until(lambda: [n.url for n in table.nodes] == ["http://127.0.0.2:2"])
            await fake.delete("d-1")
            await until(lambda: names(table) == [])
            assert (fake.lists, len(fake.watches)) == (1, 1)  # all of that from one watch


@pytest.mark.long
@pytest.mark.anyio
async def test_a_pod_that_cannot_be_a_node_is_told_once_for_each_word_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with kubernetes() as (fake, api):
        await fake.put("web-0", port_name="web")
        async with followed(source(api)):
            await fake.until_watches(1)
            assert caplog.text.count("pod web-0 is not a node") == 1


@pytest.mark.long
@pytest.mark.anyio
async def test_what_happens_while_a_watch_is_cut_is_not_missed() -> None:
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        naps = Naps()
        async with followed(source(api, naps)) as table:
            await fake.until_watches(1)
            for turn in range(1, 4):
                await fake.drop()
                await fake.put(f"d-{turn}", port=1 + turn)
                await fake.delete(f"d-{turn - 1}")
                await fake.until_watches(turn + 1)
                assert names(table) == [f"d-{turn}"]
            assert fake.lists == 4
            assert len(naps.taken) == 3


@pytest.mark.long
@pytest.mark.anyio
async def test_a_watch_that_ends_in_good_order_goes_on_where_it_was() -> None:
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        naps = Naps()
        async with followed(source(api, naps)) as table:
            await fake.until_watches(1)
            await fake.put("d-1", port=2)
            await until(lambda: names(table) == ["d-0", "d-1"])
            await fake.end()
            await fake.delete("d-0")
            await until(lambda: names(table) == ["d-1"])
            assert (fake.lists, len(fake.watches), naps.taken) == (1, 2, [])  # no trouble, so nothing listed anew


@pytest.mark.long
@pytest.mark.anyio
async def test_a_watch_that_may_not_go_on_where_it_was_lists_anew() -> None:
    """410 is the answer to the next watch, not an event of the last one."""
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        naps = Naps()
        async with followed(source(api, naps)) as table:
            await fake.until_watches(1)
            await fake.put("web-0", port=9, part="router")  # the watch is not told, so its version falls behind
            fake.compact()
            await fake.end()
            await fake.until_watches(2)
            assert (fake.lists, fake.watches[-1]) == (2, fake.version)
            assert naps.taken == [RETRY_S, RETRY_S]  # after a watch without an event, and after 410
            await fake.put("d-1", port=2)
            await until(lambda: names(table) == ["d-0", "d-1"])


@pytest.mark.long
@pytest.mark.anyio
async def test_a_version_that_is_too_old_is_listed_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        async with followed(source(api)) as table:
            await fake.until_watches(1)
            await fake.put("d-1", port=2, part="router")  # the watch's version falls behind: it is not told of these
            fake.compact()
            await fake.put("d-2", port=3)
            await until(lambda: names(table) == ["d-0", "d-2"])
            assert "too old resource version" in caplog.text
            await fake.until_watches(2)
            assert fake.lists == 2
            assert fake.watches[1] == fake.version


@pytest.mark.long
@pytest.mark.anyio
async def test_while_the_api_server_is_away_the_nodes_stay_and_it_is_left_in_peace() -> None:
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        naps = Naps()
        async with followed(source(api, naps)) as table:
            await fake.until_watches(1)
            fake.failing_with = 503
            await fake.drop()
            await until(lambda: len(naps.taken) >= 6)
            assert names(table) == ["d-0"]
            assert naps.taken[:6] == [0.25, 0.5, 1.0, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]
            await fake.delete("d-0")
            fake.failing_with = 0
            await until(lambda: names(table) == [])


@pytest.mark.long
@pytest.mark.anyio
async def test_a_watch_that_died_without_a_word_is_noticed_by_listing_now_and_then() -> None:
    async with kubernetes() as (fake, api):
        await fake.put("d-0", port=1)
        naps = Naps()
        async with followed(source(api, naps, relist_s=0.05)) as table:
            await until(lambda: fake.lists >= 3)
            assert names(table) == ["d-0"]
            assert naps.taken == []  # in good order, so at once


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("trouble", ["none", "dropped", "410"])
async def test_a_pod_that_goes_gets_no_new_request_within_a_second(trouble: str) -> None:
    old, new = FakeNode("decode", fakes.decode), FakeNode("decode", fakes.decode)
    body = {"model": "demo", "prompt": "x", "stream": True}
    async with running(old, new), kubernetes() as (fake, api):
        for name, node in (("d-0", old), ("d-1", new)):
            await fake.put(name, port=port_of(node))
        naps = Naps()
        async with serving(sources=[source(api, naps)], start_empty=True) as router:
            await fake.until_watches(1)
            table = router.services.table
            assert [n.is_healthy(table.clock()) for n in table.nodes] == [True, True]
            if trouble == "410":
                await fake.put("web-0", part="router")
                fake.compact()
            elif trouble == "dropped":
                await fake.drop()
            await fake.put("d-0", port=port_of(old), terminating=True)
            await until(lambda: len(table.nodes) == 1)
            assert sum(naps.taken) < 1.0, "all else is the time of a request"
            for _ in range(4):
                async with router.session.post(router.url + "/v1/completions", json=body) as answer:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            assert (len(old.seen), len(new.seen)) == (0, 4)


def port_of(node: FakeNode) -> int:
    return int(node.url.rsplit(":", 1)[1])


def test_without_lightkube_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightkube", None)
    monkeypatch.delitem(sys.modules, "pd_router.sources.kubernetes", raising=False)
    with pytest.raises(StartupError, match=r"pd-cluster\[kubernetes\]"):
        make_sources(RouterConfig(kubernetes_namespace="serving"))


def test_the_way_to_the_api_server_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(StartupError, match="cannot reach an API server"):
        make_sources(RouterConfig(kubernetes_namespace="serving"))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    (made,) = make_sources(RouterConfig(kubernetes_namespace="serving"))
    assert made.name == "kubernetes"


@pytest.mark.parametrize("selector", ["", "a", "a=", "=b", "a=b,,c=d"])
def test_a_bad_selector_is_refused(selector: str) -> None:
    with pytest.raises(StartupError, match="--kubernetes-selector"):
        RouterConfig(kubernetes_namespace="serving", kubernetes_selector=selector)
