"""The errors that both the router and a node answer with, and their body in OpenAI's shape.

PdError
├── InvalidRequest   400  the request can never be served
├── ModelNotFound    404
├── BodyTooLarge     413
├── NodesDied        500  several nodes died while they served the request; it must not be tried again
└── StartupError          a flag, file, port or device that must be changed before the process can start

The node's own errors are in `pd_cluster.errors`, the router's own in `pd_router.errors`. Bugs are assertions instead.
"""

from __future__ import annotations

from typing import Any

ENGINE_DIED = "engine_died"  # `code` of a node's answer when its engine process has died


class PdError(Exception):
    """Base. `status`: HTTP status; `kind`: OpenAI's `error.type`; `code`: a stable word for programs to read.

    `param` names the field of the request that is wrong. `code` and `status` of an instance override the class's.
    """

    status = 500
    kind = "server_error"
    code = "internal_error"

    def __init__(self, message: str, param: str | None = None, code: str = "", *, status: int = 0) -> None:
        super().__init__(message)
        self.param = param
        if code:
            self.code = code
        if status:
            self.status = status

    def to_body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(str(self), self.kind, self.code, self.param)


class InvalidRequest(PdError):
    """The request can never be served."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class ModelNotFound(PdError):
    """The requested model is not served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(PdError):
    """The request body is longer than this process accepts."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class NodesDied(PdError):
    """Several nodes died while they served the request, perhaps because of it: it must not be tried again."""

    code = "nodes_died"


class StartupError(PdError):
    """The process cannot start as configured; the message says what to change."""

    code = "startup"


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
