"""What an answer says beside the generated text: its names, its time, token ids, and the text of the prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_cluster.server.bodies.schema import GenerationBody
from pd_http.json_pieces import json_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.requests.prompt_scores import PromptScores
    from pd_cluster.server.text.detokenizer import Vocabulary
    from pd_cluster.server.text.tokenizer import Tokenizer
    from pd_connectors.protocol.messages import SampledToken

TURN_TOKENS = 1 << 16  # become text in 5 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerExtras:
    """The prompts are those of the request, in order; each has n choices."""

    request_id: str
    model: str
    vocabulary: Vocabulary
    created: int  # Unix seconds
    body: GenerationBody = field(default_factory=GenerationBody)
    with_logprobs: bool = False
    prompts: Sequence[Sequence[int]] = ()  # token ids, with `return_token_ids`
    echoes: Sequence[str] = ()  # with `echo`: the text before each choice of a prompt
    scores: Sequence[PromptScores] = ()  # by prompt, when log-probabilities of prompts are asked for

    @property
    def names_are_ids(self) -> bool:
        """Whether log-probabilities name token 5 "token_id:5"."""
        return bool(self.body.return_tokens_as_token_ids)

    def echo(self, index: int) -> str:
        """The prompt's text that choice `index` begins with."""
        return self.echoes[index // (self.body.n or 1)] if self.echoes else ""

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """The fields with ids and log-probabilities of the prompt of choice `index`, if they were asked for."""
        ids = {"prompt_token_ids": self.prompts[index // (self.body.n or 1)]} if self.prompts else {}
        return ids | self.scores[index // (self.body.n or 1)].fields if self.scores else ids

    def echo_logprobs(self, index: int) -> tuple[dict[str, list[bytes]], int]:
        """See `PromptScores.echo`."""
        return self.scores[index // (self.body.n or 1)].echo(self.echo(index)) if self.scores else ({}, 0)

    def output_ids(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """The field with the ids of these tokens, if it was asked for."""
        return {"token_ids": [token.token_id for token in tokens]} if self.body.return_token_ids else {}


async def echo_texts(tokenizer: Tokenizer, prompts: Sequence[tuple[object, Sequence[int]]]) -> list[str]:
    """The texts of prompts, each as the client sent it, or of its token ids, in turns: 2 million take 0.2 s."""
    texts, num_tokens = list[str](), 0
    for given, token_ids in prompts:
        if isinstance(given, str):
            texts.append(given)
            continue
        texts.append(tokenizer.text_of(token_ids, skip_special=True))
        num_tokens += len(token_ids)
        if num_tokens > TURN_TOKENS:
            num_tokens = 0
            await asyncio.sleep(0)
    return texts


def more_fields(fields: dict[str, Any]) -> bytes:
    """`fields` as JSON that goes on after another field of an object; b"" for none."""
    return b"," + b"".join(json_pieces(fields))[1:-1] if fields else b""
