"""Log-probabilities of a prompt in answers: `prompt_logprobs` of vLLM, and `logprobs` of an echoed completion."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_cluster.protocol.sampling_params import MAX_TOP_LOGPROBS
from pd_cluster.server.requests.logprobs import SHAPED_TOKENS, completion_logprobs, finite, json_items
from pd_cluster.server.text.text_offsets import echo_offsets
from pd_connectors.protocol.messages import SampledToken
from pd_http.json_pieces import JsonList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.prompt_outputs import PromptToken
    from pd_cluster.server.text.detokenizer import Vocabulary

# Log-probabilities of the prompts in one answer: 80 bytes each as JSON. One prompt of 131,072 tokens may have 15 each
MAX_SCORES = 1 << 21
FIELD_BYTES, ECHO_BYTES = 80, 40  # of one log-probability, as JSON: 67 and 31 with the texts of the demo's tokens


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """Where an answer shows log-probabilities of the prompt, each with the number of alternatives; None: nowhere."""

    field: int | None  # in `prompt_logprobs`
    echo: int | None  # in `logprobs`, before those of the output
    names_are_ids: bool = False  # see AnswerExtras

    @classmethod
    def of(cls, field: int | None, echo: int | None, *, names_are_ids: bool) -> PromptAsk | None:
        """None: the answer shows none. Raises InvalidRequest."""
        if field is None and echo is None:
            return None
        for name, value in (("prompt_logprobs", field), ("logprobs", echo)):
            if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
                raise InvalidRequest(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}, not {value}", name)
        return cls(field, echo, names_are_ids)

    @property
    def param(self) -> str:
        """The field of the request that asks."""
        return "logprobs" if self.field is None else "prompt_logprobs"

    @property
    def outputs(self) -> PromptOutputs:
        """What the engine has to find out."""
        return PromptOutputs(logprobs=self.num_top)

    @property
    def num_top(self) -> int:
        """The most alternatives of a token that it shows."""
        return max(self.field or 0, self.echo or 0)

    def num_bytes(self, num_tokens: Sequence[int], is_stream: bool | None = False) -> int:
        """What those of an answer take, about. `num_tokens`: of each prompt. A stream's event is there three times."""
        field = 0 if self.field is None else (self.field + 1) * FIELD_BYTES
        echo = 0 if self.echo is None else (self.echo + 1) * ECHO_BYTES
        return (field + echo) * (sum(num_tokens) + (2 * max(num_tokens) if is_stream else 0))

    def check_length(self, num_tokens: int) -> None:
        """`num_tokens`: of the prompts, each counted for each of its choices. Raises InvalidRequest."""
        if (num_scores := num_tokens * (self.num_top + 1)) > MAX_SCORES:
            raise InvalidRequest(
                f"the answer would hold {num_scores} log-probabilities of prompts; {MAX_SCORES} are allowed",
                self.param,
            )


class PromptScores:
    """The log-probabilities of one prompt, shaped step by step: those of a long prompt take a while.

    Every position but 0 is taken once, in order.
    """

    def __init__(self, ask: PromptAsk, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._ask = ask
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._num_reported = 1  # the first token has no entry
        self._field = [b"null"]  # items of JSON lists, also below
        first = [SampledToken(token_id) for token_id in prompt[:1]]
        shaped = completion_logprobs(vocabulary, first, names_are_ids=ask.names_are_ids)
        self._echo = {"tokens": [json_items(shaped["tokens"])], "token_logprobs": [b"null"], "top_logprobs": [b"null"]}

    async def take(self, start: int, entries: Sequence[PromptToken]) -> None:
        """Add the entries of the positions from `start` on. Raises ValueError unless they go on after the last.

        In turns of 4 ms: those of 20,000 tokens take 0.3 s, and may come at once.
        """
        end = start + len(entries)
        if start != self._num_reported or [entry.token_id for entry in entries] != list(self._prompt[start:end]):
            raise ValueError(f"entries {start} to {end} are not those of the prompt after {self._num_reported}")
        self._num_reported = end
        for first in range(0, len(entries), SHAPED_TOKENS):
            self._keep(entries[first : first + SHAPED_TOKENS])
            await asyncio.sleep(0)

    def _keep(self, entries: Sequence[PromptToken]) -> None:
        ask = self._ask
        if ask.field is not None:
            self._field.append(b",".join([orjson.dumps(self._entry(entry, ask.field)) for entry in entries]))
        if ask.echo is not None:
            shaped = completion_logprobs(self._vocabulary, entries, num_top=ask.echo, names_are_ids=ask.names_are_ids)
            for name, values in shaped.items():
                self._echo[name].append(json_items(values))

    @property
    def fields(self) -> dict[str, Any]:
        """Of the answer: a list of None, then by token {token id: its log-probability, rank and text}."""
        if self._ask.field is None:
            return {}
        return {"prompt_logprobs": JsonList(self._field)}

    def echo(self, text: str) -> tuple[dict[str, list[bytes]], int]:
        """The first part of an echoed completion's `logprobs`, as items of JSON lists, and the characters of `text`,
        the prompt's.

        Empty if not asked for. The entries of an answer that another node has begun are not here, and its output
        stands after the prompt too.
        """
        if self._ask.echo is None:
            return {}, 0
        offsets = echo_offsets(self._vocabulary, self._prompt[: self._num_reported], text)
        return self._echo | {"text_offset": [json_items(offsets)]}, len(text)

    def _entry(self, entry: PromptToken, num_top: int) -> dict[str, dict[str, Any]]:
        """The token itself, then the most likely ones."""
        shaped = {str(entry.token_id): self._score(entry.token_id, entry.logprob, entry.rank)}
        for rank, one in enumerate(entry.top[:num_top], 1):
            shaped.setdefault(str(one.token_id), self._score(one.token_id, one.logprob, rank))
        return shaped

    def _score(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": _text(self._vocabulary, token_id)}


def _text(vocabulary: Vocabulary, token_id: int) -> str:
    return vocabulary.token_bytes(token_id).decode(errors="replace")
