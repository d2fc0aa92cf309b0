"""Fields of a request body that this server does not read.

A field is refused when it would change the answer of a server that honours it. A field of `HARMLESS` would not. The two
tables and the structs of `schema.py` cover OpenAI's document and vLLM's and SGLang's protocols. All other fields are
ignored as harmless ones are: the header `x-pd-ignored` of the answer names them. For what is below the fields of a
body, see `pd_http.left_out`.
"""

from __future__ import annotations

import re
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

IGNORED_HEADER = "x-pd-ignored"
MAX_NAMED = 32  # names in the header; of further names it has the number
MAX_NAME_CHARS = 48
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
_MAX_HARMLESS_BYTES = 64  # every harmless value is shorter; longer values are not parsed


class FieldRefusal(NamedTuple):
    """Why a field is refused, and its harmless values: they ask for what this server does in any case."""

    why: str
    harmless: tuple[Any, ...] = _NOTHING


_STRUCTURED = FieldRefusal("use structured_outputs")
_THINKING = "use reasoning_effort or enable_thinking"
_STATELESS = "no answers are stored: send the whole conversation, and wait for the answer"
_ONE_PROMPT = "the prompt must come as text or token ids in prompt, or as messages"

REFUSED: dict[str, FieldRefusal] = {
    # the input
    "suffix": FieldRefusal("the model does not fill in the middle"),
    "input_ids": FieldRefusal(_ONE_PROMPT),
    "input_embeds": FieldRefusal(_ONE_PROMPT),
    "prompt_embeds": FieldRefusal(_ONE_PROMPT),
    "truncation_side": FieldRefusal("prompts are cut at their beginning", (None, "left")),
    "chat_template": FieldRefusal("the chat template is the model's: a request must not contain one"),
    "documents": FieldRefusal("use chat_template_kwargs if the model's chat template reads documents"),
    "functions": FieldRefusal("functions is superseded by tools"),
    "function_call": FieldRefusal("function_call is superseded by tool_choice", (*_NOTHING, "none", "auto")),
    "task": FieldRefusal("chat templates know no tasks"),
    "ec_transfer_params": FieldRefusal("this server reads text alone"),
    "extra_key": FieldRefusal("use cache_salt"),
    "lora_path": FieldRefusal("a request names an adapter by model; orders load it"),
    "previous_response_id": FieldRefusal(_STATELESS),
    "conversation": FieldRefusal(_STATELESS),
    "thread": FieldRefusal(_STATELESS),
    "background": FieldRefusal(_STATELESS),
    "compaction": FieldRefusal("ask for a summary as a message"),
    "moderation": FieldRefusal("this server does not moderate"),
    "access_programs": FieldRefusal("this server does not moderate"),
    "session_params": FieldRefusal("sessions are not supported"),
    # reasoning
    "reasoning": FieldRefusal(_THINKING, (None,)),
    "thinking_token_budget": FieldRefusal(_THINKING, (None,)),
    # the choice of tokens
    "structural_tag": _STRUCTURED,
    "grammar": _STRUCTURED,
    "logits_processors": FieldRefusal("logits processors are not supported"),
    "custom_logit_processor": FieldRefusal("logits processors are not supported"),
    "custom_params": FieldRefusal("logits processors are not supported"),
    "vllm_xargs": FieldRefusal("logits processors are not supported"),
    "watermarking": FieldRefusal("answers get no watermark"),
    "beam_width": FieldRefusal("n is the width of a beam search, or best_of where fewer answers are wanted", (None,)),
    # the end of the output
    "max_new_tokens": FieldRefusal("use max_tokens", (None,)),
    "min_new_tokens": FieldRefusal("use min_tokens", (None, 0)),
    "stop_regex": FieldRefusal("use stop"),
    "no_stop_trim": FieldRefusal("use include_stop_str_in_output"),
    "repetition_detection": FieldRefusal("repetition is not detected"),
    # the content of the answer
    "echo": FieldRefusal("a chat answer does not repeat the last message"),
    "logprob_token_ids": FieldRefusal("use logprobs or top_logprobs"),
    "return_prompt_token_ids": FieldRefusal("use return_token_ids"),
    "return_prompt_text": FieldRefusal("use return_token_ids and /detokenize"),
    "return_meta_info": FieldRefusal("the fields of the answer are OpenAI's"),
    "return_cached_tokens_details": FieldRefusal("use usage.prompt_tokens_details"),
    "return_hidden_states": FieldRefusal("the answer holds text"),
    "return_routed_experts": FieldRefusal("the answer holds text"),
    "embed_dtype": FieldRefusal("vectors are float32", (None, "float32")),
    "endianness": FieldRefusal("vectors are little-endian", (None, "native", "little")),
    "use_activation": FieldRefusal("scores are probabilities, or cosines; use normalize for vectors", (None, True)),
    "max_tokens_per_doc": FieldRefusal("documents are not cut", (None,)),
    "max_chunks_per_doc": FieldRefusal("documents are not cut", (None,)),
    "rank_fields": FieldRefusal("documents are text", (None, ["text"])),
    "audio": FieldRefusal("this server generates text"),
    "modalities": FieldRefusal("this server generates text", (*_NOTHING, ["text"])),
}


_LABEL = "a label for the operator's records; none are kept"
_HOSTED = "it is for tools that a server runs, which are left out"
_MEDIA = "messages have no images, audio or video"
_PLACEMENT = "the router chooses the nodes, and kv_transfer_params carry the handoff"

# Why a field changes no answer of this server
HARMLESS: dict[str, str] = {
    "web_search_options": _HOSTED,
    "user": _LABEL,
    "metadata": _LABEL,
    "custom_labels": _LABEL,
    "safety_identifier": _LABEL,
    "session_id": _LABEL,
    "store": "answers are not stored",
    "service_tier": "there is one tier",
    "ngram_corpus_id": "it may only make an answer faster",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "cache_control": "prefixes are found by their tokens",
    "inference_geo": _PLACEMENT,
    "diagnostics": _LABEL,
    "user_profile_id": _LABEL,
    "workspace_id": _LABEL,
    "billing_policy": _LABEL,
    "fallback_credit_token": _LABEL,
    "betas": "each field is judged by itself",
    "speed": "there is one speed",
    "max_tool_calls": _HOSTED,
    "container": _HOSTED,
    "mcp_servers": _HOSTED,
    "context_management": "it would only shorten the conversation, which is taken as it is",
    "truncation": "input that is too long is an error",
    "fallbacks": "this server answers with one model",
    "image": _MEDIA,
    "prompt_cache_retention": "prefixes stay cached as long as there is room",
    "verbosity": "the models served here have no such setting",
    "spaces_between_special_tokens": "tokens are joined by their bytes",
    "stream_interval": "each chunk holds the tokens that have come",
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "images_config": _MEDIA,
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "use_audio_in_video": _MEDIA,
    "return_mm_kwargs": _MEDIA,
    "return_token_offsets": "only vLLM's render endpoints read it",
    "routed_experts_prompt_start": "return_routed_experts, which is refused, alone would need it",
    "routed_experts_start_len": "return_routed_experts, which is refused, alone would need it",
    "stream_reasoning": "SGLang's router adds it to every request",
    "bootstrap_host": _PLACEMENT,
    "bootstrap_port": _PLACEMENT,
    "bootstrap_room": _PLACEMENT,
    "routed_dp_rank": _PLACEMENT,
    "data_parallel_rank": _PLACEMENT,
    "disagg_prefill_dp_rank": _PLACEMENT,
}


_NO_PLACE = FieldRefusal("the answer has no place for it")
_ONE_ANSWER = FieldRefusal("there is one answer", (None, 1))
_OF_CHAT = {
    "n": _ONE_ANSWER,
    "best_of": _ONE_ANSWER,
    "use_beam_search": FieldRefusal("it is a field of chat and completions"),
    "logprobs": _NO_PLACE,
    "top_logprobs": FieldRefusal(_NO_PLACE.why, (None, 0)),
    "prompt_logprobs": FieldRefusal(_NO_PLACE.why, (None,)),
    "return_token_ids": _NO_PLACE,
    "return_tokens_as_token_ids": _NO_PLACE,
    "separate_reasoning": FieldRefusal("reasoning has a place of its own", (None, True)),
    "max_completion_tokens": FieldRefusal("it is a field of chat", (None,)),
    "add_generation_prompt": FieldRefusal("it is a field of chat", (None, True)),
    "continue_final_message": FieldRefusal("it is a field of chat"),
}
# By path: fields that chat reads and this API does not have, or has under another name
ELSEWHERE: dict[str, dict[str, FieldRefusal]] = {
    MESSAGES: _OF_CHAT
    | {
        "stop": FieldRefusal("use stop_sequences"),
        "stream_options": FieldRefusal("the usage is in message_delta"),
        "response_format": FieldRefusal("use output_config.format"),
        "reasoning_effort": FieldRefusal("use thinking or output_config.effort", (None,)),
        "enable_thinking": FieldRefusal("use thinking", (None,)),
        "include_reasoning": FieldRefusal("use thinking.display", (None, True)),
        "parallel_tool_calls": FieldRefusal("use tool_choice.disable_parallel_tool_use", (None, True)),
        "output_format": FieldRefusal("use output_config.format"),
    },
    RESPONSES: _OF_CHAT
    | {
        "messages": FieldRefusal("use input"),
        "max_tokens": FieldRefusal("use max_output_tokens", (None,)),
        "response_format": FieldRefusal("use text.format"),
        "reasoning_effort": FieldRefusal("use reasoning.effort", (None,)),
        "enable_thinking": FieldRefusal("use reasoning.effort", (None,)),
        "prompt": FieldRefusal("this server keeps no templates of prompts"),
    },
}
ELSEWHERE[COUNT_TOKENS] = ELSEWHERE[MESSAGES]


def refuse(unread: Mapping[str, msgspec.Raw], refused: Mapping[str, FieldRefusal] = REFUSED) -> None:
    """Raises InvalidRequest for the first of these fields that cannot be ignored. `refused`: why, by name."""
    for name in refused.keys() & unread.keys():
        refusal = refused[name]
        if not _is_one_of(bytes(unread[name]), refusal.harmless):
            raise InvalidRequest(f"{name} is not supported: {refusal.why}", name, "unsupported_parameter")


def _is_one_of(raw: bytes, values: tuple[Any, ...]) -> bool:
    raw = raw.strip()
    if len(raw) > _MAX_HARMLESS_BYTES:
        return False
    try:
        given = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the body decoder skips unread fields without full checks
        return False
    return any(type(given) is type(value) and given == value for value in values)  # 0 is not False


def ignored_header(names: Collection[str], before: Mapping[str, str] | None = None) -> dict[str, str]:
    """The header that names these fields; {} for none. Clients choose the names, so they are cut and made printable.

    `before`: headers with names that were told earlier.
    """
    first = nsmallest(MAX_NAMED, names)
    named = [re.sub(r"[^A-Za-z0-9_.\-\[\]]", "?", name[:MAX_NAME_CHARS]) or "?" for name in first]
    if len(names) > MAX_NAMED:
        named.append(f"+{len(names) - MAX_NAMED}")
    earlier = [before[IGNORED_HEADER]] if before and IGNORED_HEADER in before else []
    return {IGNORED_HEADER: ",".join([*earlier, *named])} if named else {}
