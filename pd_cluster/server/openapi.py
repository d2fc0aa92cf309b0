"""The OpenAPI document of a node: bodies as `schema.py` decodes them, answers as the structs here describe them.

The structs of answers are documentation; `tests/server/test_openapi.py` holds real answers to them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from pd_cluster import __version__
from pd_cluster.server.schema import ChatBody, CompletionBody, DetokenizeBody, ReleaseBody, TokenizeBody

FinishWord = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens found in the node's prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. `timings` (ms by phase): in a stream, for clients that set `stream_options.include_timings`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    timings: dict[str, float] | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    """A token, its natural logarithm of probability (-9999 for zero probability), and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the answer, and the most probable tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry for each token of the choice."""

    content: list[ChosenTokenLogprob]


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    """A call that the client should carry out."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning_content` and `tool_calls` need a node with an output parser."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """`stop_reason`: the stop string or the stop token that ended the choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(msgspec.Struct):
    """Lists with one entry for each token of the choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """`stop_reason`: the stop string or the stop token that ended the choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None


class TextCompletion(msgspec.Struct):
    """A whole completion. The choices of several prompts are in the order of the prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct):
    """The model that this node serves. `max_model_len` is null until the engine is ready."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """One model."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizedPrompt(msgspec.Struct):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizedPrompt(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class LeaseReleased(msgspec.Struct):
    """`released` is false when the lease is not, or no longer, of this engine."""

    released: bool


class ErrorDetail(msgspec.Struct):
    """`param`: the field of the body that is wrong. `code`: a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer that is not a success."""

    error: ErrorDetail


class Operation(NamedTuple):
    """One route. `answer` None: plain text; dict: an object with fields that depend on the node's state."""

    method: str
    path: str
    summary: str
    body: type | None
    answer: type | None
    streams: bool = False  # answers server-sent events when the body has `stream: true`


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatBody, ChatCompletion, True),
    Operation("post", "/v1/completions", "Continue one prompt or several", CompletionBody, TextCompletion, True),
    Operation("get", "/v1/models", "List the model", None, ModelList),
    Operation("get", "/v1/models/{name}", "Describe the model", None, ModelCard),
    Operation("post", "/tokenize", "Token ids of a prompt or of messages", TokenizeBody, TokenizedPrompt),
    Operation("post", "/detokenize", "Text of token ids", DetokenizeBody, DetokenizedPrompt),
    Operation("get", "/health", "State of the node; status 503 unless it is ok", None, dict),
    Operation("get", "/kv", "State of the KV cache", None, dict),
    Operation("get", "/metrics", "Prometheus metrics", None, None),
    Operation("post", "/pd/release", "Release the lease of a signed ticket", ReleaseBody, LeaseReleased),
)


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1. Takes some milliseconds: build it once."""
    kinds = [kind for one in OPERATIONS for kind in (one.body, one.answer) if kind not in (None, dict)]
    _, schemas = msgspec.json.schema_components([*kinds, ErrorBody], ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one)
    info = {"title": "pd-cluster node", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(one: Operation) -> dict[str, Any]:
    content = _json(one.answer) if one.answer is not None else {"text/plain": {"schema": {"type": "string"}}}
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers = {"200": {"description": "success", "content": content}}
    error = {"description": "an error", "content": _json(ErrorBody)}
    described: dict[str, Any] = {"summary": one.summary, "responses": answers | {"default": error}}
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": _json(one.body)}
    if "{name}" in one.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    return described


def _json(kind: type) -> dict[str, Any]:
    schema = {"type": "object"} if kind is dict else {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"application/json": {"schema": schema}}
