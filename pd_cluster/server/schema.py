"""Request bodies. msgspec checks types while it parses; what is wrong becomes a 400 that names the field.

Unknown fields are ignored, as OpenAI-compatible servers do, except those in `_REFUSED`: they would change the answer
and cannot be honoured here, so dropping them silently would be a lie.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from pd_cluster.errors import InvalidRequest

# what msgspec raises for bytes that are no JSON; nested too deeply is one way not to be
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 256  # prompts of one /v1/completions request
# Entries of logit_bias and stop_token_ids, counted once for each prompt: each prompt is a request of its own to the
# engine, which takes 11 ms for 131,072 entries. Eight prompts may each have a list of a vocabulary of that size.
MAX_LISTED_TOKENS = 1 << 20
MAX_LIST_BYTES = 8 << 20  # of such a field: 262,144 entries with 17 digits each; decoding it holds all up for 60 ms

# each with the values that are no request for anything
_NOTHING = (b"null", b"false", b"[]", b"{}", b'""')
_REFUSED: dict[str, str] = {
    "echo": "echo is not supported: the prompt's own logprobs are not computed",
    "suffix": "suffix is not supported: the model does not fill in the middle",
    "prompt_logprobs": "prompt_logprobs is not supported",
    "functions": "functions is superseded by tools",
    "function_call": "function_call is superseded by tool_choice",
    "audio": "audio is not supported: this server generates text",
    "chat_template": "a request may not bring its own chat_template",
    "use_beam_search": "beam search is not supported",
    "guided_json": "constrained decoding is not supported",
    "guided_regex": "constrained decoding is not supported",
    "guided_choice": "constrained decoding is not supported",
    "guided_grammar": "constrained decoding is not supported",
    "structured_outputs": "constrained decoding is not supported",
    "logits_processors": "logits_processors is not supported",
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's `stream_options`, and ours."""

    include_usage: bool | None = None
    include_timings: bool | None = None  # `usage.timings`: what the request waited for, in ms


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Only `text` is served."""

    type: str


class KvTransferParams(msgspec.Struct, kw_only=True):
    """vLLM's connector fields, and our signed papers beside them; the dict's other fields are for other engines."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    ticket: str | None = None
    offer: str | None = None
    prompt_token_ids: list[int] | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: KvTransferParams | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. `prompt`: string, strings, token ids, or lists of token ids."""

    prompt: msgspec.Raw
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class ReleaseBody(msgspec.Struct, kw_only=True):
    """POST /pd/release: the signed ticket is the authority."""

    ticket: str


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(raw: bytes, kind: type[Body]) -> tuple[Body, set[str]]:
    """The body, and the names of its fields that nobody reads. Raises InvalidRequest naming the field."""
    names = _field_names(raw)
    for name in ("logit_bias", "stop_token_ids"):
        if len(names.get(name, b"")) > MAX_LIST_BYTES:
            raise InvalidRequest(f"{name} may have {MAX_LIST_BYTES} bytes", name)
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except NOT_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    unknown = names.keys() - _known(kind)
    for name in _REFUSED.keys() & unknown:
        if bytes(names[name]).strip() not in _NOTHING:
            raise InvalidRequest(_REFUSED[name], name, "unsupported_parameter")
    return body, unknown


def decode_value(raw: bytes, kind: Any, param: str) -> Any:
    """A part of a body that was kept raw. Raises InvalidRequest naming `param`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except NOT_JSON as error:
        raise InvalidRequest(f"{param}: {_reason(str(error))}", param, "invalid_type") from error


def _field_names(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object", code="invalid_json") from error
    except NOT_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _known(kind: type[msgspec.Struct]) -> set[str]:
    return set(kind.__struct_fields__)


def _invalid(message: str) -> InvalidRequest:
    """msgspec's "Expected `int | null`, got `str` - at `$.max_tokens`", said as OpenAI would."""
    missing = re.match(r"Object missing required field `(\w+)`(?: - at `\$\.(\w+))?", message)
    if missing:
        inner, outer = missing.groups()
        return InvalidRequest(
            f"{outer + '.' if outer else ''}{inner} is required", outer or inner, "missing_required_parameter"
        )
    place = re.search(r"`\$\.(\w+)", message)
    param = place.group(1) if place else None
    return InvalidRequest(f"{param or 'body'}: {_reason(message)}", param, "invalid_type")


def _reason(message: str) -> str:
    return message.split(" - at ")[0].replace(" | null", "")
