"""What the shapes of chat and of completions have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.server.requests.response_shape import ResponseShape
from pd_http.sse import SSE_DONE

if TYPE_CHECKING:
    from pd_cluster.server.requests.answer_extras import AnswerExtras


class ChunkedShape(ResponseShape):
    """Chunks of one choice each, of which the constant parts are encoded once."""

    needs_usage = False
    end = SSE_DONE

    def __init__(self, extras: AnswerExtras, prefix: str, kind: str, content: str) -> None:
        """`prefix`: of the id. `content`: the member of a choice that a chunk begins with."""
        self._extras = extras
        names = {"id": f"{prefix}-{extras.request_id}", "object": kind}
        self._head = names | {"created": extras.created, "model": extras.model}
        choice = b',"choices":[{"index":%d,' + f'"{content}":'.encode()
        self._before = b"data: " + orjson.dumps(self._head)[:-1].replace(b"%", b"%%") + choice
        options = extras.body.stream_options
        self._after = b'}],"usage":null}\n\n' if options is not None and options.include_usage else b"}]}\n\n"

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(self._head | {"choices": [], "usage": usage}) + b"\n\n"
