"""/v1/completions: prompts as text or as token ids, and the shape of answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.logprobs import completion_logprobs
from pd_cluster.server.sampling import check_num_tokens
from pd_cluster.server.schema import MAX_PROMPTS, CompletionBody, decode_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.choice import ChoiceOutput
    from pd_cluster.server.detokenizer import Vocabulary
    from pd_cluster.server.schema import GenerationBody

Prompt = str | list[int]
DEFAULT_MAX_TOKENS = 16  # as OpenAI and vLLM; chat has no default


def prompts_of(body: CompletionBody, vocab_size: int, max_model_len: int) -> list[Prompt]:
    """The prompts of the body, at least one. Raises InvalidRequest."""
    raw = bytes(body.prompt).lstrip()
    inside = raw[1:].lstrip()
    prompts: list[Prompt]
    if raw.startswith(b'"'):
        prompts = [decode_value(raw, str, "prompt")]
    elif not raw.startswith(b"["):
        raise InvalidRequest(
            "prompt must be a string, an array of strings, an array of token ids, or an array of those", "prompt"
        )
    elif inside.startswith(b'"'):
        prompts = decode_value(raw, list[str], "prompt")
    elif inside.startswith(b"["):
        prompts = decode_value(raw, list[list[int]], "prompt")
    else:
        prompts = [decode_value(raw, list[int], "prompt")]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompts)} entries; {MAX_PROMPTS} are allowed", "prompt")
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("prompt must not be empty", "prompt")
        if isinstance(prompt, str):
            continue
        check_num_tokens(len(prompt), max_model_len, "prompt")  # first: min and max read every id
        if not (min(prompt) >= 0 and max(prompt) < vocab_size):
            raise InvalidRequest(f"prompt has token ids outside the vocabulary 0..{vocab_size - 1}", "prompt")
    return prompts


def check_best_of(body: GenerationBody) -> None:
    """Raises InvalidRequest unless best_of is absent or equals n: sequences are not ranked."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of must equal n: sequences are not ranked", "best_of", "unsupported_value")


class CompletionShape:
    """`text_completion` and its chunks: content only, no parser runs. The constant part of a chunk is encoded once."""

    def __init__(
        self, request_id: str, model: str, vocabulary: Vocabulary, *, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._vocabulary = vocabulary
        self._with_logprobs = with_logprobs
        self._offsets: dict[int, int] = {}  # choice -> number of characters before the next token
        self._before = (
            b"data: " + orjson.dumps(self._head)[:-1].replace(b"%", b"%%") + b',"choices":[{"index":%d,"text":'
        )
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        logprobs = b"null"
        if self._with_logprobs and output.tokens:
            shaped, self._offsets[index] = completion_logprobs(
                self._vocabulary, output.tokens, self._offsets.get(index, 0)
            )
            logprobs = orjson.dumps(shaped)
        elif not output.parts and output.finish_reason is None:
            return b""
        end = b"null"
        if output.finish_reason is not None:
            end = b'"%s","stop_reason":%s' % (output.finish_reason.encode(), orjson.dumps(output.stop_reason))
        after = self._after if usage is None else b'}],"usage":%s}\n\n' % orjson.dumps(usage)
        rest = b'%s,"logprobs":%s,"finish_reason":%s%s' % (orjson.dumps(_text(output)), logprobs, end, after)
        return self._before % index + rest

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(self._head | {"choices": [], "usage": usage}) + b"\n\n"

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        def shaped(index: int, choice: ChoiceOutput) -> dict[str, Any]:
            logprobs = completion_logprobs(self._vocabulary, choice.tokens, 0)[0] if self._with_logprobs else None
            return {
                "index": index,
                "text": _text(choice),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }

        return self._head | {"choices": [shaped(i, choice) for i, choice in enumerate(choices)], "usage": usage}


def _text(output: ChoiceOutput) -> str:
    return "".join([part for part in output.parts if isinstance(part, str)])
