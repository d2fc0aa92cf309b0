"""Tool formats with a section of calls, each with its name before JSON: DeepSeek's, Kimi's."""

from __future__ import annotations

from dataclasses import replace

from pd_cluster.server.tools.format_template import IS_ARGUMENTS, NAME, THINK, response_template
from pd_cluster.server.tools.tool_format import ToolFormat

_DEEPSEEK_ANCHOR = ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"]
_DEEPSEEK_OPEN = r"(?:<｜tool▁calls▁begin｜>\s{0,16})?<｜tool▁call▁begin｜>"
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    template=response_template(
        _DEEPSEEK_ANCHOR,
        {
            "open_pattern": _DEEPSEEK_OPEN + r"function<｜tool▁sep｜>\s{0,16}" + NAME + r"\s{0,16}```json\n",
            "close_pattern": r"\n?```\s{0,16}<｜tool▁call▁end｜>",
            "transform": IS_ARGUMENTS,
        },
        THINK,
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
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    model_types=("deepseek_v31",),
    signs=("<｜tool▁calls▁begin｜>",),
    template=response_template(
        _DEEPSEEK_ANCHOR,
        {
            "open_pattern": _DEEPSEEK_OPEN + NAME + r"<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "transform": IS_ARGUMENTS,
        },
        THINK,
        hidden="<｜tool▁calls▁end｜>",
    ),
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    separator="",
)

KIMI_K2 = ToolFormat(
    name="kimi_k2",
    model_types=("kimi_k2", "kimi_k25"),
    signs=("<|tool_call_argument_begin|>",),
    template=response_template(
        "<|im_assistant|>assistant<|im_middle|>",
        {
            # clients that write ids in letters and digits alone teach the model the second form (exo-explore/exo#2281)
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s{0,16})?<\|tool_call_begin\|>\s{0,16}"
            rf"(?:(?:functions\.)?{NAME}:\d{{1,9}}|functions_{NAME}_\d{{1,9}})\s{{0,16}}<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
            "transform": IS_ARGUMENTS,
        },
        THINK,
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
