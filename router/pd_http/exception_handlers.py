"""How the apps of router and node answer exceptions: in the shape of the API that was called."""

from __future__ import annotations

import http
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from pd_http.dialects import dialect_of
from pd_http.errors import InvalidRequest, PdError
from pd_http.reply import json_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response


def exception_handlers(headers_of: Callable[[Request], Mapping[str, str]] = lambda _: {}) -> dict[Any, Any]:
    """Handlers for starlette's `exception_handlers`. `headers_of`: headers of the answer to a request."""

    def answer(request: Request, error: PdError, headers: Mapping[str, str] | None = None) -> Response:
        dialect = dialect_of(request.url.path)
        return json_response(
            dialect.error_body(error), dialect.status(error), {**(headers or {}), **headers_of(request)}
        )

    async def pd_error(request: Request, error: PdError) -> Response:
        return answer(request, error, error.answer_headers)

    async def http_error(request: Request, error: HTTPException) -> Response:
        phrase = http.HTTPStatus(error.status_code).phrase
        message, code = f"{phrase}: {request.method} {request.url.path}", phrase.lower().replace(" ", "_")
        return answer(request, InvalidRequest(message, code=code, status=error.status_code), error.headers)

    async def bug(request: Request, error: Exception) -> Response:
        return answer(request, PdError("internal error"))  # starlette raises the exception again, and uvicorn logs it

    return {PdError: pd_error, HTTPException: http_error, Exception: bug}
