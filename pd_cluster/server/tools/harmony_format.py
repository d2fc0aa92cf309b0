"""The tool format of gpt-oss: channels of messages, one of them with a recipient."""

from __future__ import annotations

from pd_cluster.server.tools.format_template import IS_ARGUMENTS, NAME, response_template
from pd_cluster.server.tools.tool_format import ToolFormat

_RECIPIENT = r" to=functions\." + NAME
_CHANNEL = r"<\|channel\|>\w{1,16}"
_START = r"(?:<\|start\|>assistant)?"
_JSON_MESSAGE = r" ?(?:<\|constrain\|>)?\w{0,16}<\|message\|>"
_GPT_OSS_TEMPLATE = response_template(
    "<|start|>assistant",
    {
        # the recipient stands before or after the channel
        "open_pattern": rf"{_START}(?:{_RECIPIENT} ?{_CHANNEL}|{_CHANNEL}{_RECIPIENT}){_JSON_MESSAGE}",
        "close_pattern": r"<\|call\|>|<\|end\|>",
        "transform": IS_ARGUMENTS,
    },
    {"open_pattern": _START + r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
)
_GPT_OSS_TEMPLATE["fields"]["content"] = {
    "open_pattern": _START + r"<\|channel\|>(?:final|commentary)" + _JSON_MESSAGE,
    "close_pattern": r"<\|end\|>|<\|return\|>",
}
GPT_OSS = ToolFormat(
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
