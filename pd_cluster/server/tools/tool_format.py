"""How families of models write tool calls and reasoning. Data only: the parser and the grammars read it.

A message with calls is, with the fields of `ToolFormat`:

    begin  head NAME middle ARGUMENTS tail  separator  head NAME middle ARGUMENTS tail  end

ARGUMENTS is one JSON object, or with `parameter` one element for each argument:

    before KEY between VALUE after
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAME = r"(?P<name>[\w.-]{1,256})"  # patterns are bounded, because text that may match one is held back
_THINK = {"open": "<think>", "close": "</think>"}
# `function` of a call is the parsed text of its region, or has that text as its arguments
_IS_CALL = {"type": "function", "function": "{content}"}
_IS_ARGUMENTS = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


class Parameter(NamedTuple):
    """The texts around the key and the value of an argument. A text is written as it is, another value as JSON."""

    before: str
    between: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write tool calls. Every piece is the text that models of the format are trained on."""

    name: str  # of `--tool-format`
    model_types: tuple[str, ...]  # `model_type` in config.json
    signs: tuple[str, ...]  # a chat template that contains all of them is of this format
    template: Mapping[str, Any]  # a response template of transformers, which the parser follows
    head: str
    middle: str
    tail: str
    begin: str = ""  # before the first call
    separator: str | None = "\n"  # between two calls; None: a message has one call
    end: str = ""  # after the last call
    parameter: Parameter | None = None  # None: the arguments are one JSON object
    numbered: str = ""  # after NAME, before the number of the call; "": calls have no number
    bare_head: bool = False  # the parser takes a head that begins an answer for a call, also without `begin`
    reasoning_start: str = ""  # "": the format has no reasoning
    reasoning_end: str = ""
    content_start: str = ""  # before the content of an answer
    # Pieces of the texts above that are one token each in the models of the format. A tokenizer may lack them: then
    # they are plain text. Where it has them, only the token is a marker, and the same characters in text are not.
    tokens: tuple[str, ...] = ()
    short_ids: bool = False  # ids of calls have 9 letters and digits: Mistral's chat templates refuse others


def _template(
    anchor: str | list[str], calls: dict[str, Any], reasoning: dict[str, Any] | None, *, hidden: str = ""
) -> dict[str, Any]:
    """`hidden`: a marker between regions that is no content."""
    fields = {"reasoning_content": {"content": "text"} | reasoning} if reasoning else {}
    call = {"content": "json", "transform": _IS_CALL, "repeats": True} | calls
    content = {"content": "text"} | ({"close": hidden} if hidden else {})
    return {"start_anchor": anchor, "fields": fields | {"tool_calls": call, "content": content}}


_HERMES = ToolFormat(
    name="hermes",
    model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    signs=("<tool_call>",),
    template=_template("<|im_start|>assistant\n", {"open": "<tool_call>", "close": "</tool_call>"}, _THINK),
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    reasoning_start="<think>",
    reasoning_end="</think>",
    tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
)

_QWEN3_CODER = replace(
    _HERMES,
    name="qwen3_coder",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    signs=("<function=",),
    template=_template(
        "<|im_start|>assistant\n",
        {
            "open_pattern": r"<tool_call>\s{0,16}<function=(?P<name>[^<>\n]{1,256})>",
            "close_pattern": r"</function>\s{0,16}</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^<>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _IS_ARGUMENTS,
        },
        _THINK,
    ),
    head="<tool_call>\n<function=",
    middle=">\n",
    tail="</function>\n</tool_call>",
    parameter=Parameter("<parameter=", ">\n", "\n</parameter>\n"),
)

# One reader for both: versions differ in the line breaks. In answers under load the opening tag of a value may be
# missing (vllm-project/vllm#49248)
_GLM_TEMPLATE = _template(
    "<|assistant|>",
    {
        "open_pattern": r"<tool_call>\s{0,16}" + _NAME + r"\s{0,1024}(?=<arg_key>|</tool_call>)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            # where the tags are tokens a value may begin with any character
            "tag_pattern": r"<arg_key>(?P<key>[^<>\n]{1,256})</arg_key>(?:(?<=\udc80</arg_key[>])\s{0,16}"
            r"(?=[^\s\udc80])|\s{0,16}(?:<arg_value>|(?=[^\s<\udc80])))"
            r"(?P<value>.*?)</arg_value>"
        },
        "transform": _IS_ARGUMENTS,
    },
    _THINK,
)
_GLM45 = replace(
    _HERMES,
    name="glm45",
    model_types=("glm4_moe",),
    signs=("<tool_call>", "<arg_key>"),
    template=_GLM_TEMPLATE,
    begin="\n",
    head="<tool_call>",
    middle="\n",
    tail="</tool_call>",
    parameter=Parameter("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    reasoning_start="\n<think>",
    tokens=(*_HERMES.tokens, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_GLM47 = replace(
    _GLM45,
    name="glm47",
    model_types=("glm4_moe_lite", "glm_moe_dsa"),
    signs=("<tool_call>", "</arg_key><arg_value>"),
    begin="",
    middle="",
    separator="",
    parameter=Parameter("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    reasoning_start="<think>",
)

_MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    model_types=("minimax_m2",),
    signs=("<minimax:tool_call>",),
    template=_template(
        "]~b]ai\n",
        {
            # `^`: after the call before it
            "open_pattern": r'(?:<minimax:tool_call>|^)\s{0,16}<invoke name="' + _NAME + '">',
            "close": "</invoke>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r'<parameter name="(?P<key>[^"\n]{1,256})">(?P<value>.*?)</parameter>'},
            "transform": _IS_ARGUMENTS,
        },
        _THINK,
        hidden="</minimax:tool_call>",
    ),
    begin="\n<minimax:tool_call>\n",
    head='<invoke name="',
    middle='">\n',
    tail="</invoke>",
    end="\n</minimax:tool_call>",
    parameter=Parameter('<parameter name="', '">', "</parameter>\n"),
    bare_head=True,
    reasoning_start="<think>",
    reasoning_end="</think>",
    tokens=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
)

_LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    model_types=("llama", "llama4", "llama4_text", "mllama"),
    signs=("<|python_tag|>",),
    template=_template(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        # most calls have no marker: they are the whole message
        {"open_pattern": r"(?:^[\s;]{0,16}(?:<\|python_tag\|>)?|<\|python_tag\|>)\s{0,16}(?=\{)"},
        None,
    ),
    head='{"name": "',
    middle='", "parameters": ',
    tail="}",
    separator="; ",
    tokens=("<|python_tag|>",),
)

_MISTRAL_TEMPLATE = _template(
    ["[/INST]", "[/TOOL_RESULTS]"],
    {
        "open_pattern": r"\[TOOL_CALLS\]\s{0,16}(?:(?=\[\s{0,16}[{\]])|"
        + _NAME
        + r"(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}(?=\{))",
    },
    {"open": "[THINK]", "close": "[/THINK]"},
)
_MISTRAL = ToolFormat(
    name="mistral",
    model_types=("mistral", "mixtral"),
    signs=("[TOOL_CALLS]",),
    template=_MISTRAL_TEMPLATE,
    begin="[TOOL_CALLS][",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    separator=", ",
    end="]",
    tokens=("[TOOL_CALLS]",),
    short_ids=True,
)
_MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    model_types=("mistral3", "ministral", "ministral3"),
    signs=("[ARGS]",),
    template=_MISTRAL_TEMPLATE,
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    separator="",
    reasoning_start="[THINK]",
    reasoning_end="[/THINK]",
    tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
    short_ids=True,
)

_DEEPSEEK_ANCHOR = ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"]
_DEEPSEEK_OPEN = r"(?:<｜tool▁calls▁begin｜>\s{0,16})?<｜tool▁call▁begin｜>"
_DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    template=_template(
        _DEEPSEEK_ANCHOR,
        {
            "open_pattern": _DEEPSEEK_OPEN + r"function<｜tool▁sep｜>\s{0,16}" + _NAME + r"\s{0,16}```json\n",
            "close_pattern": r"\n?```\s{0,16}<｜tool▁call▁end｜>",
            "transform": _IS_ARGUMENTS,
        },
        _THINK,
        hidden="<｜tool▁calls▁end｜>",
    ),
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    reasoning_start="<think>",
    reasoning_end="</think>",
    tokens=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁end｜>", "<think>", "</think>"),
    ),
)
_DEEPSEEK_V31 = replace(
    _DEEPSEEK_V3,
    name="deepseek_v31",
    model_types=("deepseek_v31",),
    signs=("<｜tool▁calls▁begin｜>",),
    template=_template(
        _DEEPSEEK_ANCHOR,
        {
            "open_pattern": _DEEPSEEK_OPEN + _NAME + r"<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "transform": _IS_ARGUMENTS,
        },
        _THINK,
        hidden="<｜tool▁calls▁end｜>",
    ),
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    separator="",
)

_KIMI_K2 = ToolFormat(
    name="kimi_k2",
    model_types=("kimi_k2", "kimi_k25"),
    signs=("<|tool_call_argument_begin|>",),
    template=_template(
        "<|im_assistant|>assistant<|im_middle|>",
        {
            # clients that write ids in letters and digits alone teach the model the second form (exo-explore/exo#2281)
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s{0,16})?<\|tool_call_begin\|>\s{0,16}"
            rf"(?:(?:functions\.)?{_NAME}:\d{{1,9}}|functions_{_NAME}_\d{{1,9}})\s{{0,16}}<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
            "transform": _IS_ARGUMENTS,
        },
        _THINK,
        hidden="<|tool_calls_section_end|>",
    ),
    begin="<|tool_calls_section_begin|>",
    head="<|tool_call_begin|>functions.",
    middle="<|tool_call_argument_begin|>",
    tail="<|tool_call_end|>",
    separator="",
    end="<|tool_calls_section_end|>",
    numbered=":",
    reasoning_start="<think>",
    reasoning_end="</think>",
    tokens=(
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *("<|tool_calls_section_end|>", "<think>", "</think>"),
    ),
)

_RECIPIENT = r" to=functions\." + _NAME
_CHANNEL = r"<\|channel\|>\w{1,16}"
_START = r"(?:<\|start\|>assistant)?"
_JSON_MESSAGE = r" ?(?:<\|constrain\|>)?\w{0,16}<\|message\|>"
_GPT_OSS_TEMPLATE = _template(
    "<|start|>assistant",
    {
        # the recipient stands before or after the channel
        "open_pattern": rf"{_START}(?:{_RECIPIENT} ?{_CHANNEL}|{_CHANNEL}{_RECIPIENT}){_JSON_MESSAGE}",
        "close_pattern": r"<\|call\|>|<\|end\|>",
        "transform": _IS_ARGUMENTS,
    },
    {"open_pattern": _START + r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
)
_GPT_OSS_TEMPLATE["fields"]["content"] = {
    "open_pattern": _START + r"<\|channel\|>(?:final|commentary)" + _JSON_MESSAGE,
    "close_pattern": r"<\|end\|>|<\|return\|>",
}
_GPT_OSS = ToolFormat(
    name="gpt_oss",
    model_types=("gpt_oss",),
    signs=("<|channel|>",),
    template=_GPT_OSS_TEMPLATE,
    head="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    tail="<|call|>",
    separator=None,
    reasoning_start="<|channel|>analysis<|message|>",
    reasoning_end="<|end|><|start|>assistant",
    content_start="<|channel|>final<|message|>",
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)

# A chat template may have the signs of several: the first one counts.
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        *(_QWEN3_CODER, _GLM47, _GLM45, _HERMES, _MINIMAX_M2, _MISTRAL_ARGS, _MISTRAL, _DEEPSEEK_V3, _DEEPSEEK_V31),
        *(_KIMI_K2, _GPT_OSS, _LLAMA3_JSON),
    )
}


def find_format(model_type: str, chat_templates: Sequence[str], choice: str = "auto") -> ToolFormat | None:
    """The format that `--tool-format` (`choice`) names; None for "none".

    auto: the first format of which a chat template has the signs, else None, because such a template shows the model
    no tools. Of several templates the first one that has any counts. Without a chat template: the format of the model
    type, or None.
    """
    if choice != "auto":
        return FORMATS.get(choice)
    if chat_templates:
        shown = (one for text in chat_templates for one in FORMATS.values() if all(sign in text for sign in one.signs))
        return next(shown, None)
    return next((one for one in FORMATS.values() if model_type in one.model_types), None)
