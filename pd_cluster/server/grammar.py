"""Turns a request's fields for structured output into a grammar in llguidance's language, and checks grammars."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.worker.grammars import NO_PACKAGE

if TYPE_CHECKING:
    from pd_cluster.server.schema import GenerationBody, ResponseFormat, StructuredOutputs

# A schema of this size took 0.3 s of CPU on a vocabulary of 128,000 tokens: its check, compilation and first masks
MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMARS_BYTES = 1 << 20  # of all prompts together: each has a copy on the engine
MAX_WRITTEN_BYTES = 4 * MAX_GRAMMAR_BYTES  # in llguidance's language, which escapes texts once more
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Fields of vLLM and of SGLang, and the members of `structured_outputs` that they stand for
_SYNONYMS = {
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
    kind: str  # json, json_object, regex, choice or grammar
    value: Any
    coerces_one_of: bool = False  # read `oneOf` of a JSON schema as `anyOf`


def grammar_source(body: GenerationBody) -> GrammarSource | None:
    """What the body says about the form of the output; None: nothing.

    Raises InvalidRequest for a form that is not supported, and for two forms.
    """
    found = [
        GrammarSource(param, kind, value)
        for param, kind in _SYNONYMS.items()
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
    return GrammarSource(param, "json", wanted.json_schema.schema, coerces_one_of=not wanted.json_schema.strict)


def _of_structured_outputs(wanted: StructuredOutputs) -> GrammarSource:
    param = "structured_outputs"
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(wanted, name):
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param, "unsupported_value")
    found = [(kind, value) for kind in _KINDS if (value := getattr(wanted, kind)) not in (None, False)]
    if len(found) != 1:
        raise InvalidRequest(f"structured_outputs needs one of {', '.join(_KINDS)}, not {len(found)}", param)
    return GrammarSource(param, *found[0])


def _check_size(text: str, num_prompts: int, param: str) -> None:
    """Raises InvalidRequest for a grammar that is too long, alone or for all prompts together."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} has {num_bytes} bytes; {MAX_GRAMMAR_BYTES} are allowed", param)
    if num_bytes * num_prompts > MAX_GRAMMARS_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes} bytes, for {num_prompts} prompts; {MAX_GRAMMARS_BYTES} are allowed in all", param
        )


class GrammarChecks:
    """Writes and checks grammars in a thread. Close it to end the thread.

    There is one thread, so that hostile grammars take no more than one core.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def grammar(self, source: GrammarSource | None, num_prompts: int) -> str:
        """The checked grammar of a request with so many prompts; "" for none. Raises InvalidRequest."""
        if source is None:
            return ""
        value = source.value if isinstance(source.value, str) else msgspec.json.encode(source.value).decode()
        _check_size(value, num_prompts, source.param)
        text = await asyncio.get_running_loop().run_in_executor(self._thread, _write, source, value)
        await self.check(text, source.param)
        return text

    async def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest, with llguidance's sentence, for a grammar that it does not take."""
        if len(grammar) > MAX_WRITTEN_BYTES:
            raise InvalidRequest(
                f"{param}: the grammar has {len(grammar)} characters; {MAX_WRITTEN_BYTES} are allowed", param
            )
        await asyncio.get_running_loop().run_in_executor(self._thread, _check, grammar, param)


def _write(source: GrammarSource, value: str) -> str:
    """The grammar in llguidance's language. `value`: the source's value if that is a string, else its JSON."""
    try:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError as error:
        raise InvalidRequest(NO_PACKAGE, source.param, "unsupported_value") from error
    # Without blanks between tokens: weak models repeat blanks where a grammar allows them
    options: Any = {"whitespace_flexible": False, "coerce_one_of": source.coerces_one_of}
    try:
        match source.kind:
            case "json":
                return str(LLMatcher.grammar_from_json_schema(value, overrides=options))
            case "json_object":
                return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=options))
            case "regex":
                return str(LLMatcher.grammar_from_regex(value))
            case "choice":
                return _choice(source)
        return str(any_to_lark(value))
    except InvalidRequest:
        raise
    except Exception as error:  # the converter of grammars raises plain Exceptions
        raise InvalidRequest(f"{source.param}: {_first_line(str(error))}", source.param) from error


def _choice(source: GrammarSource) -> str:
    """One terminal, which the lexer follows: a rule with more than 2,000 alternatives exceeds llguidance's limits."""
    if not source.value or not all(source.value):
        raise InvalidRequest(f"{source.param}: a choice needs strings that are not empty", source.param)
    return f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(text, ensure_ascii=False) for text in source.value)}\n"


def _check(grammar: str, param: str) -> None:
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as error:
        raise InvalidRequest(NO_PACKAGE, param, "unsupported_value") from error
    limits = LLParserLimits(verbose_errors=False)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_wrong:
        raise InvalidRequest(f"{param}: {_first_line(messages[0])}", param)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
