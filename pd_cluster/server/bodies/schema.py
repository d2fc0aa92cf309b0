"""Request bodies. msgspec checks types while it parses; a wrong type becomes a 400 that names the field.

Fields that the struct of a body lacks are refused, or named in the answer: see `fields.py`.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.fields import refuse
from pd_http.dialect import whole_number
from pd_http.frames import Continuation
from pd_http.left_out import LeftOut
from pd_http.member_bounds import BAD_JSON, MAX_NODE_FIELDS, top_level

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 256  # prompts of one /v1/completions request
# Entries of each of `LISTS`, counted once for each prompt: each prompt is a request of its own to the
# engine, and 131,072 entries take 11 ms there. The limit allows eight prompts with an entry for each token of such a
# vocabulary.
MAX_LISTED_TOKENS = 1 << 20
LISTS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
MAX_LOGITS_ARGS_BYTES = 64 << 10  # of all prompts together: each has a copy on the engine

_Objects = list[dict[str, msgspec.Raw]]
_NULL = msgspec.Raw(b"null")
_TOKEN_KEYS = Meta(extra_json_schema={"propertyNames": {"pattern": "^-?[0-9]+$"}})


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`: of OpenAI, vLLM (`continuous_usage_stats`) and this server (`include_timings`)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # each chunk has the usage so far
    include_timings: bool | None = None  # `usage.timings`: time by phase in ms


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`response_format.json_schema`. An answer always follows the schema; `strict` refuses what it cannot hold to."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None  # None: any object
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer. The type is `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one form of the answer. JSON may have one blank after each comma and colon."""

    json: str | dict[str, Any] | None = None  # a JSON schema, or its text
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    structural_tag: str | dict[str, Any] | None = None  # refused
    whitespace_pattern: str | None = None  # refused
    disable_additional_properties: bool | None = None  # true is refused
    disable_any_whitespace: bool | None = None  # JSON without that blank
    disable_fallback: bool | None = None  # there is one library


class PredictedPart(msgspec.Struct, kw_only=True):
    """A part of `prediction.content`. They are joined as they are."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """OpenAI's `prediction`: text that much of the answer may repeat. It makes answers faster, and changes none."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Meta(min_length=1)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


class KvTransferParams(msgspec.Struct, kw_only=True):
    """vLLM's connector fields, and ours. Fields of the dict that are not listed here are for other engines."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    ticket: str | None = None
    offer: str | None = None
    prompt_token_ids: list[int] | None = None
    continuation: Continuation | None = None  # see `continuation.py`
    goes_on: bool | None = None  # D to P: the KV is for a stream that was cut
    prompt_steps: list[tuple[int, int]] | None = None  # names of the prompt's blocks: see `AddRequest.steps`
    # D to P, see `decode_sampling`; without it P reads the body's own fields
    sampling: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})] | UnsetType = UNSET


class PromptFields(msgspec.Struct, kw_only=True):
    """Fields of every request with prompts."""

    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    rid: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


class GenerationBody(PromptFields, kw_only=True):
    """Fields that chat and completions share."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
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
    logit_bias: Annotated[dict[int, float], _TOKEN_KEYS] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logits_args: dict[str, Any] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: KvTransferParams | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None


TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        TOKEN_IDS,
        {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. `prompt`: string, strings, token ids, or lists of token ids."""

    prompt: Annotated[msgspec.Raw, Meta(extra_json_schema=_PROMPT)]  # decoded by `completions.prompts_of`
    logprobs: int | None = None
    echo: bool | None = None


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
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class ReleaseBody(msgspec.Struct, kw_only=True):
    """POST /pd/release. The signature of the ticket authorizes the release."""

    ticket: str


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(raw: bytes, kind: type[Body]) -> tuple[Body, set[str]]:
    """The body, and the names of its fields that are not read. Raises InvalidRequest that names the wrong field."""
    fields = top_level(raw, most=MAX_NODE_FIELDS)
    try:
        body = _decoded(raw, fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except BAD_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    unread = {name: value for name, value in fields.items() if name not in kind.__struct_fields__}
    refuse(unread)
    names = set(unread)
    if isinstance(body, GenerationBody) and body.stream_options is not None:
        members = top_level(fields["stream_options"], "stream_options").keys() - set(StreamOptions.__struct_fields__)
        names |= {f"stream_options.{member}" for member in members}
    if isinstance(body, ChatBody) and body.prediction is not None:
        names |= _unknown_in(fields["prediction"], body.prediction)
    return body, names


def _unknown_in(raw: msgspec.Raw, prediction: Prediction) -> set[str]:
    """The members that `prediction` ignores. Their values are passed over: no text, and no number, is read again."""
    left_out, members = LeftOut(), top_level(raw, "prediction")
    levels: list[tuple[str, type[msgspec.Struct], _Objects]] = [("prediction", Prediction, [members])]
    if not isinstance(prediction.content, str):
        levels.append(("prediction.content[]", PredictedPart, decode_value(members["content"], _Objects, "prediction")))
    for place, kind, objects in levels:
        for name, value in itertools.chain.from_iterable(one.items() for one in objects):
            if name not in kind.__struct_fields__ and value != _NULL:
                left_out.add("member", f"{place}.{name}")
    return set(left_out)


def _decoded(raw: bytes, fields: dict[str, msgspec.Raw], kind: type[Body]) -> Body:
    """Some languages write the integer 4 as 4.0, which msgspec refuses: such a body is decoded twice."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        whole = {name: whole_number(value) for name, value in fields.items()}
        if all(whole[name] is value for name, value in fields.items()):
            raise
        return msgspec.json.decode(msgspec.json.encode(whole), type=kind)


def decode_value(raw: bytes, kind: Any, param: str) -> Any:
    """Decode a part of a body that was kept raw. Raises InvalidRequest that names `param`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except BAD_JSON as error:
        raise InvalidRequest(f"{param}: {_reason(str(error))}", param, "invalid_type") from error


def _invalid(message: str) -> InvalidRequest:
    """msgspec's "Expected `int | null`, got `str` - at `$.max_tokens`" in OpenAI's form."""
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
