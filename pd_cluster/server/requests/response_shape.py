"""The seam between answers and APIs: how one API writes an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.requests.choice import ChoiceOutput


class ResponseShape:
    """How one API writes its answers. One object for each request: it holds the state of the stream.

    That state depends on the outputs, not on how they were cut into chunks. To continue a stream of another node, pass
    the output of `Choice.replay` to `chunk` and drop the bytes.
    """

    needs_usage = True  # in every call of `chunk`
    end = b""  # of a stream, after everything else

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        """The server-sent events of new output of choice `index`; b"" when there is nothing to show.

        `usage`: of the request so far, for clients that asked for it in every chunk, and if `needs_usage`. None in a
        replay, of which the bytes are dropped.
        """
        raise NotImplementedError

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event before `end`, for clients that asked for the usage."""
        return b""

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer. `choices`: all of them, complete and in order."""
        raise NotImplementedError
