"""The form of a chat answer: its content as `response_format` and its like say, its calls as the tools say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.grammar_source import GrammarSource, grammar_source
from pd_cluster.server.message_grammar import MessageForm
from pd_cluster.server.output_parser import ParserOptions
from pd_cluster.server.tool_use import inlined, loosened

if TYPE_CHECKING:
    from pd_cluster.server.schema import ChatBody
    from pd_cluster.server.tokenizer import Tokenizer
    from pd_cluster.server.tool_format import ToolFormat
    from pd_cluster.server.tool_use import ToolUse

_ANY_ARGUMENTS = {"type": "object"}


def check_format(use: ToolUse, tool_format: ToolFormat | None, *, has_parser: bool) -> None:
    """Raises InvalidRequest when the model may call a tool, and calls would come back as text or unconstrained."""
    if use.functions and tool_format is None and (use.is_constrained or not has_parser):
        raise InvalidRequest(
            "tools is not supported: this server does not know how the model writes calls; start its nodes with "
            '--tool-format, or send tool_choice "none" for an answer without tools',
            "tools",
            "unsupported_parameter",
        )


def parser_options(body: ChatBody, use: ToolUse) -> ParserOptions:
    """What the body asks of the answer's parts."""
    dropped, kept = body.include_reasoning is False, body.separate_reasoning is False
    return ParserOptions(
        tools={one.name: _readable(one.parameters) for one in use.functions},
        parallel_calls=use.parallel,
        streamed=bool(body.stream),
        reasoning="drop" if dropped else "content" if kept else "separate",
    )


def _readable(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema with the types of its properties, by which a parser of XML reads them."""
    properties = parameters.get("properties", {})
    return parameters | {"properties": {key: inlined(value, parameters) for key, value in properties.items()}}


async def chat_grammar_source(
    body: ChatBody, use: ToolUse, tool_format: ToolFormat | None, tokenizer: Tokenizer, options: dict[str, Any]
) -> GrammarSource | None:
    """What holds the answer to its form; None for a free answer. `options`: arguments of the chat template.

    Calls that must be made replace the content, so its form is not used. Calls that may be made are an alternative to
    content of the form, and only strict tools hold the arguments to their schemas. Raises InvalidRequest.
    """
    source = grammar_source(body)
    if tool_format is None or not (source or use.is_constrained):
        return source
    thinking = await _thinking(tool_format, tokenizer, options)
    if not use.functions and thinking == "no":
        return source
    functions = tuple(
        (one.name, one.parameters if one.strict else loosened(one.parameters) if use.required else _ANY_ARGUMENTS)
        for one in use.functions
    )
    strict = tuple(one.name for one in use.functions if one.strict)
    form = MessageForm(tool_format.name, functions, use.required, use.parallel, strict, thinking)
    if source is None or use.required:
        source = GrammarSource("tools", "", "")
    return replace(source, message=form)


async def _thinking(tool_format: ToolFormat, tokenizer: Tokenizer, options: dict[str, Any]) -> str:
    """Whether the answer may begin with reasoning, see `MessageForm.thinking`."""
    start, end = tool_format.reasoning_start, tool_format.reasoning_end
    if not start or options.get("continue_final_message"):
        return "no"
    prompt = await tokenizer.generation_prompt(options)
    if start in prompt or end in prompt:
        return "no" if prompt.rfind(end) > prompt.rfind(start) else "open"
    thinks = {"enable_thinking": True, "thinking": True}
    if start in await tokenizer.generation_prompt(options | thinks):
        return "no"  # this template opens the reasoning if it is asked to
    marker = next((token for token in tool_format.tokens if start.startswith(token)), start)
    return "may" if tokenizer.knows(marker) else "no"
