"""D's request to a prefill node: ask for a ticket, and stay connected until the prompt is computed.

A P that queues sends a keep-alive once a second (`keepalive`), so a P that sends nothing for `PEER_SILENCE_S` is
frozen, however long its queue is. After the ticket, D's engine judges P by its lease.

The router opens its prefill legs by itself (`pd_router.requests.legs`): it counts failures by node, retries kept-alive
connections, and judges silence by /health. The two share the events, `pd_http.node_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import orjson

from pd_connectors.protocol.clock import patiently
from pd_http.errors import ENGINE_DIED
from pd_http.files import has_files
from pd_http.node_answers import FailureKind, PrefillEvents, code_of, has_lost_requests, object_in
from pd_http.sse import EVENT_STREAM

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
logger = logging.getLogger("pd_cluster.server")

MAX_REFUSAL_BYTES = 64 << 10  # of a refusal's body: its code stands after its message
PEER_SILENCE_S = 3.0  # three of P's keep-alives
PROBE_S = 1.0  # for a P that broke its connection to answer /health


class PeerError(Exception):
    """This prefill node gave no usable ticket."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"peer_{kind}: {detail}")
        self.kind = kind


class PrefillClient:
    """An open request to P. Closing it before its end makes P abort the prefill."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        node_url: str,
        response: aiohttp.ClientResponse,
        ticket: str,
        events: PrefillEvents,
    ) -> None:
        self.ticket = ticket
        self._session = session
        self._node_url = node_url
        self.has_died = False  # P, or its engine, before the prompt was computed
        self.has_given_up = False  # P said that it cannot compute the prompt, as at the end of a drain
        self._response = response
        self._events = events
        self._rest = asyncio.create_task(self._read_rest(), name="prefill-leg")

    @classmethod
    async def open(
        cls, session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], deadline_s: float
    ) -> PrefillClient:
        """Returns with P's ticket, which P sends before it computes anything. Raises PeerError."""
        try:
            async with asyncio.timeout(deadline_s), contextlib.AsyncExitStack() as on_failure:
                response = await _received(url, _post(session, url, body, headers))
                on_failure.callback(response.close)
                events = PrefillEvents()
                ticket = await _first_ticket(response, events)
                on_failure.pop_all()
                return cls(session, url, response, ticket, events)
        except TimeoutError as error:
            raise PeerError(FailureKind.TIMEOUT, f"{url} gave no ticket within {deadline_s:.1f} s") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
            kind = FailureKind.UNREACHABLE if await _lives(session, url) else FailureKind.DIED
            raise PeerError(kind, f"{url}: {error!r}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: not a URL
            raise PeerError(FailureKind.UNREACHABLE, f"{url}: {error!r}") from error

    async def lives(self) -> bool:
        """Whether P and its engine are alive, by P's /health and its last event."""
        return await _lives(self._session, self._node_url) and not self.has_died

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        self._rest.cancel()
        self._response.close()
        await asyncio.wait({self._rest})

    async def _read_rest(self) -> None:
        """Read until P is done. D's engine follows the lease itself; only this answer shows that P died."""
        try:
            await self._events.outcome(self._response.content.readany)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            logger.info("a prefill node closed the connection: %r", error)
        event = self._events.told
        self.has_died = event is None or code_of(event.data) == ENGINE_DIED
        self.has_given_up = event is not None and event.name == "error" and not self.has_died


async def _post(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]
) -> aiohttp.ClientResponse:
    return await session.post(
        f"{url.rstrip('/')}/v1/completions",
        data=orjson.dumps(body),
        headers={"content-type": "application/json", "x-pd-ticket": "stream"} | headers,
        allow_redirects=False,  # nodes never redirect, and the prompt must not go where another server says
    )


async def _received(url: object, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which waits for P. Raises PeerError if P sends nothing for PEER_SILENCE_S."""
    try:
        return await patiently(work, PEER_SILENCE_S)
    except TimeoutError as error:
        raise PeerError(FailureKind.FROZEN, f"{url} has sent nothing for {PEER_SILENCE_S:g} s") from error


async def _lives(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether P answers, and neither has a dead engine nor has just started."""
    try:
        async with asyncio.timeout(PROBE_S), session.get(f"{url.rstrip('/')}/health") as response:
            health = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return not has_files()  # a node without descriptors cannot tell
    return not has_lost_requests(object_in(health))


async def _first_ticket(response: aiohttp.ClientResponse, events: PrefillEvents) -> str:
    """Raises PeerError."""
    url = response.url
    if response.status != 200 or response.content_type != EVENT_STREAM:
        body = await _received(url, response.content.read(MAX_REFUSAL_BYTES))
        raise _refusal(url, str(response.status), body)
    try:
        event = await events.ticket(lambda: _received(url, response.content.readany()))
    except ValueError as error:
        raise PeerError(FailureKind.BAD_ANSWER, f"{url}: {error}") from error
    if event is None:
        raise PeerError(FailureKind.BAD_ANSWER, f"{url}: the answer ended before its first event")
    if event.name == "error":
        raise _refusal(url, "error", event.data)
    try:
        ticket = orjson.loads(event.data)["kv_transfer_params"]["ticket"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise PeerError(FailureKind.BAD_ANSWER, f"{url}: the event has no ticket") from error
    if not isinstance(ticket, str):
        raise PeerError(FailureKind.BAD_ANSWER, f"{url}: the ticket is not a string")
    return ticket


def _refusal(url: object, answered: str, body: bytes) -> PeerError:
    kind = FailureKind.DIED if code_of(body) == ENGINE_DIED else FailureKind.REFUSED
    return PeerError(kind, f"{url} answered {answered}: {body[:2000].decode(errors='replace')}")
