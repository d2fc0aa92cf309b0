"""`GET /dashboard` and its snapshot: its headers, its clients, its bounds, and what it tells."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from pd_router.edge.dashboard import INTERVAL_S, MAX_WATCHERS, SharedSnapshot, is_local
from pd_router.errors import TooManyWatchers
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.framed_nodes import FramedScript, framed_nodes
from tests.router.framed_streams import make_stream
from tests.router.router_process import serving, until
from tests.router.test_router_workers import workers_of
from tests.router.test_succession import DEADLINE_S, routers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.router_process import Router

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {"model": "demo", "prompt": "hi", "stream": True}


async def state_of(router: Router) -> dict[str, Any]:
    async with router.session.get(router.url + "/dashboard/state") as answer:
        assert answer.status == 200
        told: dict[str, Any] = await answer.json()
        return told


# --- the page


async def test_the_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    async with serving(start_empty=True) as router, router.session.get(router.url + "/dashboard") as answer:
        page = await answer.text()
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert answer.content_type == "text/html"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    for tag in ("script", "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert (policy["base-uri"], policy["form-action"]) == ("'none'", "'none'")
    assert policy["require-trusted-types-for"] == "'script'"


async def test_the_page_has_no_way_for_a_name_to_become_markup() -> None:
    async with serving(start_empty=True) as router, router.session.get(router.url + "/dashboard") as answer:
        page = await answer.text()
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|DOMParser", page) == []
    assert re.findall(r"<[^>]*\s(?:on\w+|style|src)\s*=", page) == [], "no handler, style or source in markup"
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    assert len(page.splitlines()) <= 400


# --- its clients


@pytest.mark.parametrize(
    ("peer", "headers", "expected"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, True),
        ("127.0.0.1", {"host": "127.0.0.1"}, True),
        ("127.9.9.9", {"host": "LOCALHOST:9000"}, True),  # ssh -L, kubectl port-forward
        ("::1", {"host": "[::1]:8000"}, True),
        ("::ffff:127.0.0.1", {"host": "localhost"}, True),
        ("10.0.0.7", {"host": "localhost:8000"}, False),
        ("127.0.0.1", {"host": "router.example:8000"}, False),  # a name that a site lets mean 127.0.0.1
        ("127.0.0.1", {"host": "localhost.example"}, False),
        ("127.0.0.1", {}, False),
        ("127.0.0.1", {"host": "localhost", "origin": "https://site.example"}, False),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-for": "203.0.113.5"}, False),
        ("127.0.0.1", {"host": "localhost", "forwarded": "for=203.0.113.5"}, False),
        ("127.0.0.1", {"host": "localhost", "via": "1.1 proxy"}, False),
        ("", {"host": "localhost"}, False),  # a unix socket
        ("not an address", {"host": "localhost"}, False),
    ],
)
def test_what_is_local(peer: str, headers: dict[str, str], expected: bool) -> None:
    assert is_local(peer, headers) is expected


@pytest.mark.parametrize(("setting", "status"), [("local", 403), ("open", 200), ("off", 404)])
@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/state"])
async def test_the_setting_decides_about_clients_of_other_machines(setting: str, status: int, path: str) -> None:
    headers = {"host": "router.example"}
    async with (
        serving(start_empty=True, dashboard=setting) as router,
        router.session.get(router.url + path, headers=headers) as answer,
    ):
        assert answer.status == status
        if status == 403:
            error = (await answer.json())["error"]
            assert error["code"] == "dashboard_closed"
            assert "--dashboard open" in error["message"]


async def test_no_page_of_another_site_reads_it_even_if_it_may_call_the_router() -> None:
    allowed = ("https://site.example",)
    async with serving(start_empty=True, allowed_origins=allowed) as router:
        headers = {"origin": allowed[0]}
        async with router.session.get(router.url + "/dashboard/state", headers=headers) as answer:
            assert answer.status == 403


async def test_other_methods_are_refused() -> None:
    async with serving(start_empty=True) as router, router.session.post(router.url + "/dashboard/state") as answer:
        assert answer.status == 405


# --- its cost


class Making:
    """Counts snapshots, and finishes each when told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.count = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.error: Exception | None = None
        self.shared = SharedSnapshot(self.make, lambda: self.now_s)

    async def make(self) -> bytes:
        self.count += 1
        number = self.count
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return b"%d" % number


async def test_watchers_share_one_snapshot_a_second() -> None:
    making = Making()
    assert making.count == 0, "nothing is computed while no page watches"
    making.go_on.clear()
    asking = [asyncio.ensure_future(making.shared.get()) for _ in range(3)]
    await until(lambda: making.count)
    making.now_s += 10 * INTERVAL_S
    asking.append(asyncio.ensure_future(making.shared.get()))
    await asyncio.sleep(0)
    asking[0].cancel()  # a watcher that leaves takes nothing from the others
    making.go_on.set()
    assert await asyncio.gather(*asking[1:]) == [b"1"] * 3
    assert await making.shared.get() == b"2", "the first one is old by now"
    making.now_s += 0.9 * INTERVAL_S
    assert await making.shared.get() == b"2"
    making.now_s += 0.1 * INTERVAL_S
    assert await making.shared.get() == b"3"


async def test_more_watchers_than_allowed_are_refused_until_the_next_snapshot() -> None:
    making = Making()
    for _ in range(MAX_WATCHERS):
        assert await making.shared.get() == b"1"
    with pytest.raises(TooManyWatchers):
        await making.shared.get()
    making.now_s += INTERVAL_S
    assert await making.shared.get() == b"2"


async def test_a_snapshot_that_fails_is_made_again() -> None:
    making = Making()
    making.error = ValueError("as scripted")
    with pytest.raises(ValueError, match="as scripted"):
        await making.shared.get()
    making.error = None
    making.now_s += INTERVAL_S
    assert await making.shared.get() == b"2"


async def test_a_refused_watcher_is_told_when_to_come_back() -> None:
    async with serving(start_empty=True) as router:
        router.services.table.clock = lambda: 5.0  # so that all requests are within one interval
        answers = [await router.session.get(router.url + "/dashboard/state") for _ in range(MAX_WATCHERS + 1)]
        assert [answer.status for answer in answers] == [200] * MAX_WATCHERS + [429]
        assert answers[-1].headers["retry-after"] == "5"
        assert (await answers[-1].json())["error"]["code"] == "too_many_watchers"


# --- what it tells


async def test_a_streamed_handoff_is_told_with_its_phases() -> None:
    p = FakeNode("prefill", fakes.prefill, node_id="p")
    script = FramedScript(make_stream(1))
    [d] = framed_nodes(script, 1)
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + "/v1/completions", json=BODY) as answer:
            await answer.read()
            request_id = answer.headers["x-request-id"]
        await router.idle()
        told = await state_of(router)
    [note] = told["newest"]
    assert (note["request_id"], note["model"], note["outcome"]) == (request_id, "demo", "ok")
    assert (note["order"], note["reason"], note["prefill"], note["decode"]) == ("p-first", "default", "p", d.node_id)
    assert note["phases"]
    assert sum(note["phases"].values()) == pytest.approx(note["ttft_s"])
    assert 0 < note["ttft_s"] <= note["total_s"]
    assert told["slowest"] == [note]
    assert [pair["key"] for pair in told["pairs"]] == [["p", d.node_id]]
    assert [route["key"] for route in told["routes"]] == [["p-first", "default", "ok"]]
    assert [node["node_id"] for node in told["nodes"]] == ["p", d.node_id]
    assert told["in_flight"] == 0


async def test_a_fallback_and_a_refusal_are_told_with_their_reasons() -> None:
    p = FakeNode("prefill", fakes.prefill_error_first, node_id="p")
    d = FakeNode("decode", fakes.decode, node_id="d")
    async with running(p, d), serving([p], [d]) as router:
        for body in (BODY, BODY | {"model": "none\u202e" * 100}, {**BODY, "stream": False}):
            async with router.session.post(router.url + "/v1/completions", json=body) as answer:
                await answer.read()
            await router.idle()  # a request is noted after its answer has ended
        told = await state_of(router)
    whole, refused, streamed = told["newest"]
    assert (streamed["order"], streamed["reason"]) == ("direct", "prefill-failed")
    assert (refused["outcome"], refused["order"], refused["model"]) == ("refused", "none", "")
    assert (whole["ttft_s"], whole["decode"]) == (None, "d")
    assert [route["key"] for route in told["routes"]] == [
        ["direct", "prefill-failed", "ok"], ["none", "none", "refused"],
    ]  # fmt: skip


async def test_nothing_of_a_request_but_names_and_figures_is_told() -> None:
    d = FakeNode("decode", fakes.decode, node_id="d")
    async with running(d), serving(None, [d]) as router:
        headers = {"authorization": "Bearer secret-key", "x-api-key": "secret-key"}
        body = BODY | {"prompt": "secret prompt", "user": "secret user"}
        async with router.session.post(router.url + "/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
        await router.idle()
        async with router.session.get(router.url + "/dashboard/state") as answer:
            text = await answer.text()
        assert "secret" not in text
        assert '"decode":"d"' in text, "the request is told"


@pytest.mark.integration
async def test_all_workers_are_told_by_each(tmp_path: Path) -> None:
    d = FakeNode("decode", fakes.decode, node_id="d")
    async with (
        running(d),
        routers(tmp_path, "--decode", d.url, "--workers", "2") as router,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        for number in range(20):
            headers = {"x-request-id": f"request-{number}"}
            async with session.post(router.url + "/v1/completions", json=BODY, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
        told: dict[str, Any] = {"newest": []}
        async with asyncio.timeout(DEADLINE_S):
            while len(told["newest"]) < 20:  # a request is noted after its answer has ended
                await asyncio.sleep(0.2)  # more than MAX_WATCHERS a second are refused
                async with session.get(router.url + "/dashboard/state") as answer:
                    told = await answer.json()
        assert {note["request_id"] for note in told["newest"]} == {f"request-{number}" for number in range(20)}
        assert (told["num_workers"], told["late_workers"]) == (2, [])
        frozen = workers_of(router)[1]
        frozen.suspend()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while told["late_workers"] != [1]:  # the first answers may be of the snapshot before
                    await asyncio.sleep(0.2)  # more than MAX_WATCHERS a second are refused
                    async with session.get(router.url + "/dashboard/state") as answer:
                        told = await answer.json()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor ends a worker that is frozen for long
                frozen.resume()
        assert told["num_workers"] == 2
