"""Errors that a client or an operator can cause at a node. The first six are shared with the router (`pd_http.errors`).

PdError
├── InvalidRequest      400
├── ModelNotFound       404
├── BodyTooLarge        413
├── NodesDied           500
├── StartupError
├── Overloaded          503  try again later, or on another node
├── EngineUnavailable   503  the engine process is starting or shutting down
│   ├── EngineLost      503  the engine process has died
│   └── EngineFrozen    503  the engine makes no progress; it may continue
└── PrefillUnavailable  502  no prefill node could serve the request, and local prefill is not allowed
"""

from __future__ import annotations

from pd_http.errors import (
    ENGINE_DIED,
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    NodesDied,
    PdError,
    StartupError,
)

__all__ = [
    "BodyTooLarge",
    "EngineFrozen",
    "EngineLost",
    "EngineUnavailable",
    "InvalidRequest",
    "ModelNotFound",
    "NodesDied",
    "Overloaded",
    "PdError",
    "PrefillUnavailable",
    "StartupError",
    "error_named",
]


class Overloaded(PdError):
    """The queue is full."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"


class EngineUnavailable(PdError):
    """The engine process is starting or shutting down."""

    status = 503
    code = "engine_unavailable"


class EngineLost(EngineUnavailable):
    """The engine process has died, perhaps because of this request."""

    code = ENGINE_DIED


class EngineFrozen(EngineUnavailable):
    """No step of the engine has ended for longer than a step may take."""

    code = "engine_frozen"


class PrefillUnavailable(PdError):
    """Every allowed way to prefill the request has failed."""

    status = 502
    code = "prefill_unavailable"


def error_named(name: str, message: str, param: str | None = None, code: str = "") -> PdError:
    """The error that another process named by its class; a plain PdError if this process has no such class."""
    kinds: list[type[PdError]] = [PdError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return next((kind for kind in kinds if kind.__name__ == name), PdError)(message, param, code)
