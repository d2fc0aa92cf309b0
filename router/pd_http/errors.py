"""The errors that both the router and a node answer with, and their body in OpenAI's shape.

PdError                                      500
├── InvalidRequest, OrderVersion             400, 409
├── NotAuthorized, ModelNotFound             401, 404
├── AdapterAbsent, AdapterConflict           409
├── BodyTooLarge, UnreadCoding               413, 415
├── BodiesWait, NoRoom                       503, for now
├── NodesDied                                500, never again
│   └── NodesFrozen
├── StartupError                             the process ends; `UnservedModel` of a node is one
└── those of `pd_cluster.errors` (nodes) and `pd_router.errors` (the router). Bugs are assertions instead
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ENGINE_DIED = "engine_died"  # `code` of a node's answer when its engine process has died
MAX_MESSAGE_CHARS = 4096  # some name what a client sent: a model's name of 8 MB came back, and stood in logs


class PdError(Exception):
    """Base. `status`: HTTP status; `kind`: OpenAI's `error.type`; `code`: a stable word for programs to read.

    A subclass names those that differ from its base's. `code` and `status` of an instance override the class's.
    `param` names the field of the request that is wrong.
    """

    status = 500
    kind = "server_error"
    code = "internal_error"
    answer_headers: Mapping[str, str] = {}  # of the answer, beside those of its status
    retry_after_s = 0  # whole seconds after which the same request may succeed; 0: not told

    def __init_subclass__(cls, *, status: int = 0, kind: str = "", code: str = "") -> None:
        super().__init_subclass__()
        cls.status, cls.kind, cls.code = status or cls.status, kind or cls.kind, code or cls.code

    def __init__(self, message: str, param: str | None = None, code: str = "", *, status: int = 0) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}...")
        self.param = param
        if code:
            self.code = code
        if status:
            self.status = status

    def to_body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(str(self), self.kind, self.code, self.param)


class InvalidRequest(PdError, status=400, kind="invalid_request_error", code="invalid_value"):
    """The request can never be served."""


class ModelNotFound(PdError, status=404, kind="invalid_request_error", code="model_not_found"):
    """The requested model is not served here."""


class AdapterAbsent(PdError, status=409, kind="invalid_request_error", code="adapter_absent"):
    """This node does not serve the name that a router sent it: another node may."""


# Of a node to which a router has sent a name that the node told it: it has another set of adapters now
ABSENT_CODES = frozenset({AdapterAbsent.code, ModelNotFound.code})


class AdapterConflict(PdError, status=409, kind="invalid_request_error", code="adapter_conflict"):
    """Another order about the same adapter was first."""


class BodyTooLarge(PdError, status=413, kind="invalid_request_error", code="body_too_large"):
    """The request body is longer than this process accepts."""


class UnreadCoding(PdError, status=415, kind="invalid_request_error", code="unsupported_coding"):
    """The request body is compressed, or coded in another way that is not read."""

    answer_headers = {"accept-encoding": "identity"}  # RFC 9110, 15.5.16


class BodiesWait(PdError, status=503, kind="overloaded_error", code="overloaded"):
    """Other large bodies were decoded for too long."""


class NoRoom(PdError, status=503, kind="overloaded_error", code="no_memory"):
    """The requests of this process hold as much memory as they may (`max_held_mb`)."""

    retry_after_s = 2


class NodesDied(PdError, code="nodes_died"):
    """Several nodes died while they served the request, perhaps because of it: it must not be tried again."""

    answer_headers = {"x-should-retry": "false"}  # to the SDKs of OpenAI and Anthropic, which try a 500 twice more


class NodesFrozen(NodesDied, code="nodes_frozen"):
    """Several nodes stood still before they gave the request its first token: it must not be tried again."""


FINAL_CODES = frozenset({NodesDied.code, NodesFrozen.code})  # of errors after which no node may be asked


class OrderVersion(PdError, status=409, kind="invalid_request_error", code="protocol_mismatch"):
    """An order in another protocol version. The sender must be upgraded, or the receiver."""


class NotAuthorized(PdError, status=401, kind="authentication_error", code="bad_signature"):
    """An order that this cluster's key has not signed, or that has expired."""


class StartupError(PdError, code="startup"):
    """The process cannot start as configured; the message says which flag, file, port or device to change."""


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
