"""Passes a decode node's answer on to the client, byte for byte."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_http.body import ClientGone
from pd_http.errors import PdError
from pd_http.node_answers import FailureKind
from pd_http.sse import error_event, event_bytes
from pd_router.headers import DECODE_BY, PREFILL_BY, RawHeaders, answered
from pd_router.upstream import LegFailed

if TYPE_CHECKING:
    from pd_http.reply import HeaderList, Reply
    from pd_router.legs import DecodeLeg
    from pd_router.node_table import Node

# The deadline of a stream is moved once per this share of it, not at each chunk.
_REFRESH_SHARE = 0.1


async def send_answer(leg: DecodeLeg, reply: Reply, prefill_by: Node, idle_timeout_s: float) -> None:
    """Send all of `leg`'s answer. `prefill_by`: the node that prefilled, unless the answer names one.

    Raises ClientGone, or LegFailed if a stream breaks off. The client then has an error event without an end of the
    stream: the server closes the connection of an incomplete answer.
    """
    if leg.whole is not None:
        headers = _with_nodes(leg.whole.headers, prefill_by, leg.node)
        await reply.whole(leg.whole.status, headers, leg.whole.body)
        return
    await reply.start(leg.status, _with_nodes(leg.headers, prefill_by, leg.node), _cut_off)
    tail = [b"", b""]
    try:
        await _splice(leg, reply, idle_timeout_s, tail)
        _check_end(leg.node, b"".join(tail))
    except LegFailed as failure:
        await reply.write(_last_words(b"".join(tail), failure))
        raise
    await reply.end()


async def _splice(leg: DecodeLeg, reply: Reply, idle_timeout_s: float, tail: list[bytes]) -> None:
    """Copy until the stream ends. `tail` gets the last two chunks.

    Raises LegFailed, or ClientGone if the client does not take its bytes.
    """
    loop = asyncio.get_running_loop()
    refresh_s = idle_timeout_s * _REFRESH_SHARE
    chunk = leg.first_chunk
    sending = True
    try:
        async with asyncio.timeout(idle_timeout_s) as limit:
            refresh_at = loop.time() + refresh_s
            while chunk:
                sending = True
                await reply.write(chunk)
                sending = False
                tail[0], tail[1] = tail[1], chunk
                now = loop.time()
                if now >= refresh_at:
                    limit.reschedule(now + idle_timeout_s)
                    refresh_at = now + refresh_s
                chunk = await leg.read()
    except TimeoutError as error:
        if sending:
            raise ClientGone from error
        detail = f"the stream made no progress for {idle_timeout_s:g} s"
        raise LegFailed(leg.node, FailureKind.TIMEOUT, detail, wait="stream") from error


def _check_end(node: Node, tail: bytes) -> None:
    """Raises LegFailed unless the stream ends with [DONE] or with the node's own error event."""
    if not tail.rstrip().endswith(b"[DONE]") and b'data: {"error"' not in tail:
        raise LegFailed(node, FailureKind.BROKEN, "the stream ended without [DONE]")


def _last_words(tail: bytes, failure: LegFailed) -> bytes:
    """An error event; a blank line before it ends an incomplete event."""
    event = event_bytes(PdError(f"the answer broke off: {failure}", code="stream_interrupted").to_body())
    return event if tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n" + event


def _cut_off(error: PdError) -> bytes:
    """The last events of a stream that the router ends. The blank line ends an event that the node may have begun."""
    return b"\n\n" + error_event(error)


def _with_nodes(headers: RawHeaders, prefill_by: Node, decode_by: Node) -> HeaderList:
    kept = answered(headers)
    names = {name for name, _ in kept}
    for name, node in ((PREFILL_BY, prefill_by), (DECODE_BY, decode_by)):
        if name.encode() not in names:
            kept.append((name.encode(), node.node_id.encode()))
    return kept
