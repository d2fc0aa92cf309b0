"""The OpenAPI document of a node: bodies as `schema.py` decodes them, answers as the structs here describe them.

The structs of answers are documentation; `tests/server/test_openapi.py` holds real answers to them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pd_cluster import __version__, errors
from pd_cluster.errors import PdError, StartupError
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody, DetokenizeBody, ReleaseBody, TokenizeBody
from pd_cluster.server.requests.prompt_bodies import EmbeddingBody, RerankBody, ScoreBody
from pd_connectors.protocol.feed import FEED_TYPE
from pd_connectors.protocol.ticket import ORDER_HEADER
from pd_http.endpoints import ENDPOINTS, NODE_ACTIONS, Endpoint, Kind
from pd_http.messages_dialect import MessagesFields
from pd_http.responses_dialect import ResponsesFields

FinishWord = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens found in the prefix cache of the node, or of its prefill node."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: from the first token of the reasoning to the marker that ends it."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET  # of the request's `prediction`
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. `timings` (ms by phase): for clients that set `stream_options.include_timings`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
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
    """`arguments` is JSON text."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    """A call that the client should carry out."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning` and `tool_calls` need a known format of answers (`--tool-format`)."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """`stop_reason`: the stop string or the stop token that ended the choice. `token_ids`: with `return_token_ids`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """Of one token after the prompt before it. `rank`: 1 for the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsOf = list[dict[str, PromptLogprob] | None]
"""By token of the prompt: the token's id and those of the most likely ones. Null: the first token has none."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat answer. `prompt_token_ids`: with `return_token_ids`; `prompt_logprobs` if they are asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsOf | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Lists with one entry for each token of the choice; with `echo` after those of the prompt, the first of which has
    no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`stop_reason`: as in `ChatChoice`. The token ids are there with `return_token_ids`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsOf | UnsetType = UNSET


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


class MessagesBody(MessagesFields, kw_only=True):
    """POST /v1/messages. Most of chat's fields for sampling can be added."""

    model: str | None = None
    max_tokens: int | None = None  # required unless tokens are counted
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class ResponsesBody(ResponsesFields, kw_only=True):
    """POST /v1/responses. Most of chat's fields for sampling can be added."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool | None = None


class TokenCount(msgspec.Struct):
    """Tokens of the prompt that a conversation becomes."""

    input_tokens: int


class TokenizedPrompt(msgspec.Struct):
    """The token ids of a prompt. `token_strs`, with `return_token_strs`: the vocabulary's entries."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedPrompt(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class TokenizerFacts(msgspec.Struct):
    """The tokenizer of the model. Tokens are text; null: it has none."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


class LeaseReleased(msgspec.Struct):
    """`released` is false when the lease is not, or no longer, of this engine."""

    released: bool


class ServerVersion(msgspec.Struct):
    """Version of this package."""

    version: str


class ServerLoad(msgspec.Struct):
    """Requests that are being answered."""

    server_load: int


class OrderTaken(msgspec.Struct):
    """The engine has the order before any later request."""

    success: bool


class ErrorDetail(msgspec.Struct):
    """`param`: the field of the body that is wrong. `code`: a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer that is not a success."""

    error: ErrorDetail


# By the name of an endpoint
BODIES: dict[str, type] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "messages": MessagesBody,
    "count_tokens": MessagesBody,
    "responses": ResponsesBody,
    "embeddings": EmbeddingBody,
    "pooling": EmbeddingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "release": ReleaseBody,
}
ANSWERS: dict[str, type] = {  # of all others: an object with fields that depend on the node
    "chat": ChatCompletion,
    "completions": TextCompletion,
    "count_tokens": TokenCount,
    "models": ModelList,
    "model": ModelCard,
    "tokenize": TokenizedPrompt,
    "detokenize": DetokenizedPrompt,
    "tokenizer_info": TokenizerFacts,
    "version": ServerVersion,
    "load": ServerLoad,
    "release": LeaseReleased,
    **dict.fromkeys(NODE_ACTIONS.values(), OrderTaken),
}
_TEXT = {"schema": {"type": "string"}}
_OTHER_CONTENT: dict[str, dict[str, Any]] = {  # that is not JSON
    "feed": {FEED_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    "metrics": {"text/plain": _TEXT},
}


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1. Takes some milliseconds: build it once."""
    kinds = [*BODIES.values(), *ANSWERS.values(), ErrorBody]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for one in ENDPOINTS:
        if one.kind is not Kind.ROUTER:
            paths.setdefault(one.template, {})[one.method.lower()] = _operation(one)
    info = {"title": "pd-cluster node", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(one: Endpoint) -> dict[str, Any]:
    content = _OTHER_CONTENT.get(one.name) or _json(ANSWERS.get(one.name, dict))
    if one.kind is Kind.GENERATE:  # when the body has `stream: true`
        content["text/event-stream"] = _TEXT
    answers = {"200": {"description": "success", "content": content}} | (_errors() if one.method == "POST" else {})
    error = {"description": "an error", "content": _json(ErrorBody)}
    if one.name == "health":
        answers["503"] = {"description": "the node is not ok", "content": content}  # the same body
    described: dict[str, Any] = {"summary": one.summary, "responses": answers | {"default": error}}
    if one.name in BODIES:
        described["requestBody"] = {"required": True, "content": _json(BODIES[one.name])}
    if "{name}" in one.template:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if one.signed:
        order = {"name": ORDER_HEADER, "in": "header", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [order | {"description": "a NodeOrder, signed with the cluster's key"}]
    return described


def _errors() -> dict[str, Any]:
    """The answers of errors by status, with the codes that programs may read."""
    codes: dict[int, set[str]] = {}
    for kind in (getattr(errors, name) for name in errors.__all__):
        if isinstance(kind, type) and issubclass(kind, PdError) and not issubclass(kind, StartupError):
            codes.setdefault(kind.status, set()).add(kind.code)
    content = _json(ErrorBody)
    return {
        str(status): {"description": ", ".join(sorted(some)), "content": content}
        for status, some in sorted(codes.items())
    }


def _json(kind: type) -> dict[str, Any]:
    schema = {"type": "object"} if kind is dict else {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"application/json": {"schema": schema}}
