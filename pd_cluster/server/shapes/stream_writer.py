"""How the bytes of a streamed answer go out: as server-sent events, or in frames for a router that can continue it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pd_connectors.protocol.stream_codec import encode_message
from pd_http.frames import FRAMES_TYPE, ChoiceProgress, Frame, StreamEnd, StreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pd_cluster.server.requests.choice import ChoiceOutput
    from pd_http.dialect import Dialect
    from pd_http.errors import PdError
    from pd_http.frames import StreamHead
    from pd_http.node_report import NodeReport
    from pd_http.reply import Reply


class EventWriter:
    """Events as they are. `start` once, `write` for each list of new outputs, `end` once."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    async def start(self, headers: Mapping[str, str]) -> None:
        await self._reply.start_events(headers)

    async def write(self, first_index: int, outputs: Iterable[ChoiceOutput], data: bytes, num_cached: int) -> None:
        """`data`: the events of these outputs. `first_index`: the choice of the answer that their index 0 means.

        `num_cached`: tokens of their prompt, if the request has several.
        """
        await self._reply.write(data)

    async def end(self, data: bytes, report: NodeReport) -> None:
        await self._reply.end(data)


class FrameWriter(EventWriter):
    """See `pd_http.frames`. The head leaves with the first frame: a prompt's cached tokens are not known earlier."""

    def __init__(self, reply: Reply, head: Callable[[], StreamHead]) -> None:
        super().__init__(reply)
        self._head = head
        self._pending = b""

    async def start(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        self._pending = encode_message(self._head())
        await self._reply.start(
            200, [(b"content-type", FRAMES_TYPE.encode()), *raw], partial(_failed, self._reply.dialect)
        )

    async def write(self, first_index: int, outputs: Iterable[ChoiceOutput], data: bytes, num_cached: int) -> None:
        choices = tuple(
            ChoiceProgress(
                first_index + output.index,
                tuple([token.token_id for token in output.tokens]),
                output.num_chars,
                output.finish_reason or "",
                num_cached,
            )
            for output in outputs
        )
        pending, self._pending = self._pending, b""
        await self._reply.write(pending + encode_message(Frame(choices, data)))

    async def end(self, data: bytes, report: NodeReport) -> None:
        await self._reply.end(self._pending + encode_message(StreamEnd(data, report)))


def _failed(dialect: Dialect, error: PdError) -> bytes:
    return encode_message(StreamFailed(error.status, error.code, dialect.error_event(error)))
