"""Nodes that are cut after and inside each frame, with the router in between: the client must not notice.

The nodes are real but for the engine of some cases; what they say is held to `tests/cut_streams.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn

from pd_cluster.worker.device_executor import DeviceExecutor
from pd_http.sockets import bound
from pd_router.requests import continued_stream
from tests.cut_streams import Case, Said, same_bytes, same_choices, same_content
from tests.engine.test_core_pipeline import make_connector
from tests.in_loop_server import in_loop
from tests.router.router_process import Router, serving
from tests.server.cut_nodes import SCRIPTED, SEVERAL, Pair
from tests.server.test_continued_generation import CASES, config_of, engine_of, node_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pd_connectors.base import Connector

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(900)]
# Nodes, router and clients share one loop, which takes seconds for a turn on a busy machine
LENIENT: dict[str, Any] = {
    "eject_after": 9999, "max_node_deaths": 9999, "continue_wait_s": 0.0, "probe_timeout_s": 60.0,
    "connect_timeout_s": 60.0,
}  # fmt: skip
WAIT_S = 120.0
AT_ONCE = 64  # streams
CUT = b"x-cut"  # header of a request: the messages that pass, and whether half of the next one does


class CutNode:
    """A node's app on a port. It breaks the first connection of each request that says where."""

    def __init__(self, app: ASGIApp, cut: set[bytes]) -> None:
        """`cut`: what was cut already, of all nodes."""
        self._app = app
        self._cut = cut
        self.url = ""
        self.num_messages = 0  # of the longest answer

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[CutNode]:
        listener = bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
        async with in_loop(config, listener):
            yield self

    def forget(self) -> None:
        """Cut all places anew."""
        self._cut.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        place = dict(scope["headers"]).get(CUT)
        left, inside = (1 << 30, False) if place in self._cut or place is None else _parse(place)
        if place is not None:
            self._cut.add(place)
        over = asyncio.Event()
        passed = 0

        async def passing(message: Message) -> None:
            nonlocal passed
            if over.is_set():
                return  # the last words of a node that is stopped
            if message["type"] == "http.response.body":
                if passed == left:
                    if inside:
                        await send({**message, "body": message["body"][: len(message["body"]) // 2], "more_body": True})
                    over.set()
                    await asyncio.Event().wait()
                passed += 1
                self.num_messages = max(self.num_messages, passed)
            await send(message)

        app, stop = asyncio.ensure_future(self._app(scope, receive, passing)), asyncio.ensure_future(over.wait())
        await asyncio.wait({app, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in (app, stop):  # a server closes the connection of an answer that its app leaves incomplete
            task.cancel()
        await asyncio.gather(app, stop, return_exceptions=True)


def _parse(place: bytes) -> tuple[int, bool]:
    number, _, inside = place.partition(b"-")
    return int(number), bool(inside)


@contextlib.asynccontextmanager
async def cluster(apps: Sequence[ASGIApp]) -> AsyncIterator[tuple[Router, list[CutNode]]]:
    async with contextlib.AsyncExitStack() as stack:
        cut: set[bytes] = set()
        nodes = [await stack.enter_async_context(CutNode(app, cut).serving()) for app in apps]
        yield await stack.enter_async_context(serving(decode=nodes, **LENIENT)), nodes


async def ask(router: Router, case: Case, cut: str = "") -> bytes:
    # A kept connection may be closed while the engine computes in this loop
    headers = {"x-request-id": "cut", "connection": "close"} | ({CUT.decode(): cut} if cut else {})
    async with (
        asyncio.timeout(WAIT_S),
        router.session.post(router.url + case.path, json=case.body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def check(
    router: Router, nodes: list[CutNode], case: Case, same: Callable[[bytes, bytes], None], step: int = 1
) -> int:
    """Of all places to cut, each `step`th. Returns the number of cuts."""
    for node in nodes:
        node.num_messages = 0
    whole = alike(await ask(router, case))
    num = max(node.num_messages for node in nodes)
    cuts = [f"{number}{inside}" for number in range(1, num) for inside in ("", "-inside")][::step]
    nodes[0].forget()
    before = router.count("pd_router_continuations_total", outcome="continued")
    places = asyncio.Semaphore(AT_ONCE)

    async def ask_in_turn(cut: str) -> bytes:
        async with places:
            return await ask(router, case, cut)

    for cut, answer in zip(cuts, await asyncio.gather(*map(ask_in_turn, cuts)), strict=True):
        try:
            same(alike(answer), whole)
        except AssertionError as error:
            raise AssertionError(f"{case}, cut at {cut} of {num}:\n{error}") from error
    assert router.count("pd_router_continuations_total", outcome="continued") - before == len(cuts)
    return len(cuts)


def alike(answer: bytes) -> bytes:
    """Without what differs between two requests: `created`, which one stream says once, and what a node had cached."""
    if answer.startswith(b"data: "):  # of chat or completions
        assert len(Said.by(answer).heads) == 1
    names = b"created|created_at|cached_tokens|input_tokens|cache_read_input_tokens"
    return re.sub(rb'"(%s)":\d+' % names, rb'"\1":1', answer)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 9])
async def test_no_cut_of_an_answer_is_seen(step: int) -> None:
    num = 0
    for case, texts, end in SCRIPTED:
        async with Pair(texts, end=end) as pair, cluster(pair.apps) as (router, nodes):
            num += await check(router, nodes, case, same_bytes, step)
    assert num > 300 / step


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
async def test_no_cut_of_an_answer_to_several_prompts_is_seen(step: int) -> None:
    case, texts, end = SEVERAL
    async with Pair(texts, end=end) as pair, cluster(pair.apps) as (router, nodes):
        assert await check(router, nodes, case, same_choices, step) > 40 / step


async def test_without_continuation_a_cut_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued_stream, "may_continue", lambda record, told: False)
    case, texts, end = SCRIPTED[0]
    async with Pair(texts, end=end) as pair, cluster(pair.apps) as (router, nodes):
        with pytest.raises((AssertionError, aiohttp.ClientError)):
            await check(router, nodes, case, same_bytes, 20)


@pytest.fixture(scope="module", params=["demo_model", "tool_model"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, DeviceExecutor, Connector]]:
    executor = DeviceExecutor.started(config_of(request.param), lambda text: None)
    for connector in make_connector(executor):
        yield request.param, executor, connector
    executor.close()


@pytest.mark.slow
async def test_no_cut_of_a_generation_is_seen(model: tuple[str, DeviceExecutor, Connector]) -> None:
    name, executor, connector = model
    async with engine_of(executor, connector, name) as engine, contextlib.AsyncExitStack() as stack:
        apps = [node_of(engine, node, name, stack) for node in ("first", "second")]
        async with cluster(apps) as (router, nodes):
            for of, case in CASES:
                if of == name and (case.body["temperature"] == 0 or "seed" in case.body):
                    await check(router, nodes, case, same_content)
