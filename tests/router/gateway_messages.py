"""What a gateway sends to an endpoint picker, as messages of ext_proc."""

from __future__ import annotations

import json
from typing import Any

from pd_router.endpoint_picker.messages import FULL_DUPLEX_STREAMED, ProcessingRequest

COMPLETIONS = "/v1/completions"


def request_headers(
    path: str = COMPLETIONS,
    method: str = "POST",
    *,
    is_last: bool = False,
    subset: list[str] | None = None,
    body_mode: int = FULL_DUPLEX_STREAMED,
    answer_mode: int = FULL_DUPLEX_STREAMED,
    **headers: str,
) -> Any:
    """`headers`: with _ for -."""
    message = ProcessingRequest()
    message.protocol_config.request_body_mode = body_mode
    message.protocol_config.response_body_mode = answer_mode
    message.request_headers.end_of_stream = is_last
    named = {":path": path, ":method": method} | {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in named.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        hint = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        hint.value.update({"x-gateway-destination-endpoint-subset": subset})
    return message


def request_body(data: bytes, *, is_last: bool = True) -> Any:
    return ProcessingRequest(request_body={"body": data, "end_of_stream": is_last})


def response_headers(status: int = 200, *, is_last: bool = False, served: str = "", **headers: str) -> Any:
    message = ProcessingRequest()
    message.response_headers.end_of_stream = is_last
    for name, value in {":status": str(status), **headers}.items():
        message.response_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=value.encode())
    if served:
        metadata = message.metadata_context.filter_metadata.add(key="envoy.lb")
        metadata.value.update({"x-gateway-destination-endpoint-served": served})
    return message


def response_body(data: bytes, *, is_last: bool = False) -> Any:
    return ProcessingRequest(response_body={"body": data, "end_of_stream": is_last})


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": "x" * 4000, "stream": True, **fields}).encode()


def told(answer: Any) -> dict[str, str]:
    """The headers that an answer to headers sets."""
    kind = answer.WhichOneof("response")
    if kind == "immediate_response":
        mutation = answer.immediate_response.headers
    else:
        mutation = getattr(answer, kind).response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def parts(answers: list[Any], kind: str = "request_body") -> list[tuple[bytes, bool]]:
    """The parts of a body that answers send on, and whether each is the last."""
    streamed = [
        getattr(answer, kind).response.body_mutation.streamed_response
        for answer in answers
        if answer.WhichOneof("response") == kind
    ]
    return [(one.body, one.end_of_stream) for one in streamed]
