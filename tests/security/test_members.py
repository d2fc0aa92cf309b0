"""Bodies of the smallest members, at each place of each API: a node and a router refuse them before any pass over them.

What a pass costs is counted, not timed: lines of Python that run on the event loop.
At full size, against a real cluster and with times, it is `test_member_storm.py`.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd_cluster.server.app import create_app
from pd_http.body_turns import BodyTurns
from pd_http.dialects import dialect_of
from pd_http.errors import InvalidRequest
from pd_router.calls.body import RequestBody
from tests.security.smallest_members import TEXTS, Body, Place, places, repeated
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import make_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

pytestmark = [pytest.mark.anyio, pytest.mark.long]
SIZE = 800_000  # twice to ten times what the bounds of members allow
TEXT_SIZE = 1 << 17
MAX_LINES = 20_000  # of a body that is refused; 3,000 are those of any request. A pass takes 5 to 40 a member
OF_NODES = "kv_transfer_params"  # D sends P names of blocks and tokens of a stream: C code reads 2 million of them
JSON = {"content-type": "application/json"}


class Lines:
    """Counts the lines of Python that this thread runs, loops in one line included."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += event == "line"
        return self._line


def drawn() -> list[tuple[Place, bytes]]:
    """Each place once, with one of its members: in turn, so that each member is drawn at many places.

    Fields that several paths of one dialect share are drawn for the first of them.
    """
    known = {(dialect_of(place.path), place.name): place for place in reversed(places())}
    return [(place, place.members[number % len(place.members)]) for number, place in enumerate(known.values())]


def body_of(place: Place, member: bytes) -> bytes:
    return place.body(member, TEXT_SIZE if member in TEXTS else SIZE)


def test_every_body_is_drawn_and_is_json() -> None:
    paths = {place.path for place in places()}
    assert paths > {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/pd/release"}
    names = {place.name for place in places()}
    assert names > {"metadata{}", "stop[]", "kv_transfer_params.continuation.choices[]", "messages[].content[]"}
    for place in places():
        for member in place.members:
            assert httpx.Response(200, content=place.body(member, 60)).json(), (place, member)


def test_a_body_of_the_storm_is_the_same_in_the_process_that_sends_it() -> None:
    for body in (Body("", place, member, 60) for place in places() for member in place.members):
        sent = pickle.loads(pickle.dumps(body)).data()
        repeated.cache_clear()  # it has what `sent` is made of
        assert sent == body.data(), body


async def test_a_node_makes_no_pass_over_them() -> None:
    state = make_state(FakeEngine(says([5])))
    found: list[str] = []
    app = create_app(state)
    transport = httpx.ASGITransport(app)
    # The lifespan ends the process that checks grammars: another test counted it as its own
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://n") as client:
        await client.post("/v1/completions", json={"prompt": "a"})  # modules that the first request imports
        for place, member in drawn():
            body, lines = body_of(place, member), Lines()
            state.turns = BodyTurns()  # without a pause after the last one
            with lines.counted():
                answer = await client.post(place.path, content=body, headers=JSON)
            may_be_served = member in TEXTS or place.name.startswith(OF_NODES)
            if lines.count > MAX_LINES or answer.status_code not in ((200, 400) if may_be_served else (400,)):
                found.append(f"{place.path} {place.name} {member!r}: {lines.count} lines, {answer.text[:200]}")
    assert not found, "\n".join(found)


def test_a_router_makes_no_pass_over_them() -> None:
    found: list[str] = []
    for place, member in drawn()[::3]:
        body, lines = body_of(place, member), Lines()
        with lines.counted(), contextlib.suppress(InvalidRequest):
            RequestBody(body, dialect_of(place.path)).text_chain(b"key")
        if lines.count > MAX_LINES:
            found.append(f"{place.path} {place.name} {member!r}: {lines.count} lines")
    assert not found, "\n".join(found)
