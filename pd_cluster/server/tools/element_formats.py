"""Tool formats that write each argument as an element: Qwen3-Coder's, GLM's, MiniMax's."""

from __future__ import annotations

from dataclasses import replace

from pd_cluster.server.tools.format_template import IS_ARGUMENTS, NAME, THINK, response_template
from pd_cluster.server.tools.json_formats import HERMES
from pd_cluster.server.tools.tool_format import Parameter, ToolFormat

QWEN3_CODER = replace(
    HERMES,
    name="qwen3_coder",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    signs=("<function=",),
    template=response_template(
        "<|im_start|>assistant\n",
        {
            "open_pattern": r"<tool_call>\s{0,16}<function=(?P<name>[^<>\n]{1,256})>",
            "close_pattern": r"</function>\s{0,16}</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^<>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": IS_ARGUMENTS,
        },
        THINK,
    ),
    head="<tool_call>\n<function=",
    middle=">\n",
    tail="</function>\n</tool_call>",
    parameter=Parameter("<parameter=", ">\n", "\n</parameter>\n"),
)

# One reader for both: versions differ in the line breaks. In answers under load the opening tag of a value may be
# missing (vllm-project/vllm#49248)
_GLM_TEMPLATE = response_template(
    "<|assistant|>",
    {
        "open_pattern": r"<tool_call>\s{0,16}" + NAME + r"\s{0,1024}(?=<arg_key>|</tool_call>)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            # where the tags are tokens a value may begin with any character
            "tag_pattern": r"<arg_key>(?P<key>[^<>\n]{1,256})</arg_key>(?:(?<=\udc80</arg_key[>])\s{0,16}"
            r"(?=[^\s\udc80])|\s{0,16}(?:<arg_value>|(?=[^\s<\udc80])))"
            r"(?P<value>.*?)</arg_value>"
        },
        "transform": IS_ARGUMENTS,
    },
    THINK,
)
GLM45 = replace(
    HERMES,
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
    tokens=(*HERMES.tokens, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM47 = replace(
    GLM45,
    name="glm47",
    model_types=("glm4_moe_lite", "glm_moe_dsa"),
    signs=("<tool_call>", "</arg_key><arg_value>"),
    begin="",
    middle="",
    separator="",
    parameter=Parameter("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    reasoning_start="<think>",
)

MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    model_types=("minimax_m2",),
    signs=("<minimax:tool_call>",),
    template=response_template(
        "]~b]ai\n",
        {
            # `^`: after the call before it
            "open_pattern": r'(?:<minimax:tool_call>|^)\s{0,16}<invoke name="' + NAME + '">',
            "close": "</invoke>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r'<parameter name="(?P<key>[^"\n]{1,256})">(?P<value>.*?)</parameter>'},
            "transform": IS_ARGUMENTS,
        },
        THINK,
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
