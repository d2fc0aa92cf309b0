"""The tables of `docs/api.md`: endpoints, request fields, refused fields and errors.

`tests/docs/test_api_page.py` sends every field of `READ` to a node and compares all tables with the routes and bodies.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pd_cluster.errors  # noqa: F401 - their subclasses are listed
import pd_router.errors  # noqa: F401
from docs.generate.document import code, table
from pd_cluster.server.bodies.fields import ELSEWHERE, HARMLESS, REFUSED
from pd_cluster.server.bodies.schema import (
    MAX_LOGITS_ARGS_BYTES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    ChatBody,
    CompletionBody,
)
from pd_cluster.server.bodies.tool_use import MAX_DEPTH
from pd_cluster.server.grammar.grammar_checks import MAX_GRAMMAR_BYTES
from pd_cluster.server.grammar.json_schema import MAX_LEVELS
from pd_cluster.server.requests.request_checks import MAX_BAD_WORD_CHARS
from pd_http.dialect import MANY_TOOLS, OPENAI
from pd_http.dialects import MESSAGES, RESPONSES
from pd_http.endpoints import ENDPOINTS, Kind
from pd_http.errors import PdError, StartupError
from pd_http.member_bounds import CHAT_BOUNDS, MAX_FIELDS, TOKEN_FIELDS, TRANSLATED_BOUNDS
from pd_http.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = "docs/api.md"
_NAME = re.compile(  # of a field: with a dot or an underscore, after "use", or before "is" at the beginning
    r"\b[a-z_]+\.[a-z_.]*[a-z]\b|\b[a-z]+(?:_[a-z]+)+\b|(?<=\buse )[a-z]+\b|^(?:n|functions)(?= is )"
)
_ERROR_FILES = {"pd_http.errors", "pd_cluster.errors", "pd_router.errors"}


class Read(NamedTuple):
    """A field that a node reads. `example` is accepted beside a plain body."""

    example: Any
    meaning: str


READ: dict[str, Read] = {
    "messages": Read([{"role": "user", "content": "hi"}], "Text content, as a string or as parts of type `text`."),
    "prompt": Read("hi", "A string, token ids, or a list of either (up to 256 prompts)."),
    "model": Read("demo", "Must be the served name. Without it the only model answers."),
    "n": Read(2, "1 to 128. The prompt is computed once."),
    "best_of": Read(1, "Only when it equals `n`, or as the width of a beam search."),
    "use_beam_search": Read(False, "vLLM's field: see [beam search](#beam-search)."),
    "length_penalty": Read(1.0, "Of a beam search: -10 to 10, default 1."),
    "early_stopping": Read(False, 'Of a beam search: `true`, `false` (default) or `"never"`.'),
    "max_tokens": Read(4, "Default: 16 for completions; for chat, what fits."),
    "max_completion_tokens": Read(4, "Wins over `max_tokens`."),
    "temperature": Read(0.5, "0 to 2. The default is the one in `generation_config.json`, else 1."),
    "top_p": Read(0.9, "Above 0, at most 1. The default is the model's, as for `temperature`."),
    "top_k": Read(20, "vLLM's field. 0 and -1: all."),
    "min_p": Read(0.1, "vLLM's field, 0 to 1."),
    "repetition_penalty": Read(1.1, "vLLM's field, above 0, at most 10; over prompt and output."),
    "presence_penalty": Read(0.5, "-2 to 2, over the output."),
    "frequency_penalty": Read(0.5, "-2 to 2, over the output."),
    "seed": Read(7, "Equal seeds give equal tokens, on any node and in any batch, as far as logits are equal."),
    "logit_bias": Read({"5": 1}, "-100 to 100 for each token id."),
    "allowed_token_ids": Read([5, 6], "vLLM's field: no other token is generated, not even the end."),
    "bad_words": Read(
        ["x"], "vLLM's field: texts that the model does not write, up to 4,096 characters in all, token by token."
    ),
    "min_tokens": Read(1, "vLLM's field: no end before so many tokens, unless a grammar allows nothing else."),
    "stop": Read(["x"], "Up to 16 strings of at most 1,024 characters."),
    "stop_token_ids": Read([7], "vLLM's field."),
    "ignore_eos": Read(True, "vLLM's field. Without effect on an answer with a grammar."),
    "include_stop_str_in_output": Read(True, "vLLM's field."),
    "skip_special_tokens": Read(False, "vLLM's field. Default: true."),
    "logits_args": Read({}, "Arguments of the node's own logits stages (`--logits-stage`), at most 64 KiB."),
    "stream": Read(True, "Server-sent events."),
    "stream_options": Read(
        {"include_usage": True, "continuous_usage_stats": True, "include_timings": True},
        "`include_usage`; vLLM's `continuous_usage_stats`; `include_timings`, see below.",
    ),
    "response_format": Read({"type": "json_object"}, "`text`, `json_object` or `json_schema`, see below."),
    "structured_outputs": Read(
        {"choice": ["a", "b"]},
        "vLLM's field: one of `json`, `json_object`, `regex`, `choice`, `grammar` (Lark or GBNF), see below.",
    ),
    "guided_json": Read({"type": "object"}, "vLLM's older name for `structured_outputs.json`."),
    "guided_json_object": Read(True, "vLLM's older name for `structured_outputs.json_object`."),
    "guided_regex": Read("[0-9]+", "vLLM's older name for `structured_outputs.regex`."),
    "guided_choice": Read(["a", "b"], "vLLM's older name for `structured_outputs.choice`."),
    "guided_grammar": Read('start: "a"', "vLLM's older name for `structured_outputs.grammar`."),
    "json_schema": Read('{"type": "object"}', "SGLang's name for `structured_outputs.json`."),
    "regex": Read("[0-9]+", "SGLang's name for `structured_outputs.regex`."),
    "ebnf": Read('root ::= "a"', "SGLang's name for `structured_outputs.grammar`."),
    "priority": Read(1, "Ignored unless the node is started with `--priorities`. Lower is served first."),
    "cache_salt": Read("tenant", "vLLM's field: requests with another salt share no cached blocks with these."),
    "request_id": Read("r-1", "vLLM's field: the id in the answer, up to 128 characters. Wins over `x-request-id`."),
    "rid": Read("r-1", "SGLang's name for `request_id`, as text."),
    "truncate_prompt_tokens": Read(5, "vLLM's field, 1 or more: only so many of the prompt's last tokens count."),
    "prompt_logprobs": Read(1, "vLLM's field, 0 to 20 alternatives for each token of the prompt, see below."),
    "return_token_ids": Read(True, "vLLM's field: adds `prompt_token_ids` and `token_ids`."),
    "return_tokens_as_token_ids": Read(True, "vLLM's field: logprobs name token 5 `token_id:5`."),
    "echo": Read(True, "The text begins with the prompt; with `logprobs` they too. `max_tokens` 0: nothing else."),
    "add_special_tokens": Read(True, "vLLM's field. Default: true for completions, false for chat."),
    "kv_transfer_params": Read({"do_remote_decode": False}, "vLLM's connector fields, for routers."),
    "logprobs": Read(1, "Chat: true or false. Completions: 0 to 20 alternatives."),
    "top_logprobs": Read(2, "0 to 20 alternatives for each token; needs `logprobs`."),
    "tools": Read([], "Functions; others are left out. At most 128; a model of a known format. See [tools](tools.md)."),
    "tool_choice": Read("none", "`none`, `auto`, `required`, a named function, or `allowed_tools`."),
    "parallel_tool_calls": Read(False, "Default: true. False: an answer has at most one call."),
    "reasoning_effort": Read(
        "none", "For the chat template: `none` to `xhigh`. Named in `x-pd-ignored` if it has no use for it."
    ),
    "enable_thinking": Read(False, "Short for `chat_template_kwargs.enable_thinking`."),
    "include_reasoning": Read(True, "vLLM's field. False: the reasoning is not in the answer."),
    "separate_reasoning": Read(True, "SGLang's field. False: the reasoning stays in the content."),
    "add_generation_prompt": Read(True, "vLLM's field. Default: true."),
    "continue_final_message": Read(False, "vLLM's field."),
    "chat_template_kwargs": Read({"enable_thinking": False}, "Arguments of the model's chat template."),
    "prediction": Read(
        {"type": "content", "content": "hi"}, "Text that the answer may repeat: see [predictions](#predictions)."
    ),
}


def _endpoints() -> str:
    places = {Kind.NODE: "nodes", Kind.ROUTER: "router"}
    rows = []
    for one in ENDPOINTS:
        place, order = places.get(one.kind, "router, nodes"), " (signed order)" * one.signed
        rows.append([code(f"{one.method} {one.template}"), place, f"{one.summary}{order}."])
    return table(["endpoint", "on", "what it does"], rows)


def _read_fields() -> str:
    rows = []
    for name, field in READ.items():
        chat, completions = (name in kind.__struct_fields__ for kind in (ChatBody, CompletionBody))
        rows.append([code(name), "yes" if chat else "", "yes" if completions else "", field.meaning])
    return table(["field", "chat", "completions", "meaning and limits"], rows)


def _sentence(why: str) -> str:
    """The reason of a refusal, with names of fields as code: a name at its beginning is not capitalized."""
    text = _NAME.sub(lambda name: code(name[0]), why)
    return f"{text[0].upper()}{text[1:]}."


def _refused_fields() -> str:
    names: dict[tuple[str, str], list[str]] = {}
    for name, refusal in REFUSED.items():
        harmless = ", ".join(code(json.dumps(value)) for value in refusal.harmless)
        names.setdefault((refusal.why, harmless), []).append(code(name))
    rows = [[", ".join(fields), _sentence(why), harmless] for (why, harmless), fields in names.items()]
    return table(["field", "why it is refused", "values that are accepted all the same"], rows)


def _elsewhere() -> str:
    """Fields of chat that the other APIs lack."""
    rows = []
    for name in dict.fromkeys([*ELSEWHERE[MESSAGES], *ELSEWHERE[RESPONSES]]):
        refusals = (ELSEWHERE[path].get(name) for path in (MESSAGES, RESPONSES))
        rows.append([code(name), *("" if one is None else _sentence(one.why) for one in refusals)])
    return table(["field of chat", "Messages", "Responses"], rows)


def _harmless_fields() -> str:
    names: dict[str, list[str]] = {}
    for name, why in HARMLESS.items():
        names.setdefault(why, []).append(code(name))
    return table(["field", "why it changes no answer"], [[", ".join(some), f"{why}."] for why, some in names.items()])


def errors() -> Iterator[type[PdError]]:
    """Every error that an HTTP answer can carry by its class. Those of the command line are in other files."""
    kinds: list[type[PdError]] = [PdError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.__module__ in _ERROR_FILES and kind is not StartupError and kind is not PdError:
            yield kind


def _errors() -> str:
    rows = []
    for kind in errors():
        place = {"pd_cluster": "node", "pd_router": "router"}.get(kind.__module__.partition(".")[0], "both")
        what = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        rows.append([str(kind.status), code(kind.code), place, what])
    for refusal in Refusal:
        if refusal.status:
            text = f"{refusal.message[0].upper()}{refusal.message[1:]}."
            rows.append([str(refusal.status), code(refusal.word), "both", text])
    return table(["status", "code", "from", "meaning"], sorted(rows))


def _bounds() -> str:
    """What a body may have, as `pd_http.member_bounds` and the checks of nodes have it."""
    chat, translated = CHAT_BOUNDS, TRANSLATED_BOUNDS
    rows = [
        ("fields", f"{MAX_FIELDS:,}", "of a body, read or not"),
        ("entries", f"{chat.others.entries:,}", "objects and lists in lists, of all fields together"),
        ("", f"{translated.others.entries:,}", "the same, in Messages and Responses"),
        ("values", f"{chat.others.values:,}", "members of objects and lists at any level, of all fields together"),
        ("", f"{chat.others.values:,}", "the same, in arguments of tool calls that are text"),
        ("messages", "the context", "a message has a token at least"),
        ("`prediction`", "the context", "tokens"),
        ("levels of a schema", f"{MAX_LEVELS}", f"{MAX_DEPTH} in tools"),
        ("`tools`", f"{OPENAI.tool_limits.tools}", f"{MANY_TOOLS:,} in Messages and Responses"),
        ("`stop`", f"{MAX_STOP_STRINGS}", f"strings of {MAX_STOP_CHARS:,} characters"),
        ("`bad_words`", f"{MAX_BAD_WORD_CHARS:,}", "characters in all"),
        (
            "a schema, grammar or choices",
            f"{MAX_GRAMMAR_BYTES >> 10} KiB",
            "as JSON without blanks; 1 MiB for all prompts",
        ),
        ("`logits_args`", f"{MAX_LOGITS_ARGS_BYTES >> 10} KiB", "for all prompts together"),
    ]
    for name, most in TOKEN_FIELDS.items():
        if name != "kv_transfer_params":
            prompts = f", {most.entries:,} prompts" if most.entries else ""
            rows.append((code(name), f"{most.values:,}", f"tokens{prompts}; they do not count above"))
    return table(["what", "most", "where"], rows)


PARTS = {
    "endpoints": _endpoints,
    "read-fields": _read_fields,
    "refused-fields": _refused_fields,
    "harmless-fields": _harmless_fields,
    "elsewhere": _elsewhere,
    "errors": _errors,
    "bounds": _bounds,
}
