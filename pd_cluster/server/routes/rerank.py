"""/v1/score and /v1/rerank: how relevant documents are for a query.

A causal reranker is asked a question about each pair. The score is the probability of "yes" against "no".
"""

from __future__ import annotations

from array import array
from math import isfinite, tanh
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest
from pd_cluster.models.model_task import SCORE
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_cluster.server.requests.prompt_bodies import MAX_INPUTS, RerankBody, ScoreBody
from pd_cluster.server.requests.prompt_reads import Reads, read_prompts
from pd_cluster.server.requests.request_checks import check_prompt_fields, check_room_for_prompt, decoded
from pd_cluster.server.routes.embeddings import head, no_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.messages import PromptRead
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.requests.prompt_bodies import PairFields
    from pd_cluster.server.state import NodeState

# Qwen3-Reranker's, by its model card. A chat template with messages of the roles query and document asks its own
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
Pair = tuple[str, str]  # a query and a document


async def score(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/score`. Raises PdError."""
    body = decoded(state, reply, raw, ScoreBody)
    check_prompt_fields(body)
    pairs = _pairs(_texts(body, "text_1", "queries"), _texts(body, "text_2", "documents"))
    reads = await _scores(state, caller, body, pairs)
    data = [{"object": "score", "index": index, "score": one} for index, one in enumerate(reads.results)]
    answer = head(state, body, f"score-{body.request_id or body.rid or caller.request_id}")
    await reply.json(200, answer | {"data": data, "usage": reads.usage}, {"x-pd-prefill": state.node_id})


async def rerank(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/rerank`: the documents in the order of their scores. Raises PdError."""
    body = decoded(state, reply, raw, RerankBody)
    check_prompt_fields(body)
    top_n = body.top_n or len(body.documents)
    if top_n < 0:
        raise InvalidRequest(f"top_n must not be negative, but is {top_n}", "top_n")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    reads = await _scores(state, caller, body, _pairs([body.query], texts))
    best = sorted(range(len(texts)), key=lambda index: -reads.results[index])[:top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": reads.results[index]} for index in best]
    if body.return_documents is not False:
        results = [one | {"document": {"text": texts[one["index"]]}} for one in results]
    name = f"rerank-{body.request_id or body.rid or caller.request_id}"
    answer = {"id": name, "model": state.name_for(body.model), "usage": reads.usage, "results": results}
    await reply.json(200, answer, {"x-pd-prefill": state.node_id})


def _texts(body: ScoreBody, *names: str) -> list[str]:
    """The texts of the one of these fields that is given."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"one of {' and '.join(names)} is required", names[0], "missing_required_parameter")
    texts = getattr(body, given[0])
    return [texts] if isinstance(texts, str) else texts


def _pairs(queries: Sequence[str], documents: Sequence[str]) -> list[Pair]:
    """One query with each document, or as many of each. Raises InvalidRequest."""
    if not queries or not documents or not all(queries) or not all(documents):
        raise InvalidRequest("queries and documents must not be empty", "documents")
    if len(documents) > MAX_INPUTS:
        raise InvalidRequest(f"there are {len(documents)} documents; {MAX_INPUTS} are allowed", "documents")
    if len(queries) == 1:
        queries = [queries[0]] * len(documents)
    if len(queries) != len(documents):
        raise InvalidRequest(f"{len(queries)} queries do not pair with {len(documents)} documents", "documents")
    return list(zip(queries, documents, strict=True))


async def _scores(state: NodeState, caller: Caller, body: PairFields, pairs: Sequence[Pair]) -> Reads[float]:
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens is not supported: queries and documents are not cut", "truncate_prompt_tokens"
        )
    state.check_task(SCORE, "scores")
    outputs = PromptOutputs(logits_of=tuple(one for one in (state.task.yes_id, state.task.no_id) if one is not None))
    _check_length(pairs, body.instruction or "", state.max_body_bytes)
    prompts = [array("I", await _question(state, pair, body.instruction)) for pair in pairs]
    return await read_prompts(state, caller, body, prompts, outputs, _probability)


def _check_length(pairs: Sequence[Pair], instruction: str, limit: int) -> None:
    """A query of a long context for 2,048 documents is 200 million tokens. Raises InvalidRequest."""
    num_chars = sum(len(query) + len(document) + len(instruction) for query, document in pairs)
    if num_chars > limit:
        raise InvalidRequest(
            f"the {len(pairs)} pairs have {num_chars} characters in all, the query counted in each; "
            f"{limit} are allowed",
            "documents",
        )


def _probability(index: int, read: PromptRead) -> float:
    """The softmax of the two logits, for "yes". Raises PdError if one of them is NaN or infinity."""
    yes, no = (*read.logits, 0.0)[:2]
    if not isfinite(yes - no):
        raise no_number("documents", index)
    return (1.0 + tanh((yes - no) / 2)) / 2


async def _question(state: NodeState, pair: Pair, instruction: str | None) -> list[int]:
    tokenizer, limit, (query, document) = state.tokenizer, state.ready.max_model_len, pair
    if tokenizer.chat_template.asks_about_documents:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction:
            messages.insert(0, {"role": "system", "content": instruction})
        prompt = await tokenizer.encode_chat(messages, None, {"add_generation_prompt": True}, max_tokens=limit)
    else:
        text = QUESTION.format(instruction=instruction or INSTRUCTION, query=query, document=document)
        prompt = await tokenizer.encode(text, max_tokens=limit, add_special_tokens=False, param="documents")
    check_room_for_prompt(len(prompt), limit, "documents")
    return prompt
