"""Errors that a client or an operator can cause. Our own bugs are assertions.

PdError
├── InvalidRequest      400  the request can never be served
├── ModelNotFound       404
├── BodyTooLarge        413
├── Overloaded          503  try again later, or elsewhere
├── EngineUnavailable   503  the engine process is starting or shutting down
│   ├── EngineLost      503  the engine process has died
│   └── EngineFrozen    503  the engine makes no progress; it may go on
├── PeersDied           500  several nodes have died while they served the request; it must not be tried again
├── PrefillUnavailable  502  no prefill node could serve the request, and local prefill is not allowed
└── StartupError             a flag, file, port or device that must be changed before the node can start
"""

from __future__ import annotations


class PdError(Exception):
    """Base. `status` is the HTTP status, `kind` OpenAI's `error.type`, `code` a stable machine-readable word."""

    status = 500
    kind = "server_error"
    code = "internal_error"


class InvalidRequest(PdError):
    """The request can never be served. `param` names the offending field."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str = "") -> None:
        super().__init__(message)
        self.param = param
        if code:
            self.code = code


class ModelNotFound(PdError):
    """No such model is served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(PdError):
    """No request that this model can serve needs so long a body."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class Overloaded(PdError):
    """The queue is full."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"


class EngineUnavailable(PdError):
    """The engine process is starting or shutting down."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"


class EngineLost(EngineUnavailable):
    """The engine process has died, perhaps of this request."""

    code = "engine_died"


class EngineFrozen(EngineUnavailable):
    """No step of the engine has ended for longer than a step may take."""

    code = "engine_frozen"


class PeersDied(PdError):
    """Several nodes have died while they served the request: it must not be tried again."""

    code = "nodes_died"


class PrefillUnavailable(PdError):
    """Every allowed way to prefill the request has failed."""

    status = 502
    kind = "server_error"
    code = "prefill_unavailable"


class StartupError(PdError):
    """The node cannot start as configured; the message says what to change."""


def error_named(name: str, message: str, param: str | None = None, code: str = "") -> PdError:
    """The error that another process named by its class; a plain PdError when there is no such class here."""
    kinds: list[type[PdError]] = [PdError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    kind = next((kind for kind in kinds if kind.__name__ == name), PdError)
    return kind(message, param, code) if issubclass(kind, InvalidRequest) else kind(message)
