"""Why a leg to a node failed."""

from __future__ import annotations

from enum import StrEnum


class FailureKind(StrEnum):
    """Why a leg failed. The value is its name in metrics."""

    CONNECT = "connect"  # no process listens there, or no route
    BROKEN = "broken"  # the connection ended before the answer did
    TIMEOUT = "timeout"  # a named deadline passed
    FROZEN = "frozen"  # by the health checks, the node makes no progress
    DIED = "died"  # the node, or its engine, died after the request was sent
    REFUSED = "refused"  # the node answered 429 or 5xx
    BAD_ANSWER = "bad_answer"  # the answer does not follow the protocol
