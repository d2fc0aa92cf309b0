"""D's request to a prefill node: ask for a ticket, and stay on the line until the prompt is computed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import StrEnum
from typing import Any

import aiohttp
import orjson

logger = logging.getLogger("pd_cluster.server")

MAX_EVENT_BYTES = 64 << 20
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
    BAD_ANSWER = "peer_bad_answer"


class PeerError(Exception):
    """This prefill node will not do."""

    def __init__(self, fault: PeerFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


class PrefillLeg:
    """An open request to P. P gives the prefill up when it is closed before its end."""

    def __init__(self, response: aiohttp.ClientResponse, ticket: str) -> None:
        self.ticket = ticket
        self._response = response
        self._rest = asyncio.create_task(self._read_rest(), name="prefill-leg")

    @classmethod
    async def open(
        cls, session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], deadline_s: float
    ) -> PrefillLeg:
        """Returns with P's ticket, which it hands out before it computes anything. Raises PeerError."""
        try:
            async with asyncio.timeout(deadline_s), contextlib.AsyncExitStack() as on_failure:
                response = await session.post(
                    f"{url.rstrip('/')}/v1/completions",
                    data=orjson.dumps(body),
                    headers={"content-type": "application/json", "x-pd-ticket": "stream"} | headers,
                    allow_redirects=False,  # a node never sends elsewhere; whoever does must not get the prompt moved
                )
                on_failure.callback(response.close)
                ticket = await _first_ticket(response)
                on_failure.pop_all()
                return cls(response, ticket)
        except TimeoutError as error:
            raise PeerError(PeerFault.TIMEOUT, f"{url} gave no ticket within {deadline_s:.1f} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an address that is none
            raise PeerError(PeerFault.UNREACHABLE, f"{url}: {error!r}") from error

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._rest.cancel()
        self._response.close()
        await asyncio.wait({self._rest})

    async def _read_rest(self) -> None:
        """Until P is done. What P says at the end is no news: D's engine hears of the lease itself."""
        try:
            async for _ in self._response.content.iter_any():
                pass
        except (aiohttp.ClientError, OSError) as error:
            logger.info("a prefill node hung up: %r", error)


async def _first_ticket(response: aiohttp.ClientResponse) -> str:
    if response.status != 200 or response.content_type != "text/event-stream":
        text = (await response.content.read(2000)).decode(errors="replace")
        raise PeerError(PeerFault.REFUSED, f"{response.url} answered {response.status}: {text}")
    name, data = await _read_event(response.content)
    if name != "ticket":
        raise PeerError(PeerFault.REFUSED, f"{response.url} answered {name}: {data[:2000].decode(errors='replace')}")
    try:
        ticket = orjson.loads(data)["kv_transfer_params"]["ticket"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise PeerError(PeerFault.BAD_ANSWER, f"{response.url}: no ticket in its event") from error
    if not isinstance(ticket, str):
        raise PeerError(PeerFault.BAD_ANSWER, f"{response.url}: the ticket is no string")
    return ticket


async def _read_event(stream: aiohttp.StreamReader) -> tuple[str, bytes]:
    """The first server-sent event: (its name, its data)."""
    buffer = bytearray()
    while b"\n\n" not in buffer:
        part = await stream.readany()
        if not part or len(buffer) > MAX_EVENT_BYTES:
            raise PeerError(PeerFault.BAD_ANSWER, "the answer ended before its first event")
        buffer += part
    fields: dict[bytes, bytes] = {}
    for line in bytes(buffer[: buffer.index(b"\n\n")]).split(b"\n"):
        field, _, value = line.partition(b":")
        fields[field] = value.strip()
    return fields.get(b"event", b"message").decode(errors="replace"), fields.get(b"data", b"")
