"""/v1/completions: what a body asks for, of prompts as text or as token ids, and the shape of answers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import Work
from pd_cluster.server.bodies.schema import MAX_PROMPTS
from pd_cluster.server.grammar.grammar_source import grammar_source
from pd_cluster.server.params.sampling import last_tokens, sampling_params, text_options
from pd_cluster.server.requests.answer_extras import more_fields
from pd_cluster.server.requests.generation_ask import GenerationAsk
from pd_cluster.server.requests.generation_request import KvSource
from pd_cluster.server.requests.logprobs import SHAPED_TOKENS, completion_logprobs, json_items
from pd_cluster.server.requests.prompt_list import Prompt, prompt_list
from pd_cluster.server.requests.prompt_scores import PromptAsk
from pd_cluster.server.requests.prompt_space import space_of
from pd_cluster.server.requests.prompt_steps import names_for
from pd_cluster.server.shapes.chunked_shape import ChunkedShape
from pd_cluster.server.text.text_offsets import TextOffsets
from pd_cluster.server.tools.output_parser import DEFAULT_OPTIONS
from pd_http.json_pieces import JsonList, json_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.bodies.schema import CompletionBody
    from pd_cluster.server.requests.answer_extras import AnswerExtras
    from pd_cluster.server.requests.choice import ChoiceOutput
    from pd_cluster.server.state import NodeState

DEFAULT_MAX_TOKENS = 16  # as OpenAI and vLLM; chat has no default


def completion_ask(state: NodeState, body: CompletionBody, raw: bytes) -> GenerationAsk:
    """What `body`, which came as `raw`, asks for. Raises InvalidRequest."""
    max_model_len, vocab_size = state.ready.max_model_len, state.tokenizer.vocab_size
    prompts = prompts_of(body, vocab_size, max_model_len)
    space = space_of(state.adapters, body)
    names = names_for(state, space, raw) if len(prompts) == 1 else None

    async def tokenize(prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            if names is not None:
                await asyncio.to_thread(names.name_ids, len(prompt))
            return last_tokens(prompt, body)
        return await state.tokenizer.encode(
            prompt,
            max_tokens=max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
            note=None if names is None else lambda encoded: names.name_text(encoded, [prompt]),
            refuses=body.truncate_prompt_tokens is None,
            last=body.truncate_prompt_tokens,
        )

    shown = body.logprobs if body.echo else None
    scores = PromptAsk.of(body.prompt_logprobs, shown, names_are_ids=bool(body.return_tokens_as_token_ids))
    is_read = reads_only(body)
    sampling = partial(
        sampling_params,
        body,
        state.defaults,
        logprobs=body.logprobs,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        one_token=is_read,
    )
    return GenerationAsk(
        body=body,
        space=space,
        prompts=[partial(tokenize, prompt) for prompt in prompts],
        prompt_field="prompt",
        form=partial(grammar_source, body),
        sampling=sampling,
        text=partial(text_options, body, None, DEFAULT_OPTIONS),
        shape=CompletionShape,
        with_logprobs=body.logprobs is not None,
        echo_ids=any(isinstance(prompt, str) for prompt in prompts),
        echoes=prompts if body.echo else (),
        kv_source=KvSource(Work.READ) if is_read else None,
        names=names,
        scores=scores,
    )


def prompts_of(body: CompletionBody, vocab_size: int, max_model_len: int) -> list[Prompt]:
    """The prompts of the body, at least one. Raises InvalidRequest."""
    raw = bytes(body.prompt)
    return prompt_list(raw, "prompt", body, most=MAX_PROMPTS, vocab_size=vocab_size, max_model_len=max_model_len)


def reads_only(body: CompletionBody) -> bool:
    """Whether the request only asks about its prompts: `max_tokens` 0. Raises InvalidRequest if it asks for nothing."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit != 0:
        return False
    if not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens 0 needs echo or prompt_logprobs: the answer would be empty", "max_tokens")
    if body.n not in (None, 1):
        raise InvalidRequest("max_tokens 0 excludes n: there is nothing to choose", "n")
    return True


class CompletionShape(ChunkedShape):
    """`text_completion` and its chunks: content only, no parser runs."""

    def __init__(self, extras: AnswerExtras) -> None:
        super().__init__(extras, "cmpl", "text_completion", "text")
        self._begun: set[int] = set()  # choices of which a chunk was sent
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        logprobs, extras = b"null", self._extras
        is_first = index not in self._begun
        if extras.with_logprobs and (output.tokens or (is_first and extras.scores)):
            logprobs = b"".join(json_pieces(self._logprobs(index, output)))
        elif not output.parts and output.finish_reason is None and not (extras.body.return_token_ids and output.tokens):
            return b""
        text, ids = _text(output), extras.output_ids(output.tokens)
        if is_first:
            self._begun.add(index)
            text, ids = extras.echo(index) + text, ids | extras.prompt_fields(index)
        end = b"null"
        if output.finish_reason is not None:
            end = b'"%s","stop_reason":%s' % (output.finish_reason.encode(), orjson.dumps(output.stop_reason))
        after = self._after if usage is None else b'}],"usage":%s}\n\n' % orjson.dumps(usage)
        rest = b'%s,"logprobs":%s%s,"finish_reason":%s%s' % (orjson.dumps(text), logprobs, more_fields(ids), end, after)
        return self._before % index + rest

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        def shaped(index: int, choice: ChoiceOutput) -> dict[str, Any]:
            ids = self._extras.output_ids(choice.tokens) | self._extras.prompt_fields(index)
            return ids | {
                "index": index,
                "text": self._extras.echo(index) + _text(choice),
                "logprobs": self._logprobs(index, choice) if self._extras.with_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }

        return self._head | {"choices": JsonList(map(shaped, range(len(choices)), choices)), "usage": usage}

    def _logprobs(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        """An echoed prompt comes before the first output of a choice."""
        extras, tokens, before = self._extras, output.tokens, dict[str, list[bytes]]()
        if index not in self._offsets:
            before, start = extras.echo_logprobs(index)
            self._offsets[index] = TextOffsets(
                extras.vocabulary, start, skip_special=extras.body.skip_special_tokens is not False
            )
        items = {name: [*values] for name, values in before.items()}
        for first in range(0, max(1, len(tokens)), SHAPED_TOKENS):
            some = tokens[first : first + SHAPED_TOKENS]
            shaped = completion_logprobs(extras.vocabulary, some, names_are_ids=extras.names_are_ids)
            shaped["text_offset"] = self._offsets[index].of([token.token_id for token in some])
            if not before and len(tokens) <= SHAPED_TOKENS:
                return shaped
            for name, values in shaped.items():
                items.setdefault(name, []).append(json_items(values))
        return {name: JsonList(parts) for name, parts in items.items()}


def _text(output: ChoiceOutput) -> str:
    return "".join([part for part in output.parts if isinstance(part, str)])
