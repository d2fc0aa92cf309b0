"""Errors that a client or an operator can cause at a node. The router shares those of `pd_http.errors`.

PdError
├── BadAdapter                               400
├── CannotContinue, RoleMoved                409
├── TooManyChecks, Overloaded                429, 503
├── EngineUnavailable                        503
│   └── EngineLost, EngineFrozen
├── PrefillUnavailable                       502
├── RankLost (`worker/rank_frames.py`), StateLeft (`worker/state.py`)                            of an engine
├── OrderRefused (`launch/node_commands.py`), UnitDied (`launch/on_ray/cluster.py`)              of a command
└── StartupError
    └── UnservedModel
"""

from __future__ import annotations

from pd_http.errors import (
    ENGINE_DIED,
    AdapterAbsent,
    AdapterConflict,
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    NodesDied,
    NotAuthorized,
    OrderVersion,
    PdError,
    StartupError,
)

__all__ = [
    "AdapterAbsent",
    "AdapterConflict",
    "BadAdapter",
    "BodyTooLarge",
    "CannotContinue",
    "EngineFrozen",
    "EngineLost",
    "EngineUnavailable",
    "InvalidRequest",
    "ModelNotFound",
    "NodesDied",
    "NotAuthorized",
    "OrderVersion",
    "Overloaded",
    "PdError",
    "PrefillUnavailable",
    "RoleMoved",
    "StartupError",
    "TooManyChecks",
    "UnservedModel",
    "error_named",
]


class UnservedModel(StartupError):
    """The config is well-formed, and what it asks for is not served."""


class BadAdapter(PdError, status=400, kind="invalid_request_error", code="bad_adapter"):
    """The files of an adapter that cannot be served; the message names the file, setting or tensor, and why."""


class Overloaded(PdError, status=503, kind="overloaded_error", code="overloaded"):
    """The queue is full."""


class TooManyChecks(PdError, status=429, kind="rate_limit_error", code="too_many_checks"):
    """Too many new grammars wait to be checked, of this client or in sum."""

    retry_after_s = 5  # half of the time in which a client's line is checked


class EngineUnavailable(PdError, status=503, code="engine_unavailable"):
    """The engine process is starting or shutting down."""


class EngineLost(EngineUnavailable, code=ENGINE_DIED):
    """The engine process has died, perhaps because of this request."""


class EngineFrozen(EngineUnavailable, code="engine_frozen"):
    """No step of the engine has ended for longer than a step may take."""


class CannotContinue(PdError, status=409, kind="invalid_request_error", code="cannot_continue"):
    """This node would not write the same stream as the node that began it."""


class RoleMoved(PdError, status=409, kind="invalid_request_error", code="role_moved"):
    """The node's role has changed since the sender of the order looked."""


class PrefillUnavailable(PdError, status=502, code="prefill_unavailable"):
    """Every allowed way to prefill the request has failed."""


def error_named(name: str, message: str, param: str | None = None, code: str = "") -> PdError:
    """The error that another process named by its class; a plain PdError if this process has no such class."""
    kinds: list[type[PdError]] = [PdError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return next((kind for kind in kinds if kind.__name__ == name), PdError)(message, param, code)
