"""What a router or a decode node reads from a node's answers: errors, health, and the events of a prefill leg."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from pd_http.sse import Event, SseParser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

# `kv_transfer_params` of a request that is only to be prefilled: what vLLM's connector expects too.
ASK_TICKET: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class FailureKind(StrEnum):
    """Why a request to a node failed. The value is its name in metrics; a decode node writes `peer_` before it."""

    CONNECT = "connect"  # no process listens there, or no route
    OWN = "own"  # this process cannot open a connection to any node, which tells nothing of this one
    BROKEN = "broken"  # the connection ended before the answer did
    UNREACHABLE = "unreachable"  # a decode node's name for the two above
    TIMEOUT = "timeout"  # a named deadline passed
    FROZEN = "frozen"  # the node makes no progress: by its health checks, or it sends nothing
    DIED = "died"  # the node, or its engine, died after the request was sent
    LEFT = "left"  # the node is gone by order, and had said that it drains
    REFUSED = "refused"  # the node answered 429 or 5xx
    BAD_ANSWER = "bad_answer"  # the answer does not follow the protocol
    PROTOCOL_MISMATCH = "protocol_mismatch"  # the ticket is of another protocol version
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"  # the ticket is of other weights


class PrefillEvents:
    """The events of one prefill leg: "ticket" first, at the end "done"; "error" may replace either.

    Events of any other name are dropped.

    `told`: the last "error" event so far if there was one, else "done".

    `read` returns the next bytes of the answer, b"" at its end. What it raises passes through; an event that is too
    long raises ValueError.
    """

    __slots__ = ("_parser", "_ready", "told")

    def __init__(self) -> None:
        self._parser = SseParser()
        self.told: Event | None = None
        self._ready: list[Event] = []  # a short prompt's "done" may arrive together with its ticket

    async def ticket(self, read: Callable[[], Awaitable[bytes]]) -> Event | None:
        """The "ticket" or "error" event. None: the answer ended before."""
        while (event := await self._next(read)) is not None:
            if event.name in ("ticket", "error"):
                return event
        return None

    async def outcome(self, read: Callable[[], Awaitable[bytes]]) -> Event | None:
        """Read to the end. -> `told`; None: the answer broke off before P told anything."""
        self.take(b"")
        while chunk := await read():
            self.take(chunk)
        return self.told

    def take(self, chunk: bytes) -> None:
        """Take the next bytes after the ticket, for `told`. Raises ValueError if an event is too long."""
        events, self._ready = [*self._ready, *(self._parser.feed(chunk) if chunk else ())], []
        for event in events:
            if event.name == "error" or (event.name == "done" and (self.told is None or self.told.name == "done")):
                self.told = event

    async def _next(self, read: Callable[[], Awaitable[bytes]]) -> Event | None:
        while not self._ready:
            chunk = await read()
            if not chunk:
                return None
            self._ready = self._parser.feed(chunk)
        return self._ready.pop(0)


def object_in(body: bytes) -> dict[str, Any]:
    """The JSON object in an answer; empty if the answer is anything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0  # in Messages and Responses
    output_tokens: int = 0


class _WithUsage(msgspec.Struct):
    usage: _Usage


_WITH_USAGE = msgspec.json.Decoder(_WithUsage)


def usage_in(body: bytes) -> tuple[int, int] | None:
    """Tokens of prompt and answer in a whole answer, of any dialect. None: it does not tell."""
    try:
        usage = _WITH_USAGE.decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens


def code_of(body: bytes) -> str:
    """`error.code` of an answer; "" if it has none."""
    error = object_in(body).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


def has_lost_requests(health: Mapping[str, Any]) -> bool:
    """Whether a node's /health says that its engine is dead, or that the process is too new to know a request.

    Every report of a node has an epoch. What has none is by another server, or by the bounds of connections.
    """
    return "epoch" in health and health.get("status") in ("dead", "starting")
