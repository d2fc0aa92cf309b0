"""Which path speaks which dialect."""

from __future__ import annotations

from pd_http.dialect import OPENAI, Dialect
from pd_http.messages_dialect import MessagesDialect
from pd_http.responses_dialect import ResponsesDialect

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
_MESSAGES = MessagesDialect()
_BY_PATH: dict[str, Dialect] = {MESSAGES: _MESSAGES, COUNT_TOKENS: _MESSAGES, RESPONSES: ResponsesDialect()}


def dialect_of(path: str) -> Dialect:
    """OpenAI's for every path that is not named here."""
    return _BY_PATH.get(path, OPENAI)
