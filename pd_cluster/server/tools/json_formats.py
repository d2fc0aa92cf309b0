"""Tool formats of which a call is one JSON object: Qwen's, Llama's, Mistral's."""

from __future__ import annotations

from pd_cluster.server.tools.format_template import NAME, THINK, response_template
from pd_cluster.server.tools.tool_format import ToolFormat

HERMES = ToolFormat(
    name="hermes",
    model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    signs=("<tool_call>",),
    template=response_template("<|im_start|>assistant\n", {"open": "<tool_call>", "close": "</tool_call>"}, THINK),
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    reasoning_start="<think>",
    reasoning_end="</think>",
    tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
)

LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    model_types=("llama", "llama4", "llama4_text", "mllama"),
    signs=("<|python_tag|>",),
    template=response_template(
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

_MISTRAL_TEMPLATE = response_template(
    ["[/INST]", "[/TOOL_RESULTS]"],
    {
        "open_pattern": r"\[TOOL_CALLS\]\s{0,16}(?:(?=\[\s{0,16}[{\]])|"
        + NAME
        + r"(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}(?=\{))",
    },
    {"open": "[THINK]", "close": "[/THINK]"},
)
MISTRAL = ToolFormat(
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
MISTRAL_ARGS = ToolFormat(
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
