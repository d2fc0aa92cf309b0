"""Fields of a request body that this server does not read: the table of refused fields, names of ignored ones.

A field is refused when it would change the answer of a server that honours it. The table covers the fields of OpenAI's
document and of vLLM's and SGLang's protocols, except two that their routers add to every request (`separate_reasoning`,
`stream_reasoning`). Every other field is ignored, and the header `x-pd-ignored` of the answer names it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd_cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
_THINKING = "the model's chat template controls reasoning: use chat_template_kwargs"
_ONE_PROMPT = "the prompt must come as text or token ids in prompt, or as messages"

REFUSED: dict[str, FieldRefusal] = {
    # the input
    "suffix": FieldRefusal("the model does not fill in the middle"),
    "input_ids": FieldRefusal(_ONE_PROMPT),
    "input_embeds": FieldRefusal(_ONE_PROMPT),
    "prompt_embeds": FieldRefusal(_ONE_PROMPT),
    "truncate_prompt_tokens": FieldRefusal("prompts are not truncated", (None,)),
    "chat_template": FieldRefusal("the chat template is the model's: a request must not contain one"),
    "documents": FieldRefusal("use chat_template_kwargs if the model's chat template reads documents"),
    "functions": FieldRefusal("functions is superseded by tools"),
    "function_call": FieldRefusal("function_call is superseded by tool_choice", (*_NOTHING, "none", "auto")),
    "web_search_options": FieldRefusal("this server does not search the web", (None,)),
    "lora_path": FieldRefusal("adapters are not supported"),
    "session_params": FieldRefusal("sessions are not supported"),
    # reasoning
    "reasoning_effort": FieldRefusal(_THINKING, (None,)),
    "reasoning": FieldRefusal(_THINKING, (None,)),
    "enable_thinking": FieldRefusal(_THINKING, (None,)),
    "thinking_token_budget": FieldRefusal(_THINKING, (None,)),
    "include_reasoning": FieldRefusal("reasoning is part of the content", (None, True)),
    # the choice of tokens
    "structural_tag": _STRUCTURED,
    "grammar": _STRUCTURED,
    "allowed_token_ids": FieldRefusal("use logit_bias", (None,)),
    "bad_words": FieldRefusal("use logit_bias"),
    "logits_processors": FieldRefusal("logits processors are not supported"),
    "custom_logit_processor": FieldRefusal("logits processors are not supported"),
    "custom_params": FieldRefusal("logits processors are not supported"),
    "vllm_xargs": FieldRefusal("logits processors are not supported"),
    "use_beam_search": FieldRefusal("beam search is not supported"),
    # the end of the output
    "max_new_tokens": FieldRefusal("use max_tokens", (None,)),
    "min_new_tokens": FieldRefusal("use min_tokens", (None, 0)),
    "stop_regex": FieldRefusal("use stop"),
    "no_stop_trim": FieldRefusal("use include_stop_str_in_output"),
    "repetition_detection": FieldRefusal("repetition is not detected"),
    # the content of the answer
    "echo": FieldRefusal("the answer does not repeat the prompt"),
    "prompt_logprobs": FieldRefusal("the prompt's logprobs are not computed"),
    "logprob_token_ids": FieldRefusal("use logprobs or top_logprobs"),
    "return_token_ids": FieldRefusal("the answer holds text"),
    "return_tokens_as_token_ids": FieldRefusal("the answer holds text"),
    "return_hidden_states": FieldRefusal("the answer holds text"),
    "return_routed_experts": FieldRefusal("the answer holds text"),
    "audio": FieldRefusal("this server generates text"),
    "modalities": FieldRefusal("this server generates text", (*_NOTHING, ["text"])),
}


def refuse(unread: Mapping[str, msgspec.Raw]) -> None:
    """Raises InvalidRequest for the first of these fields that cannot be ignored."""
    for name in REFUSED.keys() & unread.keys():
        refusal = REFUSED[name]
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


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names these fields; {} for none. Clients choose the names, so they are cut and made printable."""
    ordered = sorted(names)
    named = [re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:MAX_NAME_CHARS]) or "?" for name in ordered[:MAX_NAMED]]
    if len(ordered) > MAX_NAMED:
        named.append(f"+{len(ordered) - MAX_NAMED}")
    return {IGNORED_HEADER: ",".join(named)} if named else {}
