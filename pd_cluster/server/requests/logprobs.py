"""Logprobs in the shapes of the two APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from pd_http.json_pieces import JsonList

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.protocol.prompt_outputs import PromptToken
    from pd_cluster.server.text.detokenizer import Vocabulary
    from pd_connectors.protocol.messages import SampledToken

SHAPED_TOKENS = 256  # at once: as objects log-probabilities take four times the memory of their JSON
_LOWEST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


def chat_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[SampledToken], *, names_are_ids: bool = False
) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions: one entry for each token, with the token that ended the sequence."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = vocabulary.token_bytes(token_id)
        name = f"token_id:{token_id}" if names_are_ids else raw.decode(errors="replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(raw)}

    entries = (
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(one.token_id, one.logprob) for one in token.top]}
        for token in tokens
    )
    return {"content": [*entries] if len(tokens) <= SHAPED_TOKENS else JsonList(entries)}


def completion_logprobs(
    vocabulary: Vocabulary,
    tokens: Iterable[SampledToken | PromptToken],
    *,
    num_top: int | None = None,
    names_are_ids: bool = False,
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of legacy completions, but for the text offsets.

    `num_top`: alternatives of each token; None: all that it has.
    """

    def name_of(token_id: int) -> str:
        return f"token_id:{token_id}" if names_are_ids else _name(vocabulary, token_id)

    names: list[str] = []
    tops: list[dict[str, float]] = []
    values: list[float] = []
    for token in tokens:
        name = name_of(token.token_id)
        names.append(name)
        values.append(finite(token.logprob))
        top = {name_of(one.token_id): finite(one.logprob) for one in token.top[:num_top]}
        tops.append({name: values[-1]} | top)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}


def json_items(values: list[Any]) -> bytes:
    """The items of a list as JSON, with commas between them."""
    return orjson.dumps(values)[1:-1]


def _name(vocabulary: Vocabulary, token_id: int) -> str:
    """The token's text. A part of a character is written as its bytes, as OpenAI does, so that parts stay distinct."""
    raw = vocabulary.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float:
    """The log-probability as JSON can say it."""
    return _LOWEST if logprob is None or not logprob >= _LOWEST else logprob
