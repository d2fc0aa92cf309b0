"""What the fields of a request say about the form of its output.

Of a chat answer the content is as `response_format` and its like say, and calls are as the tools say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.tool_use import inlined, loosened
from pd_cluster.server.grammar.message_grammar import MessageForm
from pd_cluster.server.tools.output_parser import ParserOptions

if TYPE_CHECKING:
    from pd_cluster.server.bodies.schema import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs
    from pd_cluster.server.bodies.tool_use import ToolUse
    from pd_cluster.server.text.tokenizer import Tokenizer
    from pd_cluster.server.tools.tool_format import ToolFormat

_ANY_ARGUMENTS = {"type": "object"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Fields of vLLM and of SGLang, and the members of `structured_outputs` that they stand for
SYNONYMS = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a request says about the form of its output."""

    param: str  # the field that says it
    kind: str  # json, json_object, regex, choice or grammar; "" for any text; "written" by another node
    value: Any
    coerces_one_of: bool = False  # read `oneOf` of a JSON schema as `anyOf`
    strict: bool = False  # refuse formats of a JSON schema that cannot be held to
    blanks: bool = True  # JSON may have a blank after each comma and colon
    message: MessageForm | None = None  # of a chat answer: the source is then the form of its content


async def grammar_source(body: GenerationBody) -> GrammarSource | None:
    """What the body says about the form of the output; None: nothing.

    Raises InvalidRequest for a form that is not supported, and for two forms. A coroutine, as that of chat is.
    """
    found = [
        GrammarSource(param, kind, value)
        for param, kind in SYNONYMS.items()
        if (value := getattr(body, param)) not in (None, False)
    ]
    if body.response_format is not None and body.response_format.type != "text":
        found.append(_of_response_format(body.response_format))
    if body.structured_outputs is not None:
        found.append(_of_structured_outputs(body.structured_outputs))
    if len(found) > 1:
        names = " and ".join(source.param for source in found[:2])
        raise InvalidRequest(f"{names} exclude each other: an answer has one form", found[1].param)
    return found[0] if found else None


def _of_response_format(wanted: ResponseFormat) -> GrammarSource:
    param = "response_format"
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise InvalidRequest("response_format of the type json_object takes no json_schema", param)
        return GrammarSource(param, "json_object", True)
    if wanted.type != "json_schema":
        raise InvalidRequest(
            f"response_format {wanted.type} is not supported: use text, json_object or json_schema",
            param,
            "unsupported_value",
        )
    if wanted.json_schema is None:
        raise InvalidRequest("response_format of the type json_schema needs json_schema", param)
    if wanted.json_schema.schema is None:
        return GrammarSource(param, "json_object", True)
    strict = bool(wanted.json_schema.strict)
    return GrammarSource(param, "json", wanted.json_schema.schema, coerces_one_of=not strict, strict=strict)


def _of_structured_outputs(wanted: StructuredOutputs) -> GrammarSource:
    param = "structured_outputs"
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(wanted, name):
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param, "unsupported_value")
    found = [(kind, value) for kind in _KINDS if (value := getattr(wanted, kind)) not in (None, False)]
    if len(found) != 1:
        raise InvalidRequest(f"structured_outputs needs one of {', '.join(_KINDS)}, not {len(found)}", param)
    return GrammarSource(param, *found[0], blanks=not wanted.disable_any_whitespace)


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
    source = await grammar_source(body)
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
    start, end = tool_format.reasoning_start.strip(), tool_format.reasoning_end
    if not start or options.get("continue_final_message"):
        return "no"
    prompt = await tokenizer.generation_prompt(options)
    if start in prompt or end in prompt:
        return "no" if prompt.rfind(end) > prompt.rfind(start) else "open"
    thinks = {"enable_thinking": True, "thinking": True}
    if start in await tokenizer.generation_prompt(options | thinks):
        return "no"  # this template opens the reasoning if it is asked to
    marker = next((token for token in tool_format.tokens if token in start), start)
    return "may" if tokenizer.knows(marker) else "no"
