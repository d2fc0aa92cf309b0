"""The messages of `envoy.service.ext_proc.v3` that an endpoint picker reads and writes, with Envoy's field numbers.

They are declared here and not taken from the package xds-protos, because that installs modules over those of
opentelemetry-proto and googleapis-common-protos, with which exporters of traces then fail. Fields that are not declared
are ignored on arrival. On the wire an enum is an int32, and a map a list of entries.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

FULL_DUPLEX_STREAMED = 4  # of a body mode
OVERWRITE_IF_EXISTS_OR_ADD = 2  # `append_action` of a header

_PACKAGE = "pd_router.ext_proc"
_STRUCT = struct_pb2.Struct.DESCRIPTOR.full_name
# Message -> its fields: number, type, name. `[]` after a type: repeated. Fields of `_ONEOF` exclude each other.
_MESSAGES = {
    "HeaderValue": ("1 string key", "2 string value", "3 bytes raw_value"),
    "HeaderMap": ("1 HeaderValue[] headers",),
    "HttpHeaders": ("1 HeaderMap headers", "3 bool end_of_stream"),
    "HttpBody": ("1 bytes body", "2 bool end_of_stream"),
    "HttpTrailers": ("1 HeaderMap trailers",),
    "NamedStruct": ("1 string key", "2 Struct value"),
    "Metadata": ("1 NamedStruct[] filter_metadata",),
    "ProtocolConfiguration": ("1 int32 request_body_mode", "2 int32 response_body_mode"),
    "ProcessingRequest": (
        "2 HttpHeaders request_headers", "3 HttpHeaders response_headers", "4 HttpBody request_body",
        "5 HttpBody response_body", "6 HttpTrailers request_trailers", "7 HttpTrailers response_trailers",
        "8 Metadata metadata_context", "11 ProtocolConfiguration protocol_config",
    ),
    "HeaderValueOption": ("1 HeaderValue header", "3 int32 append_action"),
    "HeaderMutation": ("1 HeaderValueOption[] set_headers", "2 string[] remove_headers"),
    "StreamedBodyResponse": ("1 bytes body", "2 bool end_of_stream"),
    "BodyMutation": ("3 StreamedBodyResponse streamed_response",),
    "CommonResponse": ("2 HeaderMutation header_mutation", "3 BodyMutation body_mutation"),
    "HeadersResponse": ("1 CommonResponse response",),
    "BodyResponse": ("1 CommonResponse response",),
    "TrailersResponse": ("1 HeaderMutation header_mutation",),
    "HttpStatus": ("1 int32 code",),
    "ImmediateResponse": ("1 HttpStatus status", "2 HeaderMutation headers", "3 bytes body", "5 string details"),
    "ProcessingResponse": (
        "1 HeadersResponse request_headers", "2 HeadersResponse response_headers", "3 BodyResponse request_body",
        "4 BodyResponse response_body", "5 TrailersResponse request_trailers", "6 TrailersResponse response_trailers",
        "7 ImmediateResponse immediate_response", "8 Struct dynamic_metadata",
    ),
}  # fmt: skip
_ONEOF = {"ProcessingRequest": ("request", range(2, 8)), "ProcessingResponse": ("response", range(1, 8))}


def _classes() -> dict[str, Any]:
    """Message -> its class."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        oneof, numbers = _ONEOF.get(name, ("", range(0)))
        if oneof:
            message.oneof_decl.add(name=oneof)
        for field in fields:
            number, kind, label = field.split()
            declared = message.field.add(name=label, number=int(number))
            declared.label = declared.LABEL_REPEATED if kind.endswith("[]") else declared.LABEL_OPTIONAL
            kind = kind.removesuffix("[]")
            if kind == "Struct" or kind in _MESSAGES:
                declared.type = declared.TYPE_MESSAGE
                declared.type_name = f".{_STRUCT}" if kind == "Struct" else f".{_PACKAGE}.{kind}"
            else:
                declared.type = getattr(declared, f"TYPE_{kind.upper()}")
            if int(number) in numbers:
                declared.oneof_index = 0
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
