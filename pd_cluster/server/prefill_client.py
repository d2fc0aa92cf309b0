"""D's request to a prefill node: ask for a ticket, and stay on the line until the prompt is computed.

A P that queues says so once a second (`keepalive`), so one that says nothing for `PEER_SILENCE_S` is frozen, however
long its queue is. Once there is a ticket, D's engine judges P by its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import orjson

from pd_cluster.errors import EngineLost
from pd_connectors.protocol.clock import patiently

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
logger = logging.getLogger("pd_cluster.server")

MAX_EVENT_BYTES = 64 << 20
PEER_SILENCE_S = 3.0  # three of P's keep-alives
PROBE_S = 1.0  # for a P that broke its connection off to say that it lives
TAIL_BYTES = 4096  # the last event of an answer is shorter
# what vLLM's connector expects of the leg that only prefills
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PeerFault(StrEnum):
    """Why a prefill node gave no usable ticket; counted under this name."""

    UNREACHABLE = "peer_unreachable"
    REFUSED = "peer_refused"
    TIMEOUT = "peer_timeout"
    FROZEN = "peer_frozen"
    DIED = "peer_died"
    BAD_ANSWER = "peer_bad_answer"


class PeerError(Exception):
    """This prefill node will not do."""

    def __init__(self, fault: PeerFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


class PrefillClient:
    """An open request to P. P gives the prefill up when it is closed before its end."""

    def __init__(
        self, session: aiohttp.ClientSession, node_url: str, response: aiohttp.ClientResponse, ticket: str, rest: bytes
    ) -> None:
        self.ticket = ticket
        self._session = session
        self._node_url = node_url
        self.url = str(response.url)
        self.has_died = False  # P, or its engine, before the prompt was computed
        self._response = response
        self._tail = rest
        self._rest = asyncio.create_task(self._read_rest(), name="prefill-leg")

    @classmethod
    async def open(
        cls, session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], deadline_s: float
    ) -> PrefillClient:
        """Returns with P's ticket, which it hands out before it computes anything. Raises PeerError."""
        try:
            async with asyncio.timeout(deadline_s), contextlib.AsyncExitStack() as on_failure:
                response = await _heard(url, _post(session, url, body, headers))
                on_failure.callback(response.close)
                ticket, rest = await _first_ticket(response)
                on_failure.pop_all()
                return cls(session, url, response, ticket, rest)
        except TimeoutError as error:
            raise PeerError(PeerFault.TIMEOUT, f"{url} gave no ticket within {deadline_s:.1f} s") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
            fault = PeerFault.UNREACHABLE if await _lives(session, url) else PeerFault.DIED
            raise PeerError(fault, f"{url}: {error!r}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an address that is none
            raise PeerError(PeerFault.UNREACHABLE, f"{url}: {error!r}") from error

    async def lives(self) -> bool:
        """Whether P and its engine live, as far as P knows."""
        return await _lives(self._session, self._node_url) and not self.has_died

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._rest.cancel()
        self._response.close()
        await asyncio.wait({self._rest})

    async def _read_rest(self) -> None:
        """Until P is done. D's engine hears of the lease itself; only that P died is told nowhere else."""
        try:
            async for part in self._response.content.iter_any():
                self._tail = (self._tail + part)[-TAIL_BYTES:]
        except (aiohttp.ClientError, OSError) as error:
            logger.info("a prefill node hung up: %r", error)
        is_told = b"event: done" in self._tail or b"event: error" in self._tail
        self.has_died = not is_told or _says_died(self._tail)


async def _post(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]
) -> aiohttp.ClientResponse:
    return await session.post(
        f"{url.rstrip('/')}/v1/completions",
        data=orjson.dumps(body),
        headers={"content-type": "application/json", "x-pd-ticket": "stream"} | headers,
        allow_redirects=False,  # a node never sends elsewhere, and the prompt must not go where another server says
    )


async def _heard(url: object, work: Coroutine[None, None, T]) -> T:
    """What P says next. Raises PeerError when P is silent."""
    try:
        return await patiently(work, PEER_SILENCE_S)
    except TimeoutError as error:
        raise PeerError(PeerFault.FROZEN, f"{url} has said nothing for {PEER_SILENCE_S:g} s") from error


async def _lives(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether P answers, and not that its engine is dead or that it has just begun."""
    try:
        async with asyncio.timeout(PROBE_S), session.get(f"{url.rstrip('/')}/health") as response:
            told = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
    try:
        return orjson.loads(told)["status"] not in ("dead", "starting")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return True


def _says_died(told: bytes) -> bool:
    return f'"code":"{EngineLost.code}"'.encode() in told.replace(b" ", b"")


async def _first_ticket(response: aiohttp.ClientResponse) -> tuple[str, bytes]:
    """The ticket, and the bytes that came with it."""
    url = response.url
    if response.status != 200 or response.content_type != "text/event-stream":
        told = await _heard(url, response.content.read(2000))
        fault = PeerFault.DIED if _says_died(told) else PeerFault.REFUSED
        raise PeerError(fault, f"{url} answered {response.status}: {told.decode(errors='replace')}")
    name, data, rest = await _read_event(url, response.content)
    if name != "ticket":
        fault = PeerFault.DIED if _says_died(data) else PeerFault.REFUSED
        raise PeerError(fault, f"{url} answered {name}: {data[:2000].decode(errors='replace')}")
    try:
        ticket = orjson.loads(data)["kv_transfer_params"]["ticket"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise PeerError(PeerFault.BAD_ANSWER, f"{response.url}: no ticket in its event") from error
    if not isinstance(ticket, str):
        raise PeerError(PeerFault.BAD_ANSWER, f"{response.url}: the ticket is no string")
    return ticket, rest


async def _read_event(url: object, stream: aiohttp.StreamReader) -> tuple[str, bytes, bytes]:
    """The first server-sent event: (its name, its data, what came behind it). Comments are keep-alives."""
    buffer = bytearray()
    while True:
        while (end := buffer.find(b"\n\n")) < 0:
            part = await _heard(url, stream.readany())
            if not part or len(buffer) > MAX_EVENT_BYTES:
                raise PeerError(PeerFault.BAD_ANSWER, f"{url}: the answer ended before its first event")
            buffer += part
        lines = [line for line in bytes(buffer[:end]).split(b"\n") if not line.startswith(b":")]
        del buffer[: end + 2]
        if lines:
            break
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field, _, value = line.partition(b":")
        fields[field] = value.strip()
    return fields.get(b"event", b"message").decode(errors="replace"), fields.get(b"data", b""), bytes(buffer)
