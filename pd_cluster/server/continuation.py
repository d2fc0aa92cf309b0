"""A stream that another node has begun: whether this node would write the same, and the state in which it goes on.

The router asks by `kv_transfer_params.continuation`, beside the client's own body. The text side of each choice is
brought to its state by a replay of the known tokens, of which the client has the bytes. The engine gets the known
tokens of the choices that have not ended (`AddRequest.known`), and generates those only.

The field is not signed: routers drop `kv_transfer_params` of clients. On the node network it allows what any request
does, an answer to a chosen prompt and seed, and one more rank of priority. Every list of it is held to the limits of an
answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_cluster.errors import CannotContinue, InvalidRequest
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.generation_request import KnownAnswer
from pd_cluster.server.request_id import is_request_id
from pd_http.frames import KnownChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.generation_request import GenerationRequest
    from pd_cluster.server.generation_stream import GenerationStream
    from pd_cluster.server.response import ResponseShape
    from pd_cluster.server.schema import GenerationBody
    from pd_http.frames import Continuation

PARAM = "kv_transfer_params.continuation"
MAX_KNOWN_TOKENS = 1 << 20  # of all choices, as in a router's record: a replay of them takes up to 10 s
REPLAY_TOKENS = 256  # at once, so that a long answer does not delay other streams: a parser takes 10 us a token
_ENDS = ("", FinishReason.STOP, FinishReason.LENGTH)


def known_answer(
    continuation: Continuation, body: GenerationBody, stream_version: str, *, vocab_size: int, num_prompts: int
) -> KnownAnswer:
    """What the continuation says of the answer to `body`. Raises InvalidRequest, CannotContinue."""
    head, n = continuation.head, body.n or 1
    if not body.stream or (body.kv_transfer_params is not None and body.kv_transfer_params.do_remote_decode):
        raise InvalidRequest(f"{PARAM} is for streams (stream: true) of nodes that decode", PARAM)
    if head.stream_version != stream_version or num_prompts != 1:
        raise CannotContinue(f"the stream is of version {head.stream_version!r}, this node's are {stream_version!r}")
    if body.seed not in (None, head.seed):
        raise CannotContinue("the stream has another seed than the request")
    if sum(len(choice.token_ids) for choice in continuation.choices) > MAX_KNOWN_TOKENS:
        raise CannotContinue(f"the stream has more than {MAX_KNOWN_TOKENS} tokens")
    choices = [KnownChoice(index=index, token_ids=(), num_chars=0) for index in range(n)]
    for choice in continuation.choices:
        place = f"choice {choice.index} of the continuation"
        if not 0 <= choice.index < n or choices[choice.index].token_ids:
            raise InvalidRequest(f"{place}: it is there twice, or not below n, which is {n}", PARAM)
        if not choice.token_ids or choice.finish_reason not in _ENDS:
            raise InvalidRequest(f"{place} needs token_ids, and {' or '.join(_ENDS[1:])} if it has ended", PARAM)
        if min(choice.token_ids) < 0 or max(choice.token_ids) >= vocab_size:
            raise InvalidRequest(f"{place} has token ids outside the vocabulary 0..{vocab_size - 1}", PARAM)
        choices[choice.index] = choice
    if not is_request_id(head.response_id):
        raise InvalidRequest("the continuation's response_id is no request id", PARAM)
    if not 0 <= head.created < 1 << 53 or (body.seed is None and not 0 <= head.seed < 1 << 63):
        raise InvalidRequest("the continuation's head has a time, or a drawn seed, that is out of range", PARAM)
    return KnownAnswer(tuple(choices), head.created, head.num_cached_tokens)


def check_prompt(continuation: Continuation, request: GenerationRequest) -> None:
    """Raises CannotContinue for another prompt than the stream's, and for more tokens than the answer may have.

    Raises InvalidRequest for a count of cached tokens that the prompt does not have.
    """
    head, num_prompt = continuation.head, len(request.prompt)
    if (head.prompt_digest, head.num_prompt_tokens) != (request.prompt_digest.hex(), num_prompt):
        raise CannotContinue("the prompt's tokens are not those of the stream")
    if not 0 <= head.num_cached_tokens <= num_prompt:
        raise InvalidRequest(f"{head.num_cached_tokens} of the prompt's {num_prompt} tokens cannot be cached", PARAM)
    assert request.known is not None
    for choice in request.known.choices:
        if len(choice.token_ids) + (not choice.finish_reason) > request.sampling.max_tokens:
            raise CannotContinue(f"choice {choice.index} has had its last token")


async def resume(stream: GenerationStream, shape: ResponseShape) -> None:
    """Bring the text side of every choice to the state behind its known tokens. Raises CannotContinue.

    Nothing more is written of a choice that has ended, so the characters of its end are not compared.
    """
    assert stream.request.known is not None
    for known in stream.request.known.choices:
        choice, num_chars = stream.choice(known.index), 0
        for token_ids in _pieces(known.token_ids):
            output = choice.replay(token_ids)
            num_chars += output.num_chars
            shape.chunk(known.index, output)  # the client has these bytes
            await asyncio.sleep(0)
        if not known.finish_reason and (choice.finished or num_chars != known.num_chars):
            raise CannotContinue(
                f"the known tokens of choice {known.index} release {num_chars} characters here, not {known.num_chars}"
            )
        if choice.num_tokens != len(known.token_ids):  # of a choice that has ended; the usage counts its tokens
            raise CannotContinue(f"the tokens of choice {known.index} end after {choice.num_tokens} tokens here")
        choice.finished = bool(known.finish_reason)


def _pieces(token_ids: Sequence[int]) -> list[Sequence[int]]:
    return [token_ids[start : start + REPLAY_TOKENS] for start in range(0, len(token_ids), REPLAY_TOKENS)]
