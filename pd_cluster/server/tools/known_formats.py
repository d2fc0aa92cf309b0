"""All tool formats, and which of them a model writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.server.tools.element_formats import GLM45, GLM47, MINIMAX_M2, QWEN3_CODER
from pd_cluster.server.tools.harmony_format import GPT_OSS
from pd_cluster.server.tools.json_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS
from pd_cluster.server.tools.section_formats import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.server.tools.tool_format import ToolFormat

# A chat template may have the signs of several: the first one counts.
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        *(QWEN3_CODER, GLM47, GLM45, HERMES, MINIMAX_M2, MISTRAL_ARGS, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31),
        *(KIMI_K2, GPT_OSS, LLAMA3_JSON),
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
