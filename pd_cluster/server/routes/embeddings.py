"""/v1/embeddings and /pooling: vectors of prompts."""

from __future__ import annotations

import base64
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from pd_cluster.errors import InvalidRequest, PdError
from pd_cluster.models.model_task import EMBED
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_cluster.server.params.sampling import last_tokens
from pd_cluster.server.requests.prompt_bodies import MAX_INPUTS, EmbeddingBody
from pd_cluster.server.requests.prompt_list import prompt_list
from pd_cluster.server.requests.prompt_reads import read_prompts
from pd_cluster.server.requests.request_checks import check_prompt_fields, check_room_for_prompt, decoded
from pd_http.json_pieces import JsonList

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pd_cluster.protocol.messages import PromptRead
    from pd_cluster.server.bodies.schema import PromptFields
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.state import NodeState

_LEAST_NORM = 1e-12  # as torch's `normalize`
POOLED = PromptOutputs(pooled=True)


async def embeddings(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/embeddings`. Raises PdError."""
    await _vectors(state, caller, reply, raw, "embedding", "embd", "embedding")


async def pooling(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /pooling`: the same vectors, as vLLM shapes them. Raises PdError."""
    await _vectors(state, caller, reply, raw, "pooling", "pool", "data")


async def _vectors(
    state: NodeState, caller: Caller, reply: CountedReply, raw: bytes, kind: str, prefix: str, member: str
) -> None:
    """`kind`: of the object of a vector, which is its `member`."""
    body = decoded(state, reply, raw, EmbeddingBody)
    state.check_task(EMBED, "vectors")
    check_prompt_fields(body)
    if body.encoding_format not in (None, "float", "base64"):
        raise InvalidRequest(
            f"encoding_format must be float or base64, not {body.encoding_format!r}", "encoding_format"
        )
    if body.dimensions is not None and not 1 <= body.dimensions <= state.task.hidden_size:
        raise InvalidRequest(f"dimensions must be 1 to {state.task.hidden_size}, not {body.dimensions}", "dimensions")
    limit = state.ready.max_model_len
    inputs = prompt_list(
        bytes(body.input), "input", body, most=MAX_INPUTS, vocab_size=state.tokenizer.vocab_size, max_model_len=limit
    )
    prompts = []
    for one in inputs:
        if isinstance(one, str):
            special = body.add_special_tokens is not False
            one = await state.tokenizer.encode(one, max_tokens=limit, add_special_tokens=special, param="input")
        prompts.append(array("I", last_tokens(one, body)))
        check_room_for_prompt(len(prompts[-1]), limit, "input")
    await reply.share.plan(len(prompts) * state.task.hidden_size * 4, "input")
    reads = await read_prompts(state, caller, body, prompts, POOLED, partial(_vector, state, body))
    # in pieces: 4,096 floats take 1 ms and three times their memory, and 512 such vectors at once stop the loop
    vectors = (_encoded(body, vector) for vector in reads.results)
    data = JsonList({"object": kind, "index": index, member: vector} for index, vector in enumerate(vectors))
    answer = head(state, body, f"{prefix}-{body.request_id or body.rid or caller.request_id}")
    await reply.json(200, answer | {"data": data, "usage": reads.usage}, {"x-pd-prefill": state.node_id})


def _vector(state: NodeState, body: EmbeddingBody, index: int, read: PromptRead) -> NDArray[np.float32]:
    """Raises PdError for NaN and infinity, which JSON does not have."""
    vector = np.frombuffer(read.pooled, "<f4").astype(np.float32)[: body.dimensions]
    if not np.isfinite(vector).all():
        raise no_number("input", index)
    if state.task.is_normed if body.normalize is None else body.normalize:
        vector /= max(float(np.linalg.norm(vector)), _LEAST_NORM)
    return vector


def _encoded(body: EmbeddingBody, vector: NDArray[np.float32]) -> Any:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))


def no_number(param: str, index: int) -> PdError:
    """The error for what a model makes of `param`[index] if that has NaN or infinity in it."""
    return PdError(f"the model's output for {param}[{index}] is not finite (NaN or infinity)", code="not_finite")


def head(state: NodeState, body: PromptFields, name: str) -> dict[str, Any]:
    """The first fields of a list."""
    return {"id": name, "object": "list", "created": int(time.time()), "model": state.name_for(body.model)}
