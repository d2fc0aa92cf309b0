"""A stream that another node has begun: whether this node would write the same, and the state in which it goes on.

The router asks by `kv_transfer_params.continuation`, beside the client's own body. The choices of several prompts are
numbered one prompt after the other. The text side of each choice is brought to its state by a replay of the known
tokens, of which the client has the bytes. The engine gets the known tokens of the choices that have not ended
(`AddRequest.known`), and generates those only, and the prompts that have not begun.

The field is not signed: routers drop `kv_transfer_params` of clients. On the node network it allows what any request
does, an answer to a chosen prompt and seed, and one more level of priority. Every list of it is held to the limits of
an answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.errors import CannotContinue, InvalidRequest
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.node.request_id import is_request_id
from pd_cluster.server.requests.generation_request import KnownAnswer, digest_of
from pd_http.frames import KnownChoice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.server.bodies.schema import GenerationBody
    from pd_cluster.server.requests.generation_request import GenerationRequest
    from pd_cluster.server.requests.generation_stream import GenerationStream
    from pd_cluster.server.requests.response_shape import ResponseShape
    from pd_http.frames import Continuation

PARAM = "kv_transfer_params.continuation"
MAX_KNOWN_TOKENS = 1 << 20  # of all choices, as in a router's record: a replay of them takes up to 10 s
REPLAY_TOKENS = 256  # at once, so that a long answer does not delay other streams: a parser takes 10 us a token
_NOT_BEGUN = KnownChoice(index=0, token_ids=(), num_chars=0)
_ENDS = ("", FinishReason.STOP, FinishReason.LENGTH)


def known_answers(
    continuation: Continuation, body: GenerationBody, stream_version: str, *, vocab_size: int, num_prompts: int
) -> tuple[KnownAnswer, ...]:
    """What the continuation says of the answer to each prompt of `body`. Raises InvalidRequest, CannotContinue."""
    head, n = continuation.head, body.n or 1
    _check_head(continuation, body, stream_version)
    known: dict[int, KnownChoice] = {}
    for choice in continuation.choices:
        place = f"choice {choice.index} of the continuation"
        if not 0 <= choice.index < n * num_prompts or choice.index in known:
            raise InvalidRequest(f"{place}: it is there twice, or not below n, which is {n}, for each prompt", PARAM)
        if not (choice.token_ids or choice.finish_reason) or choice.finish_reason not in _ENDS:
            raise InvalidRequest(f"{place} needs token_ids, or {' or '.join(_ENDS[1:])} if it has ended", PARAM)
        if min(choice.token_ids, default=0) < 0 or max(choice.token_ids, default=0) >= vocab_size:
            raise InvalidRequest(f"{place} has token ids outside the vocabulary 0..{vocab_size - 1}", PARAM)
        known[choice.index] = choice
    if num_prompts == 1:
        return (_known_answer(known, range(n), head.created, head.num_cached_tokens),)
    prompts = [range(first, first + n) for first in range(0, n * num_prompts, n)]
    cached = [max((known[one].num_cached_tokens for one in prompt if one in known), default=None) for prompt in prompts]
    return tuple(
        _known_answer(known, prompt, head.created, count) for prompt, count in zip(prompts, cached, strict=True)
    )


def _check_head(continuation: Continuation, body: GenerationBody, stream_version: str) -> None:
    head = continuation.head
    if not body.stream or (body.kv_transfer_params is not None and body.kv_transfer_params.do_remote_decode):
        raise InvalidRequest(f"{PARAM} is for streams (stream: true) of nodes that decode", PARAM)
    if head.stream_version != stream_version:
        raise CannotContinue(f"the stream is of version {head.stream_version!r}, this node's are {stream_version!r}")
    if body.seed not in (None, head.seed):
        raise CannotContinue("the stream has another seed than the request")
    if sum(len(choice.token_ids) for choice in continuation.choices) > MAX_KNOWN_TOKENS:
        raise CannotContinue(f"the stream has more than {MAX_KNOWN_TOKENS} tokens")
    if not is_request_id(head.response_id):
        raise InvalidRequest("the continuation's response_id is no request id", PARAM)
    if not 0 <= head.created < 1 << 53 or (body.seed is None and not 0 <= head.seed < 1 << 63):
        raise InvalidRequest("the continuation's head has a time, or a drawn seed, that is out of range", PARAM)


def _known_answer(known: Mapping[int, KnownChoice], prompt: range, created: int, num_cached: int | None) -> KnownAnswer:
    """`prompt`: its choices in the answer, which it numbers from 0."""
    begun = (known.get(index, _NOT_BEGUN) for index in prompt)
    choices = tuple(msgspec.structs.replace(choice, index=index) for index, choice in enumerate(begun))
    return KnownAnswer(choices, created, num_cached)


def check_prompts(continuation: Continuation, requests: Sequence[GenerationRequest]) -> None:
    """Raises CannotContinue for other prompts than the stream's, and for more tokens than an answer may have.

    Raises InvalidRequest for a count of cached tokens that a prompt does not have.
    """
    head, num_tokens = continuation.head, sum(len(one.prompt) for one in requests)
    if (head.prompt_digest, head.num_prompt_tokens) != (digest_of(requests).hex(), num_tokens):
        raise CannotContinue("the prompt's tokens are not those of the stream")
    for number, request in enumerate(requests):
        known, num_prompt = request.known, len(request.prompt)
        assert known is not None
        if not 0 <= (known.num_cached_tokens or 0) <= num_prompt:
            raise InvalidRequest(
                f"{known.num_cached_tokens} of the prompt's {num_prompt} tokens cannot be cached", PARAM
            )
        for index, choice in enumerate(known.choices, number * request.num_choices):
            if len(choice.token_ids) + (not choice.finish_reason) > request.sampling.max_tokens:
                raise CannotContinue(f"choice {index} has had its last token")


async def resume(stream: GenerationStream, first_index: int, shape: ResponseShape) -> None:
    """Bring the text side of every choice to the state after its known tokens. Raises CannotContinue.

    `first_index`: of the prompt's first choice in the answer. Nothing more is written of a choice that has ended, so
    the characters of its end are not compared.
    """
    assert stream.request.known is not None
    for known in stream.request.known.choices:
        index, choice, num_chars = first_index + known.index, stream.choice(known.index), 0
        for token_ids in _pieces(known.token_ids):
            output = choice.replay(token_ids)
            num_chars += output.num_chars
            shape.chunk(index, output)  # the client has these bytes
            await asyncio.sleep(0)
        if not known.finish_reason and (choice.finished or num_chars != known.num_chars):
            raise CannotContinue(
                f"the known tokens of choice {index} release {num_chars} characters here, not {known.num_chars}"
            )
        if choice.num_tokens != len(known.token_ids):  # of a choice that has ended; the usage counts its tokens
            raise CannotContinue(f"the tokens of choice {index} end after {choice.num_tokens} tokens here")
        choice.finished = bool(known.finish_reason)


def _pieces(token_ids: Sequence[int]) -> list[Sequence[int]]:
    return [token_ids[start : start + REPLAY_TOKENS] for start in range(0, len(token_ids), REPLAY_TOKENS)]
