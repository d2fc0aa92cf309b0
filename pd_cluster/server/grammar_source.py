"""What the fields of a request say about the form of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from pd_cluster.server.message_grammar import MessageForm
    from pd_cluster.server.schema import GenerationBody, ResponseFormat, StructuredOutputs

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


async def form_of(body: GenerationBody) -> GrammarSource | None:
    """`grammar_source`, for callers that may have to wait."""
    return grammar_source(body)


def grammar_source(body: GenerationBody) -> GrammarSource | None:
    """What the body says about the form of the output; None: nothing.

    Raises InvalidRequest for a form that is not supported, and for two forms.
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
