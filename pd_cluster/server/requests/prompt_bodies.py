"""The bodies of requests about prompts alone."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pd_cluster.server.bodies.schema import TOKEN_IDS, PromptFields

MAX_INPUTS = 2048  # of one request, as OpenAI's
_INPUT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
        TOKEN_IDS,
        {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


class EmbeddingBody(PromptFields, kw_only=True):
    """POST /v1/embeddings and /pooling. `input`: string, strings, token ids, or lists of token ids."""

    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    encoding_format: str | None = None  # float, base64
    dimensions: int | None = None  # the first so many
    normalize: bool | None = None  # None: as the model's files say


class PairFields(PromptFields, kw_only=True):
    """Fields that score and rerank share."""

    instruction: str | None = None  # what makes a document relevant


class ScoreBody(PairFields, kw_only=True):
    """POST /v1/score. One text is compared with each of the others, or two lists of equal length pair by pair."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None  # another name of text_1
    documents: str | list[str] | None = None  # and of text_2


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankBody(PairFields, kw_only=True):
    """POST /v1/rerank, as Jina and Cohere have it."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None  # null, 0: all
    return_documents: bool | None = None
