"""The two legs of a request: P's leg yields a ticket and is then read to its end, D's leg yields the answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pd_http.errors import ENGINE_DIED
from pd_http.node_answers import FailureKind, PrefillEvents, code_of, object_in
from pd_http.sse import EVENT_STREAM
from pd_router.body import raw_object
from pd_router.headers import PREFILL_BY
from pd_router.upstream import LEG_ERRORS, Answer, LegFailed, Refused, Upstream, leg_failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_http.sse import Event
    from pd_router.node_table import Charge, Node

log = logging.getLogger("pd_router")
_KV = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Handoff:
    """P's kv_transfer_params. `params` goes to D unchanged; `ticket` is None for engines without tickets."""

    node: Node
    params: dict[str, Any]
    ticket: str | None


class PrefillLeg:
    """P's leg. Call `open`, then `drain` in a task of its own; `close` ends it at any time.

    Closing it early makes P abort the request. The charge on P is released when the leg ends.
    """

    def __init__(self, upstream: Upstream, node: Node, charge: Charge) -> None:
        self.node = node
        self._upstream = upstream
        self._charge = charge
        self._events = PrefillEvents()
        self._response: aiohttp.ClientResponse | None = None

    async def open(self, path: str, headers: Mapping[str, str], body: bytes, ticket_timeout_s: float) -> Handoff:
        """Send the request and wait for the ticket. Raises LegFailed or Refused, with the leg closed."""
        try:
            self._response = await self._upstream.post(self.node, path, headers, body, ticket_timeout_s)
            try:
                async with asyncio.timeout(ticket_timeout_s):
                    return await self._handoff(self._response)
            except LEG_ERRORS as error:
                raise leg_failure(self.node, error, "ticket", f"no ticket within {ticket_timeout_s:g} s") from error
            except (ValueError, msgspec.MsgspecError) as error:
                raise LegFailed(self.node, FailureKind.BAD_ANSWER, f"no ticket: {error}") from error
        except BaseException:
            self.close()
            raise

    async def _handoff(self, response: aiohttp.ClientResponse) -> Handoff:
        if response.content_type != EVENT_STREAM:
            return self._read_params(await response.read())  # an engine without tickets: it has prefilled already
        event = await self._events.ticket(response.content.readany)
        if event is None:
            raise LegFailed(self.node, FailureKind.BROKEN, "the answer ended without a ticket")
        if event.name == "error":
            raise _refusal_in(event) or _failure_in(self.node, event)
        return self._read_params(event.data)

    def _read_params(self, data: bytes) -> Handoff:
        found = raw_object(data).get(_KV)
        if found is None or bytes(found) == b"null":
            raise LegFailed(self.node, FailureKind.BAD_ANSWER, "the answer has no kv_transfer_params")
        params = raw_object(found)
        ticket = msgspec.json.decode(params["ticket"], type=str | None) if "ticket" in params else None
        return Handoff(self.node, dict(params), ticket)

    async def drain(self, timeout_s: float) -> None:
        """Read to the end, so that the connection can be reused. Raises LegFailed if P did not finish."""
        assert self._response is not None
        try:
            if self._response.content_type == EVENT_STREAM:
                async with asyncio.timeout(timeout_s):
                    await self._read_to_end(self._response)
            self._charge.prefill_done()
        except (*LEG_ERRORS, ValueError) as error:
            raise leg_failure(self.node, error, "prefill", f"prefill not done within {timeout_s:g} s") from error
        finally:
            self.close()

    async def _read_to_end(self, response: aiohttp.ClientResponse) -> None:
        event = await self._events.outcome(response.content.readany)
        if event is None:
            raise LegFailed(self.node, FailureKind.BROKEN, "the answer ended before the prefill did")
        if event.name == "error":
            raise _failure_in(self.node, event)

    def close(self) -> None:
        """Idempotent. After the end of the answer the connection is in the pool already."""
        if self._response is not None:
            self._response.close()
        self._charge.release()


def _failure_in(node: Node, event: Event) -> LegFailed:
    text = event.data[:500].decode("utf-8", "replace")
    kind = FailureKind.DIED if code_of(event.data) == ENGINE_DIED else FailureKind.REFUSED
    return LegFailed(node, kind, f"error event {text}")


def _refusal_in(event: Event) -> Refused | None:
    """A 4xx that came as an event, because the node had begun its answer before it knew."""
    status = object_in(event.data).get("status")
    if not isinstance(status, int) or not 400 <= status < 500 or status == 429:
        return None
    return Refused(Answer(status, (), event.data))


class DecodeLeg:
    """D's leg. After `open` the answer is `whole` (not streamed), or `first_chunk` and what `read` returns."""

    def __init__(self, upstream: Upstream, node: Node, charge: Charge) -> None:
        self.node = node
        self.whole: Answer | None = None
        self.first_chunk = b""
        self._upstream = upstream
        self._charge = charge
        self._response: aiohttp.ClientResponse | None = None

    async def open(
        self, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float, body_timeout_s: float
    ) -> None:
        """Send the request; wait for the first bytes of a stream, or for the whole of any other answer.

        The client gets no byte before this returns, so another node may still take over. Raises LegFailed or Refused,
        with the leg closed.
        """
        try:
            response = self._response = await self._upstream.post(self.node, path, headers, body, first_byte_s)
            try:
                if response.content_type == EVENT_STREAM:
                    async with asyncio.timeout(first_byte_s):
                        self.first_chunk = await response.content.readany()
                    if not self.first_chunk:
                        raise LegFailed(self.node, FailureKind.BROKEN, "the stream ended before its first byte")
                else:
                    async with asyncio.timeout(body_timeout_s):
                        self.whole = Answer(response.status, tuple(response.raw_headers), await response.read())
            except LEG_ERRORS as error:
                raise leg_failure(self.node, error, "body", "the answer began and then stopped") from error
        except BaseException:
            self.close()
            raise
        if self.whole is None:
            self._charge.prefill_done()
        else:
            self._charge.prefill_over()  # long before the end of the answer

    @property
    def status(self) -> int:
        assert self._response is not None
        return self._response.status

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        assert self._response is not None
        return tuple(self._response.raw_headers)

    @property
    def prefilled_by(self) -> str:
        """The node that prefilled the prompt, by the answer's headers; "" if they do not name it."""
        assert self._response is not None
        return self._response.headers.get(PREFILL_BY, "")

    async def read(self) -> bytes:
        """The next bytes of the stream, unchanged; empty at its end. Raises LegFailed if it broke off."""
        assert self._response is not None
        try:
            return await self._response.content.readany()
        except aiohttp.ClientError as error:
            raise leg_failure(self.node, error, "", "") from error

    def close(self) -> None:
        """Idempotent. Closing it before the end of the answer makes D abort the request."""
        if self._response is not None:
            self._response.close()
        self._charge.release()
