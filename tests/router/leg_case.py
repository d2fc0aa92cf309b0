"""One request of which legs fail, and all that comes of it, in words that stand in a table."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from pd_router.nodes.node_report import report
from pd_router.policy.charge import Charge
from tests.deadlines import HANG_S
from tests.http.answer import CHAT, HI
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Script, Seen, running
from tests.router.router_process import Router, serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

P_SPEED = 100_000.0  # bytes per second
BUSY_BYTES = 1_000_000  # ten seconds of it
SOON_S = 0.02  # of a wait that shall end
COUNTED = {
    "pd_router_leg_failures_total": "{leg} {node} {kind}",
    "pd_router_legs_moved_total": "{leg} left {node}",
    "pd_router_client_disconnects_total": "client left {phase}",
    "pd_router_requests_nodes_died_total": "nodes died",
    "pd_router_tries_exhausted_total": "no {leg} node left",
    "pd_router_ticket_releases_total": "release {result}",
}


async def die(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """The connection breaks, and no process listens."""
    await node.vanish()
    return await fakes.hang_up(node, request, seen)


async def start_again(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """The same, with a supervisor that has started the node again before the router looks."""
    node.epoch += 1
    return await fakes.hang_up(node, request, seen)


async def lose_engine(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return fakes.error(503, "engine_died")


async def blame_request(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return fakes.error(500, "nodes_died")


async def break_off(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    node.go_on.set()
    return await fakes.decode_dies(node, request, seen)


WORDS: dict[str, Script] = {  # see LegCase.nodes
    "gone": fakes.decode,  # it was there when the router started
    "silent": fakes.silent,
    "hangs-up": fakes.hang_up,
    "dies": die,
    "restarts": start_again,
    "lost-engine": lose_engine,
    "blames-request": blame_request,
    "ticket": fakes.prefill,
    "ticket-stands": fakes.prefill_until_told,
    "ticket-error": fakes.prefill_error_after_ticket,
    "error": fakes.prefill_error_first,
    "no-ticket": fakes.decode,
    "ok": fakes.decode,
    "stands": fakes.decode_until_told,
    "breaks": break_off,
    "no-end": fakes.decode_forgets_done,
    "tells-error": fakes.decode_tells_error,
}


@dataclass(frozen=True)
class LegCase:
    """What the nodes do, and what comes of it."""

    nodes: str  # p0 p1 ... > d0 d1 ...: a key of WORDS, or the status of a refusal: 503, 503-alone (without a ticket)
    gets: str  # the client: status, order and its reason, the nodes that prefilled and decoded, what the body says
    asked: str  # nodes in the order in which they got it; d0<p0: with a ticket of p0; d0?: with an offer instead
    counted: str = ""  # by the router's metrics
    ill: str = ""  # nodes that get no requests after it; one failure of their own is enough
    closed: str = ""  # nodes with a leg that the router closed before its end
    outcome: str = "ok"
    stream: bool | None = None  # None: a case for each
    order: str | None = None  # asked for by the client
    busy: str = ""  # nodes with much to read; then a prompt may go to decode nodes
    leaves: str = ""  # when the client leaves: this node has got the request; or a piece of the stream has come
    falls: str = ""  # a node, and what befalls it when it has got the request: it is silent or frozen
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[bool, ...]:
        return (False, True) if self.stream is None else (self.stream,)

    @property
    def expected(self) -> tuple[object, ...]:
        return self.gets, self.asked, sorted(filter(None, self.counted.split(", "))), self.ill, [self.outcome]

    async def run(self, *, stream: bool) -> tuple[object, ...]:
        """What came of it, to be compared with `expected`. Checks by itself what is left behind."""
        world = World(self)
        settings = {"eject_after": 1, "prefill_on_decode": "auto" if self.busy else "never", **self.settings}
        async with running(*world.nodes), serving(world.prefills, world.decodes, **settings) as router:
            for node, word in zip(world.nodes, world.words, strict=True):
                if word == "gone":
                    await node.stop()
            with world.busy(router):
                gets = await world.send(router, stream=stream)
            await until(lambda: outcomes(router))
            await router.idle()
            ill = [str(node["node_id"]) for node in report(router.services.table) if not node["healthy"]]
            found = (gets, " ".join(world.asked), counted(router), " ".join(ill), outcomes(router))
            if found == self.expected:
                await until(lambda: world.closed() == self.closed)
            released = [ticket for node in world.prefills for ticket in node.released]
            assert released == ["ticket-1"] * self.counted.count("release ok")
            assert router.count("pd_router_requests_in_flight") == 0
            return found


def make_busy(router: Router, number: int = 0) -> Charge:
    """A node has a lot to read, the first prefill node if no other is named. That one has read at its speed."""
    node, clock = router.services.table.nodes[number], router.services.table.clock
    if number == 0:
        node.speed.note(round(P_SPEED * 10), clock() - 10.0, clock())
    return Charge(node, clock, prefill_bytes=BUSY_BYTES)


class World:
    """The nodes of a case, and the order in which they were asked."""

    def __init__(self, case: LegCase) -> None:
        self._case = case
        prefills, decodes = (side.split() for side in case.nodes.split(">"))
        self.words = prefills + decodes
        self.asked: list[str] = []
        self.prefills = [self._node("prefill", f"p{number}", word) for number, word in enumerate(prefills)]
        self.decodes = [self._node("decode", f"d{number}", word) for number, word in enumerate(decodes)]
        self.nodes = self.prefills + self.decodes

    def _node(self, role: str, name: str, word: str) -> FakeNode:
        async def noted(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
            params = seen.body.get("kv_transfer_params", {})
            giver = (params.get("remote_engine_id") or "").removeprefix("engine-")
            self.asked.append(name + (f"<{giver}" if "ticket" in params else "?" if "offer" in params else ""))
            if (stops := word.removesuffix("-and-p0")) != word:
                await self.prefills[0].stop()
            status, _, alone = stops.partition("-")
            if not status.isdecimal():
                script = WORDS[stops]
            else:
                script = fakes.decode if alone and "ticket" in params else fakes.refuse(int(status))
            return await script(node, request, seen)

        return FakeNode(role, noted, node_id=name)

    def closed(self) -> str:
        return " ".join(node.node_id for node in self.nodes if any(leg.gone.is_set() for leg in node.seen))

    @contextlib.contextmanager
    def busy(self, router: Router) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for number, node in enumerate(self.nodes):
                if node.node_id in self._case.busy.split():
                    stack.enter_context(make_busy(router, number))
            yield

    async def send(self, router: Router, *, stream: bool) -> str:
        """What the client gets, if it does not leave."""
        case, named = self._case, {node.node_id: node for node in self.nodes}
        task = asyncio.ensure_future(ask(router, case.order, stream=stream, is_left=case.leaves == "stream"))
        if case.falls:
            name, illness = case.falls.split()
            await named[name].wait_seen(1)
            named[name].is_silent, named[name].is_frozen = illness == "silent", illness == "frozen"
            await router.poll(named[name], limit_s=SOON_S if illness == "silent" else HANG_S)
            down = [str(node["down"]) for node in report(router.services.table) if node["node_id"] == name]
            assert ("did not answer" if illness == "silent" else "no progress") in down[0]
        if case.leaves not in ("", "stream"):
            await named[case.leaves].wait_seen(1)
            task.cancel()
            await asyncio.wait({task})
            return ""
        return await task


async def ask(router: Router, order: str | None, *, stream: bool, is_left: bool) -> str:
    headers = {"x-pd-route": order} if order else {}
    body, end = bytearray(), ""
    async with (
        asyncio.timeout(HANG_S),
        router.session.post(router.url + CHAT, json=HI | {"stream": stream}, headers=headers) as answer,
    ):
        try:
            while piece := await answer.content.readany():
                body += piece
                if is_left:
                    return ""
        except aiohttp.ClientPayloadError:  # the connection ends before the answer does
            end = " CUT"
        words = [str(answer.status), answer.headers.get("x-pd-route", "").replace("; reason=", " ")]
        words += [answer.headers.get(f"x-pd-{leg}", "") for leg in ("prefill", "decode")]
        return f"{' '.join(filter(None, words))}: {said(bytes(body))}{end}"


def said(body: bytes) -> str:
    """The pieces of a stream, or what an error says; "all" for a whole answer."""
    if body == fakes.WHOLE_STREAM:
        return "all"
    parts = body.strip().split(b"\n\n") if body.startswith(b"data: ") else [body]
    return " ".join(_part(part.removeprefix(b"data: ")) for part in parts)


def _part(part: bytes) -> str:
    try:
        told = orjson.loads(part)
    except orjson.JSONDecodeError:
        return "?"
    if "error" not in told:
        return str(told["choices"][0]["delta"]["content"] if "choices" in told else "all")
    code, message = told["error"].get("code", "c"), str(told["error"]["message"])
    return message if code == "c" else str(code)


def _samples(router: Router, *names: str) -> Iterator[tuple[str, dict[str, str], int]]:
    for family in router.services.metrics.registry.collect():
        yield from ((one.name, one.labels, int(one.value)) for one in family.samples if one.name in names and one.value)


def counted(router: Router) -> list[str]:
    """What `COUNTED` names, once for each time."""
    found: list[str] = []
    for name, labels, value in _samples(router, *COUNTED):
        found += [COUNTED[name].format(**labels)] * value
    return sorted(found)


def outcomes(router: Router) -> list[str]:
    samples = _samples(router, "pd_router_requests_total")
    return [labels["outcome"] for _, labels, value in samples for _ in range(value)]
